// Products with Int8 weights for many tokens: see staged_gemm.cuh.
#include "lowbit/staged_gemm.cuh"

STAGED_GEMMS(Int8, int8)
