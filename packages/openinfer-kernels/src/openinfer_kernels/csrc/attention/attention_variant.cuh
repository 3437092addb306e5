// What a model may change about the scores of attention: a window, a first key, a soft cap, sinks. Kernels are templates of one of
// the two below; with `Plain` they compile to what they would be without it.
//
//     s = scale q . k,  with a cap c  s = c tanh(s / c);  a key is seen where  position - window < key <= position
//     P = exp(s) / (exp(sink) + sum exp(s))
//
// Kernels compute with powers of two: what follows the tanh is log2(e) times the above.
#pragma once
#include "attention/attention.cuh"

namespace attention {

__device__ __forceinline__ float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Its functions are static, as an unused `this` is enough to change how kernels are compiled.
struct Plain {
  static constexpr bool kIsVariant = false, kIsFp8 = false;
  using Cache = LayerCache;

  // The first key that a query at this position sees.
  static __device__ __forceinline__ int first_seen(int) { return 0; }
  template <int kCount>
  static __device__ __forceinline__ void cap_scores(float (&)[kCount]) {}
};

struct Variant {
  static constexpr bool kIsVariant = true, kIsFp8 = false;
  using Cache = LayerCache;

  const float* sinks;  // [H] logits; null: none
  int window;          // keys that a query sees, its own among them; the largest integer: all
  int first_key;       // keys before it are seen by no query after them; not of Hopper's kernel for prompts
  float cap;           // of scores, times log2(e); 0: none
  float slope;         // of products: 2 log2(e) scale / cap; where there is a cap, the arguments' scale is 1

  // A query before the first key sees its own.
  __device__ __forceinline__ int first_seen(int position) const {
    return max(max(0, min(first_key, position)), position - window + 1);
  }

  // c tanh(x / c) = c - 2 c / (1 + exp(2 x / c)), from products to scores. Its error is absolute, below 2^-20 of the
  // cap. `tanh.approx` is off by 2^-11 of a score, which moves a weight of a far score by more than its rounding to
  // BF16 does: results are 1.04 to 6 times as far from the truth, with this function no farther than with the exact one.
  template <int kCount>
  __device__ __forceinline__ void cap_scores(float (&scores)[kCount]) const {
    if (cap == 0.0f) return;
#pragma unroll
    for (int i = 0; i < kCount; i++)
      scores[i] = fmaf(-2.0f * cap, reciprocal_fast(1.0f + exp2_fast(scores[i] * slope)), cap);
  }

  // A query head's sink, times log2(e).
  __device__ __forceinline__ float sink_of(int head) const {
    constexpr float kLog2E = 1.4426950408889634f;
    return sinks == nullptr ? kMinusInfinity : __ldg(sinks + head) * kLog2E;
  }
};

}  // namespace attention
