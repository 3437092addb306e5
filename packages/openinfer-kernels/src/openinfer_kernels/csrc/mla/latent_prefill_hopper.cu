// Causal attention of longer rows over expanded latents, with Hopper's warpgroup products: heads of 128 + 64 and 128.
//
// FlashAttention-3 (Shah et al. 2024, algorithm 2). A block holds 128 tokens of one head. Three warpgroups:
//
//   producer     for each tile of keys, last to first: tensor copies of the head's own columns and of the shared ones
//   2 consumers  64 tokens each:  S' = Q K'^T starts │ O += P V starts │ softmax of S' while O is made │ O scaled, P = S'
//
// The consumers start products alternately (ping-pong), so that one's softmax runs under the other's products. A tile of
// keys may reach beyond the row: scores there are -inf, and values are set to zero, as they may be anything.
#include "attention/attention.cuh"
#include "attention/attention_query_tile.cuh"
#include "attention/attention_wgmma.cuh"
#include "common/hopper.cuh"

using namespace attention;
using namespace hopper;

namespace {

constexpr int kThreads = (kConsumers + 1) * 128;
constexpr int kQueryRows = kConsumers * 64;
constexpr int kKeys = 128;                // of a tile
constexpr int kBox = 64;                  // values of one copy: 128 bytes, one swizzle row
constexpr int kRowBytes = kBox * 2;
constexpr int kBoxBytes = kKeys * kRowBytes;
constexpr int kStages = 2;
constexpr int kHead = 192, kValue = 128;  // of queries and keys; of values
constexpr int kOwn = 256;                 // columns of a head: 128 of its key, 128 of its value
constexpr int kKeyBoxes = kHead / kBox, kValueBoxes = kValue / kBox;

struct Arguments {
  const bf16* q;            // [T, H, 192]
  bf16* out;                // [T, H, 128]
  const int* query_starts;  // [R + 1]
  const int* context_lens;  // [R]
  const int* starts;        // [R] first entry of each row in the copies' arrays
  int num_rows, num_heads, least_tokens;
  int first_head;           // of those whose keys and values there are
  float scale;              // of scores, times log2(e)
};

struct Shared {
  alignas(1024) uint8_t q[kQueryRows * kHead * 2];               // [boxes][query_rows][128 bytes]
  alignas(1024) uint8_t k[kStages][kKeyBoxes * kBoxBytes];       // [boxes][keys][128 bytes]
  alignas(1024) uint8_t v[kStages][kValueBoxes * kBoxBytes];
  uint64_t k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
  int scratch[kTileScratch(kThreads / 32)];
};

// 16 tokens of the product with V: their values side by side, boxes of 64 values apart.
__device__ __forceinline__ uint64_t value_descriptor(const uint8_t* tile) {
  return ((uint64_t(shared_address(tile)) & 0x3FFFF) >> 4) | (uint64_t(kBoxBytes >> 4) << 16) |
         (uint64_t(1024 >> 4) << 32) | (uint64_t(1) << 62);
}

// Where 16 bytes of a query row lie in [boxes][query_rows][128 bytes], swizzled as the copies and products expect.
__device__ __forceinline__ int place(int query_row, int chunk) {
  return (chunk / 8) * kQueryRows * kRowBytes + query_row * kRowBytes + ((chunk % 8) ^ (query_row & 7)) * 16;
}

__device__ void produce(Shared& s, const CUtensorMap& own, const CUtensorMap& shared, int first_entry, int last_key,
                        int head) {
  const uint64_t policy = evict_last_policy();
  int step = 0;
  for (int first = last_key; first >= 0; first -= kKeys, step++) {
    const int stage = step % kStages, entry = first_entry + first;
    if (step >= kStages) barrier_wait(&s.k_empty[stage], (step / kStages - 1) & 1);
    barrier_expect(&s.k_full[stage], kKeyBoxes * kBoxBytes);
    for (int box = 0; box < 2; box++)
      load_box(s.k[stage] + box * kBoxBytes, &own, &s.k_full[stage], head * kOwn + box * kBox, entry, policy);
    load_box(s.k[stage] + 2 * kBoxBytes, &shared, &s.k_full[stage], 0, entry, policy);
    if (step >= kStages) barrier_wait(&s.v_empty[stage], (step / kStages - 1) & 1);
    barrier_expect(&s.v_full[stage], kValueBoxes * kBoxBytes);
    for (int box = 0; box < kValueBoxes; box++)
      load_box(s.v[stage] + box * kBoxBytes, &own, &s.v_full[stage], head * kOwn + 128 + box * kBox, entry, policy);
  }
}

struct Consumer {
  static constexpr int kScores = kKeys / 2, kSums = kValue / 2, kSteps = kKeys / 16;

  float o[kSums];
  uint32_t p[kSteps][4];
  float top[2] = {kMinusInfinity, kMinusInfinity}, weight[2] = {0, 0};

  static __device__ __forceinline__ void start_scores(float (&scores)[kScores], const uint8_t* q, const uint8_t* k) {
#pragma unroll
    for (int step = 0; step < kHead / 16; step++) {
      const int box = step / 4, at = step % 4 * 2;
      multiply_keys<kKeys>(scores, tile_descriptor(q + box * kQueryRows * kRowBytes) + at,
                           tile_descriptor(k + box * kBoxBytes) + at, step);
    }
  }

  __device__ __forceinline__ void start_sums(const uint8_t* v) {
    const uint64_t values = value_descriptor(v);
#pragma unroll
    for (int step = 0; step < kSteps; step++) multiply_values<kValue>(o, p[step], values + step * (16 * kRowBytes >> 4));
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

  __device__ __forceinline__ void keep(const float (&scores)[kScores]) {
#pragma unroll
    for (int step = 0; step < kSteps; step++)
#pragma unroll
      for (int i = 0; i < 4; i++) p[step][i] = packed(scores[8 * step + 2 * i], scores[8 * step + 2 * i + 1]);
  }

  // Scores of keys that a query row does not see: `limits` are the last positions seen by this thread's two query_rows.
  static __device__ __forceinline__ void hide(float (&scores)[kScores], int first_key, const int (&limits)[2]) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < kScores; i++)
      if (first_key + i / 4 * 8 + 2 * t + (i & 1) > limits[(i >> 1) & 1]) scores[i] = kMinusInfinity;
  }
};

// This warpgroup's 64 query rows of queries to shared memory; absent query rows are zero.
__device__ void put_queries(Shared& s, const Arguments& a, const QueryTile& tile, int head, int group) {
  constexpr int kChunks = kHead / 8;
#pragma unroll 4
  for (int i = threadIdx.x % 128; i < 64 * kChunks; i += 128) {
    const int m = group * 64 + i / kChunks, chunk = i % kChunks, query_row = tile.first_query_row + m;
    uint4 values = make_uint4(0, 0, 0, 0);
    if (query_row < tile.num_query_rows)
      values = *reinterpret_cast<const uint4*>(
          a.q + (int64_t(tile.first_query + query_row) * a.num_heads + head) * kHead + chunk * 8);
    *reinterpret_cast<uint4*>(s.q + place(m, chunk)) = values;
  }
  copies_see_writes();
  warpgroup_sync(group);
}

// Writes 64 query rows through the queries' place in shared memory, so that whole query rows go out.
__device__ void store_sums(Shared& s, const Arguments& a, const QueryTile& tile, Consumer& c, int head, int group) {
  constexpr int kChunks = kValue / 8;
  const int thread = threadIdx.x % 128, first = group * 64 + thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    c.weight[r] += __shfl_xor_sync(~0u, c.weight[r], 1);
    c.weight[r] += __shfl_xor_sync(~0u, c.weight[r], 2);
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
      *reinterpret_cast<uint4*>(a.out + (int64_t(tile.first_query + query_row) * a.num_heads + head) * kValue +
                                chunk * 8) = *reinterpret_cast<const uint4*>(s.q + place(m, chunk));
  }
}

// Sets values from token `valid` of a tile on to zero.
__device__ void clear_values(uint8_t* v, int valid, int group) {
  if (valid >= kKeys) return;
  for (int i = threadIdx.x % 128; i < (kKeys - valid) * kValueBoxes * 8; i += 128) {
    const int row = valid + i / (kValueBoxes * 8), box = i / 8 % kValueBoxes;
    *reinterpret_cast<uint4*>(v + box * kBoxBytes + row * kRowBytes + i % 8 * 16) = make_uint4(0, 0, 0, 0);
  }
  copies_see_writes();
  warpgroup_sync(group);
}

__device__ void consume(Shared& s, const Arguments& a, const QueryTile& tile, int seen, int head, int group) {
  const int thread = threadIdx.x % 128,
            query_row = tile.first_query_row + group * 64 + thread / 32 * 16 + thread % 32 / 4;
  const uint8_t* q = s.q + group * 64 * kRowBytes;
  const bool frees = thread % 32 == 0;
  if (group == 1) warp_scheduler_barrier_arrive(0);  // the first consumer begins
  put_queries(s, a, tile, head, group);
  const int limits[2] = {tile.past + query_row, tile.past + query_row + 8};
  const int seen_by_all = tile.past + tile.first_query_row + group * 64 + 1;
  const int last_key = (seen - 1) / kKeys * kKeys;

  Consumer c;
  float scores[Consumer::kScores], factor[2];
#pragma unroll
  for (int i = 0; i < Consumer::kSums; i++) c.o[i] = 0;
  barrier_wait(&s.k_full[0], 0);
  wgmma_fence();
  Consumer::start_scores(scores, q, s.k[0]);
  wgmma_commit();
  wgmma_wait<0>();
  if (frees) barrier_arrive(&s.k_empty[0]);
  Consumer::hide(scores, last_key, limits);
  c.exponentials(scores, factor, a.scale);
  c.keep(scores);
  barrier_wait(&s.v_full[0], 0);
  clear_values(s.v[0], seen - last_key, group);
  int step = 1;
  for (int first = last_key - kKeys; first >= 0; first -= kKeys, step++) {
    const int stage = step % kStages, before = (step - 1) % kStages;
    barrier_wait(&s.k_full[stage], (step / kStages) & 1);
    warp_scheduler_barrier_sync(group);
    wgmma_fence();
    Consumer::start_scores(scores, q, s.k[stage]);
    wgmma_commit();
    barrier_wait(&s.v_full[before], ((step - 1) / kStages) & 1);
    wgmma_fence();
    c.start_sums(s.v[before]);
    wgmma_commit();
    warp_scheduler_barrier_arrive(1 - group);
    wgmma_wait<1>();
    if (frees) barrier_arrive(&s.k_empty[stage]);  // the scores are there; the product with V is still under way
    if (first + kKeys > seen_by_all) Consumer::hide(scores, first, limits);
    c.exponentials(scores, factor, a.scale);
    wgmma_wait<0>();
    if (frees) barrier_arrive(&s.v_empty[before]);
#pragma unroll
    for (int j = 0; j < Consumer::kSums; j++) c.o[j] *= factor[(j >> 1) & 1];
    c.keep(scores);
  }
  const int stage = (step - 1) % kStages;
  barrier_wait(&s.v_full[stage], ((step - 1) / kStages) & 1);
  wgmma_fence();
  c.start_sums(s.v[stage]);
  wgmma_commit();
  wgmma_wait<0>();
  store_sums(s, a, tile, c, head, group);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    latent_prefill_hopper(const __grid_constant__ CUtensorMap own, const __grid_constant__ CUtensorMap shared, Arguments a) {
  extern __shared__ uint8_t raw[];
  // Swizzled boxes begin at multiples of 1024, to which dynamic shared memory need not be aligned.
  auto& s = *reinterpret_cast<Shared*>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t(1023));
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; i++) {
      barrier_init(&s.k_full[i], 1);
      barrier_init(&s.v_full[i], 1);
      barrier_init(&s.k_empty[i], kConsumers * 4);
      barrier_init(&s.v_empty[i], kConsumers * 4);
    }
    barrier_init_fence();
    prefetch_map(&own);
    prefetch_map(&shared);
  }
  launch_dependents();
  wait_for_previous_kernel();
  const int own_head = blockIdx.y, head = a.first_head + own_head;  // a head's tiles run side by side: it stays in the L2 cache
  const QueryTile tile = find_tile<kThreads / 32>(blockIdx.x, a.query_starts, a.context_lens, a.num_rows,
                                                  a.least_tokens, 1, kQueryRows, s.scratch);
  if (tile.row < 0) return;
  const int seen = tile.past + min(tile.first_query_row + kQueryRows, tile.num_query_rows);
  if (threadIdx.x < 128) {
    leave_registers<24>();  // 384 threads begin with 168 each; 24 + 2 * 240 is three times that
    if (threadIdx.x == 0) produce(s, own, shared, __ldcg(a.starts + tile.row), (seen - 1) / kKeys * kKeys, own_head);
  } else {
    take_registers<240>();
    consume(s, a, tile, seen, head, int(threadIdx.x) / 128 - 1);
  }
}
