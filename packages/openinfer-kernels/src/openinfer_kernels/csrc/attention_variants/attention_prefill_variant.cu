// Prefill attention with a window, a soft cap or sinks, for any GPU: attention_prefill.cu with `Variant`.
#define ATTENTION_VARIANT
#include "attention/attention_prefill.cu"

ATTENTION_PREFILL(attention_prefill_variant, Variant, 32, 8, 64, 2)
ATTENTION_PREFILL(attention_prefill_variant, Variant, 64, 8, 64, 2)
ATTENTION_PREFILL(attention_prefill_variant, Variant, 128, 8, 64, 1)
ATTENTION_PREFILL(attention_prefill_variant, Variant, 256, 4, 32, 1)
