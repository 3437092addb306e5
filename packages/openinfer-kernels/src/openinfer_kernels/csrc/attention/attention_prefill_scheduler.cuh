// The tile scheduler of prefill attention: work tiles, in an order that all blocks agree on.
//
// A tile is 128 query rows of a row and one KV head; a query row is a (token, query head) pair. A tile is one work
// tile, unless there are fewer tiles than blocks: then tiles of rows that have a long past are divided along their keys
// into splits of about as many keys as each block should get. A split has two tiles of keys at least. Of a context, a
// tile has what its first token's window and those after it reach.
#pragma once
#include "attention/attention_variant.cuh"

namespace attention {

constexpr int kSchedulerThreads = 384;  // that count together: all of a block
constexpr int kTileQueryRows = 128;
constexpr int kMaxRows = 1024;
constexpr int kMaxSplits = 16;  // of a tile: the block that adds them reads them one after the other

// What work tiles are made from; the same for all blocks.
template <class V>
struct Rows : V {
  const int* query_starts;  // [R + 1]
  const int* context_lens;  // [R]
  int num_rows, group, num_kv_heads;
  int least_tokens;         // of a row that this kernel serves
  bool may_split;
};

// What every thread of a block looks up about rows, in shared memory.
struct RowTable {
  int sums[kSchedulerThreads / 32];
  int work;  // tiles of keys of one KV head
  int first_work_tiles[kMaxRows + 1], first_queries[kMaxRows + 1], contexts[kMaxRows], splits[kMaxRows];
};

struct WorkTile {
  int row, kv_head;
  int first_query_row, num_query_rows;  // of the tile; of its row
  int first_query;            // of the row, in the step
  int past;                   // position of the row's first token
  int begin_key, end_key;     // of this split; the last split ends with what the tile's last query row sees
  int first_key;              // that the tile's first query row sees: of split 0, `begin_key` or in its first tile
  int split, splits;
  int first_of_tile;  // the work tile that is the tile's split 0; further splits follow `num_kv_heads` apart
};

__device__ __forceinline__ int ceil_div(int value, int of) { return (value + of - 1) / of; }

// Tiles of a row, of one KV head. Rows with few tokens, or with no context, which are padding, have none.
template <class V>
__device__ __forceinline__ int tiles_of(const RowTable& c, const Rows<V>& rows, int row) {
  const int num_tokens = c.first_queries[row + 1] - c.first_queries[row];
  const bool is_ours = num_tokens >= rows.least_tokens && c.contexts[row] > 0;
  return is_ours ? ceil_div(num_tokens * rows.group, kTileQueryRows) : 0;
}

// Fills `first_work_tiles` with running sums of `tiles x splits`; returns the sum of all.
template <class V>
__device__ __forceinline__ int sum_work_tiles(RowTable& c, const Rows<V>& rows) {
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  int before = 0;
  for (int base = 0; base < rows.num_rows; base += kSchedulerThreads) {
    const int row = base + thread;
    const int work_tiles = row < rows.num_rows ? tiles_of(c, rows, row) * c.splits[row] : 0;
    int sum = work_tiles;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    if (lane == 31) c.sums[warp] = sum;
    __syncthreads();
    int first = before + sum - work_tiles;
    for (int w = 0; w < kSchedulerThreads / 32; w++) {
      if (w < warp) first += c.sums[w];
      before += c.sums[w];
    }
    if (row < rows.num_rows) c.first_work_tiles[row] = first;
    __syncthreads();
  }
  if (thread == 0) c.first_work_tiles[rows.num_rows] = before;
  __syncthreads();
  return before;
}

// Keys of the longest tile of a row, at most.
template <class V>
__device__ __forceinline__ int most_keys(const RowTable& c, const Rows<V>& rows, int row) {
  if constexpr (V::kIsVariant) {
    const int later_tokens = kTileQueryRows / rows.group + 1;  // of a tile, after its first
    return rows.window < c.contexts[row] - later_tokens ? rows.window + later_tokens : c.contexts[row];
  }
  return c.contexts[row];
}

// Divides tiles of rows with a past so that each of `blocks` gets about as many keys.
template <int kKeys, class V>
__device__ __forceinline__ void split_tiles(RowTable& c, const Rows<V>& rows, int blocks) {
  if (threadIdx.x == 0) c.work = 0;
  __syncthreads();
  int work = 0;
  for (int row = threadIdx.x; row < rows.num_rows; row += kSchedulerThreads)
    work += tiles_of(c, rows, row) * ceil_div(most_keys(c, rows, row), kKeys);
  if (work > 0) atomicAdd(&c.work, work);
  __syncthreads();
  const int each = ceil_div(c.work * rows.num_kv_heads, blocks);
  for (int row = threadIdx.x; row < rows.num_rows; row += kSchedulerThreads) {
    int past = c.contexts[row] - (c.first_queries[row + 1] - c.first_queries[row]);
    // Every tile of the row has as many keys at least.
    if constexpr (V::kIsVariant) past = min(past, rows.window);
    const int wanted = (2 * ceil_div(most_keys(c, rows, row), kKeys) + each) / (2 * max(each, 1));
    c.splits[row] = max(1, min(min(wanted, kMaxSplits), past / (2 * kKeys)));
  }
  __syncthreads();
}

// The number of work tiles of one KV head, for all threads of a block.
template <int kKeys, class V>
__device__ __forceinline__ int count_work_tiles(RowTable& c, const Rows<V>& rows, int blocks) {
  for (int row = threadIdx.x; row < rows.num_rows; row += kSchedulerThreads) {
    c.first_queries[row] = __ldcg(rows.query_starts + row);
    c.contexts[row] = __ldcg(rows.context_lens + row);
    c.splits[row] = 1;
  }
  if (threadIdx.x == 0) c.first_queries[rows.num_rows] = __ldcg(rows.query_starts + rows.num_rows);
  __syncthreads();
  const int work_tiles = sum_work_tiles(c, rows);
  if (!rows.may_split || work_tiles * rows.num_kv_heads >= blocks) return work_tiles;
  split_tiles<kKeys>(c, rows, blocks);
  return sum_work_tiles(c, rows);
}

// A row's last tile, which is the longest, comes first; the KV heads of a split side by side.
template <int kKeys, class V>
__device__ __forceinline__ WorkTile work_tile_at(const RowTable& c, const Rows<V>& rows, int index) {
  const int wanted = index / rows.num_kv_heads;
  int low = 0, high = rows.num_rows;  // first_work_tiles[low] <= wanted < first_work_tiles[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (c.first_work_tiles[middle] <= wanted)
      low = middle;
    else high = middle;
  }
  WorkTile work_tile;
  work_tile.row = low;
  work_tile.kv_head = index % rows.num_kv_heads;
  work_tile.splits = c.splits[low];
  const int in_row = wanted - c.first_work_tiles[low], from_last = in_row / work_tile.splits;
  work_tile.split = in_row - from_last * work_tile.splits;
  work_tile.first_of_tile = index - work_tile.split * rows.num_kv_heads;
  work_tile.first_query = c.first_queries[low];
  const int num_tokens = c.first_queries[low + 1] - work_tile.first_query;
  work_tile.num_query_rows = num_tokens * rows.group;
  work_tile.first_query_row = (ceil_div(work_tile.num_query_rows, kTileQueryRows) - 1 - from_last) * kTileQueryRows;
  work_tile.past = c.contexts[low] - num_tokens;
  const int seen =
      work_tile.past + (min(work_tile.first_query_row + kTileQueryRows, work_tile.num_query_rows) - 1) / rows.group + 1;
  const int key_tiles = ceil_div(seen, kKeys);
  if constexpr (V::kIsVariant) {
    work_tile.first_key = rows.first_seen(work_tile.past + work_tile.first_query_row / rows.group);
    const int before = work_tile.first_key / kKeys, some = key_tiles - before;
    work_tile.begin_key = (before + some * work_tile.split / work_tile.splits) * kKeys;
    work_tile.end_key = min(seen, (before + some * (work_tile.split + 1) / work_tile.splits) * kKeys);
  } else {
    work_tile.first_key = 0;
    work_tile.begin_key = key_tiles * work_tile.split / work_tile.splits * kKeys;
    work_tile.end_key = min(seen, key_tiles * (work_tile.split + 1) / work_tile.splits * kKeys);
  }
  return work_tile;
}

}  // namespace attention
