// How attention over latents is divided: all units of all items stand in one line, cut into equal pieces.
//
// An item is a (token, tile of 16 query heads); a unit is `kUnit` tokens of its context. Each token of a row is an item of
// its own, with as many units as the row's last token has; those that it does not see are empty. The line is made on the
// device, from the rows' contexts.
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
  float* parts;             // [workers, 2, kPart]
  Item* items;              // [T, head tiles]
  int num_rows, table_stride, num_heads, block_shift;
  int most_tokens;          // of a row, for it to be ours
  int early;                // nonzero: the batch may be read before the previous kernel has ended
  float scale;              // of scores, times log2(e)
};

struct Rows {
  int* starts;    // [R + 1] first unit of each row
  int* contexts;  // [R]
  int* queries;   // [R + 1] first token of each row

  __device__ __forceinline__ Rows(int* memory, int num_rows)
      : starts(memory), contexts(memory + num_rows + 1), queries(memory + 2 * num_rows + 1) {}
};

template <int kUnit>
__device__ __forceinline__ int units_of(int context) {
  return (context + kUnit - 1) / kUnit;
}

// Sums up the units of all rows that are ours; every thread takes consecutive rows. Returns the number of units.
template <int kUnit, int kThreads>
__device__ int count_units(const Arguments& a, int tiles, const Rows& rows, int* sums) {
  const int thread = threadIdx.x, each = (a.num_rows + kThreads - 1) / kThreads;
  const int first = min(thread * each, a.num_rows), last = min(first + each, a.num_rows);
  int mine = 0;
  for (int row = first; row < last; row++) {
    const int start = __ldcg(a.query_starts + row), count = __ldcg(a.query_starts + row + 1) - start;
    const int context = count > 0 && count <= a.most_tokens ? __ldcg(a.context_lens + row) : 0;
    rows.queries[row] = start;
    rows.queries[row + 1] = start + count;
    rows.contexts[row] = context;
    rows.starts[row] = units_of<kUnit>(context) * count * tiles;
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
    const int units = rows.starts[row];
    rows.starts[row] = before;
    before += units;
  }
  if (thread == 0) rows.starts[a.num_rows] = total;
  __syncthreads();
  return total;
}

// The first `units % workers` workers have one unit more.
struct Division {
  int units, workers;

  __device__ __forceinline__ int first_of(int worker) const {
    return worker * (units / workers) + min(worker, units % workers);
  }
  __device__ __forceinline__ int worker_of(int unit) const {
    const int each = units / workers, more = units % workers;
    return unit < more * (each + 1) ? unit / (each + 1) : more + (unit - more * (each + 1)) / each;
  }
};

// A place in the line.
template <int kUnit>
struct Place {
  int row, query, tile;  // `query`: token of the step
  int unit, units;       // of this item
  int seen;              // tokens that the query sees

  __device__ __forceinline__ void enter(int new_row, int item, int tiles, const Rows& rows) {
    row = new_row;
    query = rows.queries[row] + item / tiles;
    tile = item % tiles;
    units = units_of<kUnit>(rows.contexts[row]);
    seen = rows.contexts[row] - (rows.queries[row + 1] - query) + 1;
  }
  __device__ __forceinline__ void find(int in_line, int tiles, int num_rows, const Rows& rows) {
    int low = 0, high = num_rows;  // starts[low] <= in_line < starts[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (rows.starts[middle] <= in_line) low = middle;
      else high = middle;
    }
    const int here = in_line - rows.starts[low], each = units_of<kUnit>(rows.contexts[low]);
    enter(low, here / each, tiles, rows);
    unit = here % each;
  }
  __device__ __forceinline__ void advance(int tiles, int num_rows, const Rows& rows) {
    if (++unit < units) return;
    unit = 0;
    const int item = (query - rows.queries[row]) * tiles + tile + 1;
    if (item < (rows.queries[row + 1] - rows.queries[row]) * tiles) {
      enter(row, item, tiles, rows);
      return;
    }
    int next = row + 1;
    while (next < num_rows && rows.contexts[next] == 0) next++;
    if (next < num_rows) enter(next, 0, tiles, rows);
  }
  __device__ __forceinline__ bool is_empty() const { return unit * kUnit >= seen; }
};

}  // namespace latent
