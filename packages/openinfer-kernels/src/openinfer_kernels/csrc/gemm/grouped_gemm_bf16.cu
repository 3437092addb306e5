// Products of several matrices of BF16: see grouped_gemm.cuh.
#include "gemm/grouped_gemm.cuh"

GROUPED_GEMM(bf16, few, Bf16, 16, 8, 1, 4, 2, 5, 3)
GROUPED_GEMM(bf16, 8, Bf16, 64, 8, 4, 1, 2, 7, 3)
GROUPED_GEMM(bf16, 32, Bf16, 64, 32, 4, 1, 2, 6, 3)
GROUPED_GEMM(bf16, 128, Bf16, 128, 128, 2, 1, 2, 3, 2)
