// Products with Int4 weights for any number of tokens: see lowbit_gemm.cuh.
#include "lowbit/lowbit_gemm.cuh"

LOWBIT_GEMM_SUMS(Int4, int4, kStore, store)
LOWBIT_GEMM_SUMS(Int4, int4, kSwiglu, swiglu)
LOWBIT_GEMM_WEIGHTS(Int4, int4, kStore, store)
LOWBIT_GEMM_WEIGHTS(Int4, int4, kSwiglu, swiglu)
LOWBIT_GEMM_BF16_GROUPS(Int4, int4, kStore, store)
LOWBIT_GEMM_BF16_GROUPS(Int4, int4, kSwiglu, swiglu)
LOWBIT_GEMM(Int4, int4, 128, kWoven, woven, kStore, store)
LOWBIT_GEMM(Int4, int4, 128, kWoven, woven, kSwiglu, swiglu)
LOWBIT_GEMM_E4M3(Int4, int4, kStore, store)
LOWBIT_GEMM_E4M3(Int4, int4, kSwiglu, swiglu)
LOWBIT_GEMM_E4M3_GROUPS(Int4, int4, kStore, store)
LOWBIT_GEMM_E4M3_GROUPS(Int4, int4, kSwiglu, swiglu)
