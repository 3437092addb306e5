// Prefill attention over a cache in FP8, for Hopper: attention_prefill_hopper.cu with the producer of
// attention_prefill_staging.cuh.
#define ATTENTION_FP8
#include "attention_fp8/fp8_cache.cuh"
#include "attention/attention_prefill_hopper.cu"

namespace {
struct NoMap {};
}  // namespace

#define ATTENTION_PREFILL_FP8(D, KEYS)                                                            \
  extern "C" __global__ void __launch_bounds__(kThreads, 1)                                       \
      attention_prefill_hopper_fp8_##D(const __grid_constant__ Arguments<Fp8Pages> arguments) {   \
    run<Shape<D, KEYS, Fp8Pages>>(NoMap{}, arguments);                                            \
  }

ATTENTION_PREFILL_FP8(64, 128)
ATTENTION_PREFILL_FP8(128, 128)
ATTENTION_PREFILL_FP8(256, 64)
