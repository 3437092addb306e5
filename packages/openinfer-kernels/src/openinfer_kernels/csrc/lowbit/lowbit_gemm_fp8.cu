// Products with Fp8 weights for any number of tokens: see lowbit_gemm.cuh.
#include "lowbit/lowbit_gemm.cuh"

LOWBIT_GEMM_SUMS(Fp8, fp8, kStore, store)
LOWBIT_GEMM_SUMS(Fp8, fp8, kSwiglu, swiglu)
LOWBIT_GEMM_WEIGHTS(Fp8, fp8, kStore, store)
LOWBIT_GEMM_WEIGHTS(Fp8, fp8, kSwiglu, swiglu)
LOWBIT_GEMM_E4M3(Fp8, fp8, kStore, store)
LOWBIT_GEMM_E4M3(Fp8, fp8, kSwiglu, swiglu)
