// Decode attention over a cache in FP8, for Hopper: attention_decode_hopper.cu with tiles of attention_kv_tile_fp8.cuh.
// Tiles are half as large, so rings are twice as deep.
#define ATTENTION_FP8
#include "attention_fp8/attention_kv_tile_fp8.cuh"
#include "attention/attention_decode_hopper.cu"

ATTENTION_DECODE(attention_decode_hopper_fp8, Fp8, 64, 1, 8, 2)
ATTENTION_DECODE(attention_decode_hopper_fp8, Fp8, 64, 2, 8, 2)
ATTENTION_DECODE(attention_decode_hopper_fp8, Fp8, 128, 1, 4, 2)
ATTENTION_DECODE(attention_decode_hopper_fp8, Fp8, 128, 2, 4, 2)
ATTENTION_DECODE(attention_decode_hopper_fp8, Fp8, 256, 1, 4, 1)
