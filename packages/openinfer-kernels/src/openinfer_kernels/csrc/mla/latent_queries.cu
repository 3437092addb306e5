// Queries over latents: of each head, its unrotated part times the rows of `kv_b_proj` that make keys, next to its
// rotated part. A block has 64 of the 512 columns of one head, and up to 64 tokens.
//
// The weights depend on no kernel: they are asked for before the previous one has ended.
#include "common/pdl.cuh"
#include "mla/latent.cuh"

using namespace latent;
using attention::mma;
using attention::packed;

namespace {

constexpr int kWarps = 4, kThreads = kWarps * 32;
constexpr int kColumns = 64;  // of a block
constexpr int kTokens = 64;   // of a block: 16 at a time
constexpr int kPitch = kColumns + kPad, kQueryPitch = kNope + kPad;

struct Arguments {
  const bf16* q;        // [T, H, 192]
  const bf16* weight;   // [H, 256, 512]: of each head 128 key rows, then 128 value rows
  bf16* out;            // [T, H, 576]
  Item* items;          // [T, head tiles], cleared
  int num_tokens, num_heads;
};

// Rotated parts of the block's tokens as they are; and, once for 16 heads, the items without a result so far.
__device__ void copy_rest(const Arguments& a, int head, int first) {
  const int count = min(kTokens, a.num_tokens - first);
  for (int i = threadIdx.x; i < count * (kRope / 8); i += kThreads) {
    const int64_t query_row = int64_t(first + i / (kRope / 8)) * a.num_heads + head;
    const int at = i % (kRope / 8) * 8;
    *reinterpret_cast<uint4*>(a.out + query_row * kEntry + kLatent + at) =
        *reinterpret_cast<const uint4*>(a.q + query_row * kHead + kNope + at);
  }
  const int tiles = (a.num_heads + kHeads - 1) / kHeads;
  if (head % kHeads == 0)
    for (int i = threadIdx.x; i < count; i += kThreads) a.items[(first + i) * tiles + head / kHeads] = {0, 0};
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads) latent_queries(Arguments a) {
  __shared__ __align__(16) bf16 weights[kNope * kPitch];
  __shared__ __align__(16) bf16 queries[kTokens * kQueryPitch];
  const int head = blockIdx.x, column = blockIdx.y * kColumns, first = blockIdx.z * kTokens;
  const int count = min(kTokens, a.num_tokens - first);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  launch_dependents();
  const bf16* from = a.weight + int64_t(head) * (kNope + kValue) * kLatent + column;
  for (int i = threadIdx.x; i < kNope * (kColumns / 8); i += kThreads) {
    const int row = i / (kColumns / 8), at = i % (kColumns / 8) * 8;
    copy_16(weights + row * kPitch + at, from + row * kLatent + at);
  }
  wait_for_previous_kernel();
  for (int i = threadIdx.x; i < (count + 15) / 16 * 16 * (kNope / 8); i += kThreads) {
    const int token = i / (kNope / 8), at = i % (kNope / 8) * 8;
    const bool is_there = token < count;
    const int64_t query_row = int64_t(first + (is_there ? token : 0)) * a.num_heads + head;
    copy_16(queries + token * kQueryPitch + at, a.q + query_row * kHead + at, is_there);
  }
  commit_copies();
  if (blockIdx.y == 0) copy_rest(a, head, first);
  wait_for_copies<0>();
  __syncthreads();
  // This warp's 16 columns: lanes name rows 0..15 of a step, and the column's half.
  const bf16* matrices = weights + lane % 16 * kPitch + warp * 16 + lane / 16 * 8;
  for (int base = 0; base < count; base += 16) {
    float sums[2][4] = {};
#pragma unroll
    for (int step = 0; step < kNope / 16; step++) {
      uint32_t x[4], w[4];
      load_matrices(x, queries + (base + lane % 16) * kQueryPitch + step * 16 + lane / 16 * 8);
      load_transposed(w, matrices + step * 16 * kPitch);
      mma(sums[0], x[0], x[1], x[2], x[3], w[0], w[1]);
      mma(sums[1], x[0], x[1], x[2], x[3], w[2], w[3]);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int token = base + g + 8 * r;
      if (token >= count) continue;
      bf16* to = a.out + (int64_t(first + token) * a.num_heads + head) * kEntry + column + warp * 16 + 2 * t;
#pragma unroll
      for (int n = 0; n < 2; n++) *reinterpret_cast<uint32_t*>(to + n * 8) = packed(sums[n][2 * r], sums[n][2 * r + 1]);
    }
  }
}
