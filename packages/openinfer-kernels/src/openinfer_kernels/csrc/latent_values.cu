// Values of mixed latents: the parts of each item are added, and the sum times the rows of `kv_b_proj` that make values.
// A block has some of the 128 rows of one head, and up to 16 tokens.
//
// A part is an unnormalised sum under its own maximum, so parts are added as in Milakov and Gimelshein 2018, "Online
// normalizer calculation for softmax", always in the same order: results do not depend on timing. The weights are on
// their way before the previous kernel has ended.
#include "latent.cuh"
#include "overlap.cuh"

using namespace latent;
using attention::exp2_fast;
using attention::kMinusInfinity;
using attention::mma;
using attention::packed;

namespace {

constexpr int kWarps = 8, kThreads = kWarps * 32;
constexpr int kTokens = 16;
constexpr int kLine = kLatent + kPad;
constexpr int kPartsAtOnce = 4;
constexpr int kEach = kLatent / kWarps;  // of the inner size, for each warp

struct Arguments {
  const bf16* whole;    // [T, H, 512]
  const float* parts;   // [workers, 2, kPart]
  const Item* items;    // [T, head tiles]
  const bf16* weight;   // [H, 256, 512]
  bf16* out;            // [T, H, 128]
  int num_tokens, num_heads;
};

template <int kRows>
struct Shared {
  alignas(16) bf16 weights[kRows * kLine];
  alignas(16) bf16 mixed[kTokens * kLine];
  alignas(16) float ways[kWarps][kLatent];   // sums of the warps that share a token
  float tops[kWarps], totals[kWarps];
  alignas(16) float sums[kWarps][kTokens][kRows];
  int counts[kTokens];
};

// A lane's 16 of the 512 values of a sum: four at 4 (lane + 32 i).
struct Running {
  float4 sum[4];
  float top = kMinusInfinity, total = 0;

  __device__ __forceinline__ Running() {
#pragma unroll
    for (int i = 0; i < 4; i++) sum[i] = make_float4(0, 0, 0, 0);
  }
  __device__ __forceinline__ void raise(float highest) {
    const float factor = highest == top ? 1.0f : exp2_fast(top - highest);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      sum[i].x *= factor, sum[i].y *= factor, sum[i].z *= factor, sum[i].w *= factor;
    }
    total *= factor;
    top = highest;
  }
  __device__ __forceinline__ void add(const float4 (&values)[4], float factor, float more) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      sum[i].x += values[i].x * factor, sum[i].y += values[i].y * factor;
      sum[i].z += values[i].z * factor, sum[i].w += values[i].w * factor;
    }
    total += more * factor;
  }
};

// How much a sum under the maximum `top` counts under `highest`; a part may have seen no key at all.
__device__ __forceinline__ float share(float top, float highest) { return top == highest ? 1.0f : exp2_fast(top - highest); }

// Every `ways`-th part of an item from `way` on. The first worker's part lies in its second slot, as it begins the item;
// the others' in their first.
__device__ Running add_parts(const Arguments& a, const Item& item, int head, int way, int ways, int lane) {
  Running all;
  const float* begin = a.parts + int64_t(item.first_worker) * 2 * kPart;
  for (int c = way; c < item.count; c += ways * kPartsAtOnce) {
    float4 values[kPartsAtOnce][4];
    float tops[kPartsAtOnce], totals[kPartsAtOnce];
#pragma unroll
    for (int j = 0; j < kPartsAtOnce; j++) {
      const int index = min(c + j * ways, item.count - 1);
      const float* part = begin + (int64_t(index) * 2 + (index == 0)) * kPart;
#pragma unroll
      for (int i = 0; i < 4; i++)
        values[j][i] = __ldcg(reinterpret_cast<const float4*>(part + head * kLatent) + lane + 32 * i);
      tops[j] = __ldcg(part + kHeads * kLatent + head);
      totals[j] = __ldcg(part + kHeads * (kLatent + 1) + head);
    }
    float highest = all.top;
#pragma unroll
    for (int j = 0; j < kPartsAtOnce; j++) highest = fmaxf(highest, tops[j]);
    all.raise(highest);
#pragma unroll
    for (int j = 0; j < kPartsAtOnce; j++)
      if (c + j * ways < item.count) all.add(values[j], share(tops[j], highest), totals[j]);
  }
  return all;
}

__device__ __forceinline__ void put(bf16* line, const Running& all, int lane) {
  const float inverse = 1.0f / all.total;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float4 v = all.sum[i];
    *reinterpret_cast<uint2*>(line + 4 * (lane + 32 * i)) =
        make_uint2(packed(v.x * inverse, v.y * inverse), packed(v.z * inverse, v.w * inverse));
  }
}

// Mixed latents of the block's tokens in shared memory; zeros where there is no token or no result. Where tokens are few,
// several warps share the parts of one.
template <int kRows>
__device__ void gather_mixed(Shared<kRows>& s, const Arguments& a, int head, int first) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int count = min(kTokens, a.num_tokens - first), tiles = (a.num_heads + kHeads - 1) / kHeads;
  const int ways = count == 1 ? 8 : count == 2 ? 4 : count <= 4 ? 2 : 1;
  for (int i = count * (kLatent / 8) + threadIdx.x; i < kTokens * (kLatent / 8); i += kThreads)
    *reinterpret_cast<uint4*>(s.mixed + i / (kLatent / 8) * kLine + i % (kLatent / 8) * 8) = make_uint4(0, 0, 0, 0);
  for (int base = 0; base < count; base += kWarps / ways) {
    const int token = base + warp / ways, way = warp % ways;
    Item item = {0, 0};
    if (token < count) item = a.items[(first + token) * tiles + head / kHeads];
    bf16* line = s.mixed + token * kLine;
    Running all;
    if (item.count <= 1) {
      if (way == 0 && token < count) {
        const bf16* from = a.whole + (int64_t(first + token) * a.num_heads + head) * kLatent;
        for (int i = lane; i < kLatent / 8; i += 32)
          *reinterpret_cast<uint4*>(line + i * 8) =
              item.count ? *reinterpret_cast<const uint4*>(from + i * 8) : make_uint4(0, 0, 0, 0);
        if (lane == 0) s.counts[token] = item.count;
      }
    } else {
      all = add_parts(a, item, head % kHeads, way, ways, lane);
      if (way == 0 && lane == 0) s.counts[token] = item.count;
    }
    if (ways == 1) {
      if (item.count > 1) put(line, all, lane);
      continue;
    }
    if (item.count > 1 && way > 0) {
#pragma unroll
      for (int i = 0; i < 4; i++) *reinterpret_cast<float4*>(s.ways[warp] + 4 * (lane + 32 * i)) = all.sum[i];
      if (lane == 0) {
        s.tops[warp] = all.top;
        s.totals[warp] = all.total;
      }
    }
    __syncthreads();
    if (item.count > 1 && way == 0) {
      for (int w = warp + 1; w < warp + ways; w++) {
        float4 values[4];
#pragma unroll
        for (int i = 0; i < 4; i++) values[i] = *reinterpret_cast<const float4*>(s.ways[w] + 4 * (lane + 32 * i));
        const float highest = fmaxf(all.top, s.tops[w]);
        all.raise(highest);
        all.add(values, share(s.tops[w], highest), s.totals[w]);
      }
      put(line, all, lane);
    }
    __syncthreads();
  }
}

template <int kRows>
__device__ void run(const Arguments& a) {
  extern __shared__ __align__(16) uint8_t raw[];
  auto& s = *reinterpret_cast<Shared<kRows>*>(raw);
  const int head = blockIdx.x, row = blockIdx.y * kRows, first = blockIdx.z * kTokens;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  allow_next_kernel();
  const bf16* from = a.weight + (int64_t(head) * (kNope + kValue) + kNope + row) * kLatent;
  for (int i = threadIdx.x; i < kRows * (kLatent / 8); i += kThreads) {
    const int line = i / (kLatent / 8), at = i % (kLatent / 8) * 8;
    copy_16(s.weights + line * kLine + at, from + line * kLatent + at);
  }
  commit_copies();
  wait_for_previous_kernel();
  gather_mixed(s, a, head, first);
  wait_for_copies<0>();
  __syncthreads();
  float sums[kRows / 8][4] = {};
#pragma unroll
  for (int step = 0; step < kEach / 16; step++) {
    const int at = warp * kEach + step * 16;
    uint32_t x[4];
    load_matrices(x, s.mixed + lane % 16 * kLine + at + lane / 16 * 8);
#pragma unroll
    for (int n = 0; n < kRows / 16; n++) {  // 16 rows: lines 0..7, their second half, lines 8..15, their second half
      uint32_t w[4];
      load_matrices(w, s.weights + (n * 16 + lane / 16 * 8 + lane % 8) * kLine + at + lane / 8 % 2 * 8);
      mma(sums[2 * n], x[0], x[1], x[2], x[3], w[0], w[1]);
      mma(sums[2 * n + 1], x[0], x[1], x[2], x[3], w[2], w[3]);
    }
  }
#pragma unroll
  for (int n = 0; n < kRows / 8; n++)
#pragma unroll
    for (int r = 0; r < 2; r++)
      *reinterpret_cast<float2*>(&s.sums[warp][g + 8 * r][n * 8 + 2 * t]) = make_float2(sums[n][2 * r], sums[n][2 * r + 1]);
  __syncthreads();
  for (int i = threadIdx.x; i < kTokens * kRows / 2; i += kThreads) {
    const int token = i / (kRows / 2), at = i % (kRows / 2) * 2;
    if (first + token >= a.num_tokens || s.counts[token] == 0) continue;
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
