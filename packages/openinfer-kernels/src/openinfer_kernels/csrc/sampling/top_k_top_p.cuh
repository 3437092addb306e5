// The threshold of top-k and top-p where it lies too deep for a few candidates: two ways to find the distance at which
// a running sum over the whole row reaches a target, by the order of the few tokens near it, or bit by bit.
#pragma once
#include "sampling/candidates.cuh"
#include "sampling/scores.cuh"
#include "sampling/softmax_weights.cuh"

namespace {

constexpr int kBins = 2048, kBinBits = 11, kFineBins = 4096;

static_assert(kBins == kCandidates && kFineBins == 2 * kCandidates, "bins and candidates share one place");

// Bins of equal width over the scores from the largest down to where nothing matters.
struct Ruler {
  float largest, bins_per_score;

  __device__ __forceinline__ int bin(float score) const {
    return int(fminf((largest - score) * bins_per_score, kFineBins));
  }
  __device__ __forceinline__ float upper_edge(int bin) const { return largest - float(bin) / bins_per_score; }
};

// What a token within `ruler` counts for a threshold: 1 for top-k, its weight for top-p.
struct CountOne {
  __device__ __forceinline__ uint64_t operator()(uint32_t, float) const { return 1; }
  __device__ __forceinline__ uint64_t most(float) const { return 1; }
  __device__ __forceinline__ uint64_t least(float) const { return 1; }
};

struct CountWeight {
  SoftmaxWeights softmax_weight;
  uint32_t end;  // tokens from this distance on count nothing

  __device__ __forceinline__ uint64_t operator()(uint32_t distance, float score) const {
    return distance < end ? softmax_weight(score) : 0;
  }
  // Bounds that hold in spite of roundings of the edge of a bin.
  __device__ __forceinline__ uint64_t most(float upper_edge) const {
    const uint64_t weight = softmax_weight(upper_edge);
    return weight + (weight >> 16) + 1;
  }
  __device__ __forceinline__ uint64_t least(float lower_edge) const {
    const uint64_t weight = softmax_weight(lower_edge);
    return weight - (weight >> 16);
  }
};

struct Reached {
  uint32_t distance;
  uint64_t before;
};

constexpr uint32_t kTooMany = kNoDistance - 1;

// The distance at which the running sum of `value(distance, score)`, in order of distance, reaches `target`, and the
// sum of what lies below it. The numbers of tokens per bin of `ruler` bound the running sums; the tokens of the few
// bins in which it may be are put in order by one block. kTooMany if these do not fit.
template <class Logit, class Value>
__device__ __noinline__ Reached reach_by_order(Scores<Logit> scores, Distances distances, uint64_t* work, Ruler ruler,
                                               uint64_t target, Value value) {
  constexpr int kWidth = Scores<Logit>::kWidth, kMine = kFineBins / kThreads;
  __shared__ uint64_t sum_of_block, count_of_block, reached_distance, reached_before;
  __shared__ uint32_t appended;
  __shared__ int first_bin, last_bin;
  uint32_t* counts = reinterpret_cast<uint32_t*>(work);
  for (int i = threadIdx.x; i < kCandidates; i += kThreads) work[i] = 0;
  if (threadIdx.x == 0) {
    appended = 0;
    first_bin = last_bin = kFineBins - 1;
    reached_distance = kTooMany;
  }
  __syncthreads();
  scores.template each_access<2>([&](int, const float (&values)[kWidth]) {
#pragma unroll
    for (int i = 0; i < kWidth; i++) {
      const int bin = ruler.bin(values[i]);
      if (bin < kFineBins) atomicAdd(&counts[bin], 1);
    }
  });
  cluster_sync();
  uint64_t pairs[kMine / 2];  // of counts
  uint64_t most = 0, least = 0;
#pragma unroll
  for (int i = 0; i < kMine / 2; i++) {
    pairs[i] = 0;
#pragma unroll
    for (int rank = 0; rank < kClusterSize; rank++)
      pairs[i] += cluster_read(&work[threadIdx.x * (kMine / 2) + i], rank);
  }
  cluster_sync();  // counts have been read, by all; now they are the cluster's
#pragma unroll
  for (int i = 0; i < kMine / 2; i++) work[threadIdx.x * (kMine / 2) + i] = pairs[i];
  const int mine = threadIdx.x * kMine;
#pragma unroll 1
  for (int i = mine; i < mine + kMine; i++) {
    most += counts[i] * value.most(ruler.upper_edge(i));
    least += counts[i] * value.least(ruler.upper_edge(i + 1));
  }
  most = block_sum_before(most);
  least = block_sum_before(least);
#pragma unroll 1
  for (int i = mine; i < mine + kMine; i++) {
    const uint64_t most_after = most + counts[i] * value.most(ruler.upper_edge(i));
    const uint64_t least_after = least + counts[i] * value.least(ruler.upper_edge(i + 1));
    if (most < target && target <= most_after) first_bin = i;
    if (least < target && target <= least_after) last_bin = i;
    most = most_after;
    least = least_after;
  }
  __syncthreads();
  const int from = first_bin, to = last_bin;
  uint64_t above = 0;
  scores.template each_access<2>([&](int at, const float (&values)[kWidth]) {
#pragma unroll
    for (int i = 0; i < kWidth; i++) {
      const int bin = ruler.bin(values[i]);
      if (bin > to || bin >= kFineBins) continue;
      const uint32_t distance = distances.of(values[i]);
      if (bin < from)
        above += value(distance, values[i]);
      else
        append(work, &appended, entry(distance, scores.slice.first + at + i));
    }
  });
  above = block_fold(above, Sum());
  if (threadIdx.x == 0) {
    sum_of_block = above;
    count_of_block = appended;
  }
  cluster_sync();
  above = cluster_fold(&sum_of_block, Sum());
  const int count = int(cluster_fold(&count_of_block, Sum()));
  if (cluster_rank() == 0 && count > 0 && count <= kCandidates && above < target) {
    collect(work, &count_of_block);
    sort(work, count);
    uint64_t running[kHeld];
    const auto amount = [&](int at) {
      const uint32_t distance = work[at] >> 32;
      return value(distance, distances.value(distance));
    };
    uint64_t before = above + running_weights(count, amount, running);
#pragma unroll
    for (int i = 0; i < kHeld; i++) {
      const int at = threadIdx.x * kHeld + i;
      if (at < count && before < target && target <= above + running[i]) {
        const uint32_t distance = work[at] >> 32;
        int low = 0, high = at;  // the first of the same distance
        while (low < high) {
          const int middle = (low + high) / 2;
          if (uint32_t(work[middle] >> 32) < distance)
            low = middle + 1;
          else
            high = middle;
        }
        reached_distance = distance;
        reached_before = before - uint64_t(at - low) * amount(at);
      }
      before = above + running[i];
    }
  }
  cluster_sync();
  return {uint32_t(cluster_read(&reached_distance, 0)), cluster_read(&reached_before, 0)};
}

// The distance at which the running sum of `value(distance, score)`, in order of distance, reaches `target`, and the
// sum of what lies below it; kNoDistance if it is not reached within `range`. Each round takes kBinBits of its bits.
template <class Logit, class Value>
__device__ __noinline__ Reached reach(Scores<Logit> scores, Distances distances, uint64_t* bins, uint32_t range,
                                      uint64_t target, Value value) {
  __shared__ Reached reached;
  Reached from = {0, 0};
  int shift = max(0, 32 - __clz(range) - kBinBits);
  while (true) {
    for (int i = threadIdx.x; i < kBins; i += kThreads) bins[i] = 0;
    if (threadIdx.x == 0) reached = {kNoDistance, 0};
    __syncthreads();
    scores.template each<1>([&](int, float score) {
      const uint32_t distance = distances.of(score), bin = (distance - from.distance) >> shift;
      if (distance < from.distance || bin >= kBins || distance > range) return;
      const uint64_t amount = value(distance, score);
      if (amount > 0) add_to(&bins[bin], amount);
    });
    cluster_sync();  // the bins of all blocks are complete
    constexpr int kMine = kBins / kThreads;
    uint64_t sums[kMine], sum = 0;
#pragma unroll
    for (int i = 0; i < kMine; i++) {
      sums[i] = 0;
#pragma unroll
      for (int rank = 0; rank < kClusterSize; rank++) sums[i] += cluster_read(&bins[threadIdx.x * kMine + i], rank);
      sum += sums[i];
    }
    uint64_t before = from.before + block_sum_before(sum);
#pragma unroll
    for (int i = 0; i < kMine; i++) {
      if (before < target && target <= before + sums[i])
        reached = {from.distance + (uint32_t(threadIdx.x * kMine + i) << shift), before};
      before += sums[i];
    }
    cluster_sync();  // all blocks have read them, and may clear their own
    from = reached;
    if (shift == 0 || from.distance == kNoDistance) return from;
    __syncthreads();
    shift = max(0, shift - kBinBits);
  }
}

__device__ __forceinline__ uint32_t ties_that_reach(uint64_t missing, uint64_t weight, uint32_t most) {
  return weight == 0 ? most : uint32_t(min(uint64_t(most), (missing + weight - 1) / weight));
}

// `reach_by_order`, or `reach` where too many tokens are near the target.
template <class Logit, class Value>
__device__ __forceinline__ Reached reach_anyhow(const Scores<Logit>& scores, const Distances& distances,
                                                const SoftmaxWeights& softmax_weight, uint64_t* work, float octaves,
                                                uint64_t target, Value value) {
  const Ruler ruler = {softmax_weight.largest, kFineBins / octaves * softmax_weight.scale};
  const Reached reached = reach_by_order(scores, distances, work, ruler, target, value);
  if (reached.distance != kTooMany) return reached;
  return reach(scores, distances, work, softmax_weight.range(distances), target, value);
}

// The threshold of top-k, then top-p, at any depth. (ptxas lays out functions that are not inlined by their names: one
// that sorts before `reach` gives the kernels other registers.)
template <class Logit>
__device__ __noinline__ Threshold find_kept(Scores<Logit> scores, Distances distances, SoftmaxWeights softmax_weight,
                                            uint64_t* work, uint64_t sum, int num_token_ids, Draw draw) {
  __shared__ uint64_t of_block;
  Threshold threshold = {kNoDistance, 0};
  uint64_t sum_before = sum;
  if (draw.top_k > 0) {
    const Reached at = reach_anyhow(scores, distances, softmax_weight, work, kOctaves, draw.top_k, CountOne{});
    if (at.distance != kNoDistance) {
      threshold = {at.distance, uint32_t(draw.top_k - at.before)};
      sum_before = 0;
      scores.template each<2>([&](int, float score) {
        if (distances.of(score) < threshold.end) sum_before += softmax_weight(score);
      });
      sum_before = block_fold(sum_before, Sum());
      if (threadIdx.x == 0) of_block = sum_before;
      cluster_sync();
      sum_before = cluster_fold(&of_block, Sum());
      sum = sum_before + threshold.num_ties * softmax_weight(distances.value(threshold.end));
    }
  }
  if (draw.top_p >= 1) return threshold;
  const uint64_t wanted = share_of(sum, draw.top_p);
  if (wanted > sum_before) {
    threshold.num_ties =
        ties_that_reach(wanted - sum_before, softmax_weight(distances.value(threshold.end)), threshold.num_ties);
    return threshold;
  }
  // tokens that all together hold less than half of the rest cannot be needed
  const float negligible = 0.5f * (1 - draw.top_p) * float(sum) / float(num_token_ids);
  const float octaves = fminf(kOctaves, 44 - log2f(negligible));
  const Reached at = reach_anyhow(scores, distances, softmax_weight, work, octaves, wanted,
                                  CountWeight{softmax_weight, threshold.end});
  return {at.distance, ties_that_reach(wanted - at.before, softmax_weight(distances.value(at.distance)), kNoDistance)};
}

}  // namespace
