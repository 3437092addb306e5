// Inverse-CDF sampling over a whole row: running sums of warps, then those of the warp into which the draw fell.
#pragma once
#include "sampling/cluster.cuh"
#include "sampling/scores.cuh"
#include "sampling/softmax_weights.cuh"

namespace {

// What part of a row holds: the weight of what is certainly kept, and how many tokens lie exactly at the threshold.
struct Mass {
  uint64_t weight;
  uint32_t ties;

  __device__ __forceinline__ Mass operator+(const Mass& other) const {
    return {weight + other.weight, ties + other.ties};
  }
};

// Inverts the cumulative distribution of what the threshold keeps, in order of token id.
template <class Logit>
__device__ __forceinline__ void sample_inverse_cdf(const Scores<Logit>& scores, const Distances& distances,
                                                   const SoftmaxWeights& softmax_weight, const Threshold& threshold,
                                                   const Draw& draw, int* token) {
  constexpr int kWidth = Scores<Logit>::kWidth, kAtOnce = 32 * kWidth;
  __shared__ uint64_t warp_weights[kWarps], block_weight, block_ties, block_weight_so_far;
  __shared__ uint32_t warp_ties[kWarps], block_ties_so_far;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, end = scores.slice.size;
  const int per_warp = ((end + kWarps - 1) / kWarps + kAtOnce - 1) / kAtOnce * kAtOnce;
  const int warp_first = warp * per_warp, warp_end = min(end, warp_first + per_warp);
  const auto mass_of = [&](float score) -> Mass {
    const uint32_t distance = distances.of(score);
    return {distance < threshold.end ? softmax_weight(score) : 0, distance == threshold.end};
  };
  Mass mine = {0, 0};
  for (int first = warp_first + lane * kWidth; first < warp_end; first += kAhead * kAtOnce) {
    Stored<Logit, kWidth> held[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; i++)
      if (first + i * kAtOnce < warp_end) held[i] = read<kWidth>(scores.stored + first + i * kAtOnce);
#pragma unroll
    for (int i = 0; i < kAhead; i++) {
      if (first + i * kAtOnce >= warp_end) break;
      float values[kWidth];
      scores.unpack(first + i * kAtOnce, held[i], values);
#pragma unroll
      for (int j = 0; j < kWidth; j++) mine = mine + mass_of(values[j]);
    }
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2)
    mine = mine + Mass{__shfl_xor_sync(~0u, mine.weight, mask), __shfl_xor_sync(~0u, mine.ties, mask)};
  if (lane == 0) {
    warp_weights[warp] = mine.weight;
    warp_ties[warp] = mine.ties;
  }
  __syncthreads();
  Mass block = {0, 0};
#pragma unroll
  for (int i = 0; i < kWarps; i++) block = block + Mass{warp_weights[i], warp_ties[i]};
  if (threadIdx.x == 0) {
    block_weight = block.weight;
    block_ties = block.ties;
  }
  cluster_sync();
  Mass before = {0, 0}, all = {0, 0};
#pragma unroll
  for (int rank = 0; rank < kClusterSize; rank++) {
    const Mass theirs = {cluster_read(&block_weight, rank), uint32_t(cluster_read(&block_ties, rank))};
    if (rank < cluster_rank()) before = before + theirs;
    all = all + theirs;
  }
  const uint64_t tie_weight = threshold.num_ties ? softmax_weight(distances.value(threshold.end)) : 0;
  const auto kept = [&](const Mass& mass) { return mass.weight + min(mass.ties, threshold.num_ties) * tie_weight; };
  const uint64_t target = draw.target(kept(all));
  if (target < kept(before) || target >= kept(before + block)) return;
  int owner = 0;
  for (Mass next = before; owner < kWarps; owner++, before = next) {
    next = before + Mass{warp_weights[owner], warp_ties[owner]};
    if (target < kept(next)) break;
  }
  const int owner_first = owner * per_warp, owner_end = min(end, owner_first + per_warp);
  for (int first = owner_first; first < owner_end; first += kThreads * kWidth) {
    const int at = first + threadIdx.x * kWidth;
    float values[kWidth];
    Mass here = {0, 0};
    if (at < owner_end) {
      scores.at(at, values);
#pragma unroll
      for (int i = 0; i < kWidth; i++) here = here + mass_of(values[i]);
    }
    Mass reached = before + Mass{block_sum_before(here.weight),
                                 threshold.num_ties > 0 ? uint32_t(block_sum_before(here.ties)) : 0};
    const Mass last = reached + here;
    if (kept(reached) <= target && target < kept(last)) {
#pragma unroll
      for (int i = 0; i < kWidth; i++) {
        const Mass next = reached + mass_of(values[i]);
        if (kept(reached) <= target && target < kept(next)) *token = scores.slice.first + at + i;
        reached = next;
      }
    }
    if (threadIdx.x == kThreads - 1) {
      block_weight_so_far = last.weight;
      block_ties_so_far = last.ties;
    }
    __syncthreads();
    before = {block_weight_so_far, block_ties_so_far};
  }
}

}  // namespace
