// Values of mixed latents: of each head, its mixed latent times the rows of `kv_b_proj` that make values. A block has
// some of the 128 rows of one head, and up to 32 tokens; its warps share the inner size.
//
// The weights depend on no kernel: they are asked for before the previous one has ended.
#include "common/pdl.cuh"
#include "mla/latent.cuh"

using namespace latent;
using attention::mma;
using attention::packed;

namespace {

constexpr int kWarps = 8, kThreads = kWarps * 32;
constexpr int kTokens = 32;              // of a block: 16 at a time
constexpr int kPitch = kLatent + kPad;
constexpr int kChunks = kLatent / 8;     // of 16 bytes, of a query row
constexpr int kEach = kLatent / kWarps;  // of the inner size, for each warp

struct Arguments {
  const bf16* whole;   // [T, H, 512]
  const Item* items;   // [T, head tiles]
  const bf16* weight;  // [H, 256, 512]: of each head 128 key rows, then 128 value rows
  bf16* out;           // [T, H, 128]
  int num_tokens, num_heads;
};

template <int kRows>
struct Shared {
  alignas(16) bf16 weights[kRows * kPitch];
  alignas(16) bf16 mixed[kTokens * kPitch];
  alignas(16) float sums[kWarps][kTokens][kRows];
  int counts[kTokens];
};

template <int kRows>
__device__ void run(const Arguments& a) {
  extern __shared__ __align__(16) uint8_t raw[];
  auto& s = *reinterpret_cast<Shared<kRows>*>(raw);
  const int head = blockIdx.x, row = blockIdx.y * kRows, first = blockIdx.z * kTokens;
  const int count = min(kTokens, a.num_tokens - first), tiles = (a.num_heads + kHeads - 1) / kHeads;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  launch_dependents();
  const bf16* from = a.weight + (int64_t(head) * (kNope + kValue) + kNope + row) * kLatent;
  for (int i = threadIdx.x; i < kRows * kChunks; i += kThreads)
    copy_16(s.weights + i / kChunks * kPitch + i % kChunks * 8, from + i * 8);
  wait_for_previous_kernel();
  for (int i = threadIdx.x; i < (count + 15) / 16 * 16 * kChunks; i += kThreads) {
    const int token = i / kChunks, at = i % kChunks * 8;
    const bool is_there = token < count;
    const int64_t query_row = int64_t(first + (is_there ? token : 0)) * a.num_heads + head;
    copy_16(s.mixed + token * kPitch + at, a.whole + query_row * kLatent + at, is_there);
  }
  commit_copies();
  if (threadIdx.x < count) s.counts[threadIdx.x] = a.items[(first + threadIdx.x) * tiles + head / kHeads].count;
  wait_for_copies<0>();
  __syncthreads();
  for (int base = 0; base < count; base += 16) {
    float sums[kRows / 8][4] = {};
#pragma unroll
    for (int step = 0; step < kEach / 16; step++) {
      const int at = warp * kEach + step * 16;
      uint32_t x[4];
      load_matrices(x, s.mixed + (base + lane % 16) * kPitch + at + lane / 16 * 8);
#pragma unroll
      for (int n = 0; n < kRows / 16; n++) {  // 16 rows: 0..7, their second half, 8..15, their second half
        uint32_t w[4];
        load_matrices(w, s.weights + (n * 16 + lane / 16 * 8 + lane % 8) * kPitch + at + lane / 8 % 2 * 8);
        mma(sums[2 * n], x[0], x[1], x[2], x[3], w[0], w[1]);
        mma(sums[2 * n + 1], x[0], x[1], x[2], x[3], w[2], w[3]);
      }
    }
#pragma unroll
    for (int n = 0; n < kRows / 8; n++)
#pragma unroll
      for (int r = 0; r < 2; r++)
        *reinterpret_cast<float2*>(&s.sums[warp][base + g + 8 * r][n * 8 + 2 * t]) =
            make_float2(sums[n][2 * r], sums[n][2 * r + 1]);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < count * kRows / 2; i += kThreads) {
    const int token = i / (kRows / 2), at = i % (kRows / 2) * 2;
    if (s.counts[token] == 0) continue;  // padding, or a row that another kernel has
    float low = 0, high = 0;
#pragma unroll
    for (int w = 0; w < kWarps; w++) {
      low += s.sums[w][token][at];
      high += s.sums[w][token][at + 1];
    }
    *reinterpret_cast<uint32_t*>(a.out + (int64_t(first + token) * a.num_heads + head) * kValue + row + at) =
        packed(low, high);
  }
}

}  // namespace

#define LATENT_VALUES(ROWS)                                                                         \
  extern "C" __global__ void __launch_bounds__(kThreads) latent_values_##ROWS(Arguments arguments) { \
    run<ROWS>(arguments);                                                                           \
  }

LATENT_VALUES(16)
LATENT_VALUES(32)
