// Products of several matrices of Fp8 weights, of experts: see lowbit_gemm.cuh.
#include "lowbit/lowbit_gemm.cuh"

LOWBIT_EXPERTS_OF(Fp8, fp8, kStore, store)
LOWBIT_EXPERTS_SUMS(Fp8, fp8, kStore, store)
LOWBIT_EXPERTS_OF(Fp8, fp8, kSwiglu, swiglu)
LOWBIT_EXPERTS_SUMS(Fp8, fp8, kSwiglu, swiglu)
