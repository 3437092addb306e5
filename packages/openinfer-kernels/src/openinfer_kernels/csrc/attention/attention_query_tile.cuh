// Which query tile a block of a prefill kernel computes, found on the device from `query_starts`.
#pragma once
#include <cstdint>

namespace attention {

// The query heads that share a KV head stand side by side: query row m of a row is head m % group of its token m /
// group.
struct QueryTile {
  int row;           // of the batch; -1: there is no such tile
  int first_query_row;  // of the tile
  int num_query_rows;   // of the row
  int first_query;   // token of the step
  int past;          // position of the row's first token
  int context;
};

// Tile `wanted` of all rows with `least_tokens` and a context, a row's last (and longest) first. For all threads of a
// block of 32 `kWarps`; `scratch` is shared.
template <int kWarps>
__device__ QueryTile find_tile(int wanted, const int* query_starts, const int* context_lens, int num_rows,
                               int least_tokens, int group, int tile_query_rows, int* scratch) {
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  QueryTile* found = reinterpret_cast<QueryTile*>(scratch + kWarps);
  if (thread == 0) found->row = -1;
  for (int base = 0, before = 0; base < num_rows; base += kWarps * 32) {
    const int row = base + thread;
    int start = 0, num_tokens = 0, context = 0;
    if (row < num_rows) {
      start = __ldcg(query_starts + row);
      num_tokens = __ldcg(query_starts + row + 1) - start;
      context = __ldcg(context_lens + row);
    }
    const int tiles =
        num_tokens >= least_tokens && context > 0 ? (num_tokens * group + tile_query_rows - 1) / tile_query_rows : 0;
    int sum = tiles;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    if (lane == 31) scratch[warp] = sum;
    __syncthreads();
    int first = before + sum - tiles;
    for (int w = 0; w < kWarps; w++) {
      if (w < warp) first += scratch[w];
      before += scratch[w];
    }
    if (first <= wanted && wanted < first + tiles) {
      *found = {
          row,    (tiles - 1 - (wanted - first)) * tile_query_rows, num_tokens * group, start, context - num_tokens,
          context};
    }
    __syncthreads();
    if (wanted < before) break;
  }
  __syncthreads();
  return *found;
}

__host__ __device__ constexpr int kTileScratch(int warps) { return warps + int(sizeof(QueryTile) / sizeof(int)); }

}  // namespace attention
