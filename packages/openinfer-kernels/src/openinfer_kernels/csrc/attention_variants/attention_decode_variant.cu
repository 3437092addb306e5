// Decode attention with a window, a soft cap or sinks, for any GPU: attention_decode.cu with `Variant`. More than 8
// query heads of a KV head are several items.
#define ATTENTION_VARIANT
#include "attention/attention_decode.cu"

ATTENTION_DECODE(attention_decode_variant, Variant, 64, 1, 3)
ATTENTION_DECODE(attention_decode_variant, Variant, 128, 1, 2)
ATTENTION_DECODE(attention_decode_variant, Variant, 256, 1, 2)
