// Products with Int4 weights that have minimums, for any number of tokens: see lowbit_gemm.cuh. Groups are of 32 columns,
// so that weights are scaled, never sums.
#include "lowbit/lowbit_gemm.cuh"

LOWBIT_GEMM_WEIGHTS(Int4Min, int4_min, kStore, store)
LOWBIT_GEMM_WEIGHTS(Int4Min, int4_min, kSwiglu, swiglu)
LOWBIT_GEMM_E4M3_GROUPS(Int4Min, int4_min, kStore, store)
LOWBIT_GEMM_E4M3_GROUPS(Int4Min, int4_min, kSwiglu, swiglu)
