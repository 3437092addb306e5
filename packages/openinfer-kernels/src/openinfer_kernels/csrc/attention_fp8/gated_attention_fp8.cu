// The append of gated_attention.cu into a cache in FP8.
#define APPEND_FP8
#include "attention_fp8/fp8_append.cuh"
#include "attention/gated_attention.cu"

#define GATED_QK_NORM_ROPE_APPEND_FP8(HEAD_DIM)                                                                  \
  extern "C" __global__ void gated_qk_norm_rope_append_fp8_##HEAD_DIM(const __grid_constant__ Arguments a) {     \
    run_vectors<HEAD_DIM / 8>(a);                                                                                \
  }

GATED_QK_NORM_ROPE_APPEND_FP8(64)
GATED_QK_NORM_ROPE_APPEND_FP8(128)
GATED_QK_NORM_ROPE_APPEND_FP8(256)
