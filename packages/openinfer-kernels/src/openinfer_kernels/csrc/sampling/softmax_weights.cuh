// Weights of tokens in fixed point, shares of their sums, and where a draw falls.
#pragma once
#include "sampling/ordered.cuh"

namespace {

constexpr float kOctaves = 46;  // so far below the likeliest token none weighs anything: 2^44 2^-46 rounds to 0

// Weights relative to the likeliest token, which has 2^44: fewer than 2^20 of them add up to less than 2^64.
//
// The scale is two floats, as up to 46 octaves multiply its rounding. At a temperature next to 0 it is bounded: 0 times
// infinity, of the likeliest token, would be NaN.
struct SoftmaxWeights {
  float largest, min_p, scale, scale_rest;

  __device__ SoftmaxWeights(float largest, float temperature, float min_p) : largest(largest), min_p(min_p) {
    const double exact = 1.4426950408889634 / double(temperature);
    scale = exact > 1e38 ? 1e38f : float(exact);
    scale_rest = exact > 1e30 ? 0.0f : float(exact - double(scale));
  }

  // A distance beyond which nothing weighs anything.
  __device__ __forceinline__ uint32_t range(const Distances& distances) const {
    const float lowest = fmaxf(largest - kOctaves / scale, -3.4e38f);
    return distances.of(lowest);
  }

  __device__ __forceinline__ uint64_t operator()(float score) const {
    const float below = score - largest;
    float weight;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(weight) : "f"(fmaf(below, scale, below * scale_rest)));
    return weight >= min_p ? __float2ull_rn(weight * 0x1p44f) : 0;  // a NaN, of an infinite distance, weighs nothing
  }
};

// What is kept of a row: distances below `end`, and of those equal to it the `num_ties` with the lowest ids.
struct Threshold {
  uint32_t end, num_ties;
};

// `share` of `sum`, rounded up, and at least 1: what a running sum must reach.
__device__ __forceinline__ uint64_t share_of(uint64_t sum, float share) {
  return max(uint64_t(1), min(sum, uint64_t(ceil(double(share) * double(sum)))));
}

// A row's top-k and top-p, and its random word.
struct Draw {
  int top_k;  // 0 if it cuts nothing
  float top_p;
  uint32_t word;

  // Where in running sums up to `sum` the draw falls.
  __device__ __forceinline__ uint64_t target(uint64_t sum) const { return __umul64hi(sum, uint64_t(word) << 32); }
};

}  // namespace
