// The kernels of adapted_heads.cuh for a cache in BF16.
#include "lora/adapted_heads.cuh"

ADAPTED_HEADS_ANY(adapted_heads)
