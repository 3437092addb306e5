// One token per row of logits [R, V]: `SamplingBatch` in ops.py has the rules, cpu/sampling.py the same in NumPy.
//
// A cluster of blocks owns a row, whose scores are its logits after penalties, bias and mask. Rows that have any of
// these are first written to a scratch in float32. Scores are read several times, all but the first time from the
// caches. Weights are exp((score - largest) / temperature) in fixed point, 44 bits after the point: sums of integers
// do not depend on their order, so neither the number of blocks nor the rest of the batch changes a bit of a row's
// answer.
//
//   greedy           the largest score, the lowest id among equals
//   no threshold     running sums per warp, then the one warp into which the draw fell looks for the token
//   top-k, top-p     a bound that hardly more tokens are within than must be kept; one block puts these few in order,
//                    finds the threshold and draws. Where it lies too deep for that, counts per bin bound where it is
//                    and the tokens near it are put in order; where even these are too many, histograms over the bits
//                    of all scores find it.
#include "common/block.cuh"
#include "common/pdl.cuh"
#include "common/philox.cuh"
#include "sampling/candidates.cuh"
#include "sampling/cluster.cuh"
#include "sampling/inverse_cdf.cuh"
#include "sampling/inverse_cdf_candidates.cuh"
#include "sampling/logit_changes.cuh"
#include "sampling/logits.cuh"
#include "sampling/ordered.cuh"
#include "sampling/sampling_record.cuh"
#include "sampling/scores.cuh"
#include "sampling/softmax_weights.cuh"
#include "sampling/top_k_top_p.cuh"

namespace {

constexpr int kMostSorted = 1024;  // the largest k for which tokens are put in order

struct Arguments {
  const void* logits;
  float* scratch;  // [R, cluster * slice], null if no row can need it
  int* tokens;
  SamplingColumns columns;
  int num_columns, num_token_ids, slice, is_wide;
  Bias bias;
  Penalties penalties;
  TokenMask mask;
};

// --- rows with changes --------------------------------------------------------------------------------------------

// Writes the scores of a slice of row `index`, whose logits begin at `logits`, to `scores`.
template <class Logit, int kWidth>
__device__ __forceinline__ void write_scores(const Arguments& a, const Logit* logits, const Slice& slice,
                                             const RowPenalties& penalties, const RowBias& bias, const uint32_t* mask,
                                             float* scores) {
  for (int at = threadIdx.x * kWidth; at < slice.size; at += kThreads * kWidth) {
    const int id = slice.first + at;
    float values[kWidth];
    to_float32(read<kWidth>(logits + id), values);
    if (penalties.output_counts) penalties.apply(id, values);
    const uint32_t allowed = mask ? mask[id / 32] >> (id % 32) : ~0u;
#pragma unroll
    for (int i = 0; i < kWidth; i++) scores[at + i] = allowed >> i & 1 ? values[i] : -CUDART_INF_F;
  }
  __syncthreads();  // a bias is added to what another thread has written
  if (bias.count > 0) bias.add(scores, slice.first, slice.size);
  __syncthreads();
}

// --- greedy rows ------------------------------------------------------------------------------------------------

// Larger scores, then lower ids are larger; a NaN is the largest.
__device__ __forceinline__ uint64_t preference(uint32_t key, uint32_t id) { return uint64_t(key) << 32 | ~id; }

template <class Logit>
__device__ __forceinline__ void choose_greedily(const Scores<Logit>& scores, int* token) {
  constexpr int kWidth = Scores<Logit>::kWidth;
  __shared__ uint64_t of_block;
  float largest = -CUDART_INF_F;
  int best_at = -1;
  bool has_nan = false;
  scores.template each_access<kAhead>([&](int at, const float (&values)[kWidth]) {
    const float best = largest_of(values);
    has_nan |= best != best;
    if (best > largest) {
      largest = best;
      best_at = at;
    }
  });
  uint64_t best = has_nan ? preference(kNaN, 0) : 0;
  if (best_at >= 0 && !has_nan) {
    float values[kWidth];
    scores.at(best_at, values);
#pragma unroll
    for (int i = kWidth - 1; i >= 0; i--)
      if (values[i] == largest) best = preference(ordered(largest), scores.slice.first + best_at + i);
  }
  best = block_fold(best, Most());
  if (threadIdx.x == 0) of_block = best;
  cluster_sync();
  best = cluster_fold(&of_block, Most());
  if (threadIdx.x == 0 && cluster_rank() == 0) *token = is_finite(uint32_t(best >> 32)) ? int(~uint32_t(best)) : -1;
}

// --- rows that are drawn ----------------------------------------------------------------------------------------

// Puts the tokens of this block that are within `bound` into `entries` and the number of all the cluster's into
// `*count`.
template <class Logit>
__device__ __forceinline__ int gather(const Scores<Logit>& scores, const Distances& distances, uint32_t bound,
                                      uint64_t* entries, uint64_t* count) {
  constexpr int kWidth = Scores<Logit>::kWidth;
  __shared__ uint32_t appended;
  if (threadIdx.x == 0) appended = 0;
  __syncthreads();
  const float least = distances.value(bound);
  scores.template each_access<kAhead>([&](int at, const float (&values)[kWidth]) {
    if (largest_of(values) < least) return;
#pragma unroll
    for (int i = 0; i < kWidth; i++)
      if (values[i] >= least) append(entries, &appended, entry(distances.of(values[i]), scores.slice.first + at + i));
  });
  __syncthreads();
  if (threadIdx.x == 0) *count = appended;
  cluster_sync();
  return int(cluster_fold(count, Sum()));
}

// What a thread knows of the largest scores: its own, and the least of its cluster's threads that have a finite one.
struct Maxima {
  uint32_t mine, worst;
};

template <class Logit>
__device__ __forceinline__ void sample_token(const Scores<Logit>& scores, const Distances& distances,
                                             const SoftmaxWeights& softmax_weight, const Draw& draw, int num_token_ids,
                                             const Maxima& maxima, uint64_t* work, int* token) {
  __shared__ uint64_t sum_of_block, count_of_block;
  if (draw.top_k == 0 && draw.top_p >= 1)
    return sample_inverse_cdf(scores, distances, softmax_weight, {kNoDistance, 0}, draw, token);
  const bool is_short = num_token_ids <= kCandidates;
  const bool is_top_k = draw.top_k > 0 && draw.top_k <= kMostSorted;
  uint64_t sum = 0;
  if (!is_short && !is_top_k) {
    scores.template each<2>([&](int, float score) { sum += softmax_weight(score); });
    sum = block_fold(sum, Sum());
    if (threadIdx.x == 0) sum_of_block = sum;
  }
  uint32_t bound = distances.of_lowest_finite();
  if (!is_short) {
    const bool is_some = is_finite(maxima.mine);
    const uint32_t mine = is_some ? distances.largest - maxima.mine : kNoDistance;
    const uint64_t amount = is_top_k ? 1 : is_some ? softmax_weight(from_ordered(maxima.mine)) : 0;
    bound = candidate_bound(mine, distances.largest - maxima.worst, amount, [&]() -> uint64_t {
      if (is_top_k) return draw.top_k;
      sum = cluster_fold(&sum_of_block, Sum());
      return draw.top_k > 0 ? ~uint64_t(0) : share_of(sum, draw.top_p);
    });
  }
  if (bound != kNoDistance) {
    const int count = gather(scores, distances, min(bound, distances.of_lowest_finite()), work, &count_of_block);
    if (count <= kCandidates) {
      if (cluster_rank() > 0) return;
      collect(work, &count_of_block);
      if (count <= kThreads) return sample_few_candidates(work, count, distances, softmax_weight, draw, sum, token);
      return sample_many_candidates(work, count, distances, softmax_weight, draw, sum, token);
    }
  }
  if (sum == 0) {
    __shared__ uint64_t of_block;
    scores.template each<2>([&](int, float score) { sum += softmax_weight(score); });
    sum = block_fold(sum, Sum());
    if (threadIdx.x == 0) of_block = sum;
    cluster_sync();
    sum = cluster_fold(&of_block, Sum());
  }
  const Threshold threshold = find_kept(scores, distances, softmax_weight, work, sum, num_token_ids, draw);
  sample_inverse_cdf(scores, distances, softmax_weight, threshold, draw, token);
}

template <class Logit>
__device__ __forceinline__ void choose(const Arguments& a, const Scores<Logit>& scores, uint64_t* work, int* token) {
  constexpr int kWidth = Scores<Logit>::kWidth;
  __shared__ uint64_t extremes;
  const int index = cluster_row();
  const float temperature = a.columns.temperature[index];
  if (temperature == 0) return choose_greedily(scores, token);
  float largest = -CUDART_INF_F;
  scores.template each_access<kAhead>(
      [&](int, const float (&values)[kWidth]) { largest = max_nan(largest, largest_of(values)); });
  const uint32_t mine = largest != largest ? kNaN : ordered(largest);
  const uint64_t folded = block_fold(uint64_t(mine) << 32 | (is_finite(mine) ? ~mine : 0), MostOfHalves());
  if (threadIdx.x == 0) extremes = folded;
  cluster_sync();
  const uint64_t all = cluster_fold(&extremes, MostOfHalves());
  const Distances distances = {uint32_t(all >> 32)};
  if (!is_finite(distances.largest)) {
    if (threadIdx.x == 0 && cluster_rank() == 0) *token = -1;
    return;
  }
  const int top_k = a.columns.top_k[index];
  const Draw draw = {top_k < a.num_token_ids ? top_k : 0, a.columns.top_p[index],
                     philox_word(a.columns.seeds[index], a.columns.positions[index])};
  const SoftmaxWeights softmax_weight(from_ordered(distances.largest), temperature, a.columns.min_p[index]);
  sample_token(scores, distances, softmax_weight, draw, a.num_token_ids, {mine, ~uint32_t(all)}, work, token);
}

template <class Logit>
__device__ __forceinline__ void sample(const Arguments& a) {
  __shared__ uint64_t work[kCandidates];
  wait_for_previous_kernel();
  launch_dependents();
  const int index = cluster_row();
  const Slice slice = slice_of(cluster_rank(), a.slice, a.num_token_ids);
  const Logit* logits = static_cast<const Logit*>(a.logits) + int64_t(index) * a.num_columns;
  const RowPenalties penalties = a.penalties.of(index, a.num_columns);
  const uint32_t* mask = a.mask.of(index, a.num_columns);
  const RowBias bias = a.bias.of(index);
  if (a.is_wide && !penalties.output_counts && !mask && bias.count == 0) {
    choose(a, Scores<Logit>{logits + slice.first, slice}, work, a.tokens + index);
  } else {
    float* scores = a.scratch + (int64_t(index) * kClusterSize + cluster_rank()) * a.slice;
    if (a.is_wide)
      write_scores<Logit, kWide<Logit>>(a, logits, slice, penalties, bias, mask, scores);
    else
      write_scores<Logit, 1>(a, logits, slice, penalties, bias, mask, scores);
    choose(a, Scores<float>{scores, slice}, work, a.tokens + index);
  }
  cluster_sync();  // other blocks may still read this one's shared memory
}

}  // namespace

extern "C" __global__ void CLUSTER_KERNEL __launch_bounds__(kThreads, 4) sample_bfloat16(const Arguments a) {
  sample<bf16>(a);
}

extern "C" __global__ void CLUSTER_KERNEL __launch_bounds__(kThreads, 4) sample_float32(const Arguments a) {
  sample<float>(a);
}
