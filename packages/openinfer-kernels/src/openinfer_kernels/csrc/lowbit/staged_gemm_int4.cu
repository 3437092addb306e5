// Products with Int4 weights for many tokens: see staged_gemm.cuh.
#include "lowbit/staged_gemm.cuh"

STAGED_GEMMS(Int4, int4)
