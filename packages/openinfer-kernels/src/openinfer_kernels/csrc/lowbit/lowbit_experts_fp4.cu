// Products of several matrices of Fp4 weights, of experts: see lowbit_gemm.cuh.
#include "lowbit/lowbit_gemm.cuh"

LOWBIT_EXPERTS_OF(Fp4, fp4, kStore, store)
LOWBIT_EXPERTS_GROUPS(Fp4, fp4, kStore, store)
LOWBIT_EXPERTS_OF(Fp4, fp4, kSwiglu, swiglu)
LOWBIT_EXPERTS_GROUPS(Fp4, fp4, kSwiglu, swiglu)
