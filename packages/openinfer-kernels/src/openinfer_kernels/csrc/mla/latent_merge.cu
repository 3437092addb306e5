// Adds the partials of items that several workers had: mixed latents of one head of one token per block. Four values
// per thread; where tokens are few, 128 threads have every so-many-th partial.
//
// A partial is an unnormalised sum under its own maximum, so partials are added as in Milakov and Gimelshein 2018,
// "Online normalizer calculation for softmax", always in the same order: results do not depend on timing.
#include "common/pdl.cuh"
#include "mla/latent.cuh"

using namespace latent;
using attention::exp2_fast;
using attention::kMinusInfinity;
using attention::packed;

namespace {

constexpr int kFours = kLatent / 4;
constexpr int kMostWays = 8;
constexpr int kPartialsAtOnce = 4;

struct Arguments {
  const float* partials;  // [workers, 2, kPartial]
  const Item* items;   // [T, head tiles]
  bf16* whole;         // [T, H, 512]
  int num_heads;
};

// A thread's share of what was added so far, under its maximum.
struct Running {
  float4 sum = make_float4(0, 0, 0, 0);
  float top = kMinusInfinity, total = 0;

  // How much something under the maximum `other` counts here; a partial may have seen no key at all.
  __device__ __forceinline__ float share(float other) const { return other == top ? 1.0f : exp2_fast(other - top); }
  __device__ __forceinline__ void raise(float highest) {
    const float factor = highest == top ? 1.0f : exp2_fast(top - highest);
    sum.x *= factor, sum.y *= factor, sum.z *= factor, sum.w *= factor;
    total *= factor;
    top = highest;
  }
  __device__ __forceinline__ void add(const float4& values, float factor, float more) {
    sum.x += values.x * factor, sum.y += values.y * factor, sum.z += values.z * factor, sum.w += values.w * factor;
    total += more * factor;
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kMostWays * kFours) latent_merge(Arguments a) {
  __shared__ Running shared[(kMostWays - 1) * kFours];
  const int head = blockIdx.x, token = blockIdx.y, four = threadIdx.x % kFours;
  const int way = threadIdx.x / kFours, ways = blockDim.x / kFours, tiles = (a.num_heads + kHeads - 1) / kHeads;
  launch_dependents();
  wait_for_previous_kernel();
  const Item item = a.items[token * tiles + head / kHeads];
  if (item.count <= 1) return;
  // The first worker's partial lies in the second place of its workspace, as it begins the item; the others' in their
  // first.
  const float* begin = a.partials + int64_t(item.first_worker) * 2 * kPartial;
  Running all;
  for (int c = way; c < item.count; c += ways * kPartialsAtOnce) {
    float4 values[kPartialsAtOnce];
    float tops[kPartialsAtOnce], totals[kPartialsAtOnce], highest = all.top;
#pragma unroll
    for (int j = 0; j < kPartialsAtOnce; j++) {
      const int index = min(c + j * ways, item.count - 1);
      const float* partial = begin + (int64_t(index) * 2 + (index == 0)) * kPartial;
      values[j] = __ldcg(reinterpret_cast<const float4*>(partial + head % kHeads * kLatent) + four);
      tops[j] = __ldcg(partial + kHeads * kLatent + head % kHeads);
      totals[j] = __ldcg(partial + kHeads * (kLatent + 1) + head % kHeads);
    }
#pragma unroll
    for (int j = 0; j < kPartialsAtOnce; j++) highest = fmaxf(highest, tops[j]);
    all.raise(highest);
#pragma unroll
    for (int j = 0; j < kPartialsAtOnce; j++)
      if (c + j * ways < item.count) all.add(values[j], all.share(tops[j]), totals[j]);
  }
  if (way > 0) shared[(way - 1) * kFours + four] = all;
  if (ways > 1) __syncthreads();
  if (way > 0) return;
  for (int w = 1; w < min(ways, item.count); w++) {
    const Running other = shared[(w - 1) * kFours + four];
    all.raise(fmaxf(all.top, other.top));
    all.add(other.sum, all.share(other.top), other.total);
  }
  const float inverse = 1.0f / all.total;
  *reinterpret_cast<uint2*>(a.whole + (int64_t(token) * a.num_heads + head) * kLatent + four * 4) =
      make_uint2(packed(all.sum.x * inverse, all.sum.y * inverse), packed(all.sum.z * inverse, all.sum.w * inverse));
}
