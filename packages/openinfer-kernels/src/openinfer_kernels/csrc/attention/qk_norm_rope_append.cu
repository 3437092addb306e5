// The kernels of qk_norm_rope_append.cuh for a cache in BF16.
#include "attention/qk_norm_rope_append.cuh"

APPEND_ANY(qk_norm_rope_append, Norm::kPlain)
APPEND_ANY(zero_centred_qk_norm_rope_append, Norm::kZeroCentred)
APPEND_ANY(rope_append, Norm::kNone)
