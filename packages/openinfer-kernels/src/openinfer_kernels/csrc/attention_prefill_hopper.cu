// Causal attention of rows with several query tokens over their paged context, with Hopper's warpgroup products.
//
// FlashAttention-3 (Shah et al. 2024, algorithm 2) over pages. A block holds a tile of 128 lines, a line being a (token,
// query head) pair; lines that share a KV head stand side by side. Three warpgroups:
//
//   producer     for each tile of keys, last to first: 16 tokens at a time by tensor copies, each from its own page
//   2 consumers  64 lines each:  S' = Q K'^T starts │ O += P V starts │ softmax of S' while O is made │ O scaled, P = S'
//
// Values beyond what the tile's last line sees are set to zero in shared memory, as they may be anything, and 0 * NaN is
// not 0; their scores are -inf.
#include "attention.cuh"
#include "attention_tiles.cuh"
#include "attention_wgmma.cuh"
#include "hopper.cuh"

using namespace attention;
using namespace hopper;

namespace {

constexpr int kConsumers = 2;                    // warpgroups
constexpr int kThreads = (kConsumers + 1) * 128;
constexpr int kLines = kConsumers * 64;
constexpr int kChunk = 16;                       // tokens of one copy
constexpr int kBox = 64;                         // values of one copy: 128 bytes, one swizzle row
constexpr int kRowBytes = kBox * 2;
constexpr int kStages = 2;

struct Arguments {
  const bf16* q;            // [T, H, D]
  bf16* out;                // [T, H D]
  const int* block_tables;  // [R, table_stride]
  const int* query_starts;  // [R + 1]
  const int* context_lens;  // [R]
  int num_rows, table_stride, group, num_kv_heads, block_shift;
  int block_lines;          // lines of the cache [blocks, layers, 2, K, B] x [D] from one block to the next
  int layer_line;           // first line of the layer in a block
  float scale;              // of scores, times log2(e)
};

template <int D_, int kKeys_>
struct Shape {
  static constexpr int D = D_, kKeys = kKeys_;
  static constexpr int kBoxes = D / kBox;
  static constexpr int kTileBytes = kKeys * D * 2;
};

template <class S>
struct Shared {
  alignas(1024) uint8_t q[kLines * S::D * 2];          // [boxes][lines][128 bytes]
  alignas(1024) uint8_t k[kStages][S::kTileBytes];     // [boxes][keys][128 bytes]
  alignas(1024) uint8_t v[kStages][S::kTileBytes];
  uint64_t k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
  int scratch[kTileScratch(kThreads / 32)];
};

// The 16 tokens of a step of the product with V: their values side by side, blocks of 64 values `kKeys` rows apart.
template <class S>
__device__ __forceinline__ uint64_t value_descriptor(const uint8_t* tile) {
  return ((uint64_t(shared_address(tile)) & 0x3FFFF) >> 4) | (uint64_t(S::kKeys * kRowBytes >> 4) << 16) |
         (uint64_t(1024 >> 4) << 32) | (uint64_t(1) << 62);
}

__device__ __forceinline__ void warpgroup_sync(int group) { asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory"); }
__device__ __forceinline__ void copies_see_writes() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
template <int kRegisters>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

__device__ __forceinline__ int64_t line_offset(const Arguments& a, const QueryTile& tile, int kv_head, int line, int head_dim) {
  const int64_t token = tile.first_query + line / a.group;
  return (token * a.num_kv_heads * a.group + kv_head * a.group + line % a.group) * head_dim;
}

// Where 16 bytes of a line lie in [boxes][lines][128 bytes], swizzled as the copies and products expect.
__device__ __forceinline__ int place(int line, int chunk) {
  return (chunk / 8) * kLines * kRowBytes + line * kRowBytes + ((chunk % 8) ^ (line & 7)) * 16;
}

// --- the producer: one warp, a lane for each 16 tokens ------------------------------------------------------

template <class S>
__device__ void produce(Shared<S>& s, const CUtensorMap& map, const Arguments& a, const QueryTile& tile, int kv_head,
                        int seen) {
  constexpr int kLanes = S::kKeys / kChunk;
  const int lane = threadIdx.x % 32;
  const int num_tiles = (seen + S::kKeys - 1) / S::kKeys;
  const int* table = a.block_tables + int64_t(tile.row) * a.table_stride;
  const uint64_t policy = evict_last_policy();
  const int value_lines = a.num_kv_heads << a.block_shift;
  for (int i = 0; i < num_tiles; i++) {
    const int first = (num_tiles - 1 - i) * S::kKeys, stage = i % kStages, parity = (i / kStages - 1) & 1;
    const int token = first + lane * kChunk;
    const bool is_there = lane < kLanes && token < seen;
    const int line = is_there ? __ldcg(table + (token >> a.block_shift)) * a.block_lines + a.layer_line +
                                    (kv_head << a.block_shift) + (token & ((1 << a.block_shift) - 1))
                              : 0;
    const int bytes = min(kLanes, (seen - first + kChunk - 1) / kChunk) * kChunk * S::D * 2;
    if (i >= kStages) barrier_wait(&s.k_empty[stage], parity);
    if (lane == 0) barrier_expect(&s.k_full[stage], bytes);
    __syncwarp();
    if (is_there)
#pragma unroll
      for (int box = 0; box < S::kBoxes; box++)
        load_box(s.k[stage] + (box * S::kKeys + lane * kChunk) * kRowBytes, &map, &s.k_full[stage], box * kBox, line, policy);
    if (i >= kStages) barrier_wait(&s.v_empty[stage], parity);
    if (lane == 0) barrier_expect(&s.v_full[stage], bytes);
    __syncwarp();
    if (is_there)
#pragma unroll
      for (int box = 0; box < S::kBoxes; box++)
        load_box(s.v[stage] + (box * S::kKeys + lane * kChunk) * kRowBytes, &map, &s.v_full[stage], box * kBox,
                 line + value_lines, policy);
  }
}

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
      multiply_keys<S::kKeys>(scores, tile_descriptor(q + box * kLines * kRowBytes) + at,
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
};

// Scores of keys that a line does not see: `limits` are the last positions seen by this thread's two lines.
template <int kScores>
__device__ __forceinline__ void hide(float (&scores)[kScores], int first_key, const int (&limits)[2]) {
  const int t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < kScores; i++)
    if (first_key + i / 4 * 8 + 2 * t + (i & 1) > limits[(i >> 1) & 1]) scores[i] = kMinusInfinity;
}

template <class S>
__device__ void consume(Shared<S>& s, const Arguments& a, const QueryTile& tile, int kv_head, int seen, int group) {
  const int thread = threadIdx.x % 128, warp = thread / 32, g = thread % 32 / 4;
  for (int i = thread; i < 64 * (S::D / 8); i += 128) {
    const int m = group * 64 + i / (S::D / 8), chunk = i % (S::D / 8), line = tile.first_line + m;
    uint4 value = make_uint4(0, 0, 0, 0);
    if (line < tile.num_lines)
      value = *reinterpret_cast<const uint4*>(a.q + line_offset(a, tile, kv_head, line, S::D) + chunk * 8);
    *reinterpret_cast<uint4*>(s.q + place(m, chunk)) = value;
  }
  copies_see_writes();
  warpgroup_sync(group);

  const int line = group * 64 + warp * 16 + g;  // of this thread in the tile, and line + 8
  const int limits[2] = {tile.past + (tile.first_line + line) / a.group, tile.past + (tile.first_line + line + 8) / a.group};
  const int seen_by_all = tile.past + (tile.first_line + group * 64) / a.group + 1;
  const int num_tiles = (seen + S::kKeys - 1) / S::kKeys;
  const uint8_t* q = s.q + group * 64 * kRowBytes;

  using C = Consumer<S>;
  C c;
  float scores[C::kScores], factor[2];
#pragma unroll
  for (int i = 0; i < C::kSums; i++) c.o[i] = 0;
  barrier_wait(&s.k_full[0], 0);
  wgmma_fence();
  C::start_scores(scores, q, s.k[0]);
  wgmma_commit();
  wgmma_wait<0>();
  if (thread % 32 == 0) barrier_arrive(&s.k_empty[0]);
  hide(scores, (num_tiles - 1) * S::kKeys, limits);
  c.exponentials(scores, factor, a.scale);
  c.keep(scores);
  barrier_wait(&s.v_full[0], 0);
  const int valid = seen - (num_tiles - 1) * S::kKeys;
  if (valid < S::kKeys) {
    for (int i = thread; i < (S::kKeys - valid) * S::kBoxes * 8; i += 128) {
      const int row = valid + i / (S::kBoxes * 8), box = i / 8 % S::kBoxes;
      *reinterpret_cast<uint4*>(s.v[0] + (box * S::kKeys + row) * kRowBytes + i % 8 * 16) = make_uint4(0, 0, 0, 0);
    }
    copies_see_writes();
    warpgroup_sync(group);
  }
  for (int i = 1; i < num_tiles; i++) {
    const int stage = i % kStages, before = (i - 1) % kStages, first_key = (num_tiles - 1 - i) * S::kKeys;
    barrier_wait(&s.k_full[stage], (i / kStages) & 1);
    wgmma_fence();
    C::start_scores(scores, q, s.k[stage]);
    wgmma_commit();
    if (i > 1) barrier_wait(&s.v_full[before], ((i - 1) / kStages) & 1);
    c.start_sums(s.v[before]);
    wgmma_commit();
    wgmma_wait<1>();
    if (thread % 32 == 0) barrier_arrive(&s.k_empty[stage]);
    if (first_key + S::kKeys > seen_by_all) hide(scores, first_key, limits);
    c.exponentials(scores, factor, a.scale);
    wgmma_wait<0>();
    if (thread % 32 == 0) barrier_arrive(&s.v_empty[before]);
#pragma unroll
    for (int j = 0; j < C::kSums; j++) c.o[j] *= factor[(j >> 1) & 1];
    c.keep(scores);
  }
  const int last = (num_tiles - 1) % kStages;
  if (num_tiles > 1) barrier_wait(&s.v_full[last], ((num_tiles - 1) / kStages) & 1);
  wgmma_fence();
  c.start_sums(s.v[last]);
  wgmma_commit();
  wgmma_wait<0>();

  // Through the queries' place in shared memory, so that whole lines are written.
#pragma unroll
  for (int r = 0; r < 2; r++) {
    c.weight[r] += __shfl_xor_sync(~0u, c.weight[r], 1);
    c.weight[r] += __shfl_xor_sync(~0u, c.weight[r], 2);
    const float inverse = 1.0f / c.weight[r];
#pragma unroll
    for (int chunk = 0; chunk < S::D / 8; chunk++)
      *reinterpret_cast<uint32_t*>(s.q + place(line + 8 * r, chunk) + thread % 4 * 4) =
          packed(c.o[4 * chunk + 2 * r] * inverse, c.o[4 * chunk + 2 * r + 1] * inverse);
  }
  warpgroup_sync(group);
  for (int i = thread; i < 64 * (S::D / 8); i += 128) {
    const int m = group * 64 + i / (S::D / 8), chunk = i % (S::D / 8), at = tile.first_line + m;
    if (at < tile.num_lines)
      *reinterpret_cast<uint4*>(a.out + line_offset(a, tile, kv_head, at, S::D) + chunk * 8) =
          *reinterpret_cast<const uint4*>(s.q + place(m, chunk));
  }
}

template <class S>
__device__ void run(const CUtensorMap& map, const Arguments& a) {
  extern __shared__ uint8_t raw[];
  auto& s = *reinterpret_cast<Shared<S>*>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t(1023));
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; i++) {
      barrier_init(&s.k_full[i], 1);
      barrier_init(&s.v_full[i], 1);
      barrier_init(&s.k_empty[i], kConsumers * 4);
      barrier_init(&s.v_empty[i], kConsumers * 4);
    }
    barrier_init_fence();
    prefetch_map(&map);
  }
  allow_next_kernel();
  wait_for_previous_kernel();
  const int kv_head = blockIdx.x % a.num_kv_heads;
  const QueryTile tile = find_tile<kThreads / 32>(blockIdx.x / a.num_kv_heads, a.query_starts, a.context_lens, a.num_rows,
                                                  a.group, kLines, s.scratch);
  if (tile.row < 0) return;
  // Keys that the last line sees.
  const int seen = tile.past + (min(tile.first_line + kLines, tile.num_lines) - 1) / a.group + 1;
  if (threadIdx.x < 128) {
    fewer_registers<24>();
    if (threadIdx.x < 32) produce(s, map, a, tile, kv_head, seen);
  } else {
    more_registers<240>();
    consume(s, a, tile, kv_head, seen, int(threadIdx.x) / 128 - 1);
  }
}

}  // namespace

#define ATTENTION_PREFILL(D, KEYS)                                                                \
  extern "C" __global__ void __launch_bounds__(kThreads, 1)                                       \
      attention_prefill_hopper_##D(const __grid_constant__ CUtensorMap map, Arguments arguments) { \
    run<Shape<D, KEYS>>(map, arguments);                                                          \
  }

ATTENTION_PREFILL(64, 128)
ATTENTION_PREFILL(128, 128)
ATTENTION_PREFILL(256, 64)
