// Products of several matrices of E4M3 with a scale per block: see grouped_gemm.cuh.
#include "gemm/grouped_gemm.cuh"

GROUPED_GEMM(fp8, few, Fp8, 16, 8, 1, 4, 2, 3, 3)
GROUPED_GEMM(fp8, 8, Fp8, 64, 8, 4, 1, 2, 5, 4)
GROUPED_GEMM(fp8, 32, Fp8, 64, 32, 4, 1, 2, 4, 3)
GROUPED_GEMM(fp8, 128, Fp8, 128, 128, 2, 1, 1, 3, 2)
