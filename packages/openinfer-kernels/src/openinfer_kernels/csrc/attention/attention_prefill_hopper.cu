// Causal attention of rows with several query tokens over their paged context, with Hopper's warpgroup products.
//
// FlashAttention-3 (Shah et al. 2024, algorithm 2) over pages. A block holds a tile of 128 query rows, which are
// (token, query head) pairs; those that share a KV head are contiguous. Three warpgroups:
//
//   producer     for each tile of keys, last to first: 16 tokens at a time by tensor copies, each from its own page
//   2 consumers  64 query rows each:  S' = Q K'^T starts │ O += P V starts │ softmax of S' while O is made │ O scaled, P = S'
//
// The consumers start products alternately (ping-pong), so that one's softmax runs under the other's products. Blocks
// stay and take tile after tile, so that keys of the next tile arrive while this one is written; the longest are handed
// out first in each row. The list of tiles is made on the device from `query_starts` (attention_prefill_scheduler.cuh).
//
// Values beyond what the tile's last query row sees are set to zero in shared memory, as they may be anything, and 0 *
// NaN is not 0; their scores are -inf. So are those before the first key that the tile's first query row sees.
//
// Where there are fewer tiles than blocks, as for a short prefill chunk after a long prefix, tiles are divided along
// their keys (split-KV). Each split's sums go to the workspace; the warpgroup that arrives last reduces all partials of
// its query rows in their order, so that results do not depend on timing.
#include "attention/attention.cuh"
#include "attention/attention_prefill_scheduler.cuh"
#include "attention/attention_wgmma.cuh"
#include "common/hopper.cuh"

using namespace attention;
using namespace hopper;

namespace {

constexpr int kThreads = (kConsumers + 1) * 128;
constexpr int kQueryRows = kConsumers * 64;
constexpr int kChunk = 16;                       // tokens of one copy
constexpr int kBox = 64;                         // values of one copy: 128 bytes, one swizzle row
constexpr int kRowBytes = kBox * 2;
constexpr int kStages = 2;
static_assert(kQueryRows == kTileQueryRows && kThreads == kSchedulerThreads);

template <class V>
struct Arguments : V {
  const bf16* q;            // [T, H, D]
  bf16* out;                // [T, H D]
  const int* block_tables;  // [R, table_stride]
  const int* query_starts;  // [R + 1]
  const int* context_lens;  // [R]
  int* counters;            // [2] work tiles handed out, blocks without work: zero before and after
  float4* partials;         // of tiles that are divided, `Partial` each; null: none may be
  int* arrivals;            // [work_tiles, 2] warpgroups that left their partial: zero before and after
  int num_rows, table_stride, group, num_kv_heads, block_shift;
  int least_tokens;         // of a row that this kernel serves
  int block_rows;           // rows of the cache [blocks, layers, 2, K, B] x [D] from one block to the next
  int layer_row;            // first row of the layer in a block
  unsigned group_reciprocal;  // 2**32 / group, rounded up
  float scale;                // of scores, times log2(e)
};

template <int D_, int kKeys_, class V_>
struct Shape {
  using V = V_;
  using Arguments = ::Arguments<V>;
  using Rows = attention::Rows<V>;
  static constexpr int D = D_, kKeys = kKeys_;
  static constexpr int kBoxes = D / kBox;
  static constexpr int kLoaders = kBoxes > 1 || V::kIsFp8 ? 2 : 1;  // warps that share the copies of a tile
  static constexpr int kTileBytes = kKeys * D * 2;
  // 384 threads begin with 168 each, which is a third of one and two of these; producers of FP8 also convert.
  static constexpr int kProducerRegisters = V::kIsFp8 ? 56 : 40, kConsumerRegisters = V::kIsFp8 ? 224 : 232;
};

// What producers need in shared memory besides.
template <class S, bool kIsFp8>
struct Staging {};

template <class S>
struct Shared {
  alignas(1024) uint8_t q[kQueryRows * S::D * 2];      // [boxes][query_rows][128 bytes]
  alignas(1024) uint8_t k[kStages][S::kTileBytes];     // [boxes][keys][128 bytes]
  alignas(1024) uint8_t v[kStages][S::kTileBytes];
  uint64_t k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
  uint64_t next_full[2], next_empty[2];
  int next[2];              // work tiles to come
  int is_last[kConsumers];  // to arrive with a partial
  RowTable work_tiles;
  Staging<S, S::V::kIsFp8> staging;
};

// --- work tiles, one after the other ---------------------------------------------------------------------------------

// Tiles are handed out on demand by a counter, but for the first of each block. A producer warp asks for tile `round +
// 1` of its block while tile `round` is under way, and leaves the answer for the block's other warps.
template <class S>
__device__ __forceinline__ int ask_for_next(Shared<S>& s, const typename S::Arguments& a, int round) {
  if (round >= 2) barrier_wait(&s.next_empty[round % 2], (round / 2 - 1) & 1);
  const int index = gridDim.x + atomicAdd(&a.counters[0], 1);
  s.next[round % 2] = index;
  barrier_arrive(&s.next_full[round % 2]);
  return index;
}

template <class S>
__device__ __forceinline__ int take_next(Shared<S>& s, int round) {
  barrier_wait(&s.next_full[round % 2], (round / 2) & 1);
  const int index = s.next[round % 2];
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(&s.next_empty[round % 2]);
  return index;
}

// The block that has nothing left last sets the counters back.
template <class V>
__device__ __forceinline__ void stop_asking(const Arguments<V>& a) {
  __threadfence();  // this block's atomics on the other counter come before
  if (atomicAdd(&a.counters[1], 1) == int(gridDim.x) - 1) a.counters[0] = a.counters[1] = 0;
}

// The 16 tokens of a step of the product with V: their values side by side, blocks of 64 values `kKeys` rows apart.
template <class S>
__device__ __forceinline__ uint64_t value_descriptor(const uint8_t* tile) {
  return ((uint64_t(shared_address(tile)) & 0x3FFFF) >> 4) | (uint64_t(S::kKeys * kRowBytes >> 4) << 16) |
         (uint64_t(1024 >> 4) << 32) | (uint64_t(1) << 62);
}

// The token of a query row, `query_row / group`; exact for what fits into 28 bits.
template <class V>
__device__ __forceinline__ int token_of(const Arguments<V>& a, int query_row) {
  return a.group == 1 ? query_row : int(__umulhi(query_row, a.group_reciprocal));
}

template <class V>
__device__ __forceinline__ int64_t query_row_offset(const Arguments<V>& a, const WorkTile& tile, int query_row,
                                                    int head_dim) {
  const int token = token_of(a, query_row);
  return (int64_t(tile.first_query + token) * a.num_kv_heads * a.group + tile.kv_head * a.group + query_row -
          token * a.group) *
         head_dim;
}

// Where 16 bytes of a query row lie in [boxes][query_rows][128 bytes], swizzled as the copies and products expect.
__device__ __forceinline__ int place(int query_row, int chunk) {
  return (chunk / 8) * kQueryRows * kRowBytes + query_row * kRowBytes + ((chunk % 8) ^ (query_row & 7)) * 16;
}

// --- the producer: two warps for keys, two for values, which share the values of a head; a lane for 16 tokens ----

template <class S>
__device__ void produce(Shared<S>& s, const CUtensorMap& map, const typename S::Arguments& a,
                        const typename S::Rows& rows, int num_work_tiles, int warp) {
  constexpr int kLanes = S::kKeys / kChunk, kBoxesEach = S::kBoxes / S::kLoaders;
  const int lane = threadIdx.x % 32, is_value = warp / 2, first_box = warp % 2 * kBoxesEach;
  if (first_box >= S::kBoxes) return;
  auto& tiles = is_value ? s.v : s.k;
  uint64_t* full = is_value ? s.v_full : s.k_full;
  uint64_t* empty = is_value ? s.v_empty : s.k_empty;
  const uint64_t policy = evict_last_policy();
  const int first_cache_row = a.layer_row + (is_value ? a.num_kv_heads << a.block_shift : 0);
  const bool asks = warp == 2;
  int step = 0, index = blockIdx.x;
  for (int round = 0; index < num_work_tiles; round++) {
    const WorkTile tile = work_tile_at<S::kKeys>(s.work_tiles, rows, index);
    bool is_first = true;
    const int* table = a.block_tables + int64_t(tile.row) * a.table_stride;
    for (int first = (tile.end_key - 1) / S::kKeys * S::kKeys; first >= tile.begin_key; first -= S::kKeys, step++) {
      const int stage = step % kStages, token = first + lane * kChunk;
      bool is_there = lane < kLanes && token < tile.end_key;
      const int cache_row = is_there ? __ldcg(table + (token >> a.block_shift)) * a.block_rows + first_cache_row +
                                           (tile.kv_head << a.block_shift) + (token & ((1 << a.block_shift) - 1))
                                     : 0;
      int chunks = min(kLanes, (tile.end_key - first + kChunk - 1) / kChunk);
      if constexpr (S::V::kIsVariant) {  // nothing is read of what the window does not reach, not even a block's id
        is_there = is_there && token + kChunk > tile.first_key;
        chunks -= max(0, tile.first_key - first) / kChunk;
      }
      // The phase that ends the stage's use before this one; in the first round it has none.
      if (step >= kStages) barrier_wait(&empty[stage], (step / kStages - 1) & 1);
      if (lane == 0) barrier_expect(&full[stage], chunks * kBoxesEach * kChunk * kRowBytes);
      __syncwarp();
      if (is_there)
#pragma unroll
        for (int box = first_box; box < first_box + kBoxesEach; box++)
          load_box(tiles[stage] + (box * S::kKeys + lane * kChunk) * kRowBytes, &map, &full[stage], box * kBox,
                   cache_row, policy);
      __syncwarp();
      if (is_first && asks && lane == 0) index = ask_for_next(s, a, round);
      is_first = false;
    }
    index = asks ? __shfl_sync(~0u, index, 0) : take_next(s, round);
  }
  if (asks && lane == 0) stop_asking(a);
}

#ifdef ATTENTION_FP8
#include "attention_fp8/attention_prefill_staging.cuh"
#endif

// --- the consumers --------------------------------------------------------------------------------------------

template <class S>
struct Consumer {
  static constexpr int kScores = S::kKeys / 2, kSums = S::D / 2, kSteps = S::kKeys / 16;

  float o[kSums];
  uint32_t p[kSteps][4];
  float top[2] = {kMinusInfinity, kMinusInfinity}, weight[2] = {0, 0};

  static __device__ __forceinline__ void start_scores(float (&scores)[kScores], const uint8_t* q, const uint8_t* k) {
#pragma unroll
    for (int step = 0; step < S::D / 16; step++) {
      const int box = step / 4, at = step % 4 * 2;
      multiply_keys<S::kKeys>(scores, tile_descriptor(q + box * kQueryRows * kRowBytes) + at,
                              tile_descriptor(k + box * S::kKeys * kRowBytes) + at, step);
    }
  }

  __device__ __forceinline__ void start_sums(const uint8_t* v) {
    const uint64_t values = value_descriptor<S>(v);
#pragma unroll
    for (int step = 0; step < kSteps; step++)
      multiply_values<S::D>(o, p[step], values + step * (kChunk * kRowBytes >> 4));
  }

  // Scores to exponentials; `factor` brings earlier sums to the new maximum.
  __device__ __forceinline__ void exponentials(float (&scores)[kScores], float (&factor)[2], float scale) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float highest = top[r];
#pragma unroll
      for (int c = 0; c < kScores / 4; c++) highest = fmaxf(highest, fmaxf(scores[4 * c + 2 * r], scores[4 * c + 2 * r + 1]));
      highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
      highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
      // Where nothing has been seen, -inf less -inf would be NaN.
      const float shift = highest == kMinusInfinity ? 0.0f : highest * scale;
      factor[r] = highest == top[r] ? 1.0f : exp2_fast(top[r] * scale - shift);
      top[r] = highest;
      float sum = 0;
#pragma unroll
      for (int c = 0; c < kScores / 4; c++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float& score = scores[4 * c + 2 * r + e];
          score = exp2_fast(fmaf(score, scale, -shift));
          sum += score;
        }
      weight[r] = weight[r] * factor[r] + sum;
    }
  }

  // The four threads of a query row have a quarter of its weights each. Added once: only the quotient needs them.
  __device__ __forceinline__ void add_up_weights() {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      weight[r] += __shfl_xor_sync(~0u, weight[r], 1);
      weight[r] += __shfl_xor_sync(~0u, weight[r], 2);
    }
  }

  __device__ __forceinline__ void keep(const float (&scores)[kScores]) {
#pragma unroll
    for (int step = 0; step < kSteps; step++)
#pragma unroll
      for (int i = 0; i < 4; i++) p[step][i] = packed(scores[8 * step + 2 * i], scores[8 * step + 2 * i + 1]);
  }
};

// --- partials of split tiles -----------------------------------------------------------------------------------

// A partial in the workspace, as threads hold it: [fours][consumer threads] sums, then [consumer threads] maxima and
// weights.
template <class S>
struct Partial {
  static constexpr int kFours = S::D / 8, kStride = kConsumers * 128, kSize = (kFours + 1) * kStride;

  float4* data;  // of this thread

  static __device__ __forceinline__ Partial of(const typename S::Arguments& a, const WorkTile& work_tile, int split,
                                               int group) {
    const int index = work_tile.first_of_tile + split * a.num_kv_heads;
    return {a.partials + int64_t(index) * kSize + group * 128 + threadIdx.x % 128};
  }

  __device__ __forceinline__ void leave(const Consumer<S>& c) const {
#pragma unroll
    for (int i = 0; i < kFours; i++)
      __stcg(data + i * kStride, make_float4(c.o[4 * i], c.o[4 * i + 1], c.o[4 * i + 2], c.o[4 * i + 3]));
    __stcg(data + kFours * kStride, make_float4(c.top[0], c.top[1], c.weight[0], c.weight[1]));
  }

  __device__ __forceinline__ float4 ends() const { return __ldcg(data + kFours * kStride); }

  // Adds this partial's sums to `c`, whose maxima are those of all partials.
  __device__ __forceinline__ void add_to(Consumer<S>& c, float scale) const {
    const float4 mine = ends();
    const float factors[2] = {exp2_fast((mine.x - c.top[0]) * scale), exp2_fast((mine.y - c.top[1]) * scale)};
    c.weight[0] += mine.z * factors[0];
    c.weight[1] += mine.w * factors[1];
#pragma unroll
    for (int i = 0; i < kFours; i++) {
      const float4 sums = __ldcg(data + i * kStride);
      c.o[4 * i] += sums.x * factors[0];
      c.o[4 * i + 1] += sums.y * factors[0];
      c.o[4 * i + 2] += sums.z * factors[1];
      c.o[4 * i + 3] += sums.w * factors[1];
    }
  }
};

// Leaves this warpgroup's sums of a split; where it is the tile's last to do so, returns true and has those of all.
template <class S>
__device__ __forceinline__ bool reduce_partials(Shared<S>& s, const typename S::Arguments& a,
                                                const WorkTile& work_tile, Consumer<S>& c, int group) {
  Partial<S>::of(a, work_tile, work_tile.split, group).leave(c);
  warpgroup_sync(group);
  if (threadIdx.x % 128 == 0) {
    int* arrivals = a.arrivals + work_tile.first_of_tile * kConsumers + group;
    s.is_last[group] = arrive(arrivals) == work_tile.splits - 1;
    if (s.is_last[group]) *arrivals = 0;  // for the next launch, which may be the replay of a graph
  }
  warpgroup_sync(group);
  if (!s.is_last[group]) return false;
#pragma unroll
  for (int i = 0; i < Consumer<S>::kSums; i++) c.o[i] = 0;
  c.top[0] = c.top[1] = kMinusInfinity;
  c.weight[0] = c.weight[1] = 0;
#pragma unroll 4
  for (int split = 0; split < work_tile.splits; split++) {
    const float4 ends = Partial<S>::of(a, work_tile, split, group).ends();
    c.top[0] = fmaxf(c.top[0], ends.x);
    c.top[1] = fmaxf(c.top[1], ends.y);
  }
#pragma unroll(S::D <= 128 ? 2 : 1)
  for (int split = 0; split < work_tile.splits; split++) Partial<S>::of(a, work_tile, split, group).add_to(c, a.scale);
  return true;
}

// Scores of keys that a query row does not see: `limits` are the last positions seen by this thread's two query_rows.
template <int kScores>
__device__ __forceinline__ void hide(float (&scores)[kScores], int first_key, const int (&limits)[2]) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < kScores; i++)
    if (first_key + i / 4 * 8 + 2 * t + (i & 1) > limits[(i >> 1) & 1]) scores[i] = kMinusInfinity;
}

// Scores of keys before the windows that end with `limits`.
template <int kScores>
__device__ __forceinline__ void hide_before(float (&scores)[kScores], int first_key, const int (&limits)[2],
                                            int window) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < kScores; i++)
    if (first_key + i / 4 * 8 + 2 * t + (i & 1) <= limits[(i >> 1) & 1] - window) scores[i] = kMinusInfinity;
}

// This warpgroup's 64 query rows, in registers between global and shared memory; absent query rows are zero.
template <class S>
struct Queries {
  static constexpr int kChunks = S::D / 8, kEach = 64 * kChunks / 128;
  uint4 values[kEach];

  __device__ __forceinline__ void load(const typename S::Arguments& a, const WorkTile& tile, int group) {
    const int thread = threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      const int query_row = tile.first_query_row + group * 64 + (i * 128 + thread) / kChunks;
      values[i] = make_uint4(0, 0, 0, 0);
      if (query_row < tile.num_query_rows)
        values[i] =
            *reinterpret_cast<const uint4*>(a.q + query_row_offset(a, tile, query_row, S::D) + thread % kChunks * 8);
    }
  }

  __device__ __forceinline__ void put(Shared<S>& s, int group) const {
    const int thread = threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < kEach; i++)
      *reinterpret_cast<uint4*>(s.q + place(group * 64 + (i * 128 + thread) / kChunks, thread % kChunks)) = values[i];
    copies_see_writes();
    warpgroup_sync(group);
  }
};

// A sink is a weight without a value, so that it is added once, to the sum of all keys' weights. Where it is so much
// above them that it overflows, the quotient is zero, which is right.
template <class S>
__device__ __forceinline__ void add_sinks(const typename S::Arguments& a, const WorkTile& tile, Consumer<S>& c,
                                          int query_row) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int head = tile.kv_head * a.group + query_row + 8 * r - token_of(a, query_row + 8 * r) * a.group;
    c.weight[r] += exp2_fast(a.sink_of(head) - c.top[r] * a.scale);
  }
}

// Writes 64 query rows through the queries' place in shared memory, so that whole query rows go out.
template <class S>
__device__ __forceinline__ void store_sums(Shared<S>& s, const typename S::Arguments& a, const WorkTile& tile,
                                           Consumer<S>& c, int group) {
  constexpr int kChunks = S::D / 8;
  const int thread = threadIdx.x % 128, first = group * 64 + thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float inverse = 1.0f / c.weight[r];
#pragma unroll
    for (int chunk = 0; chunk < kChunks; chunk++)
      *reinterpret_cast<uint32_t*>(s.q + place(first + 8 * r, chunk) + thread % 4 * 4) =
          packed(c.o[4 * chunk + 2 * r] * inverse, c.o[4 * chunk + 2 * r + 1] * inverse);
  }
  warpgroup_sync(group);
#pragma unroll 4
  for (int i = thread; i < 64 * kChunks; i += 128) {
    const int m = group * 64 + i / kChunks, chunk = i % kChunks, query_row = tile.first_query_row + m;
    if (query_row < tile.num_query_rows)
      *reinterpret_cast<uint4*>(a.out + query_row_offset(a, tile, query_row, S::D) + chunk * 8) =
          *reinterpret_cast<const uint4*>(s.q + place(m, chunk));
  }
  warpgroup_sync(group);
}

// Sets values from token `valid` of a tile on to zero.
template <class S>
__device__ __forceinline__ void clear_values(uint8_t* v, int valid, int group) {
  if (valid >= S::kKeys) return;
  for (int i = threadIdx.x % 128; i < (S::kKeys - valid) * S::kBoxes * 8; i += 128) {
    const int row = valid + i / (S::kBoxes * 8), box = i / 8 % S::kBoxes;
    *reinterpret_cast<uint4*>(v + (box * S::kKeys + row) * kRowBytes + i % 8 * 16) = make_uint4(0, 0, 0, 0);
  }
  copies_see_writes();
  warpgroup_sync(group);
}

// Sets values before token `first` of a tile to zero.
template <class S>
__device__ __forceinline__ void clear_values_before(uint8_t* v, int first, int group) {
  if (first <= 0) return;
  for (int i = threadIdx.x % 128; i < first * S::kBoxes * 8; i += 128) {
    const int row = i / (S::kBoxes * 8), box = i / 8 % S::kBoxes;
    *reinterpret_cast<uint4*>(v + (box * S::kKeys + row) * kRowBytes + i % 8 * 16) = make_uint4(0, 0, 0, 0);
  }
  copies_see_writes();
  warpgroup_sync(group);
}

// A warpgroup without query rows lets a tile's keys and values pass, and takes part in the consumers' barriers.
template <class S>
__device__ __forceinline__ void let_pass(Shared<S>& s, const WorkTile& tile, int& step, int group) {
  const bool frees = threadIdx.x % 32 == 0;
  const int last_key = (tile.end_key - 1) / S::kKeys * S::kKeys;
  for (int first = last_key; first >= tile.begin_key; first -= S::kKeys, step++) {
    const int stage = step % kStages, phase = (step / kStages) & 1;
    barrier_wait(&s.k_full[stage], phase);
    if (frees) barrier_arrive(&s.k_empty[stage]);
    if (first < last_key) {
      warp_scheduler_barrier_sync(group);
      warp_scheduler_barrier_arrive(1 - group);
    }
    barrier_wait(&s.v_full[stage], phase);
    if (frees) barrier_arrive(&s.v_empty[stage]);
  }
}

template <class S>
__device__ void consume(Shared<S>& s, const typename S::Arguments& a, const typename S::Rows& rows, int num_work_tiles,
                        int group) {
  using C = Consumer<S>;
  using V = typename S::V;
  const int thread = threadIdx.x % 128, in_group = group * 64 + thread / 32 * 16 + thread % 32 / 4;
  const uint8_t* q = s.q + group * 64 * kRowBytes;
  const bool frees = thread % 32 == 0;
  if (group == 1) warp_scheduler_barrier_arrive(0);  // the first consumer begins
  constexpr bool kPrefetches = S::D <= 128;  // the next tile's queries, while the last products of a tile run
  int step = 0, index = blockIdx.x;
  WorkTile tile, next;
  Queries<S> queries;
  if (index < num_work_tiles) {
    next = work_tile_at<S::kKeys>(s.work_tiles, rows, index);
    if constexpr (kPrefetches) queries.load(a, next, group);
  }
  for (int round = 0; index < num_work_tiles; round++) {
    tile = next;
    if (tile.first_query_row + group * 64 >= tile.num_query_rows) {
      let_pass(s, tile, step, group);
      index = take_next(s, round);
      if (index < num_work_tiles) {
        next = work_tile_at<S::kKeys>(s.work_tiles, rows, index);
        if constexpr (kPrefetches) queries.load(a, next, group);
      }
      continue;
    }
    if constexpr (!kPrefetches) queries.load(a, tile, group);
    queries.put(s, group);
    const int query_row = tile.first_query_row + in_group;  // of this thread, and query_row + 8
    const int limits[2] = {tile.past + token_of(a, query_row), tile.past + token_of(a, query_row + 8)};
    const int seen_by_all = tile.past + token_of(a, tile.first_query_row + group * 64) + 1;
    const int last_key = (tile.end_key - 1) / S::kKeys * S::kKeys;
    // The first key that the last query row of the warpgroup sees.
    const int first_of_last = a.first_seen(tile.past + token_of(a, tile.first_query_row + group * 64 + 63));

    C c;
    float scores[C::kScores], factor[2];
#pragma unroll
    for (int i = 0; i < C::kSums; i++) c.o[i] = 0;
    barrier_wait(&s.k_full[step % kStages], (step / kStages) & 1);
    wgmma_fence();
    C::start_scores(scores, q, s.k[step % kStages]);
    wgmma_commit();
    wgmma_wait<0>();
    if (frees) barrier_arrive(&s.k_empty[step % kStages]);
    if constexpr (V::kIsVariant) {
      a.cap_scores(scores);
      if (last_key < first_of_last) hide_before(scores, last_key, limits, a.window);
    }
    hide(scores, last_key, limits);
    c.exponentials(scores, factor, a.scale);
    c.keep(scores);
    barrier_wait(&s.v_full[step % kStages], (step / kStages) & 1);
    clear_values<S>(s.v[step % kStages], tile.end_key - last_key, group);
    step++;
    for (int first = last_key - S::kKeys; first >= tile.begin_key; first -= S::kKeys, step++) {
      const int stage = step % kStages, before = (step - 1) % kStages;
      barrier_wait(&s.k_full[stage], (step / kStages) & 1);
      warp_scheduler_barrier_sync(group);
      wgmma_fence();
      C::start_scores(scores, q, s.k[stage]);
      wgmma_commit();
      barrier_wait(&s.v_full[before], ((step - 1) / kStages) & 1);
      wgmma_fence();
      c.start_sums(s.v[before]);
      wgmma_commit();
      warp_scheduler_barrier_arrive(1 - group);
      wgmma_wait<1>();
      if (frees) barrier_arrive(&s.k_empty[stage]);  // the scores are there; the product with V is still under way
      if constexpr (V::kIsVariant) {
        a.cap_scores(scores);
        if (first < first_of_last) hide_before(scores, first, limits, a.window);
      }
      if (first + S::kKeys > seen_by_all) hide(scores, first, limits);
      c.exponentials(scores, factor, a.scale);
      wgmma_wait<0>();
      if (frees) barrier_arrive(&s.v_empty[before]);
#pragma unroll
      for (int j = 0; j < C::kSums; j++) c.o[j] *= factor[(j >> 1) & 1];
      c.keep(scores);
    }
    const int stage = (step - 1) % kStages;
    barrier_wait(&s.v_full[stage], ((step - 1) / kStages) & 1);
    if constexpr (V::kIsVariant) clear_values_before<S>(s.v[stage], tile.first_key - tile.begin_key, group);
    wgmma_fence();
    c.start_sums(s.v[stage]);
    wgmma_commit();
    index = take_next(s, round);
    if (index < num_work_tiles) {
      next = work_tile_at<S::kKeys>(s.work_tiles, rows, index);
      if constexpr (kPrefetches) queries.load(a, next, group);
    }
    wgmma_wait<0>();
    if (frees) barrier_arrive(&s.v_empty[stage]);
    c.add_up_weights();
    if (tile.splits == 1 || reduce_partials(s, a, tile, c, group)) {
      if constexpr (V::kIsVariant) add_sinks<S>(a, tile, c, query_row);
      store_sums(s, a, tile, c, group);
    }
  }
}

template <class S, class Map>
__device__ void run(const Map& map, const typename S::Arguments& a) {
  extern __shared__ uint8_t raw[];
  // Swizzled boxes begin at multiples of 1024, to which dynamic shared memory need not be aligned.
  auto& s = *reinterpret_cast<Shared<S>*>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t(1023));
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; i++) {
      barrier_init(&s.k_full[i], S::kLoaders);
      barrier_init(&s.v_full[i], S::kLoaders);
      barrier_init(&s.k_empty[i], kConsumers * 4);
      barrier_init(&s.v_empty[i], kConsumers * 4);
    }
    for (int i = 0; i < 2; i++) {
      barrier_init(&s.next_full[i], 1);
      barrier_init(&s.next_empty[i], 2 * S::kLoaders - 1 + kConsumers * 4);  // all warps but the one that asks
    }
    if constexpr (S::V::kIsFp8) init_staging(s.staging);
    barrier_init_fence();
    if constexpr (!S::V::kIsFp8) prefetch_map(&map);
  }
  launch_dependents();
  wait_for_previous_kernel();
  const typename S::Rows rows = {a,       a.query_starts, a.context_lens, a.num_rows,
                                 a.group, a.num_kv_heads, a.least_tokens, a.partials != nullptr};
  const int num_work_tiles = count_work_tiles<S::kKeys>(s.work_tiles, rows, gridDim.x) * a.num_kv_heads;
  if (threadIdx.x < 128) {
    leave_registers<S::kProducerRegisters>();
    if constexpr (S::V::kIsFp8) produce_fp8(s, a, rows, num_work_tiles, int(threadIdx.x) / 32);
    else produce(s, map, a, rows, num_work_tiles, int(threadIdx.x) / 32);
  } else {
    take_registers<S::kConsumerRegisters>();
    consume(s, a, rows, num_work_tiles, int(threadIdx.x) / 128 - 1);
  }
}

}  // namespace

#define ATTENTION_PREFILL(NAME, V, D, KEYS)                                               \
  extern "C" __global__ void __launch_bounds__(kThreads, 1)                               \
      NAME##_##D(const __grid_constant__ CUtensorMap map, Arguments<V> arguments) {       \
    run<Shape<D, KEYS, V>>(map, arguments);                                               \
  }

#if !defined(ATTENTION_VARIANT) && !defined(ATTENTION_FP8)  // attention_variants, attention_fp8
ATTENTION_PREFILL(attention_prefill_hopper, Plain, 64, 128)
ATTENTION_PREFILL(attention_prefill_hopper, Plain, 128, 128)
ATTENTION_PREFILL(attention_prefill_hopper, Plain, 256, 64)
#endif
