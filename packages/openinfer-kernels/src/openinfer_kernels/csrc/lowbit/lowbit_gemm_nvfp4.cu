// Products with Nvfp4 weights for any number of tokens: see lowbit_gemm.cuh.
#include "lowbit/lowbit_gemm.cuh"

LOWBIT_GEMM_WEIGHTS(Nvfp4, nvfp4, kStore, store)
LOWBIT_GEMM_WEIGHTS(Nvfp4, nvfp4, kSwiglu, swiglu)
LOWBIT_GEMM_E4M3_GROUPS(Nvfp4, nvfp4, kStore, store)
LOWBIT_GEMM_E4M3_GROUPS(Nvfp4, nvfp4, kSwiglu, swiglu)
