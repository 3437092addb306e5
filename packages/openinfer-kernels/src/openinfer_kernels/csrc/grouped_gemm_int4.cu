// Products of several matrices of integers of four bits with a scale per 32 columns: see grouped_gemm.cuh.
#include "grouped_gemm.cuh"

GROUPED_GEMM(int4, Int4, 64, 8, 4, 2, 4, 4)
GROUPED_GEMM(int4, Int4, 64, 32, 4, 2, 3, 2)
GROUPED_GEMM(int4, Int4, 128, 128, 2, 1, 2, 2)
