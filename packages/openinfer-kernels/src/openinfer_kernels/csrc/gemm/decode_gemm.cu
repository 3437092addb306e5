// The kernels of decode_gemm.cuh without adapters.
#include "gemm/decode_gemm.cuh"

#define DECODE_GEMM(TOKENS, NAME, EPILOGUE)                                                                        \
  extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)                                 \
      decode_gemm_##NAME##_##TOKENS(const __grid_constant__ CUtensorMap w_map,                                     \
                                    const __grid_constant__ CUtensorMap x_map, Output<EPILOGUE>* y, int m, int n,  \
                                    int k) {                                                                       \
    run<TOKENS, EPILOGUE>(w_map, x_map, y, m, n, k);                                                               \
  }

DECODE_GEMM(8, store, kStore)
DECODE_GEMM(16, store, kStore)
DECODE_GEMM(32, store, kStore)
DECODE_GEMM(8, swiglu, kSwiglu)
DECODE_GEMM(16, swiglu, kSwiglu)
DECODE_GEMM(32, swiglu, kSwiglu)
DECODE_GEMM(8, float32, kFloat32)
DECODE_GEMM(16, float32, kFloat32)
DECODE_GEMM(32, float32, kFloat32)

// Gate and up in tiles of five slices.
#define DECODE_GEMM_SLICES(TOKENS)                                                                                   \
  extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)                                  \
      decode_gemm_swiglu_##TOKENS##_slices(const __grid_constant__ CUtensorMap w_map,                                \
                                          const __grid_constant__ CUtensorMap x_map, bf16* y, int m, int n,         \
                                          int k) {                                                                  \
    run<TOKENS, kSwiglu, kWithout, 5>(w_map, x_map, y, m, n, k);                                                       \
  }

DECODE_GEMM_SLICES(8)
DECODE_GEMM_SLICES(16)
