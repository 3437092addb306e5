// The contexts of a step's longer rows, out of a cache in FP8 into one of BF16 that has nothing else, with block tables
// of its own: code times scale, rounded once, as the producers of attention_prefill_staging.cuh would do for each tile of
// queries anew. A CUDA block has one KV block.
#include "attention_fp8/fp8_cache.cuh"
#include "common/block.cuh"
#include "common/pdl.cuh"

using namespace attention;

namespace {

constexpr int kMaxRows = 1024;
constexpr int kEach = kMaxRows / kThreads;  // rows of a thread
constexpr int kCodes = 16;                  // that a thread brings at once

struct Arguments {
  Fp8LayerCache cache;
  const int* block_tables;  // [R, table_stride]
  const int* query_starts;  // [R + 1]
  const int* context_lens;  // [R]
  bf16* contexts;           // [blocks, 2, heads, block tokens, D]
  int* tables;              // [R, table_stride]: blocks of `contexts`; of shorter rows nothing
  int num_rows, table_stride, head_dim, least_tokens;
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads) fp8_contexts(Arguments a) {
  __shared__ int starts[kMaxRows + 1];
  launch_dependents();
  wait_for_previous_kernel();
  const int last_of_block = (1 << a.cache.block_shift) - 1;
  int blocks[kEach], sum = 0;
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    const int row = threadIdx.x * kEach + i;
    blocks[i] = 0;
    if (row < a.num_rows && __ldcg(a.query_starts + row + 1) - __ldcg(a.query_starts + row) >= a.least_tokens)
      blocks[i] = (__ldcg(a.context_lens + row) + last_of_block) >> a.cache.block_shift;
    sum += blocks[i];
  }
  int before = int(block_sum_before(sum));
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    starts[threadIdx.x * kEach + i] = before;
    before += blocks[i];
  }
  if (threadIdx.x == kThreads - 1) starts[kMaxRows] = before;
  __syncthreads();
  const int block = blockIdx.x;
  if (block >= starts[kMaxRows]) return;  // the host knows an upper bound alone
  int low = 0, high = kMaxRows;           // starts[low] <= block < starts[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (starts[middle] <= block)
      low = middle;
    else high = middle;
  }
  const int64_t place = int64_t(low) * a.table_stride + block - starts[low];
  if (threadIdx.x == 0) a.tables[place] = block;
  const uint8_t* from = a.cache.data + __ldcg(a.block_tables + place) * a.cache.block_stride;
  const int pieces = 2 * a.cache.num_heads, of_token = a.head_dim / kCodes, of_piece = of_token << a.cache.block_shift;
  uint4* to = reinterpret_cast<uint4*>(a.contexts + int64_t(block) * pieces * of_piece * kCodes);
  for (int i = threadIdx.x; i < pieces * of_piece; i += kThreads) {
    const uint8_t* piece = from + i / of_piece * a.cache.piece_bytes(a.head_dim);
    const int at = i % of_piece;
    const uint4 codes = __ldcg(reinterpret_cast<const uint4*>(piece) + at);
    const float scale = __ldcg(reinterpret_cast<const float*>(piece + of_piece * kCodes) + at / of_token);
    const uint2 c0 = e4m3_times_four(codes.x, scale), c1 = e4m3_times_four(codes.y, scale);
    const uint2 c2 = e4m3_times_four(codes.z, scale), c3 = e4m3_times_four(codes.w, scale);
    to[2 * i] = make_uint4(c0.x, c0.y, c1.x, c1.y);
    to[2 * i + 1] = make_uint4(c2.x, c2.y, c3.x, c3.y);
  }
}
