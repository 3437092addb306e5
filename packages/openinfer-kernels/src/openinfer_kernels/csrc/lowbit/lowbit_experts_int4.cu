// Products of several matrices of Int4 weights, of experts: see lowbit_gemm.cuh.
#include "lowbit/lowbit_gemm.cuh"

LOWBIT_EXPERTS_OF(Int4, int4, kStore, store)
LOWBIT_EXPERTS_SUMS(Int4, int4, kStore, store)
LOWBIT_EXPERTS_GROUPS(Int4, int4, kStore, store)
LOWBIT_EXPERTS_BF16_GROUPS(Int4, int4, kStore, store)
LOWBIT_EXPERTS_OF(Int4, int4, kSwiglu, swiglu)
LOWBIT_EXPERTS_SUMS(Int4, int4, kSwiglu, swiglu)
LOWBIT_EXPERTS_GROUPS(Int4, int4, kSwiglu, swiglu)
LOWBIT_EXPERTS_BF16_GROUPS(Int4, int4, kSwiglu, swiglu)
