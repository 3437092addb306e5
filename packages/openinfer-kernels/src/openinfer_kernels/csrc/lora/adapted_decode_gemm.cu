// The kernels of gemm/decode_gemm.cuh with adapters.
#include "gemm/decode_gemm.cuh"

#define DECODE_GEMM(TOKENS, NAME, EPILOGUE)                                                                       \
  extern "C" __global__ void __launch_bounds__(kAdaptedThreads, kBlocksPerMultiprocessor)                         \
      adapted_decode_gemm_##NAME##_##TOKENS(const __grid_constant__ CUtensorMap w_map,                            \
                                            const __grid_constant__ CUtensorMap x_map, Output<EPILOGUE>* y, int m, \
                                            int n, int k, const __grid_constant__ lora::DecodeAdapters adapters) {         \
    run<TOKENS, EPILOGUE, kWithin>(w_map, x_map, y, m, n, k, &adapters);                                             \
  }

DECODE_GEMM(8, store, kStore)
DECODE_GEMM(16, store, kStore)
DECODE_GEMM(8, swiglu, kSwiglu)
DECODE_GEMM(16, swiglu, kSwiglu)

// Gate and up in tiles of five slices.
#define DECODE_GEMM_SLICES(TOKENS)                                                                                \
  extern "C" __global__ void __launch_bounds__(kAdaptedThreads, kBlocksPerMultiprocessor)                         \
      adapted_decode_gemm_swiglu_##TOKENS##_slices(const __grid_constant__ CUtensorMap w_map,                     \
                                                   const __grid_constant__ CUtensorMap x_map, bf16* y, int m,     \
                                                   int n, int k,                                                  \
                                                   const __grid_constant__ lora::DecodeAdapters adapters) {       \
    run<TOKENS, kSwiglu, kWithin, 5>(w_map, x_map, y, m, n, k, &adapters);                                           \
  }

DECODE_GEMM_SLICES(8)
DECODE_GEMM_SLICES(16)
