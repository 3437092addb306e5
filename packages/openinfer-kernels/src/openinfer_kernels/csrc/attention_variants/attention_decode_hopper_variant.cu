// Decode attention with a window, a soft cap or sinks, for Hopper: attention_decode_hopper.cu with `Variant`. More than
// 8 query heads of a KV head are several items.
#define ATTENTION_VARIANT
#include "attention/attention_decode_hopper.cu"

ATTENTION_DECODE(attention_decode_hopper_variant, Variant, 64, 1, 4, 2)
ATTENTION_DECODE(attention_decode_hopper_variant, Variant, 128, 1, 2, 2)
ATTENTION_DECODE(attention_decode_hopper_variant, Variant, 256, 1, 2, 1)
