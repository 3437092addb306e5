// Causal attention of rows with several query tokens over their paged context, for any GPU from Ampere on.
//
// FlashAttention-2 (Dao 2023, algorithm 1): a block holds a tile of queries and walks over the keys, 16 query rows of
// the tile per warp, with a running maximum and sum. A query row is a (token, query head) pair; those of a tile share a
// KV head. Keys and values come by `cp.async`, two tiles in turn, from pages that the block table names; what lies
// beyond the context, or before what the tile's first token sees, is filled with zeros, never read.
#include "attention/attention.cuh"
#include "attention/attention_query_tile.cuh"
#include "attention/attention_variant.cuh"
#include "common/ampere.cuh"
#include "common/pdl.cuh"

using namespace ampere;
using namespace attention;

namespace {

template <class V>
struct Arguments : V {
  const bf16* q;            // [T, H, D]
  bf16* out;                // [T, H D]
  typename V::Cache cache;
  const int* block_tables;  // [R, table_stride]
  const int* query_starts;  // [R + 1]
  const int* context_lens;  // [R]
  int num_rows, table_stride, group;
  int least_tokens;         // of a row that this kernel serves
  float scale;              // of scores, times log2(e)
};

template <int D, int kWarps_, int kKeys_>
struct Shape {
  static constexpr int kWarps = kWarps_, kThreads = kWarps * 32;
  static constexpr int kQueryRows = kWarps * 16;
  static constexpr int kKeys = kKeys_;         // tokens of a tile of keys
  static constexpr int kChunks = D / 8;        // of 16 bytes, of a token
  static constexpr int kTile = kKeys * D;      // values
};

// Where 16 bytes lie in a tile: chunks are exchanged within 128 bytes by the token's last three bits, so that 8 tokens'
// chunks fall into different banks (within 64 bytes by the last two, where a token has no more).
template <int D>
__device__ __forceinline__ int place(int token, int chunk) {
  constexpr int kExchanged = D < 64 ? D / 8 - 1 : 7;
  return token * D + ((chunk ^ (token & kExchanged)) * 8);
}

// Eight numbers of a cache in FP8, rounded to BF16 on their way: nothing is asynchronous about them.
template <class Tile>
__device__ __forceinline__ void put_8(bf16* to, const Tile& from, int chunk, bool is_there) {
  *reinterpret_cast<uint4*>(to) = is_there ? from.eight(0, chunk * 8) : make_uint4(0, 0, 0, 0);
}

template <int D, class S, class V>
struct Prefill {
  const Arguments<V>& a;
  QueryTile tile;
  int kv_head;
  int first_key;  // that the tile's first token sees

  __device__ __forceinline__ int64_t query_row_offset(int query_row) const {
    const int64_t token = tile.first_query + query_row / a.group;
    return (token * a.cache.num_heads * a.group + kv_head * a.group + query_row % a.group) * D;
  }

  __device__ __forceinline__ void load_queries(bf16* to) const {
    for (int i = threadIdx.x; i < S::kQueryRows * S::kChunks; i += S::kThreads) {
      const int m = i / S::kChunks, chunk = i % S::kChunks, query_row = tile.first_query_row + m;
      const bool is_there = query_row < tile.num_query_rows;
      copy_16(to + place<D>(m, chunk), a.q + (is_there ? query_row_offset(query_row) + chunk * 8 : 0), is_there);
    }
  }

  __device__ __forceinline__ void load_keys(bf16* keys, bf16* values, int first) const {
    const int* table = a.block_tables + int64_t(tile.row) * a.table_stride;
    const int64_t value_offset = a.cache.value_offset(D);
#pragma unroll
    for (int i = 0; i < S::kKeys * S::kChunks / S::kThreads; i++) {
      const int n = (i * S::kThreads + threadIdx.x) / S::kChunks, chunk = threadIdx.x % S::kChunks, token = first + n;
      const bool is_there = token < tile.context && (!V::kIsVariant || token >= first_key);
      const int block = is_there ? __ldcg(table + (token >> a.cache.block_shift)) : 0;
      const int in_block = token & ((1 << a.cache.block_shift) - 1);
      if constexpr (V::kIsFp8) {
        const auto from = tile_of(a.cache, block, kv_head, in_block, D);
        put_8(keys + place<D>(n, chunk), from, chunk, is_there);
        put_8(values + place<D>(n, chunk), values_of(from, value_offset), chunk, is_there);
      } else {
        const bf16* from = a.cache.key(block, kv_head, in_block, D) + chunk * 8;
        copy_16(keys + place<D>(n, chunk), from, is_there);
        copy_16(values + place<D>(n, chunk), from + value_offset, is_there);
      }
    }
  }
};

template <int D, class S, class V>
__device__ void run(const Arguments<V>& a) {
  extern __shared__ __align__(128) uint8_t raw[];
  bf16* queries = reinterpret_cast<bf16*>(raw);
  bf16* tiles = queries + S::kQueryRows * D;  // keys, values; keys, values
  int* scratch = reinterpret_cast<int*>(tiles + 4 * S::kTile);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;

  launch_dependents();
  wait_for_previous_kernel();
  const int kv_head = blockIdx.x % a.cache.num_heads;
  const QueryTile tile = find_tile<S::kWarps>(blockIdx.x / a.cache.num_heads, a.query_starts, a.context_lens,
                                              a.num_rows, a.least_tokens, a.group, S::kQueryRows, scratch);
  if (tile.row < 0) return;
  const int first_key = a.first_seen(tile.past + tile.first_query_row / a.group);
  const Prefill<D, S, V> self = {a, tile, kv_head, first_key};

  const int last_query_row = min(tile.first_query_row + S::kQueryRows, tile.num_query_rows) - 1;
  const int seen = tile.past + last_query_row / a.group + 1;  // by the last query row of the tile
  const int seen_by_all = tile.past + tile.first_query_row / a.group + 1;
  const int first_of_last = a.first_seen(seen - 1);  // key that the last query row sees
  const int num_tiles = (seen + S::kKeys - 1) / S::kKeys, first_tile = first_key / S::kKeys;
  const int query_row = tile.first_query_row + warp * 16 + g;  // of this thread, and query_row + 8
  const int limits[2] = {tile.past + query_row / a.group, tile.past + (query_row + 8) / a.group};  // last position seen
  const int begins[2] = {a.first_seen(limits[0]), a.first_seen(limits[1])};                          // and the first

  self.load_queries(queries);
  bf16* first_tiles = tiles;
  if constexpr (V::kIsVariant) first_tiles += (first_tile & 1) * 2 * S::kTile;
  self.load_keys(first_tiles, first_tiles + S::kTile, first_tile * S::kKeys);
  commit_copies();

  float o[D / 8][4];
#pragma unroll
  for (int d = 0; d < D / 8; d++)
#pragma unroll
    for (int i = 0; i < 4; i++) o[d][i] = 0;
  float top[2] = {kMinusInfinity, kMinusInfinity}, weight[2] = {0, 0};

  for (int n = first_tile; n < num_tiles; n++) {
    const bf16* keys = tiles + (n & 1) * 2 * S::kTile;
    const bf16* values = keys + S::kTile;
    if (n + 1 < num_tiles) {
      bf16* next = tiles + ((n + 1) & 1) * 2 * S::kTile;
      self.load_keys(next, next + S::kTile, (n + 1) * S::kKeys);
    }
    commit_copies();  // also after the last tile, an empty group, so that one pending group is always the next tile's
    wait_for_copies<1>();
    __syncthreads();

    float s[S::kKeys / 8][4];
#pragma unroll
    for (int j = 0; j < S::kKeys / 8; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) s[j][i] = 0;
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
      uint32_t q[4];
      load_matrices(q, queries + place<D>(warp * 16 + lane % 16, 2 * k + lane / 16));
#pragma unroll
      for (int j = 0; j < S::kKeys / 16; j++) {
        uint32_t b[4];
        load_matrices(b, keys + place<D>(j * 16 + lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
        mma(s[2 * j], q[0], q[1], q[2], q[3], b[0], b[1]);
        mma(s[2 * j + 1], q[0], q[1], q[2], q[3], b[2], b[3]);
      }
    }

    const bool all_seen = (n + 1) * S::kKeys <= seen_by_all;
    if constexpr (V::kIsVariant) {
#pragma unroll
      for (int j = 0; j < S::kKeys / 8; j++) a.cap_scores(s[j]);
    }
#pragma unroll
    for (int j = 0; j < S::kKeys / 8; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        s[j][i] *= a.scale;
        if (!all_seen && n * S::kKeys + j * 8 + 2 * t + (i & 1) > limits[i >> 1]) s[j][i] = kMinusInfinity;
      }
    if (V::kIsVariant && n * S::kKeys < first_of_last) {
#pragma unroll
      for (int j = 0; j < S::kKeys / 8; j++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          if (n * S::kKeys + j * 8 + 2 * t + (i & 1) < begins[i >> 1]) s[j][i] = kMinusInfinity;
    }
    float shift[2];  // the maximum, or 0 where nothing has been seen yet
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float highest = top[r];
#pragma unroll
      for (int j = 0; j < S::kKeys / 8; j++) highest = fmaxf(highest, fmaxf(s[j][2 * r], s[j][2 * r + 1]));
      highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
      highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
      const float factor = highest == top[r] ? 1.0f : exp2_fast(top[r] - highest);
      top[r] = highest;
      shift[r] = highest == kMinusInfinity ? 0.0f : highest;
      weight[r] *= factor;
#pragma unroll
      for (int d = 0; d < D / 8; d++) {
        o[d][2 * r] *= factor;
        o[d][2 * r + 1] *= factor;
      }
    }
    uint32_t p[S::kKeys / 16][4];
#pragma unroll
    for (int j = 0; j < S::kKeys / 8; j++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        s[j][i] = exp2_fast(s[j][i] - shift[i >> 1]);
        weight[i >> 1] += s[j][i];
      }
      p[j / 2][j % 2 * 2] = packed(s[j][0], s[j][1]);
      p[j / 2][j % 2 * 2 + 1] = packed(s[j][2], s[j][3]);
    }
#pragma unroll
    for (int j = 0; j < S::kKeys / 16; j++) {
#pragma unroll
      for (int d = 0; d < D / 16; d++) {
        uint32_t b[4];
        load_transposed(b, values + place<D>(j * 16 + lane % 16, 2 * d + lane / 16));
        mma(o[2 * d], p[j][0], p[j][1], p[j][2], p[j][3], b[0], b[1]);
        mma(o[2 * d + 1], p[j][0], p[j][1], p[j][2], p[j][3], b[2], b[3]);
      }
    }
    __syncthreads();  // the next round fills the buffers that were read here
  }

#pragma unroll
  for (int r = 0; r < 2; r++) {
    weight[r] += __shfl_xor_sync(~0u, weight[r], 1);
    weight[r] += __shfl_xor_sync(~0u, weight[r], 2);
    if (query_row + 8 * r >= tile.num_query_rows) continue;
    if constexpr (V::kIsVariant)
      weight[r] += exp2_fast(a.sink_of(kv_head * a.group + (query_row + 8 * r) % a.group) - top[r]);
    const float factor = 1.0f / weight[r];
    bf16* out = a.out + self.query_row_offset(query_row + 8 * r) + 2 * t;
#pragma unroll
    for (int d = 0; d < D / 8; d++)
      *reinterpret_cast<uint32_t*>(out + d * 8) = packed(o[d][2 * r] * factor, o[d][2 * r + 1] * factor);
  }
}

}  // namespace

#define ATTENTION_PREFILL(NAME, V, D, WARPS, KEYS, BLOCKS)                                               \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS) NAME##_##D(Arguments<V> arguments) { \
    run<D, Shape<D, WARPS, KEYS>>(arguments);                                                            \
  }

#if !defined(ATTENTION_VARIANT) && !defined(ATTENTION_FP8)  // attention_variants, attention_fp8
ATTENTION_PREFILL(attention_prefill, Plain, 32, 8, 64, 2)
ATTENTION_PREFILL(attention_prefill, Plain, 64, 8, 64, 2)
ATTENTION_PREFILL(attention_prefill, Plain, 128, 8, 64, 1)
ATTENTION_PREFILL(attention_prefill, Plain, 256, 4, 32, 1)
#endif
