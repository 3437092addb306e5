// Products of several matrices of BF16: see grouped_gemm.cuh.
#include "grouped_gemm.cuh"

GROUPED_GEMM(bf16, Bf16, 64, 8, 4, 2, 7, 3)
GROUPED_GEMM(bf16, Bf16, 64, 32, 4, 2, 6, 3)
GROUPED_GEMM(bf16, Bf16, 128, 128, 2, 2, 3, 2)
