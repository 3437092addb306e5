// The kernels of gemm/gemm.cuh with adapters of prompts. In pairs that share their tokens tiles of 128 x 160 and of
// 128 x 192 fill the multiprocessors with 1,024 tokens of 2,560 and of 6,144 rows, and those of 256 x 192 with 8,192 of the
// latter, of which tiles of 160 rows leave a part of the last one empty.
#include "gemm/gemm.cuh"

#define GEMM(EPILOGUE, NAME, TOKENS, COLUMNS)                                                                     \
  extern "C" __global__ void __launch_bounds__(Sizes<TOKENS, COLUMNS>::kThreads, 1)                               \
      prompt_gemm_##NAME##_##TOKENS##x##COLUMNS(const __grid_constant__ CUtensorMap w_map,                        \
                                                const __grid_constant__ CUtensorMap x_map, void* y, int m, int n, \
                                                int k, int multicast_ctas, int group,                             \
                                                const __grid_constant__ AdapterMaps adapters) {                   \
    run<Sizes<TOKENS, COLUMNS>, EPILOGUE, kSteps>(w_map, x_map, y, m, n, k, multicast_ctas, group, &adapters);    \
  }

GEMM(kStore, store, 128, 160)
GEMM(kStore, store, 128, 192)
GEMM(kStore, store, 256, 160)
GEMM(kStore, store, 256, 192)
GEMM(kSwiglu, swiglu, 128, 160)
GEMM(kSwiglu, swiglu, 192, 160)
GEMM(kSwiglu, swiglu, 256, 160)
