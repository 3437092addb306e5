// The kernels of gemm.cuh without adapters.
#include "gemm/gemm.cuh"

#define GEMM(EPILOGUE, NAME, TOKENS, COLUMNS)                                                                     \
  extern "C" __global__ void __launch_bounds__(Sizes<TOKENS, COLUMNS>::kThreads, 1)                               \
      gemm_##NAME##_##TOKENS##x##COLUMNS(const __grid_constant__ CUtensorMap w_map,                               \
                                         const __grid_constant__ CUtensorMap x_map, void* y, int m, int n, int k, \
                                         int multicast_ctas, int group) {                                         \
    run<Sizes<TOKENS, COLUMNS>, EPILOGUE>(w_map, x_map, y, m, n, k, multicast_ctas, group);                       \
  }

// Widths for which the multiprocessors get one tile each: 122 tiles of 160 rows for Qwen3-4B's gate and up, 128 of 192
// for 8B's. Prompts take 256 x 160 in pairs, since 128 x 256 copies more for each product.
GEMM(kStore, store, 64, 96)
GEMM(kStore, store, 64, 112)
GEMM(kStore, store, 128, 96)
GEMM(kStore, store, 128, 112)
GEMM(kStore, store, 192, 96)
GEMM(kStore, store, 192, 112)
GEMM(kStore, store, 256, 160)
GEMM(kSwiglu, swiglu, 64, 96)
GEMM(kSwiglu, swiglu, 64, 160)
GEMM(kSwiglu, swiglu, 64, 192)
GEMM(kSwiglu, swiglu, 128, 96)
GEMM(kSwiglu, swiglu, 128, 160)
GEMM(kSwiglu, swiglu, 128, 192)
GEMM(kSwiglu, swiglu, 192, 96)
GEMM(kSwiglu, swiglu, 192, 160)
GEMM(kSwiglu, swiglu, 192, 192)
GEMM(kSwiglu, swiglu, 256, 160)
GEMM(kFloat32, float32, 64, 128)
GEMM(kFloat32, float32, 128, 128)
