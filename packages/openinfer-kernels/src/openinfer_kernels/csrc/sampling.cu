// One token per row of logits [R, V]: `SamplingBatch` in ops.py has the rules, cpu/sampling.py the same in NumPy.
//
// A team of blocks owns a row, whose scores are its logits after penalties, bias and mask. Rows that have any of these
// are first written to a scratch in float32. Scores are read several times, all but the first time from the caches.
// Weights are exp((score - largest) / temperature) in fixed point, 44 bits behind the point: sums of integers do not
// depend on their order, so neither the number of blocks nor the rest of the batch changes a bit of a row's answer.
//
//   greedy           the largest score, the lowest id among equals
//   no cut           running sums per warp, then the one warp into which the draw fell looks for the token
//   top-k, top-p     a bound that hardly more tokens are within than must be kept; one block puts these few in order,
//                    cuts exactly and draws. Where the cut lies too deep for that, histograms over the bits of all
//                    scores find it.
#include "block.cuh"
#include "candidates.cuh"
#include "logit_changes.cuh"
#include "logits.cuh"
#include "ordered.cuh"
#include "overlap.cuh"
#include "philox.cuh"
#include "team.cuh"

namespace {

constexpr int kBins = 2048, kBinBits = 11, kFineBins = 4096;
constexpr int kMostSorted = 1024;  // the largest k for which tokens are put in order
constexpr int kAhead = 4;          // reads in flight per thread

static_assert(kBins == kCandidates, "bins and candidates take turns in one place");

struct Arguments {
  const void* logits;
  float* scratch;  // [R, team * slice], null if no row can need it
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

// The ids of a row that one block looks at: `size` of them from `first`.
struct Slice {
  int first, size;
};

__device__ __forceinline__ Slice slice_of(int rank, int slice, int num_token_ids) {
  const int first = rank * slice;
  return {first, max(0, min(slice, num_token_ids - first))};
}

// The scores of one slice, at a 16-byte address and readable up to a multiple of 16 bytes.
template <class Logit>
struct Scores {
  static constexpr int kWidth = kWide<Logit>;
  const Logit* stored;
  Slice slice;

  __device__ __forceinline__ void unpack(int at, const Stored<Logit, kWidth>& from, float (&values)[kWidth]) const {
    widen(from, values);
    if (at + kWidth > slice.size) {  // what lies behind is never sampled
#pragma unroll
      for (int i = 0; i < kWidth; i++)
        if (at + i >= slice.size) values[i] = -CUDART_INF_F;
    }
  }

  __device__ __forceinline__ void at(int at, float (&values)[kWidth]) const {
    unpack(at, read<kWidth>(stored + at), values);
  }

  // Calls `use(offset in the slice, scores)` for the accesses of this thread.
  template <int kReads, class Use>
  __device__ __forceinline__ void each_access(Use use) const {
    constexpr int kStride = kThreads * kWidth;
    for (int first = threadIdx.x * kWidth; first < slice.size; first += kReads * kStride) {
      Stored<Logit, kWidth> held[kReads];
#pragma unroll
      for (int i = 0; i < kReads; i++)
        if (first + i * kStride < slice.size) held[i] = read<kWidth>(stored + first + i * kStride);
#pragma unroll
      for (int i = 0; i < kReads; i++) {
        if (first + i * kStride >= slice.size) break;
        float values[kWidth];
        unpack(first + i * kStride, held[i], values);
        use(first + i * kStride, values);
      }
    }
  }

  // Calls `use(offset in the slice, score)` for the scores of this thread.
  template <int kReads, class Use>
  __device__ __forceinline__ void each(Use use) const {
    each_access<kReads>([&](int at, const float(&values)[kWidth]) {
#pragma unroll
      for (int i = 0; i < kWidth; i++) use(at + i, values[i]);
    });
  }
};

// Writes the scores of a slice of row `index`, whose logits begin at `logits`, to `scores`.
template <class Logit, int kWidth>
__device__ __forceinline__ void write_scores(const Arguments& a, const Logit* logits, const Slice& slice,
                                             const RowPenalties& penalties, const uint32_t* mask, float* scores) {
  for (int at = threadIdx.x * kWidth; at < slice.size; at += kThreads * kWidth) {
    const int id = slice.first + at;
    float values[kWidth];
    widen(read<kWidth>(logits + id), values);
    if (penalties.output_counts) penalties.apply(id, values);
    const uint32_t allowed = mask ? mask[id / 32] >> (id % 32) : ~0u;
#pragma unroll
    for (int i = 0; i < kWidth; i++) scores[at + i] = allowed >> i & 1 ? values[i] : -CUDART_INF_F;
  }
  __syncthreads();
  if (a.bias.count > 0) a.bias.add(team_row(), scores, slice.first, slice.size);
  __syncthreads();
}

// --- greedy rows ------------------------------------------------------------------------------------------------

// Larger scores, then lower ids are larger; a NaN is the largest.
__device__ __forceinline__ uint64_t preference(uint32_t key, uint32_t id) { return uint64_t(key) << 32 | ~id; }

template <class Logit>
__device__ __forceinline__ void choose_greedily(const Scores<Logit>& scores, int* token) {
  constexpr int kWidth = Scores<Logit>::kWidth;
  __shared__ uint64_t slot;
  float largest = -CUDART_INF_F;
  int best_at = -1;
  bool has_nan = false;
  scores.template each_access<kAhead>([&](int at, const float(&values)[kWidth]) {
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
  if (threadIdx.x == 0) slot = best;
  team_sync();
  best = team_fold(&slot, Most());
  if (threadIdx.x == 0 && team_rank() == 0) *token = is_finite(uint32_t(best >> 32)) ? int(~uint32_t(best)) : -1;
}

// --- weights ----------------------------------------------------------------------------------------------------

constexpr float kOctaves = 46;  // so far below the likeliest token none weighs anything

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

// What is kept of candidates, and the draw.
struct Draw {
  int top_k;  // 0 if it cuts nothing
  float top_p;
  uint32_t word;

  // Where in running sums up to `sum` the draw falls.
  __device__ __forceinline__ uint64_t target(uint64_t sum) const { return __umul64hi(sum, uint64_t(word) << 32); }
};

// Draws among `count` candidates, of which the likeliest top_k are kept, then those that hold top_p of the sum of
// weights (`total`; 0: of those kept).
__device__ __noinline__ void draw_among_many(uint64_t* entries, int count, Distances distances,
                                                Weighing weigh, Draw draw, uint64_t total, int* token) {
  __shared__ uint64_t kept_sum;
  sort(entries, count);
  if (draw.top_k > 0) count = min(count, draw.top_k);
  uint64_t running[kHeld];
  running_weights(count, [&](int at) { return weigh(distances.value(entries[at] >> 32)); }, running);
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
  const auto weight_of = [&](int at) { return weigh(distances.value(uint32_t(entries[at]))); };
  uint64_t before = running_weights(count, weight_of, running);
#pragma unroll
  for (int i = 0; i < kHeld; i++) {
    if (before <= target && target < running[i]) *token = int(entries[threadIdx.x * kHeld + i] >> 32);
    before = running[i];
  }
}

// The same for at most kThreads candidates, one per thread, which finds its place by looking at all.
__device__ __forceinline__ void draw_among_few(const uint64_t* entries, int count, const Distances& distances,
                                               const Weighing& weigh, const Draw& draw, uint64_t total, int* token) {
  __shared__ uint64_t weights[kThreads];
  const bool is_one = threadIdx.x < count;
  const uint64_t mine = is_one ? entries[threadIdx.x] : ~uint64_t(0);
  uint64_t weight = is_one ? weigh(distances.value(mine >> 32)) : 0;
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

// --- the whole row ----------------------------------------------------------------------------------------------

// Bins of equal width over the scores from the largest down to where nothing matters.
struct Ruler {
  float largest, bins_per_score;

  __device__ __forceinline__ int bin(float score) const { return int(fminf((largest - score) * bins_per_score, kFineBins)); }
  __device__ __forceinline__ float upper_edge(int bin) const { return largest - float(bin) / bins_per_score; }
};

// What a token within `ruler` counts for a cut: 1 for top-k, its weight for top-p.
struct CountOne {
  __device__ __forceinline__ uint64_t operator()(uint32_t, float) const { return 1; }
  __device__ __forceinline__ uint64_t most(float) const { return 1; }
  __device__ __forceinline__ uint64_t least(float) const { return 1; }
};

struct CountWeight {
  Weighing weigh;
  uint32_t end;  // tokens from this distance on count nothing

  __device__ __forceinline__ uint64_t operator()(uint32_t distance, float score) const {
    return distance < end ? weigh(score) : 0;
  }
  // Bounds that hold in spite of roundings of the edge of a bin.
  __device__ __forceinline__ uint64_t most(float upper_edge) const {
    const uint64_t weight = weigh(upper_edge);
    return weight + (weight >> 16) + 1;
  }
  __device__ __forceinline__ uint64_t least(float lower_edge) const {
    const uint64_t weight = weigh(lower_edge);
    return weight - (weight >> 16);
  }
};

struct Reached {
  uint32_t distance;
  uint64_t before;
};

constexpr uint32_t kTooMany = kNoDistance - 1;

// The distance at which the running sum of `value(distance, score)`, in order of distance, reaches `target`, and the
// sum of what lies below it. The numbers of tokens per bin of `ruler` bound the running sums; the tokens of the few bins
// in which it may be are put in order by one block. kTooMany if these do not fit.
template <class Logit, class Value>
__device__ __noinline__ Reached reach_by_order(Scores<Logit> scores, Distances distances,
                                                  uint64_t* work, Ruler ruler, uint64_t target, Value value) {
  constexpr int kWidth = Scores<Logit>::kWidth, kMine = kFineBins / kThreads;
  __shared__ uint64_t sum_slot, count_slot, distance_slot, before_slot;
  __shared__ uint32_t appended;
  __shared__ int first_bin, last_bin;
  uint32_t* counts = reinterpret_cast<uint32_t*>(work);
  for (int i = threadIdx.x; i < kCandidates; i += kThreads) work[i] = 0;
  if (threadIdx.x == 0) {
    appended = 0;
    first_bin = last_bin = kFineBins - 1;
    distance_slot = kTooMany;
  }
  __syncthreads();
  scores.template each_access<2>([&](int, const float(&values)[kWidth]) {
#pragma unroll
    for (int i = 0; i < kWidth; i++) {
      const int bin = ruler.bin(values[i]);
      if (bin < kFineBins) atomicAdd(&counts[bin], 1);
    }
  });
  team_sync();
  uint64_t pairs[kMine / 2];  // of counts
  uint64_t most = 0, least = 0;
#pragma unroll
  for (int i = 0; i < kMine / 2; i++) {
    pairs[i] = 0;
#pragma unroll
    for (int rank = 0; rank < kTeam; rank++) pairs[i] += team_read(&work[threadIdx.x * (kMine / 2) + i], rank);
  }
  team_sync();  // counts have been read, by all; now they are the team's
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
  scores.template each_access<2>([&](int at, const float(&values)[kWidth]) {
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
    sum_slot = above;
    count_slot = appended;
  }
  team_sync();
  above = team_fold(&sum_slot, Sum());
  const int count = int(team_fold(&count_slot, Sum()));
  if (team_rank() == 0 && count > 0 && count <= kCandidates && above < target) {
    collect(work, &count_slot);
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
        distance_slot = distance;
        before_slot = before - uint64_t(at - low) * amount(at);
      }
      before = above + running[i];
    }
  }
  team_sync();
  return {uint32_t(team_read(&distance_slot, 0)), team_read(&before_slot, 0)};
}

// The distance at which the running sum of `value(distance, score)`, in order of distance, reaches `target`, and the
// sum of what lies below it; kNoDistance if it is not reached within `range`. Each round takes kBinBits of its bits.
template <class Logit, class Value>
__device__ __noinline__ Reached reach(Scores<Logit> scores, Distances distances, uint64_t* bins,
                                         uint32_t range, uint64_t target, Value value) {
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

// The same by whichever way finds it.
template <class Logit, class Value>
__device__ __forceinline__ Reached reach_anyhow(const Scores<Logit>& scores, const Distances& distances,
                                                const Weighing& weigh, uint64_t* work, float octaves, uint64_t target,
                                                Value value) {
  const Ruler ruler = {weigh.largest, kFineBins / octaves * weigh.scale};
  const Reached reached = reach_by_order(scores, distances, work, ruler, target, value);
  if (reached.distance != kTooMany) return reached;
  return reach(scores, distances, work, weigh.range(distances), target, value);
}

// The cut of top-k, then top-p, at any depth.
template <class Logit>
__device__ __noinline__ Cut find_cut(Scores<Logit> scores, Distances distances, Weighing weigh,
                                        uint64_t* work, uint64_t sum, int num_token_ids, Draw draw) {
  __shared__ uint64_t slot;
  Cut cut = {kNoDistance, 0};
  uint64_t sum_before = sum;
  if (draw.top_k > 0) {
    const Reached at = reach_anyhow(scores, distances, weigh, work, kOctaves, draw.top_k, CountOne{});
    if (at.distance != kNoDistance) {
      cut = {at.distance, uint32_t(draw.top_k - at.before)};
      sum_before = 0;
      scores.template each<2>([&](int, float score) {
        if (distances.of(score) < cut.end) sum_before += weigh(score);
      });
      sum_before = block_fold(sum_before, Sum());
      if (threadIdx.x == 0) slot = sum_before;
      team_sync();
      sum_before = team_fold(&slot, Sum());
      sum = sum_before + cut.num_ties * weigh(distances.value(cut.end));
    }
  }
  if (draw.top_p >= 1) return cut;
  const uint64_t wanted = share_of(sum, draw.top_p);
  if (wanted > sum_before) {
    cut.num_ties = ties_that_reach(wanted - sum_before, weigh(distances.value(cut.end)), cut.num_ties);
    return cut;
  }
  // tokens that all together hold less than half of the rest cannot be needed
  const float negligible = 0.5f * (1 - draw.top_p) * float(sum) / float(num_token_ids);
  const float octaves = fminf(kOctaves, 44 - log2f(negligible));
  const Reached at = reach_anyhow(scores, distances, weigh, work, octaves, wanted, CountWeight{weigh, cut.end});
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
template <class Logit>
__device__ __forceinline__ void draw_by_running_sums(const Scores<Logit>& scores, const Distances& distances,
                                                     const Weighing& weigh, const Cut& cut, const Draw& draw,
                                                     int* token) {
  constexpr int kWidth = Scores<Logit>::kWidth, kAtOnce = 32 * kWidth;
  __shared__ uint64_t warp_weights[kWarps], block_weight, block_ties, block_weight_so_far;
  __shared__ uint32_t warp_ties[kWarps], block_ties_so_far;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, end = scores.slice.size;
  const int per_warp = ((end + kWarps - 1) / kWarps + kAtOnce - 1) / kAtOnce * kAtOnce;
  const int warp_first = warp * per_warp, warp_end = min(end, warp_first + per_warp);
  const auto part_of = [&](float score) -> Part {
    const uint32_t distance = distances.of(score);
    return {distance < cut.end ? weigh(score) : 0, distance == cut.end};
  };
  Part mine = {0, 0};
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
      for (int j = 0; j < kWidth; j++) mine = mine + part_of(values[j]);
    }
  }
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
  const uint64_t target = draw.target(kept(all));
  if (target < kept(before) || target >= kept(before + block)) return;
  int owner = 0;
  for (Part next = before; owner < kWarps; owner++, before = next) {
    next = before + Part{warp_weights[owner], warp_ties[owner]};
    if (target < kept(next)) break;
  }
  const int owner_first = owner * per_warp, owner_end = min(end, owner_first + per_warp);
  for (int first = owner_first; first < owner_end; first += kThreads * kWidth) {
    const int at = first + threadIdx.x * kWidth;
    float values[kWidth];
    Part here = {0, 0};
    if (at < owner_end) {
      scores.at(at, values);
#pragma unroll
      for (int i = 0; i < kWidth; i++) here = here + part_of(values[i]);
    }
    Part reached = before + Part{block_sum_before(here.weight),
                                 cut.num_ties > 0 ? uint32_t(block_sum_before(here.ties)) : 0};
    const Part last = reached + here;
    if (kept(reached) <= target && target < kept(last)) {
#pragma unroll
      for (int i = 0; i < kWidth; i++) {
        const Part next = reached + part_of(values[i]);
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

// --- rows that are drawn ----------------------------------------------------------------------------------------

// Puts the tokens of this block that are within `bound` into `entries` and the number of all the team's into `*count`.
template <class Logit>
__device__ __forceinline__ int gather(const Scores<Logit>& scores, const Distances& distances, uint32_t bound,
                                      uint64_t* entries, uint64_t* count) {
  constexpr int kWidth = Scores<Logit>::kWidth;
  __shared__ uint32_t appended;
  if (threadIdx.x == 0) appended = 0;
  __syncthreads();
  const float least = distances.value(bound);
  scores.template each_access<kAhead>([&](int at, const float(&values)[kWidth]) {
    if (largest_of(values) < least) return;
#pragma unroll
    for (int i = 0; i < kWidth; i++)
      if (values[i] >= least) append(entries, &appended, entry(distances.of(values[i]), scores.slice.first + at + i));
  });
  __syncthreads();
  if (threadIdx.x == 0) *count = appended;
  team_sync();
  return int(team_fold(count, Sum()));
}

// What a thread knows of the largest scores: its own, and the least of its team's threads that have a finite one.
struct Maxima {
  uint32_t mine, worst;
};

template <class Logit>
__device__ __forceinline__ void draw_token(const Scores<Logit>& scores, const Distances& distances,
                                           const Weighing& weigh, const Draw& draw, int num_token_ids,
                                           const Maxima& maxima, uint64_t* work, int* token) {
  __shared__ uint64_t sum_slot, count_slot;
  if (draw.top_k == 0 && draw.top_p >= 1)
    return draw_by_running_sums(scores, distances, weigh, {kNoDistance, 0}, draw, token);
  const bool is_short = num_token_ids <= kCandidates;
  const bool is_top_k = draw.top_k > 0 && draw.top_k <= kMostSorted;
  uint64_t sum = 0;
  if (!is_short && !is_top_k) {
    scores.template each<2>([&](int, float score) { sum += weigh(score); });
    sum = block_fold(sum, Sum());
    if (threadIdx.x == 0) sum_slot = sum;
  }
  uint32_t bound = distances.of_lowest_finite();
  if (!is_short) {
    const bool is_some = is_finite(maxima.mine);
    const uint32_t mine = is_some ? distances.largest - maxima.mine : kNoDistance;
    const uint64_t amount = is_top_k ? 1 : is_some ? weigh(from_ordered(maxima.mine)) : 0;
    bound = candidate_bound(mine, distances.largest - maxima.worst, amount, [&]() -> uint64_t {
      if (is_top_k) return draw.top_k;
      sum = team_fold(&sum_slot, Sum());
      return draw.top_k > 0 ? ~uint64_t(0) : share_of(sum, draw.top_p);
    });
  }
  if (bound != kNoDistance) {
    const int count = gather(scores, distances, min(bound, distances.of_lowest_finite()), work, &count_slot);
    if (count <= kCandidates) {
      if (team_rank() > 0) return;
      collect(work, &count_slot);
      if (count <= kThreads) return draw_among_few(work, count, distances, weigh, draw, sum, token);
      return draw_among_many(work, count, distances, weigh, draw, sum, token);
    }
  }
  if (sum == 0) {
    __shared__ uint64_t slot;
    scores.template each<2>([&](int, float score) { sum += weigh(score); });
    sum = block_fold(sum, Sum());
    if (threadIdx.x == 0) slot = sum;
    team_sync();
    sum = team_fold(&slot, Sum());
  }
  const Cut cut = find_cut(scores, distances, weigh, work, sum, num_token_ids, draw);
  draw_by_running_sums(scores, distances, weigh, cut, draw, token);
}

template <class Logit>
__device__ __forceinline__ void choose(const Arguments& a, const Scores<Logit>& scores, uint64_t* work, int* token) {
  constexpr int kWidth = Scores<Logit>::kWidth;
  __shared__ uint64_t extremes;
  const int index = team_row();
  const float temperature = a.temperature[index];
  if (temperature == 0) return choose_greedily(scores, token);
  float largest = -CUDART_INF_F;
  scores.template each_access<kAhead>(
      [&](int, const float(&values)[kWidth]) { largest = max_nan(largest, largest_of(values)); });
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
  const int top_k = a.top_k[index];
  const Draw draw = {top_k < a.num_token_ids ? top_k : 0, a.top_p[index],
                     philox_word(a.seeds[index], a.positions[index])};
  const Weighing weigh(from_ordered(distances.largest), temperature, a.min_p[index]);
  draw_token(scores, distances, weigh, draw, a.num_token_ids, {mine, ~uint32_t(all)}, work, token);
}

template <class Logit>
__device__ __forceinline__ void sample(const Arguments& a) {
  __shared__ uint64_t work[kCandidates];
  wait_for_previous_kernel();
  allow_next_kernel();
  const int index = team_row();
  const Slice slice = slice_of(team_rank(), a.slice, a.num_token_ids);
  const Logit* logits = static_cast<const Logit*>(a.logits) + int64_t(index) * a.num_columns;
  const RowPenalties penalties = a.penalties.of(index, a.num_columns);
  const uint32_t* mask = a.mask.of(index, a.num_columns);
  const bool is_biased = a.bias.count > 0 && index_of(index, a.bias.rows, a.bias.count) >= 0;
  if (a.is_wide && !penalties.output_counts && !mask && !is_biased) {
    choose(a, Scores<Logit>{logits + slice.first, slice}, work, a.tokens + index);
  } else {
    float* scores = a.scratch + (int64_t(index) * kTeam + team_rank()) * a.slice;
    if (a.is_wide)
      write_scores<Logit, kWide<Logit>>(a, logits, slice, penalties, mask, scores);
    else
      write_scores<Logit, 1>(a, logits, slice, penalties, mask, scores);
    choose(a, Scores<float>{scores, slice}, work, a.tokens + index);
  }
  team_sync();
}

}  // namespace

extern "C" __global__ void TEAM_KERNEL __launch_bounds__(kThreads, 4) sample_bfloat16(const Arguments a) {
  sample<bf16>(a);
}

extern "C" __global__ void TEAM_KERNEL __launch_bounds__(kThreads, 4) sample_float32(const Arguments a) {
  sample<float>(a);
}
