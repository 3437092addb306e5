// Products with Nvfp4 weights for many tokens: see staged_gemm.cuh.
#include "lowbit/staged_gemm.cuh"

STAGED_GEMMS(Nvfp4, nvfp4)
