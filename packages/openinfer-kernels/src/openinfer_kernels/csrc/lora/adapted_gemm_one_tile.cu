// The kernels of gemm/gemm.cuh with adapters whose A x comes in parts: one tile has all tokens.
#include "gemm/gemm.cuh"

#define GEMM(EPILOGUE, NAME, TOKENS, COLUMNS)                                                                        \
  extern "C" __global__ void __launch_bounds__(Sizes<TOKENS, COLUMNS>::kThreads, 1)                                  \
      adapted_gemm_one_tile_##NAME##_##TOKENS##x##COLUMNS(const __grid_constant__ CUtensorMap w_map,                 \
                                                          const __grid_constant__ CUtensorMap x_map, void* y, int m, \
                                                          int n, int k, int multicast_ctas, int group,               \
                                                          const __grid_constant__ AdapterMaps adapters) {            \
    run<Sizes<TOKENS, COLUMNS>, EPILOGUE, kParts>(w_map, x_map, y, m, n, k, multicast_ctas, group, &adapters);       \
  }

OF_STORE_AND_SWIGLU_OF_ONE_TILE(GEMM)
