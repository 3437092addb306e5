// What there is to do in prefill attention, as blocks count it: units, in an order that all blocks agree on.
//
// A tile is 128 lines of a row and one KV head; a line is a (token, query head) pair. A tile is one unit, unless there are
// fewer tiles than blocks: then tiles of rows that have a long past are divided along their keys into parts of about as
// many keys as each block should get. A part has two tiles of keys at least.
#pragma once
#include <cstdint>

namespace attention {

constexpr int kUnitThreads = 384;  // that count together: all of a block
constexpr int kUnitLines = 128;
constexpr int kMaxUnitRows = 1024;
constexpr int kMaxParts = 16;      // of a tile: the block that adds them reads them one after the other

// What units are made from; the same for all blocks.
struct Rows {
  const int* query_starts;  // [R + 1]
  const int* context_lens;  // [R]
  int num_rows, group, num_kv_heads;
  int least_tokens;         // of a row, for it to be ours
  bool may_divide;
};

// In shared memory, of each row.
struct UnitColumns {
  int sums[kUnitThreads / 32];
  int work;  // tiles of keys of one KV head
  int first_units[kMaxUnitRows + 1], first_queries[kMaxUnitRows + 1], contexts[kMaxUnitRows], parts[kMaxUnitRows];
};

struct Unit {
  int row, kv_head;
  int first_line, num_lines;  // of the tile; of its row
  int first_query;            // of the row, in the step
  int past;                   // position of the row's first token
  int begin_key, end_key;     // of this part; the last part ends with what the tile's last line sees
  int part, parts;
  int first_of_tile;          // the unit that is the tile's part 0; further parts follow `num_kv_heads` apart
};

__device__ __forceinline__ int units_rounded_up(int value, int of) { return (value + of - 1) / of; }

// Tiles of a row, of one KV head. Rows with few tokens, or with no context, which are padding, have none.
__device__ __forceinline__ int tiles_of(const UnitColumns& c, const Rows& rows, int row) {
  const int num_tokens = c.first_queries[row + 1] - c.first_queries[row];
  const bool is_ours = num_tokens >= rows.least_tokens && c.contexts[row] > 0;
  return is_ours ? units_rounded_up(num_tokens * rows.group, kUnitLines) : 0;
}

// Fills `first_units` with running sums of `tiles x parts`; returns the sum of all.
__device__ __forceinline__ int add_up_units(UnitColumns& c, const Rows& rows) {
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  int before = 0;
  for (int base = 0; base < rows.num_rows; base += kUnitThreads) {
    const int row = base + thread;
    const int units = row < rows.num_rows ? tiles_of(c, rows, row) * c.parts[row] : 0;
    int sum = units;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    if (lane == 31) c.sums[warp] = sum;
    __syncthreads();
    int first = before + sum - units;
    for (int w = 0; w < kUnitThreads / 32; w++) {
      if (w < warp) first += c.sums[w];
      before += c.sums[w];
    }
    if (row < rows.num_rows) c.first_units[row] = first;
    __syncthreads();
  }
  if (thread == 0) c.first_units[rows.num_rows] = before;
  __syncthreads();
  return before;
}

// Divides tiles of rows with a past so that each of `blocks` gets about as many keys.
template <int kKeys>
__device__ __forceinline__ void divide_units(UnitColumns& c, const Rows& rows, int blocks) {
  if (threadIdx.x == 0) c.work = 0;
  __syncthreads();
  int work = 0;
  for (int row = threadIdx.x; row < rows.num_rows; row += kUnitThreads)
    work += tiles_of(c, rows, row) * units_rounded_up(c.contexts[row], kKeys);
  if (work > 0) atomicAdd(&c.work, work);
  __syncthreads();
  const int each = units_rounded_up(c.work * rows.num_kv_heads, blocks);
  for (int row = threadIdx.x; row < rows.num_rows; row += kUnitThreads) {
    const int past = c.contexts[row] - (c.first_queries[row + 1] - c.first_queries[row]);
    const int wanted = (2 * units_rounded_up(c.contexts[row], kKeys) + each) / (2 * max(each, 1));
    c.parts[row] = max(1, min(min(wanted, kMaxParts), past / (2 * kKeys)));
  }
  __syncthreads();
}

// The number of units of one KV head, for all threads of a block.
template <int kKeys>
__device__ __forceinline__ int count_units(UnitColumns& c, const Rows& rows, int blocks) {
  for (int row = threadIdx.x; row < rows.num_rows; row += kUnitThreads) {
    c.first_queries[row] = __ldcg(rows.query_starts + row);
    c.contexts[row] = __ldcg(rows.context_lens + row);
    c.parts[row] = 1;
  }
  if (threadIdx.x == 0) c.first_queries[rows.num_rows] = __ldcg(rows.query_starts + rows.num_rows);
  __syncthreads();
  const int units = add_up_units(c, rows);
  if (!rows.may_divide || units * rows.num_kv_heads >= blocks) return units;
  divide_units<kKeys>(c, rows, blocks);
  return add_up_units(c, rows);
}

// A row's last tile, which is the longest, comes first; the KV heads of a part side by side.
template <int kKeys>
__device__ __forceinline__ Unit unit_at(const UnitColumns& c, const Rows& rows, int index) {
  const int wanted = index / rows.num_kv_heads;
  int low = 0, high = rows.num_rows;  // first_units[low] <= wanted < first_units[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (c.first_units[middle] <= wanted) low = middle;
    else high = middle;
  }
  Unit unit;
  unit.row = low;
  unit.kv_head = index % rows.num_kv_heads;
  unit.parts = c.parts[low];
  const int in_row = wanted - c.first_units[low], from_last = in_row / unit.parts;
  unit.part = in_row - from_last * unit.parts;
  unit.first_of_tile = index - unit.part * rows.num_kv_heads;
  unit.first_query = c.first_queries[low];
  const int num_tokens = c.first_queries[low + 1] - unit.first_query;
  unit.num_lines = num_tokens * rows.group;
  unit.first_line = (units_rounded_up(unit.num_lines, kUnitLines) - 1 - from_last) * kUnitLines;
  unit.past = c.contexts[low] - num_tokens;
  const int seen = unit.past + (min(unit.first_line + kUnitLines, unit.num_lines) - 1) / rows.group + 1;
  const int key_tiles = units_rounded_up(seen, kKeys);
  unit.begin_key = key_tiles * unit.part / unit.parts * kKeys;
  unit.end_key = min(seen, key_tiles * (unit.part + 1) / unit.parts * kKeys);
  return unit;
}

}  // namespace attention
