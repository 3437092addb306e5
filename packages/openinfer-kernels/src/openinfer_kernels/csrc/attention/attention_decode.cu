// Attention of rows with one query token over their paged context, for any GPU: every key and value is read once.
//
// A warp reads the keys and values of its KV tiles (attention_kv_tile.cuh) straight into registers, without shared
// memory. The next tile's keys are asked for when this tile's have been multiplied, and so for values: each warp has a
// tile or more in flight. attention_decode_scheduler.cuh divides the work, attention_split_kv.cuh reduces it.
#include "attention/attention_split_kv.cuh"
#include "common/pdl.cuh"

using namespace attention;

namespace {

template <class V>
struct Loads {
  using Type = FromMemory;
};

#ifdef ATTENTION_FP8
template <>
struct Loads<Fp8> {
  using Type = FromFp8;
};
#endif

template <int D, int kTiles, class V>
__device__ void run(const Arguments<V>& a) {
  using W = Warp<D, kTiles>;
  using From = typename Loads<V>::Type;
  constexpr int kHeads = Shape<D, kTiles>::kHeads;
  extern __shared__ __align__(16) uint8_t raw[];
  auto& s = *reinterpret_cast<Shared<D, kTiles>*>(raw);
  const Rows<V> rows(a, reinterpret_cast<int*>(raw + sizeof(s)), a.num_rows);
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int tiles = (a.group + kHeads - 1) / kHeads, heads = a.cache.num_heads * tiles;
  const int64_t value_offset = a.cache.value_offset(D);
  const int block_mask = (1 << a.cache.block_shift) - 1;

  launch_dependents();
  if (!a.early) wait_for_previous_kernel();
  const int work_tiles = count_work_tiles(a, heads, rows, s.counts);
  const Partition partition = {work_tiles, min(work_tiles, int(gridDim.x))};
  if (int(blockIdx.x) >= partition.workers) {
    if (a.early) wait_for_previous_kernel();  // also without work: a kernel's end stands for all before it
    return;
  }
  const int first = partition.first_of(blockIdx.x), last = partition.first_of(blockIdx.x + 1);

  auto block_at = [&](const WorkTile<V>& place) {
    const int token = place.token(warp);
    return token < place.context
               ? __ldcg(a.block_tables + int64_t(place.row) * a.table_stride + (token >> a.cache.block_shift))
               : 0;
  };
  auto key_at = [&](const WorkTile<V>& place, int block) {
    const int token = place.token(warp);
    return tile_of(a.cache, block, place.head / tiles, token & block_mask, D);
  };

  WorkTile<V> here;
  here.find(first, a.num_rows, rows);
  WorkTile<V> ahead = here;
  typename W::Buffer buffers[2];
  typename V::Cache::Tile keys = key_at(here, block_at(here));
  // What is read before the previous kernel has ended does not include the newest tokens.
  const bool prefetched = a.early && here.left(warp) >= kKvTile + a.early;
  if (prefetched) {
    W::template load_k<From>(buffers[0], keys, 0, g, t);
    if constexpr (D <= 128) W::template load_v<From>(buffers[1], values_of(keys, value_offset), 0, g, t);
    else W::template load_k<From>(buffers[1], keys, 1, g, t);
  }
  if (a.early) wait_for_previous_kernel();
  if (!prefetched && here.left(warp) > 0) {
    W::template load_k<From>(buffers[0], keys, 0, g, t);
    if constexpr (D <= 128) W::template load_v<From>(buffers[1], values_of(keys, value_offset), 0, g, t);
    else W::template load_k<From>(buffers[1], keys, 1, g, t);
  }
  int next_block = 0;
  if (first + 1 < last) {
    ahead.advance(heads, a.num_rows, rows);
    next_block = block_at(ahead);
  }

  W w;
  bool is_new = true;
  Item<V> item;
  for (int work_tile = first; work_tile < last; work_tile++) {
    if (is_new) {
      item.enter(a, rows, here, tiles, kHeads);
      w.load_q(a.q + item.query * D, item.heads, g, t);
      w.clear();
    }
    const int left = here.left(warp), unseen = here.unseen(warp);
    const bool has_next = work_tile + 1 < last && ahead.left(warp) > 0;
    float scores[kTiles][4];
    uint32_t p[kTiles][2];
#pragma unroll
    for (int n = 0; n < kTiles; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) scores[n][i] = 0;
    if constexpr (D <= 128) {
      if (left > 0) w.multiply_k(scores, buffers[0], 0);
      const typename V::Cache::Tile next = key_at(ahead, next_block);
      if (has_next) W::template load_k<From>(buffers[0], next, 0, g, t);
      if (left > 0) {
        w.template exponentials<V>(p, scores, left, unseen, a.scale, a, g);
        w.template multiply_v<V>(p, buffers[1], 0, left, unseen, a, t);
      }
      if (has_next) W::template load_v<From>(buffers[1], values_of(next, value_offset), 0, g, t);
    } else {
      if (left > 0) {
        w.multiply_k(scores, buffers[0], 0);
        W::template load_v<From>(buffers[0], values_of(keys, value_offset), 0, g, t);
        w.multiply_k(scores, buffers[1], 1);
        W::template load_v<From>(buffers[1], values_of(keys, value_offset), 1, g, t);
        w.template exponentials<V>(p, scores, left, unseen, a.scale, a, g);
        w.template multiply_v<V>(p, buffers[0], 0, left, unseen, a, t);
      }
      keys = key_at(ahead, next_block);
      if (has_next) W::template load_k<From>(buffers[0], keys, 0, g, t);
      if (left > 0) w.template multiply_v<V>(p, buffers[1], 1, left, unseen, a, t);
      if (has_next) W::template load_k<From>(buffers[1], keys, 1, g, t);
    }

    is_new = here.index + 1 == here.count || work_tile + 1 == last;
    if (is_new) finish_item(s, w, a, partition, here, item, work_tile);
    here = ahead;
    if (work_tile + 2 < last) {
      ahead.advance(heads, a.num_rows, rows);
      next_block = block_at(ahead);
    }
  }
}

}  // namespace

#define ATTENTION_DECODE(NAME, V, D, TILES, BLOCKS)                                                             \
  extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS) NAME##_##D##_##TILES(Arguments<V> arguments) { \
    run<D, TILES>(arguments);                                                                                   \
  }

#if !defined(ATTENTION_VARIANT) && !defined(ATTENTION_FP8)  // attention_variants, attention_fp8
ATTENTION_DECODE(attention_decode, Plain, 64, 1, 3)
ATTENTION_DECODE(attention_decode, Plain, 64, 2, 3)
ATTENTION_DECODE(attention_decode, Plain, 128, 1, 2)
ATTENTION_DECODE(attention_decode, Plain, 128, 2, 2)
ATTENTION_DECODE(attention_decode, Plain, 256, 1, 2)
#endif
