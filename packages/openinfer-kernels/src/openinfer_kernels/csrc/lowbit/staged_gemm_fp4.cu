// Products with Fp4 weights for many tokens: see staged_gemm.cuh.
#include "lowbit/staged_gemm.cuh"

STAGED_GEMMS(Fp4, fp4)
