// Attention of rows with one query token over their paged context, with Hopper's bulk copies: every key and value is
// read once, at the speed of memory.
//
// Each warp has a ring of KV tiles (attention_kv_tile.cuh) in shared memory. As soon as a tile's keys have been
// multiplied, a lane asks for the keys of the tile that comes a ring later, and so for values: memory is busy while
// items end and partials are reduced, and before the previous kernel has ended. Bytes in flight need no L1 cache, so
// that this kernel divides it as all others do. attention_decode_scheduler.cuh divides the work, attention_split_kv.cuh
// reduces it.
#include "attention/attention_split_kv.cuh"
#include "common/hopper.cuh"

using namespace attention;
using hopper::barrier_expect;
using hopper::barrier_init;
using hopper::barrier_wait;
using hopper::shared_address;

namespace {

// kDepth: KV tiles of a warp's ring.
template <int D, int kTiles, int kDepth, class V>
struct Memory {
  static constexpr int kCodeBytes = kKvTile * D * (V::kIsFp8 ? 1 : 2);          // keys, or values
  static constexpr int kKvTileBytes = kCodeBytes + (V::kIsFp8 ? 4 * kKvTile : 0);  // with their scales
  static constexpr int kKinds = 2;
  alignas(128) uint8_t ring[kWarps][kDepth][kKinds][kKvTileBytes];
  Shared<D, kTiles> ends;
  uint64_t full[kWarps][kDepth][kKinds];
  int rows[1];  // [3 R + 1]; NVRTC takes no array without a size
};

__device__ __forceinline__ void copy(void* target, const void* from, int bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(target)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

// Where a warp's KV tiles of 32 work tiles lie, one for each lane. So far ahead, as a tile whose block id was asked for
// one tile ago waits for it: 274 instead of 260 us a layer at 256 rows of 1,024 tokens.
struct KvTiles {
  static constexpr int kWindow = 32;
  int block;       // of the cache; its load may still be in flight
  int64_t offset;  // of the keys in the block
  int left;        // tokens of the context from the tile on; nothing to do where it is not positive
  int scales;      // of a cache in FP8: bytes from the keys to their scales

  template <class V>
  __device__ __forceinline__ void find(const Arguments<V>& a, const Rows<V>& rows, int first, int last, int warp,
                                       int tiles, int head_dim) {
    const int work_tile = first + threadIdx.x % 32;
    block = left = 0;
    scales = 0;
    offset = 0;
    if (work_tile >= last) return;
    WorkTile<V> place;
    place.find(work_tile, a.num_rows, rows);
    left = place.left(warp);
    if (left <= 0) return;
    const int token = place.token(warp), block_mask = (1 << a.cache.block_shift) - 1;
    block = __ldcg(a.block_tables + int64_t(place.row) * a.table_stride + (token >> a.cache.block_shift));
    offset = a.cache.key(0, place.head / tiles, token & block_mask, head_dim) - a.cache.data;
    if constexpr (V::kIsFp8) scales = a.cache.scale_offset(token & block_mask, head_dim);
  }
  template <class Cache>
  __device__ __forceinline__ auto keys(const Cache& cache) const {
    return cache.data + block * cache.block_stride + offset;
  }
};

template <int D, int kTiles, class V>
struct WarpOf {
  using Type = Warp<D, kTiles>;
};

#ifdef ATTENTION_FP8
template <int D, int kTiles>
struct WarpOf<D, kTiles, Fp8> {
  using Type = Fp8Warp<D, kTiles>;
};
#endif

// A KV tile's keys, or values: where blocks have 16 tokens, their scales come with them, else from further on.
template <class M, class V>
__device__ __forceinline__ void copy_tile(uint8_t* target, const KvTiles& from, const void* keys, int64_t offset,
                                          uint64_t* barrier) {
  barrier_expect(barrier, M::kKvTileBytes);
  if constexpr (V::kIsFp8) {
    const uint8_t* codes = static_cast<const uint8_t*>(keys) + offset;
    if (from.scales == M::kCodeBytes) {
      copy(target, codes, M::kKvTileBytes, barrier);
    } else {
      copy(target, codes, M::kCodeBytes, barrier);
      copy(target + M::kCodeBytes, codes + from.scales, M::kKvTileBytes - M::kCodeBytes, barrier);
    }
  } else {
    copy(target, static_cast<const bf16*>(keys) + offset, M::kKvTileBytes, barrier);
  }
}

template <int D, int kTiles, int kDepth, class V>
__device__ void run(const Arguments<V>& a) {
  using W = typename WarpOf<D, kTiles, V>::Type;
  using M = Memory<D, kTiles, kDepth, V>;
  using S = Shape<D, kTiles>;
  extern __shared__ __align__(128) uint8_t raw[];
  auto& m = *reinterpret_cast<M*>(raw);
  const Rows<V> rows(a, m.rows, a.num_rows);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int tiles = (a.group + S::kHeads - 1) / S::kHeads, heads = a.cache.num_heads * tiles;
  const int64_t value_offset = a.cache.value_offset(D);
  auto& full = m.full[warp];
  auto& ring = m.ring[warp];

  hopper::launch_dependents();
  if (lane < 2 * kDepth) barrier_init(&full[lane / 2][lane % 2], 1);
  hopper::barrier_init_fence();
  // Reading early is safe: a step's inputs are from a kernel or a copy that ends before the previous kernel begins, and
  // what the step appends, for other rows of the sequence as well, is among the newest tokens.
  if (!a.early) hopper::wait_for_previous_kernel();
  const int work_tiles = count_work_tiles(a, heads, rows, m.ends.counts);
  const Partition partition = {work_tiles, min(work_tiles, int(gridDim.x))};
  if (int(blockIdx.x) >= partition.workers) {
    if (a.early) hopper::wait_for_previous_kernel();  // also without work: a kernel's end stands for all before it
    return;
  }
  const int first = partition.first_of(blockIdx.x), last = partition.first_of(blockIdx.x + 1);

  KvTiles kv_tiles, later;  // of work tiles from `window` on, and of those that come after
  kv_tiles.find(a, rows, first, last, warp, tiles, D);
  auto keys = kv_tiles.keys(a.cache);
  int window = first;
  // The first ring. What is read before the previous kernel has ended does not include the newest tokens.
  auto fill = [&](bool newest) {
    if (lane < kDepth && kv_tiles.left > 0 && (kv_tiles.left < kKvTile + a.early) == newest)
#pragma unroll
      for (int kind = 0; kind < M::kKinds; kind++)
        copy_tile<M, V>(ring[lane][kind], kv_tiles, keys, kind * value_offset, &full[lane][kind]);
  };
  fill(false);
  if (a.early) hopper::wait_for_previous_kernel();
  fill(true);

  WorkTile<V> here;
  here.find(first, a.num_rows, rows);
  Item<V> item;
  item.enter(a, rows, here, tiles, S::kHeads);
  W w;
  w.load_q(a.q + item.query * D, item.heads, g, t);
  w.clear();
  // Only now, after the first copies have been asked for.
  later.find(a, rows, window + KvTiles::kWindow, last, warp, tiles, D);
  int stage = 0, ahead = kDepth;  // the lane whose KV tile comes into `stage` next
  uint32_t parities = 0;          // bit `stage`: of the copies that come next
  for (int work_tile = first; work_tile < last; work_tile++) {
    auto ask = [&](int kind) {
      if (lane == ahead && kv_tiles.left > 0)
        copy_tile<M, V>(ring[stage][kind], kv_tiles, keys, kind * value_offset, &full[stage][kind]);
    };
    const int left = here.left(warp), unseen = here.unseen(warp);
    const uint32_t parity = parities >> stage & 1;
    float scores[kTiles][4];
    uint32_t p[kTiles][2];
    if (left > 0) {
#pragma unroll
      for (int n = 0; n < kTiles; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) scores[n][i] = 0;
      barrier_wait(&full[stage][0], parity);
      if constexpr (V::kIsFp8) {
        w.scores_of(scores, ring[stage][0], g, t);
      } else {
#pragma unroll
        for (int chunk = 0; chunk < S::kChunks; chunk++) {
          typename W::Buffer k;
          W::template load_k<FromShared>(k, reinterpret_cast<const bf16*>(ring[stage][0]), chunk, g, t);
          w.multiply_k(scores, k, chunk);
        }
      }
    }
    __syncwarp();  // all lanes have read the stage
    ask(0);
    const bool ends_item = here.index + 1 == here.count, is_last = work_tile + 1 == last;
    WorkTile<V> next = here;
    Item<V> next_item = item;
    if (!is_last) next.advance(heads, a.num_rows, rows);
    if (ends_item && !is_last) {  // its queries arrive while this item ends
      next_item.enter(a, rows, next, tiles, S::kHeads);
      w.load_q(a.q + next_item.query * D, next_item.heads, g, t);
    }
    if (left > 0) {
      if constexpr (V::kIsFp8) {
        barrier_wait(&full[stage][1], parity);
        w.exponentials_of(p, scores, ring[stage][1], left, a.scale, g);
        w.add_values(p, ring[stage][1], left, g, t);
      } else {
        w.template exponentials<V>(p, scores, left, unseen, a.scale, a, g);
        barrier_wait(&full[stage][1], parity);
#pragma unroll
        for (int chunk = 0; chunk < S::kChunks; chunk++) {
          typename W::Buffer v;
          W::template load_v<FromShared>(v, reinterpret_cast<const bf16*>(ring[stage][1]), chunk, g, t);
          w.template multiply_v<V>(p, v, chunk, left, unseen, a, t);
        }
      }
      parities ^= 1u << stage;
    }
    __syncwarp();
    ask(1);
    if (ends_item || is_last) {
      finish_item(m.ends, w, a, partition, here, item, work_tile);
      w.clear();
      item = next_item;
    }
    here = next;
    stage = stage + 1 == kDepth ? 0 : stage + 1;
    if (++ahead == KvTiles::kWindow) {
      ahead = 0;
      window += KvTiles::kWindow;
      kv_tiles = later;
      keys = kv_tiles.keys(a.cache);
      later.find(a, rows, window + KvTiles::kWindow, last, warp, tiles, D);
    }
  }
}

}  // namespace

// Rings are 128 KiB of a multiprocessor for every head dimension. At 128, one block has too few bytes
// in flight, and three blocks with rings of one KV tile are 1 to 2 us a layer slower at 1 and 8 rows.
#define ATTENTION_DECODE(NAME, V, D, TILES, DEPTH, BLOCKS)                                                      \
  extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS) NAME##_##D##_##TILES(Arguments<V> arguments) { \
    run<D, TILES, DEPTH>(arguments);                                                                            \
  }

#if !defined(ATTENTION_VARIANT) && !defined(ATTENTION_FP8)  // attention_variants, attention_fp8
ATTENTION_DECODE(attention_decode_hopper, Plain, 64, 1, 4, 2)
ATTENTION_DECODE(attention_decode_hopper, Plain, 64, 2, 4, 2)
ATTENTION_DECODE(attention_decode_hopper, Plain, 128, 1, 2, 2)
ATTENTION_DECODE(attention_decode_hopper, Plain, 128, 2, 2, 2)
ATTENTION_DECODE(attention_decode_hopper, Plain, 256, 1, 2, 1)
#endif
