// Prefill attention over a cache in FP8, for any GPU: attention_prefill.cu, whose tiles are rounded to BF16 on their way
// to shared memory.
#define ATTENTION_FP8
#include "attention_fp8/fp8_cache.cuh"
#include "attention/attention_prefill.cu"

ATTENTION_PREFILL(attention_prefill_fp8, Fp8, 32, 8, 64, 2)
ATTENTION_PREFILL(attention_prefill_fp8, Fp8, 64, 8, 64, 2)
ATTENTION_PREFILL(attention_prefill_fp8, Fp8, 128, 8, 64, 1)
ATTENTION_PREFILL(attention_prefill_fp8, Fp8, 256, 4, 32, 1)
