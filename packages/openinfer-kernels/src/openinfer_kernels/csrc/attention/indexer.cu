// Which compressed entries each token sees: scores of all on tensor cores, then the best by radix selection.
//
//     score[t, e] = sum_h weight[t, h] relu(scale * q[t, h] . key[e])        -inf where e is not complete at t
//
// A block has one token and a chunk of the entries, a warp 8 entries at a time and all heads: its A operand is the
// token's queries, held in registers. The dimensions of a product are taken in an order in which each lane's are
// neighbours, so that keys come by 16 bytes per access; the order is the same on both sides and changes nothing.
#include "attention/sparse.cuh"

namespace {

constexpr int kSize = 128;  // of a key
constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kChunkEntries = 256;  // of one block

struct Arguments {
  const bf16* queries;   // [T, heads, 128]
  const float* weights;  // [T, heads]
  float* scores;         // [T, E]
  StateRows rows;
  sparse::Entries entries;
  int heads, num_entries;  // E
  float scale;
};

// kTiles of 16 heads.
template <int kTiles>
__device__ void score(const Arguments& a) {
  const int token = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  const int chunk = blockIdx.x * kChunkEntries, chunk_end = min(chunk + kChunkEntries, a.num_entries);
  const sparse::Token at = sparse::find_token(a.rows, token);
  const int seen = at.position < 0 ? 0 : (at.position + 1) / a.entries.ratio;
  float* scores = a.scores + int64_t(token) * a.num_entries;
  for (int entry = max(chunk, seen) + threadIdx.x; entry < chunk_end; entry += kThreads) scores[entry] = -CUDART_INF_F;
  if (chunk >= seen) return;
  // Step `s` multiplies dimensions quad * 32 + 4 s .. + 3 of this lane.
  uint32_t queries[kTiles][8][4];
  float weights[kTiles][2];
#pragma unroll
  for (int tile = 0; tile < kTiles; tile++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int head = tile * 16 + half * 8 + group;
      const bool is_there = head < a.heads;
      weights[tile][half] = is_there ? a.weights[int64_t(token) * a.heads + head] : 0.0f;
      const bf16* query = a.queries + (int64_t(token) * a.heads + head) * kSize + quad * 32;
#pragma unroll
      for (int vector = 0; vector < 4; vector++) {
        uint4 bits = {0, 0, 0, 0};
        if (is_there) bits = load<8>(query + vector * 8).bits;
        queries[tile][2 * vector][half] = bits.x, queries[tile][2 * vector][2 + half] = bits.y;
        queries[tile][2 * vector + 1][half] = bits.z, queries[tile][2 * vector + 1][2 + half] = bits.w;
      }
    }
  }
  const int end = min(chunk_end, seen);
  for (int first = chunk + warp * 8; first < end; first += kWarps * 8) {
    const int entry = first + group;
    uint4 key[4] = {};
    if (entry < end) {
      const bf16* from = a.entries.cache + a.entries.offset(at.row, entry) + quad * 32;
#pragma unroll
      for (int vector = 0; vector < 4; vector++) key[vector] = load<8>(from + vector * 8).bits;
    }
    float sums[2] = {0, 0};
#pragma unroll
    for (int tile = 0; tile < kTiles; tile++) {
      float products[4] = {0, 0, 0, 0};
#pragma unroll
      for (int vector = 0; vector < 4; vector++) {
        sparse::mma(products, queries[tile][2 * vector], key[vector].x, key[vector].y);
        sparse::mma(products, queries[tile][2 * vector + 1], key[vector].z, key[vector].w);
      }
#pragma unroll
      for (int i = 0; i < 4; i++) sums[i % 2] += weights[tile][i / 2] * fmaxf(products[i] * a.scale, 0.0f);
    }
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) {
      sums[0] += __shfl_xor_sync(~0u, sums[0], mask);
      sums[1] += __shfl_xor_sync(~0u, sums[1], mask);
    }
    if (group == 0) {
#pragma unroll
      for (int i = 0; i < 2; i++)
        if (first + quad * 2 + i < end) scores[first + quad * 2 + i] = sums[i];
    }
  }
}

// Floats as integers of the same order; both zeros are equal, -inf and NaN are 0.
__device__ __forceinline__ uint32_t ordered(float value) {
  if (!(value > -CUDART_INF_F)) return 0;
  const uint32_t bits = value == 0.0f ? 0 : __float_as_uint(value);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

constexpr int kSelectThreads = 512, kSelectWarps = kSelectThreads / 32;

// Sums before each thread, and of all, of two counts below 2^16 in one integer.
__device__ __forceinline__ uint32_t sum_before(uint32_t value, uint32_t* totals, uint32_t& all) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t running = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, running, step);
    if (lane >= step) running += other;
  }
  __syncthreads();
  if (lane == 31) totals[warp] = running;
  __syncthreads();
  uint32_t before = running - value;
  all = 0;
#pragma unroll
  for (int i = 0; i < kSelectWarps; i++) {
    before += i < warp ? totals[i] : 0;
    all += totals[i];
  }
  return before;
}

// Which digit the `left`-th largest has, by one warp: a lane has 8 digits, the first lane the largest. Where there are
// fewer, it is 0.
__device__ __forceinline__ void find_digit(const uint32_t* counts, uint32_t left, uint32_t prefix, int shift,
                                           uint32_t& found_prefix, uint32_t& found_left) {
  const int lane = threadIdx.x;
  uint32_t mine = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) mine += counts[255 - lane * 8 - i];
  uint32_t running = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, running, step);
    if (lane >= step) running += other;
  }
  const uint32_t reached = __ballot_sync(~0u, running >= left);
  const int chosen = reached ? __ffs(reached) - 1 : 31;
  if (lane != chosen) return;
  uint32_t above = running - mine;
  int digit = 255 - lane * 8;
  const int last = digit - 7;
  for (; digit > last && above + counts[digit] < left; digit--) above += counts[digit];
  found_prefix = prefix | uint32_t(digit) << shift;
  found_left = left - above;
}

// The k-th largest key of a token, found 8 bits at a time, and how many of those equal to it are taken.
__device__ void select(const float* scores, int* selected, int num_entries, int k) {
  __shared__ uint32_t counts[256], totals[kSelectWarps];
  __shared__ uint32_t shared_prefix, shared_left;
  const int thread = threadIdx.x;
  uint32_t prefix = 0, left = k;
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int i = thread; i < 256; i += kSelectThreads) counts[i] = 0;
    __syncthreads();
    const uint32_t mask = shift == 24 ? 0 : ~0u << (shift + 8);
    for (int entry = thread; entry < num_entries; entry += kSelectThreads) {
      const uint32_t key = ordered(scores[entry]);
      if (key != 0 && (key & mask) == prefix) atomicAdd(&counts[key >> shift & 255], 1);
    }
    __syncthreads();
    if (thread < 32) find_digit(counts, left, prefix, shift, shared_prefix, shared_left);
    __syncthreads();
    prefix = shared_prefix;
    left = shared_left;
  }
  // Larger keys are taken, of those equal the first `left`; -inf never. Few entries leave a prefix below all of them.
  uint32_t taken = 0, equal = 0;
  for (int base = 0; base < num_entries; base += kSelectThreads) {
    const int entry = base + thread;
    const uint32_t key = entry < num_entries ? ordered(scores[entry]) : 0;
    const bool is_equal = key != 0 && key == prefix;
    uint32_t all;
    const uint32_t equal_before = equal + sum_before(is_equal, totals, all);
    equal += all;
    const bool is_taken = key > prefix || (is_equal && equal_before < left);
    const uint32_t place = taken + sum_before(is_taken, totals, all);
    taken += all;
    if (is_taken) selected[place] = entry;
  }
  for (int place = taken + thread; place < k; place += kSelectThreads) selected[place] = -1;
}

}  // namespace

#define INDEX_SCORES(NAME, TILES)                                                                                          \
  extern "C" __global__ void __launch_bounds__(kThreads) index_scores_##NAME(const __grid_constant__ Arguments a) { \
    score<TILES>(a);                                                                                                \
  }

INDEX_SCORES(16, 1)
INDEX_SCORES(32, 2)
INDEX_SCORES(64, 4)

// Grid: tokens. scores [T, E], selected [T, k].
extern "C" __global__ void __launch_bounds__(kSelectThreads) select_entries(
    const float* scores, int* selected, int num_entries, int k) {
  select(scores + int64_t(blockIdx.x) * num_entries, selected + int64_t(blockIdx.x) * k, num_entries, k);
}
