// The tile scheduler of attention over latents: the work tiles of all items form one flattened list, split evenly among
// blocks.
//
// An item is a (token, tile of 16 query heads); a work tile is `kWorkTile` tokens of its context. Each token of a row
// is an item of its own, with as many work tiles as the row's last token has; those that it does not see are empty.
// Blocks derive the list on the device from the rows' contexts, so that a captured graph serves any lengths.
#pragma once
#include "mla/latent.cuh"

namespace latent {

struct Arguments {
  const bf16* q;            // [T, H, 576]
  bf16* whole;              // [T, H, 512]
  const bf16* cache;        // of the layer
  int64_t block_stride;     // values between blocks
  const int* block_tables;  // [R, table_stride]
  const int* query_starts;  // [R + 1]
  const int* context_lens;  // [R]
  float* partials;          // [workers, 2, kPartial]
  Item* items;              // [T, head tiles]
  int num_rows, table_stride, num_heads, block_shift;
  int most_tokens;          // of a row that this kernel serves
  int early;                // nonzero: the batch may be read before the previous kernel has ended
  float scale;              // of scores, times log2(e)
  int first_key;            // of the kernels that have one: tokens before it are not seen
};

struct Rows {
  int* starts;    // [R + 1] first work tile of each row
  int* contexts;  // [R]
  int* queries;   // [R + 1] first token of each row

  __device__ __forceinline__ Rows(int* memory, int num_rows)
      : starts(memory), contexts(memory + num_rows + 1), queries(memory + 2 * num_rows + 1) {}
};

template <int kWorkTile>
__device__ __forceinline__ int work_tiles_of(int context) {
  return (context + kWorkTile - 1) / kWorkTile;
}

// Sums up the work tiles of all rows that this kernel serves; every thread takes consecutive rows. Returns their
// number.
template <int kWorkTile, int kThreads>
__device__ int count_work_tiles(const Arguments& a, int tiles, const Rows& rows, int* sums) {
  const int thread = threadIdx.x, each = (a.num_rows + kThreads - 1) / kThreads;
  const int first = min(thread * each, a.num_rows), last = min(first + each, a.num_rows);
  int mine = 0;
  for (int row = first; row < last; row++) {
    const int start = __ldcg(a.query_starts + row), count = __ldcg(a.query_starts + row + 1) - start;
    const int context = count > 0 && count <= a.most_tokens ? __ldcg(a.context_lens + row) : 0;
    rows.queries[row] = start;
    rows.queries[row + 1] = start + count;
    rows.contexts[row] = context;
    rows.starts[row] = work_tiles_of<kWorkTile>(context) * count * tiles;
    mine += rows.starts[row];
  }
  int sum = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, sum, step);
    if (thread % 32 >= step) sum += other;
  }
  if (thread % 32 == 31) sums[thread / 32] = sum;
  __syncthreads();
  int before = sum - mine, total = 0;
#pragma unroll
  for (int warp = 0; warp < kThreads / 32; warp++) {
    if (warp < thread / 32) before += sums[warp];
    total += sums[warp];
  }
  for (int row = first; row < last; row++) {
    const int work_tiles = rows.starts[row];
    rows.starts[row] = before;
    before += work_tiles;
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
template <int kWorkTile>
struct WorkTile {
  int row, query, tile;  // `query`: token of the step
  int index, count;      // of this item
  int seen;              // tokens that the query sees

  __device__ __forceinline__ void enter(int new_row, int item, int tiles, const Rows& rows) {
    row = new_row;
    query = rows.queries[row] + item / tiles;
    tile = item % tiles;
    count = work_tiles_of<kWorkTile>(rows.contexts[row]);
    seen = rows.contexts[row] - (rows.queries[row + 1] - query) + 1;
  }
  __device__ __forceinline__ void find(int flat_index, int tiles, int num_rows, const Rows& rows) {
    int low = 0, high = num_rows;  // starts[low] <= flat_index < starts[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (rows.starts[middle] <= flat_index)
        low = middle;
      else high = middle;
    }
    const int here = flat_index - rows.starts[low], each = work_tiles_of<kWorkTile>(rows.contexts[low]);
    enter(low, here / each, tiles, rows);
    index = here % each;
  }
  __device__ __forceinline__ void advance(int tiles, int num_rows, const Rows& rows) {
    if (++index < count) return;
    index = 0;
    const int item = (query - rows.queries[row]) * tiles + tile + 1;
    if (item < (rows.queries[row + 1] - rows.queries[row]) * tiles) {
      enter(row, item, tiles, rows);
      return;
    }
    int next = row + 1;
    while (next < num_rows && rows.contexts[next] == 0) next++;
    if (next < num_rows) enter(next, 0, tiles, rows);
  }
  __device__ __forceinline__ bool is_empty() const { return index * kWorkTile >= seen; }
};

}  // namespace latent
