// Products with Int8 weights for any number of tokens: see lowbit_gemm.cuh.
#include "lowbit/lowbit_gemm.cuh"

LOWBIT_GEMM_SUMS(Int8, int8, kStore, store)
LOWBIT_GEMM_SUMS(Int8, int8, kSwiglu, swiglu)
LOWBIT_GEMM_WEIGHTS(Int8, int8, kStore, store)
LOWBIT_GEMM_WEIGHTS(Int8, int8, kSwiglu, swiglu)
