// Products of several matrices of integers of four bits with a scale per 32 columns: see grouped_gemm.cuh.
#include "gemm/grouped_gemm.cuh"

GROUPED_GEMM(int4, few, Int4, 16, 8, 1, 4, 1, 4, 4)
GROUPED_GEMM(int4, 8, Int4, 64, 8, 4, 1, 2, 4, 4)
GROUPED_GEMM(int4, 32, Int4, 64, 32, 4, 1, 2, 3, 2)
GROUPED_GEMM(int4, 128, Int4, 128, 128, 2, 1, 1, 2, 2)
