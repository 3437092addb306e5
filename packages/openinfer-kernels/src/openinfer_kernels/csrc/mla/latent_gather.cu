// The latents of the contexts of a step's longer rows, out of the paged cache and one after the other, so that one
// product makes all their keys and values. A block has 64 of these entries.
#include "common/block.cuh"
#include "common/pdl.cuh"
#include "mla/latent.cuh"

using namespace latent;

namespace {

constexpr int kEntries = 64;
constexpr int kMaxRows = 1024;
constexpr int kEach = kMaxRows / kThreads;  // rows of a thread
constexpr int kChunks = kEntry / 8;         // of 16 bytes, of an entry

struct Arguments {
  const bf16* cache;        // of the layer
  int64_t block_stride;     // values between blocks
  const int* block_tables;  // [R, table_stride]
  const int* query_starts;  // [R + 1]
  const int* context_lens;  // [R]
  bf16* latents;            // [entries, 512]
  bf16* keys;               // [entries, 64]
  int* starts;              // [R] first entry of each row
  int num_rows, table_stride, block_shift, least_tokens;
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads) latent_gather(Arguments a) {
  __shared__ int starts[kMaxRows + 1];
  launch_dependents();
  wait_for_previous_kernel();
  int entries[kEach], sum = 0;
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    const int row = threadIdx.x * kEach + i;
    entries[i] = 0;
    if (row < a.num_rows && __ldcg(a.query_starts + row + 1) - __ldcg(a.query_starts + row) >= a.least_tokens)
      entries[i] = __ldcg(a.context_lens + row);
    sum += entries[i];
  }
  int before = int(block_sum_before(sum));
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    const int row = threadIdx.x * kEach + i;
    starts[row] = before;
    if (blockIdx.x == 0 && row < a.num_rows) a.starts[row] = before;
    before += entries[i];
  }
  if (threadIdx.x == kThreads - 1) starts[kMaxRows] = before;
  __syncthreads();
  const int first = blockIdx.x * kEntries, last = min(first + kEntries, starts[kMaxRows]);
  for (int i = threadIdx.x; i < (last - first) * kChunks; i += kThreads) {
    const int entry = first + i / kChunks, at = i % kChunks * 8;
    int low = 0, high = kMaxRows;  // starts[low] <= entry < starts[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (starts[middle] <= entry)
        low = middle;
      else high = middle;
    }
    const int token = entry - starts[low];
    const int block = __ldcg(a.block_tables + int64_t(low) * a.table_stride + (token >> a.block_shift));
    const bf16* from = a.cache + block * a.block_stride + int64_t(token & ((1 << a.block_shift) - 1)) * kEntry + at;
    bf16* to =
        at < kLatent ? a.latents + int64_t(entry) * kLatent + at : a.keys + int64_t(entry) * kRope + at - kLatent;
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
  }
}
