// Prefill attention with a window, a soft cap or sinks, for Hopper: attention_prefill_hopper.cu with `Variant`.
#define ATTENTION_VARIANT
#include "attention/attention_prefill_hopper.cu"

ATTENTION_PREFILL(attention_prefill_hopper_variant, Variant, 64, 128)
ATTENTION_PREFILL(attention_prefill_hopper_variant, Variant, 128, 128)
ATTENTION_PREFILL(attention_prefill_hopper_variant, Variant, 256, 64)
