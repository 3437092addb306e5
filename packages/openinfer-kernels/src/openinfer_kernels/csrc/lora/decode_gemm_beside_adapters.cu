// The kernels of gemm/decode_gemm.cuh with blocks beside them that make A x, for the kernel after them.
#include "gemm/decode_gemm.cuh"

#define DECODE_GEMM(TOKENS)                                                                                      \
  extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)                               \
      decode_gemm_beside_adapters_store_##TOKENS(const __grid_constant__ CUtensorMap w_map,                      \
                                                 const __grid_constant__ CUtensorMap x_map, bf16* y, int m,      \
                                                 int n, int k,                                                   \
                                                 const __grid_constant__ lora::DecodeAdapters adapters) {        \
    run<TOKENS, kStore, kBeside>(w_map, x_map, y, m, n, k, &adapters);                                           \
  }

DECODE_GEMM(32)
