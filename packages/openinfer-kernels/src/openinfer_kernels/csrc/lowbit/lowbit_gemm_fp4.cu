// Products with Fp4 weights for any number of tokens: see lowbit_gemm.cuh.
#include "lowbit/lowbit_gemm.cuh"

LOWBIT_GEMM_SUMS(Fp4, fp4, kStore, store)
LOWBIT_GEMM_SUMS(Fp4, fp4, kSwiglu, swiglu)
LOWBIT_GEMM_WEIGHTS(Fp4, fp4, kStore, store)
LOWBIT_GEMM_WEIGHTS(Fp4, fp4, kSwiglu, swiglu)
LOWBIT_GEMM_E4M3_GROUPS(Fp4, fp4, kStore, store)
LOWBIT_GEMM_E4M3_GROUPS(Fp4, fp4, kSwiglu, swiglu)
