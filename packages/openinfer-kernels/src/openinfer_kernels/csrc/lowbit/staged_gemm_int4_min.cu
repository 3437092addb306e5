// Products with Int4Min weights for many tokens: see staged_gemm.cuh.
#include "lowbit/staged_gemm.cuh"

STAGED_GEMMS(Int4Min, int4_min)
