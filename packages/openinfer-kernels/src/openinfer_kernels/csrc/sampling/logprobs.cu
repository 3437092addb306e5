// Log-probabilities under unmodified logits [R, V]: of one chosen token per row, with its true rank, and of the `top`
// likeliest tokens. `Logprobs` in ops.py has the rules, cpu/logprobs.py the same in NumPy.
//
// A cluster of blocks owns a row and reads it twice (the second time from its caches): for the largest logit and the
// rank, then for the sum of exponentials and the likeliest tokens. The sum is in fixed point, 44 bits after the point,
// so that a row's answer has the same bits in any batch; the rest of the arithmetic is in float64.
#include "common/block.cuh"
#include "common/pdl.cuh"
#include "sampling/candidates.cuh"
#include "sampling/cluster.cuh"
#include "sampling/logits.cuh"
#include "sampling/ordered.cuh"

namespace {

constexpr int kAhead = 4;

struct Arguments {
  const void* logits;
  const int* token_ids;
  float* chosen;
  int* ranks;
  int* top_ids;
  float* top;
  int num_columns, num_top, slice, is_wide;
};

// Calls `use(id, logits)` for the accesses of this thread to ids `first .. end` of a row.
template <int kWidth, class Logit, class Use>
__device__ __forceinline__ void for_each_access(const Logit* row, int first, int end, Use use) {
  constexpr int kStride = kThreads * kWidth;
  for (int base = first + threadIdx.x * kWidth; base < end; base += kAhead * kStride) {
    Stored<Logit, kWidth> stored[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; i++)
      if (base + i * kStride < end) stored[i] = read<kWidth>(row + base + i * kStride);
#pragma unroll
    for (int i = 0; i < kAhead; i++) {
      if (base + i * kStride >= end) break;
      float values[kWidth];
      to_float32(stored[i], values);
      use(base + i * kStride, values);
    }
  }
}

// A NaN as the least of all.
__device__ __forceinline__ float comparable(float logit) { return logit != logit ? -CUDART_INF_F : logit; }

// `log(sum(exp))` of a row whose sum of exp(logit - largest) is `sum / 2^44`.
__device__ __forceinline__ double log_sum(float largest, uint64_t sum) {
  return double(largest) + log(double(sum) * 0x1p-44);
}

// The likeliest one by one, where so many are equal that no bound leaves a few of them: each the least entry above
// the one before.
template <int kWidth, class Logit>
__device__ void select_one_by_one(const Logit* row, int first, int end, const Distances& distances, int num_top,
                                  uint64_t* entries) {
  __shared__ uint64_t of_block[2];
  uint64_t last = 0;
  for (int i = 0; i < num_top; i++) {
    uint64_t least = ~uint64_t(0);
    for_each_access<kWidth>(row, first, end, [&](int id, const float (&logits)[kWidth]) {
#pragma unroll
      for (int j = 0; j < kWidth; j++) {
        const uint64_t here = entry(distances.of(comparable(logits[j])), id + j);
        if (here < least && (i == 0 || here > last)) least = here;
      }
    });
    least = block_fold(least, Least());
    if (threadIdx.x == 0) of_block[i % 2] = least;  // the one before may still be read
    cluster_sync();
    last = cluster_fold(of_block + i % 2, Least());
    if (threadIdx.x == 0) entries[i] = last;
  }
  __syncthreads();
}

template <int kWidth, class Logit>
__device__ __forceinline__ void score_row(const Arguments& a, uint64_t* entries) {
  __shared__ uint64_t extremes, rank_of_block, sum_of_block, count_of_block;
  __shared__ uint32_t appended;
  const int index = cluster_row(), chosen = a.token_ids[index];
  const int first = cluster_rank() * a.slice, end = min(first + a.slice, a.num_columns);
  const Logit* row = static_cast<const Logit*>(a.logits) + int64_t(index) * a.num_columns;
  if (threadIdx.x == 0) appended = 0;
  float chosen_logit[1] = {CUDART_INF_F};
  if (chosen >= 0) to_float32(read<1>(row + chosen), chosen_logit);

  float largest = -CUDART_INF_F, best = -CUDART_INF_F;  // of all, and of those that are no NaN
  int num_above = 0;
  for_each_access<kWidth>(row, first, end, [&](int, const float (&logits)[kWidth]) {
    largest = max_nan(largest, largest_of(logits));
#pragma unroll
    for (int i = 0; i < kWidth; i++) {
      best = fmaxf(best, logits[i]);
      num_above += logits[i] > chosen_logit[0];
    }
  });
  const uint32_t mine = ordered(best);
  // halves: NaN or the largest; then, as its complement, the least of the threads that have a finite one
  uint64_t folded = block_fold(uint64_t(mine) << 32 | (is_finite(mine) ? ~mine : 0), MostOfHalves());
  const uint64_t above = block_fold(uint64_t(largest != largest) << 32 | uint32_t(num_above), Sum());
  if (threadIdx.x == 0) {
    extremes = folded;
    rank_of_block = above;
  }
  cluster_sync();
  folded = cluster_fold(&extremes, MostOfHalves());
  const uint64_t all_above = cluster_fold(&rank_of_block, Sum());
  const Distances distances = {uint32_t(folded >> 32)};
  const bool has_sum = is_finite(distances.largest) && all_above >> 32 == 0;
  const float maximum = from_ordered(distances.largest);

  uint32_t bound = 0;
  const bool is_short = a.num_columns <= kCandidates;
  if (is_short)
    bound = kNoDistance;
  else if (a.num_top > 0)
    bound = min(distances.of_lowest_finite(),
                candidate_bound(is_finite(mine) ? distances.largest - mine : kNoDistance,
                                distances.largest - ~uint32_t(folded), 1, [&] { return a.num_top; }));
  __syncthreads();
  uint64_t sum = 0;
  for_each_access<kWidth>(row, first, end, [&](int id, const float (&logits)[kWidth]) {
#pragma unroll
    for (int i = 0; i < kWidth; i++) {
      sum += __float2ull_rn(expf(logits[i] - maximum) * 0x1p44f);
      if (a.num_top == 0) continue;
      const uint32_t distance = distances.of(comparable(logits[i]));
      if (distance <= bound) append(entries, &appended, entry(distance, id + i));
    }
  });
  sum = block_fold(sum, Sum());
  if (threadIdx.x == 0) {
    sum_of_block = sum;
    count_of_block = appended;
  }
  cluster_sync();
  sum = cluster_fold(&sum_of_block, Sum());
  const uint64_t num_candidates = cluster_fold(&count_of_block, Sum());
  const double log_total = has_sum ? log_sum(maximum, sum) : CUDART_NAN;
  const bool leads = cluster_rank() == 0;
  if (leads && threadIdx.x == 0) {
    a.chosen[index] = chosen < 0 ? CUDART_NAN_F : float(double(chosen_logit[0]) - log_total);
    a.ranks[index] = chosen < 0 ? 0 : 1 + int(uint32_t(all_above));
  }
  if (a.num_top == 0) return;
  if (num_candidates > kCandidates || num_candidates < a.num_top) {
    select_one_by_one<kWidth>(row, first, end, distances, a.num_top, entries);
  } else if (leads) {
    const int count = collect(entries, &count_of_block);
    sort(entries, count);
  }
  if (!leads) return;
  for (int i = threadIdx.x; i < a.num_top; i += kThreads) {
    const int id = int(uint32_t(entries[i]));
    float logit[1];
    to_float32(read<1>(row + id), logit);
    a.top_ids[int64_t(index) * a.num_top + i] = id;
    a.top[int64_t(index) * a.num_top + i] = float(double(logit[0]) - log_total);
  }
}

template <class Logit>
__device__ __forceinline__ void score(const Arguments& a) {
  __shared__ uint64_t entries[kCandidates];
  wait_for_previous_kernel();
  launch_dependents();
  if (a.is_wide)
    score_row<kWide<Logit>, Logit>(a, entries);
  else
    score_row<1, Logit>(a, entries);
  cluster_sync();  // other blocks may still read this one's shared memory
}

}  // namespace

extern "C" __global__ void CLUSTER_KERNEL __launch_bounds__(kThreads, 4) logprobs_bfloat16(const Arguments a) {
  score<bf16>(a);
}

extern "C" __global__ void CLUSTER_KERNEL __launch_bounds__(kThreads, 4) logprobs_float32(const Arguments a) {
  score<float>(a);
}
