// Decode attention over a cache in FP8, for any GPU: attention_decode.cu, whose loads round to BF16.
#define ATTENTION_FP8
#include "attention_fp8/fp8_cache.cuh"
#include "attention/attention_decode.cu"

ATTENTION_DECODE(attention_decode_fp8, Fp8, 64, 1, 3)
ATTENTION_DECODE(attention_decode_fp8, Fp8, 64, 2, 3)
ATTENTION_DECODE(attention_decode_fp8, Fp8, 128, 1, 2)
ATTENTION_DECODE(attention_decode_fp8, Fp8, 128, 2, 2)
ATTENTION_DECODE(attention_decode_fp8, Fp8, 256, 1, 2)
