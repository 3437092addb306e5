// The tile scheduler of decode attention: the work tiles of all items form one flattened list, split evenly among
// blocks.
//
// A work tile is 64 tokens (a KV tile of 16 for each warp of a block) of one item, a (row, KV head, tile of query
// heads). Blocks derive the list on the device from the rows' contexts, so that a captured graph serves any lengths.
// Of a context, only what the window reaches has work tiles: they begin with the KV tile of the first key seen.
#pragma once
#include "attention/attention_variant.cuh"

namespace attention {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * 32;
constexpr int kKvTile = 16;                  // tokens of a warp
constexpr int kWorkTile = kKvTile * kWarps;  // tokens of a block
constexpr int kRowsAtOnce = 2;          // rows that a thread reads together
constexpr unsigned kAll = ~0u;

template <class V>
struct Arguments : V {
  const bf16* q;            // [T, H, D]
  bf16* out;                // [T, H D]
  typename V::Cache cache;
  const int* block_tables;  // [R, table_stride]
  const int* query_starts;  // [R + 1]
  const int* context_lens;  // [R]
  float* partials;          // [blocks, 2, partial size]
  int* arrivals;            // [items], zero before and after
  int num_rows, table_stride, group;
  int early;                // nonzero: batch and all but so many of a context's newest tokens may be read before the
                            // previous kernel has ended
  float scale;              // of scores, times log2(e)
};

template <class V>
struct Rows : V {
  int* starts;    // [R + 1] first work tile of each row
  int* contexts;  // [R] 0 for rows of several tokens, which prefill attention serves
  int* queries;   // [R] first token of each row

  __device__ __forceinline__ Rows(const V& variant, int* memory, int num_rows)
      : V(variant), starts(memory), contexts(memory + num_rows + 1), queries(memory + 2 * num_rows + 1) {}
};

// Work tiles of a row of which the keys from `first_key` on are seen.
__device__ __forceinline__ int work_tiles_of(int context, int first_key) {
  return (context - (first_key & ~(kKvTile - 1)) + kWorkTile - 1) / kWorkTile;
}

// Sums up the work tiles of all rows; every thread takes consecutive rows. Returns their number.
template <class V>
__device__ int count_work_tiles(const Arguments<V>& a, int heads, const Rows<V>& rows, int* sums) {
  const int thread = threadIdx.x, each = (a.num_rows + kThreads - 1) / kThreads;
  const int first = min(thread * each, a.num_rows), last = min(first + each, a.num_rows);
  int mine = 0;
  for (int base = first; base < last; base += kRowsAtOnce) {
    int queries[kRowsAtOnce + 1], contexts[kRowsAtOnce];
#pragma unroll
    for (int i = 0; i <= kRowsAtOnce; i++) queries[i] = __ldcg(a.query_starts + min(base + i, a.num_rows));
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; i++) contexts[i] = __ldcg(a.context_lens + min(base + i, a.num_rows - 1));
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; i++) {
      if (base + i >= last) continue;
      const int context = queries[i + 1] - queries[i] == 1 ? contexts[i] : 0;
      rows.queries[base + i] = queries[i];
      rows.contexts[base + i] = context;
      mine += work_tiles_of(context, a.first_seen(context - 1)) * heads;
    }
  }
  int sum = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(kAll, sum, step);
    if (thread % 32 >= step) sum += other;
  }
  if (thread % 32 == 31) sums[thread / 32] = sum;
  __syncthreads();
  int before = sum - mine, total = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; warp++) {
    if (warp < thread / 32) before += sums[warp];
    total += sums[warp];
  }
  for (int row = first; row < last; row++) {
    rows.starts[row] = before;
    before += work_tiles_of(rows.contexts[row], a.first_seen(rows.contexts[row] - 1)) * heads;
  }
  if (thread == 0) rows.starts[a.num_rows] = total;
  __syncthreads();
  return total;
}

// How the flattened list is split: the first `work_tiles % workers` workers have one work tile more.
struct Partition {
  int work_tiles, workers;

  __device__ __forceinline__ int first_of(int worker) const {
    return worker * (work_tiles / workers) + min(worker, work_tiles % workers);
  }
  __device__ __forceinline__ int worker_of(int work_tile) const {
    const int each = work_tiles / workers, more = work_tiles % workers;
    return work_tile < more * (each + 1) ? work_tile / (each + 1) : more + (work_tile - more * (each + 1)) / each;
  }
};

// A work tile of the flattened list.
template <class V>
struct WorkTile {
  int row, head, index, count, context;  // `index` of the `count` of this item; `head`: KV head and tile of query heads
  int first_key;                         // that the row's query sees

  __device__ __forceinline__ void enter(int new_row, const Rows<V>& rows) {
    row = new_row;
    context = rows.contexts[row];
    first_key = rows.first_seen(context - 1);
    count = work_tiles_of(context, first_key);
  }
  __device__ __forceinline__ void find(int flat_index, int num_rows, const Rows<V>& rows) {
    int low = 0, high = num_rows;  // starts[low] <= flat_index < starts[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (rows.starts[middle] <= flat_index)
        low = middle;
      else high = middle;
    }
    enter(low, rows);
    head = (flat_index - rows.starts[low]) / count;
    index = (flat_index - rows.starts[low]) % count;
  }
  __device__ __forceinline__ void advance(int heads, int num_rows, const Rows<V>& rows) {
    if (++index < count) return;
    index = 0;
    if (++head < heads) return;
    head = 0;
    do row++;
    while (row < num_rows && rows.contexts[row] == 0);
    if (row < num_rows) enter(row, rows);
  }
  // The first token of a warp's KV tile.
  __device__ __forceinline__ int token(int warp) const {
    const int in_item = index * kWorkTile + warp * kKvTile;
    if constexpr (V::kIsVariant) return (first_key & ~(kKvTile - 1)) + in_item;
    return in_item;
  }
  // Tokens of the context from this warp's KV tile on; nothing to do where it is not positive.
  __device__ __forceinline__ int left(int warp) const { return context - token(warp); }
  // Tokens at the begin of this warp's KV tile that the window does not reach; none where it is not positive.
  __device__ __forceinline__ int unseen(int warp) const { return first_key - token(warp); }
};

// A block's share of its current item.
template <class V>
struct Item {
  int begin;          // its first work tile
  int heads;          // query heads, at most 8 or 16
  int heads_per_row;  // items of each row
  int64_t query;      // first query head, in q and out

  __device__ __forceinline__ void enter(const Arguments<V>& a, const Rows<V>& rows, const WorkTile<V>& here,
                                        int tiles, int most_heads) {
    const int head_begin = here.head % tiles * most_heads;
    begin = here.index;
    heads = min(a.group - head_begin, most_heads);
    heads_per_row = a.cache.num_heads * tiles;
    query = rows.queries[here.row] * int64_t(a.cache.num_heads * a.group) + here.head / tiles * a.group + head_begin;
  }
};

}  // namespace attention
