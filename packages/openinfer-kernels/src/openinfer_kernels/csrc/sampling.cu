// One token per row of logits [R, V]: `SamplingBatch` in ops.py has the rules, cpu/sampling.py the same in NumPy.
//
// A team of blocks owns a row. Its scores (logits after penalties, bias and mask) are read once and stay in shared
// memory, or in a global scratch where that is too small. Weights are exp((score - largest) / temperature) in fixed
// point, 44 bits behind the point: sums of integers do not depend on their order, so neither the number of blocks nor
// the rest of the batch changes a bit of a row's answer.
//
//   greedy           the largest score, the lowest id among equals
//   no cut           running sums per warp, then the one warp into which the draw fell looks for the token
//   top-k, top-p     a bound that about k (or 1024) tokens are within; where they suffice, one block sorts them, cuts
//                    exactly and draws. Where the cut lies deeper, histograms over the bits of all scores find it.
#include "block.cuh"
#include "candidates.cuh"
#include "logit_changes.cuh"
#include "logits.cuh"
#include "ordered.cuh"
#include "overlap.cuh"
#include "philox.cuh"
#include "team.cuh"

namespace {

constexpr int kBins = 2048, kBinBits = 11;
constexpr uint32_t kGuess = 1024;  // tokens that a nucleus is assumed to fit in, and the largest k that is sorted
constexpr int kAhead = 4;          // reads in flight per thread
constexpr int kPadding = 8;        // a block's scores are -inf behind the last one up to a multiple of this
constexpr int kEntryBytes = kCandidates * sizeof(uint64_t);

static_assert(kBins * sizeof(uint64_t) == kEntryBytes, "bins and candidates take turns in one place");

struct Arguments {
  const void* logits;
  float* scratch;  // [R, team * slice], null where shared memory holds the scores
  int* tokens;
  const float* temperature;
  const int* top_k;
  const float *top_p, *min_p;
  const uint64_t* seeds;
  const int64_t* positions;
  int num_columns, num_token_ids, slice, is_wide;
  Bias bias;
  Penalties penalties;
  TokenMask mask;
};

// --- the scores of a row ----------------------------------------------------------------------------------------

template <class Logit>
struct Row {
  const Logit* logits;
  int num_token_ids;
  RowPenalties penalties;
  const uint32_t* mask;

  // What was read at `id`, with penalties and mask applied; -inf for ids that are never sampled.
  template <int kWidth>
  __device__ __forceinline__ void scores(int id, const Stored<Logit, kWidth>& stored, float (&values)[kWidth]) const {
    widen(stored, values);
    if (penalties.output_counts) penalties.apply(id, values);
    if (mask) {
      const uint32_t word = mask[id / 32] >> (id % 32);
#pragma unroll
      for (int i = 0; i < kWidth; i++)
        if (!(word >> i & 1)) values[i] = -CUDART_INF_F;
    }
    if (id + kWidth > num_token_ids) {
#pragma unroll
      for (int i = 0; i < kWidth; i++)
        if (id + i >= num_token_ids) values[i] = -CUDART_INF_F;
    }
  }
};

// The ids of a row that one block looks at: `size` of them from `first`.
struct Slice {
  int first, size;

  __device__ __forceinline__ int padded() const { return (size + kPadding - 1) / kPadding * kPadding; }
};

__device__ __forceinline__ Slice slice_of(int rank, int slice, int num_token_ids) {
  const int first = rank * slice;
  return {first, max(0, min(slice, num_token_ids - first))};
}

// Calls `use(offset in the slice, scores)` for the accesses of this thread.
template <int kWidth, class Logit, class Use>
__device__ __forceinline__ void for_each_access(const Row<Logit>& row, const Slice& slice, Use use) {
  constexpr int kStride = kThreads * kWidth;
  const int end = kWidth == 1 ? slice.size : slice.padded();
  for (int first = threadIdx.x * kWidth; first < end; first += kAhead * kStride) {
    Stored<Logit, kWidth> stored[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; i++) {
      const int at = first + i * kStride;
      if (at < end) stored[i] = read<kWidth>(row.logits + slice.first + at);
    }
#pragma unroll
    for (int i = 0; i < kAhead; i++) {
      const int at = first + i * kStride;
      if (at >= end) break;
      float values[kWidth];
      row.scores(slice.first + at, stored[i], values);
      use(at, values);
    }
  }
}

// Calls `use(offset in the slice, score)` for scores that are stored; threads share them in groups of four.
template <class Use>
__device__ __forceinline__ void for_each_score(const float* scores, const Slice& slice, Use use) {
  const int end = slice.padded();
  for (int at = threadIdx.x * 4; at < end; at += kThreads * 4) {
    const float4 four = *reinterpret_cast<const float4*>(scores + at);
    use(at, four.x);
    use(at + 1, four.y);
    use(at + 2, four.z);
    use(at + 3, four.w);
  }
}

// Stores the scores of the slice and returns the largest that this thread saw; NaN if any is.
template <int kWidth, class Logit>
__device__ __forceinline__ float store_scores(const Row<Logit>& row, const Slice& slice, float* scores) {
  float largest = -CUDART_INF_F;
  for_each_access<kWidth>(row, slice, [&](int at, const float(&values)[kWidth]) {
    if constexpr (kWidth == 1) {
      scores[at] = values[0];
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; i += 4)
        *reinterpret_cast<float4*>(scores + at + i) =
            make_float4(values[i], values[i + 1], values[i + 2], values[i + 3]);
    }
    largest = max_nan(largest, largest_of(values));
  });
  if (kWidth == 1 && threadIdx.x < slice.padded() - slice.size) scores[slice.size + threadIdx.x] = -CUDART_INF_F;
  return largest;
}

// --- greedy rows ------------------------------------------------------------------------------------------------

// Larger scores, then lower ids are larger; a NaN is the largest.
__device__ __forceinline__ uint64_t preference(uint32_t key, uint32_t id) { return uint64_t(key) << 32 | ~id; }

__device__ __forceinline__ void finish_greedy(uint64_t best, int* token) {
  __shared__ uint64_t slot;
  best = block_fold(best, Most());
  if (threadIdx.x == 0) slot = best;
  team_sync();
  best = team_fold(&slot, Most());
  if (threadIdx.x == 0 && team_rank() == 0) *token = is_finite(uint32_t(best >> 32)) ? int(~uint32_t(best)) : -1;
}

// Straight from the logits, which are read once and stored nowhere.
template <int kWidth, class Logit>
__device__ __forceinline__ void choose_greedily(const Row<Logit>& row, const Slice& slice, int* token) {
  float largest = -CUDART_INF_F;
  int best_at = -1;
  bool has_nan = false;
  for_each_access<kWidth>(row, slice, [&](int at, const float(&values)[kWidth]) {
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
    row.scores(slice.first + best_at, read<kWidth>(row.logits + slice.first + best_at), values);
#pragma unroll
    for (int i = kWidth - 1; i >= 0; i--)
      if (values[i] == largest) best = preference(ordered(largest), slice.first + best_at + i);
  }
  finish_greedy(best, token);
}

__device__ __forceinline__ void choose_greedily(const float* scores, const Slice& slice, float largest, int* token) {
  uint32_t id = ~0u;
  for_each_score(scores, slice, [&](int at, float score) {
    if (score == largest) id = min(id, uint32_t(slice.first + at));
  });
  finish_greedy(id == ~0u ? 0 : preference(ordered(largest), id), token);
}

// --- weights ----------------------------------------------------------------------------------------------------

// Weights relative to the likeliest token, which has 2^44.
struct Weighing {
  float largest, min_p, scale, scale_rest;

  __device__ Weighing(float largest, float temperature, float min_p) : largest(largest), min_p(min_p) {
    const double exact = 1.4426950408889634 / double(temperature);
    scale = exact > 1e38 ? 1e38f : float(exact);
    scale_rest = exact > 1e30 ? 0.0f : float(exact - double(scale));
  }

  // A distance beyond which nothing weighs anything.
  __device__ __forceinline__ uint32_t range(const Distances& distances) const {
    const float lowest = fmaxf(largest - 46 / scale, -3.4e38f);
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
struct Cut {
  uint32_t end, num_ties;
};

// `share` of `sum`, rounded up, and at least 1: what a running sum must reach.
__device__ __forceinline__ uint64_t share_of(uint64_t sum, float share) {
  return max(uint64_t(1), min(sum, uint64_t(ceil(double(share) * double(sum)))));
}

// --- few candidates: one block sorts, cuts and draws ------------------------------------------------------------

constexpr int kHeld = kCandidates / kThreads;

// The running sums of the weights of `count` entries, kHeld of them per thread; returns the sum before the first of them.
template <class WeightOf>
__device__ __forceinline__ uint64_t running_weights(int count, WeightOf weight_of, uint64_t (&running)[kHeld]) {
  uint64_t sum = 0;
#pragma unroll
  for (int i = 0; i < kHeld; i++) {
    const int at = threadIdx.x * kHeld + i;
    sum += at < count ? weight_of(at) : 0;
    running[i] = sum;
  }
  const uint64_t before = block_sum_before(sum);
#pragma unroll
  for (int i = 0; i < kHeld; i++) running[i] += before;
  return before;
}

// Draws among `count` candidates, of which the likeliest `top_k` are kept, then those that hold `top_p` of the sum of
// weights (`total`; 0: of those kept).
__device__ void draw_among(uint64_t* entries, int count, const Distances& distances, const Weighing& weigh, int top_k,
                           float top_p, uint64_t total, uint32_t word, int* token) {
  __shared__ uint64_t kept_sum;
  sort(entries, count);
  if (top_k > 0) count = min(count, top_k);
  uint64_t running[kHeld];
  running_weights(count, [&](int at) { return weigh(distances.value(entries[at] >> 32)); }, running);
  if (threadIdx.x == kThreads - 1) kept_sum = running[kHeld - 1];
  __syncthreads();
  if (top_p < 1) {
    const uint64_t wanted = share_of(total ? total : kept_sum, top_p);
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
  const uint64_t target = __umul64hi(kept_sum, uint64_t(word) << 32);
  const auto weight_of = [&](int at) { return weigh(distances.value(uint32_t(entries[at]))); };
  uint64_t before = running_weights(count, weight_of, running);
#pragma unroll
  for (int i = 0; i < kHeld; i++) {
    if (before <= target && target < running[i]) *token = int(entries[threadIdx.x * kHeld + i] >> 32);
    before = running[i];
  }
}

// --- the whole row ----------------------------------------------------------------------------------------------

// The distance at which the running sum of `value(distance, score)`, in order of distance, reaches `target`, and the
// sum of what lies below it; kNoDistance if it is not reached within `range`. Each round takes kBinBits of its bits.
struct Reached {
  uint32_t distance;
  uint64_t before;
};

template <class Value>
__device__ __forceinline__ Reached reach(const float* scores, const Slice& slice, const Distances& distances,
                                         uint64_t* bins, uint32_t range, uint64_t target, Value value) {
  __shared__ Reached reached;
  Reached from = {0, 0};
  int shift = max(0, 32 - __clz(range) - kBinBits);
  while (true) {
    for (int i = threadIdx.x; i < kBins; i += kThreads) bins[i] = 0;
    if (threadIdx.x == 0) reached = {kNoDistance, 0};
    __syncthreads();
    for_each_score(scores, slice, [&](int, float score) {
      const uint32_t distance = distances.of(score), bin = (distance - from.distance) >> shift;
      if (distance < from.distance || bin >= kBins || distance > range) return;
      const uint64_t amount = value(distance, score);
      if (amount == 0) return;
      uint32_t* halves = reinterpret_cast<uint32_t*>(&bins[bin]);
      const uint32_t low = amount, carry = atomicAdd(halves, low) > ~low;
      const uint32_t high = uint32_t(amount >> 32) + carry;
      if (high) atomicAdd(halves + 1, high);
    });
    team_sync();
    constexpr int kMine = kBins / kThreads;
    uint64_t sums[kMine], sum = 0;
#pragma unroll
    for (int i = 0; i < kMine; i++) {
      sums[i] = 0;
#pragma unroll
      for (int rank = 0; rank < kTeam; rank++) sums[i] += team_read(&bins[threadIdx.x * kMine + i], rank);
      sum += sums[i];
    }
    uint64_t before = from.before + block_sum_before(sum);
#pragma unroll
    for (int i = 0; i < kMine; i++) {
      if (before < target && target <= before + sums[i])
        reached = {from.distance + (uint32_t(threadIdx.x * kMine + i) << shift), before};
      before += sums[i];
    }
    team_sync();
    from = reached;
    if (shift == 0 || from.distance == kNoDistance) return from;
    __syncthreads();
    shift = max(0, shift - kBinBits);
  }
}

__device__ __forceinline__ uint32_t ties_that_reach(uint64_t missing, uint64_t weight, uint32_t most) {
  return weight == 0 ? most : uint32_t(min(uint64_t(most), (missing + weight - 1) / weight));
}

// The cut of top-k, then top-p, at any depth.
__device__ __forceinline__ Cut find_cut(const float* scores, const Slice& slice, const Distances& distances,
                                        const Weighing& weigh, uint64_t* bins, uint64_t sum, int top_k,
                                        float top_p) {
  __shared__ uint64_t slot;
  Cut cut = {kNoDistance, 0};
  uint64_t sum_before = sum;
  const uint32_t range = weigh.range(distances);
  const Reached at_k = top_k == 0 ? Reached{kNoDistance, 0}
                                  : reach(scores, slice, distances, bins, range, top_k, [](uint32_t, float) { return 1; });
  if (at_k.distance != kNoDistance) {
    cut = {at_k.distance, uint32_t(top_k - at_k.before)};
    sum_before = 0;
    for_each_score(scores, slice, [&](int, float score) {
      if (distances.of(score) < cut.end) sum_before += weigh(score);
    });
    sum_before = block_fold(sum_before, Sum());
    if (threadIdx.x == 0) slot = sum_before;
    team_sync();
    sum_before = team_fold(&slot, Sum());
    sum = sum_before + cut.num_ties * weigh(distances.value(cut.end));
  }
  if (top_p >= 1) return cut;
  const uint64_t wanted = share_of(sum, top_p);
  if (wanted > sum_before) {
    cut.num_ties = ties_that_reach(wanted - sum_before, weigh(distances.value(cut.end)), cut.num_ties);
    return cut;
  }
  const uint32_t end = cut.end;
  const Reached at = reach(scores, slice, distances, bins, range, wanted,
                           [&](uint32_t distance, float score) { return distance < end ? weigh(score) : 0; });
  return {at.distance, ties_that_reach(wanted - at.before, weigh(distances.value(at.distance)), kNoDistance)};
}

// Part of a row: the weight of what is certainly kept, and how many tokens lie at the end of the cut.
struct Part {
  uint64_t weight;
  uint32_t ties;

  __device__ __forceinline__ Part operator+(const Part& other) const {
    return {weight + other.weight, ties + other.ties};
  }
};

// Inverts the cumulative distribution of what the cut keeps, in order of token id.
__device__ void draw_by_running_sums(const float* scores, const Slice& slice, const Distances& distances,
                                     const Weighing& weigh, const Cut& cut, uint32_t word, int* token) {
  __shared__ uint64_t warp_weights[kWarps], block_weight, block_ties;
  __shared__ uint32_t warp_ties[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, end = slice.padded();
  const int per_warp = ((end + kWarps - 1) / kWarps + 127) / 128 * 128;
  const int warp_first = warp * per_warp, warp_end = min(end, warp_first + per_warp);
  const auto part_of = [&](float score) -> Part {
    const uint32_t distance = distances.of(score);
    return {distance < cut.end ? weigh(score) : 0, distance == cut.end};
  };
  const auto part_at = [&](int at) -> Part {
    if (at >= warp_end) return {0, 0};
    const float4 four = *reinterpret_cast<const float4*>(scores + at);
    return part_of(four.x) + part_of(four.y) + part_of(four.z) + part_of(four.w);
  };
  Part mine = {0, 0};
  for (int at = warp_first + lane * 4; at < warp_end; at += 128) mine = mine + part_at(at);
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2)
    mine = mine + Part{__shfl_xor_sync(~0u, mine.weight, mask), __shfl_xor_sync(~0u, mine.ties, mask)};
  if (lane == 0) {
    warp_weights[warp] = mine.weight;
    warp_ties[warp] = mine.ties;
  }
  __syncthreads();
  Part block = {0, 0};
#pragma unroll
  for (int i = 0; i < kWarps; i++) block = block + Part{warp_weights[i], warp_ties[i]};
  if (threadIdx.x == 0) {
    block_weight = block.weight;
    block_ties = block.ties;
  }
  team_sync();
  Part before = {0, 0}, all = {0, 0};
#pragma unroll
  for (int rank = 0; rank < kTeam; rank++) {
    const Part theirs = {team_read(&block_weight, rank), uint32_t(team_read(&block_ties, rank))};
    if (rank < team_rank()) before = before + theirs;
    all = all + theirs;
  }
  const uint64_t tie_weight = cut.num_ties ? weigh(distances.value(cut.end)) : 0;
  const auto kept = [&](const Part& part) { return part.weight + min(part.ties, cut.num_ties) * tie_weight; };
  const uint64_t target = __umul64hi(kept(all), uint64_t(word) << 32);
#pragma unroll
  for (int i = 0; i < kWarps; i++)
    if (i < warp) before = before + Part{warp_weights[i], warp_ties[i]};
  if (target < kept(before) || target >= kept(before + mine)) return;
  for (int first = warp_first; first < warp_end; first += 128) {
    const Part here = part_at(first + lane * 4);
    Part reached = before + Part{warp_sum_before(here.weight), uint32_t(warp_sum_before(here.ties))};
    const Part end_of_lane = reached + here;
    if (kept(reached) <= target && target < kept(end_of_lane)) {
      for (int i = 0; i < 4; i++) {
        const int at = first + lane * 4 + i;
        const Part next = reached + part_of(scores[at]);
        if (kept(reached) <= target && target < kept(next)) *token = slice.first + at;
        reached = next;
      }
    }
    before = {__shfl_sync(~0u, end_of_lane.weight, 31), __shfl_sync(~0u, end_of_lane.ties, 31)};
  }
}

// --- rows that are drawn ----------------------------------------------------------------------------------------

struct Look {
  uint64_t sum, candidate_sum;  // of weights; 0 if they were not asked for
  uint64_t num_candidates;
};

// One look at all scores of the row: gathers those within `bound` and sums weights.
template <bool kGather, bool kWeigh>
__device__ __forceinline__ Look look_at(const float* scores, const Slice& slice, const Distances& distances,
                                        const Weighing& weigh, uint32_t bound, uint64_t* entries, uint64_t* slots) {
  __shared__ uint32_t appended;
  if (threadIdx.x == 0) appended = 0;
  __syncthreads();
  uint64_t sum = 0, candidate_sum = 0;
  for_each_score(scores, slice, [&](int at, float score) {
    const uint64_t weight = kWeigh ? weigh(score) : 0;
    sum += weight;
    if (!kGather) return;
    const uint32_t distance = distances.of(score);
    if (distance > bound) return;
    candidate_sum += weight;
    append(entries, &appended, entry(distance, slice.first + at));
  });
  if (kWeigh) sum = block_fold(sum, Sum());
  if (kWeigh && kGather) candidate_sum = block_fold(candidate_sum, Sum());
  __syncthreads();
  if (threadIdx.x == 0) {
    slots[0] = sum;
    slots[1] = candidate_sum;
    slots[2] = appended;
  }
  team_sync();
  if (!kWeigh) return {0, 0, team_fold(slots + 2, Sum())};
  return {team_fold(slots, Sum()), team_fold(slots + 1, Sum()), team_fold(slots + 2, Sum())};
}

struct Draw {
  int top_k;  // 0 if it cuts nothing
  float top_p;
  uint32_t word;
};

// `mine` is the largest score of this thread, `worst` the least of the team's threads that have a finite one.
__device__ __forceinline__ void draw(const float* scores, const Slice& slice, const Distances& distances,
                                     const Weighing& weigh, const Draw& draw, int num_token_ids, uint32_t mine,
                                     uint32_t worst, uint64_t* work, int* token) {
  __shared__ uint64_t sorting_slots[3], cutting_slots[3];
  if (draw.top_k == 0 && draw.top_p >= 1)
    return draw_by_running_sums(scores, slice, distances, weigh, {kNoDistance, 0}, draw.word, token);
  const bool is_short = num_token_ids <= kCandidates, is_limited = draw.top_k > 0 && (is_short || draw.top_k <= kGuess);
  uint64_t sum = 0;
  if (is_limited || draw.top_k == 0) {
    uint32_t bound = distances.of_lowest_finite();
    if (!is_short)
      bound = candidate_bound(distances, is_finite(mine) ? distances.largest - mine : kNoDistance,
                              distances.largest - worst, is_limited ? draw.top_k : kGuess);
    const Look look =
        is_limited ? look_at<true, false>(scores, slice, distances, weigh, bound, work, sorting_slots)
                   : look_at<true, true>(scores, slice, distances, weigh, bound, work, sorting_slots);
    sum = look.sum;
    if (look.num_candidates <= kCandidates && (is_limited || look.candidate_sum >= share_of(sum, draw.top_p))) {
      if (team_rank() > 0) return;
      const int count = collect(work, sorting_slots + 2);
      return draw_among(work, count, distances, weigh, draw.top_k, draw.top_p, sum, draw.word, token);
    }
  }
  if (sum == 0) sum = look_at<false, true>(scores, slice, distances, weigh, 0, work, cutting_slots).sum;
  const Cut cut = find_cut(scores, slice, distances, weigh, work, sum, draw.top_k, draw.top_p);
  draw_by_running_sums(scores, slice, distances, weigh, cut, draw.word, token);
}

template <int kWidth, class Logit>
__device__ __forceinline__ void sample_row(const Arguments& a, const Row<Logit>& row, const Slice& slice,
                                           float* scores, uint64_t* work, int* token) {
  __shared__ uint64_t extremes;
  const int index = team_row();
  const float temperature = a.temperature[index];
  if (temperature == 0 && a.bias.count == 0) return choose_greedily<kWidth>(row, slice, token);
  float largest = store_scores<kWidth>(row, slice, scores);
  if (a.bias.count > 0) {
    __syncthreads();
    a.bias.add(index, scores, slice.first, slice.size);
    __syncthreads();
    largest = -CUDART_INF_F;
    for_each_score(scores, slice, [&](int, float score) { largest = max_nan(largest, score); });
  }
  const uint32_t mine = largest != largest ? kNaN : ordered(largest);
  const uint64_t folded = block_fold(uint64_t(mine) << 32 | (is_finite(mine) ? ~mine : 0), MostOfHalves());
  if (threadIdx.x == 0) extremes = folded;
  team_sync();
  const uint64_t all = team_fold(&extremes, MostOfHalves());
  const Distances distances = {uint32_t(all >> 32)};
  if (!is_finite(distances.largest)) {
    if (threadIdx.x == 0 && team_rank() == 0) *token = -1;
    return;
  }
  largest = from_ordered(distances.largest);
  if (temperature == 0) return choose_greedily(scores, slice, largest, token);
  const int top_k = a.top_k[index];
  const Draw how = {top_k < row.num_token_ids ? top_k : 0, a.top_p[index],
                    philox_word(a.seeds[index], a.positions[index])};
  draw(scores, slice, distances, Weighing(largest, temperature, a.min_p[index]), how, row.num_token_ids, mine,
       ~uint32_t(all), work, token);
}

template <class Logit, bool kShared>
__device__ __forceinline__ void sample(const Arguments& a) {
  extern __shared__ __align__(16) unsigned char shared[];
  wait_for_previous_kernel();
  allow_next_kernel();
  const int index = team_row();
  const Slice slice = slice_of(team_rank(), a.slice, a.num_token_ids);
  const Row<Logit> row = {static_cast<const Logit*>(a.logits) + int64_t(index) * a.num_columns, a.num_token_ids,
                          a.penalties.of(index, a.num_columns), a.mask.of(index, a.num_columns)};
  uint64_t* work = reinterpret_cast<uint64_t*>(shared);
  float* scores = kShared ? reinterpret_cast<float*>(shared + kEntryBytes)
                          : a.scratch + (int64_t(index) * kTeam + team_rank()) * a.slice;
  if (a.is_wide)
    sample_row<kWide<Logit>>(a, row, slice, scores, work, a.tokens + index);
  else
    sample_row<1>(a, row, slice, scores, work, a.tokens + index);
  team_sync();
}

}  // namespace

extern "C" __global__ void TEAM_KERNEL __launch_bounds__(kThreads, 2) sample_bfloat16(const Arguments a) {
  sample<bf16, true>(a);
}

extern "C" __global__ void TEAM_KERNEL __launch_bounds__(kThreads, 2) sample_float32(const Arguments a) {
  sample<float, true>(a);
}

extern "C" __global__ void TEAM_KERNEL __launch_bounds__(kThreads, 2) sample_bfloat16_scratch(const Arguments a) {
  sample<bf16, false>(a);
}

extern "C" __global__ void TEAM_KERNEL __launch_bounds__(kThreads, 2) sample_float32_scratch(const Arguments a) {
  sample<float, false>(a);
}
