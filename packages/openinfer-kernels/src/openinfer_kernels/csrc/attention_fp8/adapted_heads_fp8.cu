// The kernels of lora/adapted_heads.cuh for a cache in FP8.
#define APPEND_FP8
#include "attention_fp8/fp8_append.cuh"
#include "lora/adapted_heads.cuh"

ADAPTED_HEADS_ANY(adapted_heads_fp8)
