// Products of several matrices of E2M1 with a power of two per 32 columns: see grouped_gemm.cuh.
#include "gemm/grouped_gemm.cuh"

GROUPED_GEMM(fp4, few, Fp4, 16, 8, 1, 4, 1, 4, 4)
GROUPED_GEMM(fp4, 8, Fp4, 64, 8, 4, 1, 2, 4, 4)
GROUPED_GEMM(fp4, 32, Fp4, 64, 32, 4, 1, 2, 3, 2)
GROUPED_GEMM(fp4, 128, Fp4, 128, 128, 2, 1, 1, 2, 2)
