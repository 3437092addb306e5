// The kernels of gemm/gemm.cuh with tiles of A beside those of W, for the kernel after them.
#include "gemm/gemm.cuh"

#define GEMM(TOKENS, COLUMNS)                                                                                      \
  extern "C" __global__ void __launch_bounds__(Sizes<TOKENS, COLUMNS>::kThreads, 1)                                \
      gemm_beside_adapters_store_##TOKENS##x##COLUMNS(const __grid_constant__ CUtensorMap w_map,                   \
                                                      const __grid_constant__ CUtensorMap x_map, void* y, int m,   \
                                                      int n, int k, int multicast_ctas, int group,                 \
                                                      const __grid_constant__ AdapterMaps adapters) {              \
    run<Sizes<TOKENS, COLUMNS>, kStore, kBeside>(w_map, x_map, y, m, n, k, multicast_ctas, group, &adapters);      \
  }

GEMM(64, 96)
GEMM(64, 112)
GEMM(64, 160)
GEMM(64, 192)
