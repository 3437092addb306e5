// qk_norm_rope_append.cuh into a cache in FP8: keys are quantised from float32, after norm and RoPE.
#define APPEND_FP8
#include "attention_fp8/fp8_append.cuh"
#include "attention/qk_norm_rope_append.cuh"

#define APPEND_FP8_ANY(NAME, NORM) \
  APPEND(NAME, 32, NORM)           \
  APPEND(NAME, 64, NORM)           \
  APPEND(NAME, 128, NORM)          \
  APPEND(NAME, 256, NORM)

APPEND_FP8_ANY(qk_norm_rope_append_fp8, Norm::kPlain)
APPEND_FP8_ANY(zero_centred_qk_norm_rope_append_fp8, Norm::kZeroCentred)
APPEND_FP8_ANY(rope_append_fp8, Norm::kNone)
