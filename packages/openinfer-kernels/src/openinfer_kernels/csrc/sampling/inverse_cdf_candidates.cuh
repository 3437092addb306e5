// Inverse-CDF sampling of few candidates, which one block has: it sorts them, applies top-k and top-p exactly and draws
// in order of token id.
#pragma once
#include "sampling/candidates.cuh"
#include "sampling/softmax_weights.cuh"

namespace {

// Draws among `count` candidates, of which the likeliest top_k are kept, then those that hold top_p of the sum of
// weights (`total`; 0: of those kept).
__device__ __noinline__ void sample_many_candidates(uint64_t* entries, int count, Distances distances,
                                                    SoftmaxWeights softmax_weight, Draw draw, uint64_t total,
                                                    int* token) {
  __shared__ uint64_t kept_sum;
  sort(entries, count);
  if (draw.top_k > 0) count = min(count, draw.top_k);
  uint64_t running[kHeld];
  running_weights(count, [&](int at) { return softmax_weight(distances.value(entries[at] >> 32)); }, running);
  if (threadIdx.x == kThreads - 1) kept_sum = running[kHeld - 1];
  __syncthreads();
  if (draw.top_p < 1) {
    const uint64_t wanted = share_of(total ? total : kept_sum, draw.top_p);
    int short_of_it = 0;
#pragma unroll
    for (int i = 0; i < kHeld; i++) short_of_it += threadIdx.x * kHeld + i < count && running[i] < wanted;
    count = min(count, int(block_fold(short_of_it, Sum())) + 1);
#pragma unroll
    for (int i = 0; i < kHeld; i++)
      if (threadIdx.x * kHeld + i == count - 1) kept_sum = running[i];
  }
  for (int i = threadIdx.x; i < count; i += kThreads) entries[i] = entries[i] << 32 | entries[i] >> 32;
  sort(entries, count);  // by id
  const uint64_t target = draw.target(kept_sum);
  const auto weight_of = [&](int at) { return softmax_weight(distances.value(uint32_t(entries[at]))); };
  uint64_t before = running_weights(count, weight_of, running);
#pragma unroll
  for (int i = 0; i < kHeld; i++) {
    if (before <= target && target < running[i]) *token = int(entries[threadIdx.x * kHeld + i] >> 32);
    before = running[i];
  }
}

// The same for at most kThreads candidates, one per thread, which finds its place by looking at all.
__device__ __forceinline__ void sample_few_candidates(const uint64_t* entries, int count, const Distances& distances,
                                                      const SoftmaxWeights& softmax_weight, const Draw& draw,
                                                      uint64_t total, int* token) {
  __shared__ uint64_t weights[kThreads];
  const bool is_one = threadIdx.x < count;
  const uint64_t mine = is_one ? entries[threadIdx.x] : ~uint64_t(0);
  uint64_t weight = is_one ? softmax_weight(distances.value(mine >> 32)) : 0;
  weights[threadIdx.x] = weight;
  __syncthreads();
  int rank = 0;
  uint64_t before = 0;  // of likelier ones
  if (threadIdx.x / 32 * 32 < count) {
#pragma unroll 4
    for (int i = 0; i < count; i++) {
      const bool is_likelier = entries[i] < mine;
      rank += is_likelier;
      before += is_likelier ? weights[i] : 0;
    }
  }
  if (draw.top_k > 0 && rank >= draw.top_k) weight = 0;
  uint64_t kept_sum = block_fold(weight, Sum());
  if (draw.top_p < 1) {
    if (before >= share_of(total ? total : kept_sum, draw.top_p)) weight = 0;
    kept_sum = block_fold(weight, Sum());
  }
  weights[threadIdx.x] = weight;
  __syncthreads();
  if (threadIdx.x / 32 * 32 >= count) return;
  before = 0;  // of lower ids
#pragma unroll 4
  for (int i = 0; i < count; i++) before += uint32_t(entries[i]) < uint32_t(mine) ? weights[i] : 0;
  const uint64_t target = draw.target(kept_sum);
  if (before <= target && target < before + weight) *token = int(uint32_t(mine));
}

}  // namespace
