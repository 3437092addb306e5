// The end of an item of attention: a block adds its warps' sums. What is all of an item is written; else it is a part in
// the workspace (unnormalised sum, maximum, sum of exponentials per head), and the block that arrives last adds all parts
// in their order, so that results do not depend on timing.
#pragma once
#include "attention/attention_turn.cuh"

namespace attention {

constexpr int kPartsAtOnce = 8;         // parts in flight while a block adds them

template <int D, int kTiles>
struct Shared {
  static constexpr int kHeads = Shape<D, kTiles>::kHeads;
  float tops[kWarps][kHeads], weights[kWarps][kHeads];
  int counts[kWarps];
  int is_last;
  alignas(16) float sums[kWarps * kHeads * (D + kPadding)];  // per warp; then what `add_parts` shares
};

__device__ __forceinline__ float4 scaled(float4 v, float f) { return make_float4(v.x * f, v.y * f, v.z * f, v.w * f); }
__device__ __forceinline__ void add(float4& to, float4 v, float f) {
  to.x += v.x * f;
  to.y += v.y * f;
  to.z += v.z * f;
  to.w += v.w * f;
}
__device__ __forceinline__ void store(bf16* to, float4 v) {
  *reinterpret_cast<uint2*>(to) = make_uint2(packed(v.x, v.y), packed(v.z, v.w));
}

// A part in the workspace: sums [heads, D], then maxima [heads], then exponentials [heads].
template <int D, int kTiles>
constexpr int kPartSize = Shape<D, kTiles>::kHeads * (D + 2);

// Adds the warps' sums: to `out` where they are all of the item, else to `part`.
template <int D, int kTiles>
__device__ void add_warps(const Shared<D, kTiles>& s, bf16* out, float* part, int heads) {
  constexpr int kHeads = Shape<D, kTiles>::kHeads;
  for (int i = threadIdx.x; i < heads * (D / 4); i += kThreads) {
    const int head = i / (D / 4), at = i % (D / 4) * 4;
    float highest = s.tops[0][head];
#pragma unroll
    for (int w = 1; w < kWarps; w++) highest = fmaxf(highest, s.tops[w][head]);
    float4 sum = make_float4(0, 0, 0, 0);
    float weight = 0;
#pragma unroll
    for (int w = 0; w < kWarps; w++) {
      const float factor = exp2_fast(s.tops[w][head] - highest);
      add(sum, *reinterpret_cast<const float4*>(s.sums + (w * kHeads + head) * (D + kPadding) + at), factor);
      weight += s.weights[w][head] * factor;
    }
    if (part == nullptr) {
      store(out + head * D + at, scaled(sum, 1.0f / weight));
      continue;
    }
    __stcg(reinterpret_cast<float4*>(part + head * D + at), sum);
    if (at == 0) {
      __stcg(part + kHeads * D + head, highest);
      __stcg(part + kHeads * (D + 1) + head, weight);
    }
  }
}

// A thread's share of four values of a head: parts added so far, under their maximum.
struct Running {
  float4 sum = make_float4(0, 0, 0, 0);
  float top = kMinusInfinity, weight = 0;

  __device__ __forceinline__ void raise(float highest) {
    const float factor = highest == top ? 1.0f : exp2_fast(top - highest);
    sum = scaled(sum, factor);
    weight *= factor;
    top = highest;
  }
};

// Adds the parts of an item in the order of workers. The first worker's part lies in its second slot, as it begins the
// item; the others' in their first. Where threads are many, several share four values, each with every so many parts.
template <int D, int kTiles>
__device__ __noinline__ void add_parts(Shared<D, kTiles>& s, const float* parts, int first, int count, bf16* out, int heads) {
  constexpr int kHeads = Shape<D, kTiles>::kHeads;
  const int fours = heads * (D / 4), ways = max(1, kThreads / fours), way = ways == 1 ? 0 : threadIdx.x / fours;
  const float* begin = parts + int64_t(first) * 2 * kPartSize<D, kTiles>;
  Running* shared = reinterpret_cast<Running*>(s.sums);  // [ways, fours]
  for (int i = threadIdx.x - way * fours; i < fours && way < ways; i += kThreads) {
    const int head = i / (D / 4), at = i % (D / 4) * 4;
    Running all;
    for (int c = way; c < count; c += ways * kPartsAtOnce) {
      float4 sums[kPartsAtOnce];
      float tops[kPartsAtOnce], weights[kPartsAtOnce];
      float highest = all.top;
#pragma unroll
      for (int j = 0; j < kPartsAtOnce; j++) {
        const int index = min(c + j * ways, count - 1);
        const float* part = begin + (int64_t(index) * 2 + (index == 0)) * kPartSize<D, kTiles>;
        sums[j] = __ldcg(reinterpret_cast<const float4*>(part + head * D + at));
        tops[j] = __ldcg(part + kHeads * D + head);
        weights[j] = __ldcg(part + kHeads * (D + 1) + head);
      }
#pragma unroll
      for (int j = 0; j < kPartsAtOnce; j++) highest = fmaxf(highest, tops[j]);
      all.raise(highest);
#pragma unroll
      for (int j = 0; j < kPartsAtOnce; j++) {
        if (c + j * ways >= count) continue;
        const float factor = exp2_fast(tops[j] - highest);
        add(all.sum, sums[j], factor);
        all.weight += weights[j] * factor;
      }
    }
    if (ways == 1) store(out + head * D + at, scaled(all.sum, 1.0f / all.weight));
    else shared[way * fours + i] = all;
  }
  if (ways > 1) {
    __syncthreads();
    if (int(threadIdx.x) < fours) {
      Running all = shared[threadIdx.x];
      for (int w = 1; w < ways; w++) {
        const Running other = shared[w * fours + threadIdx.x];
        const float highest = fmaxf(all.top, other.top);
        all.raise(highest);
        const float factor = other.top == kMinusInfinity ? 0.0f : exp2_fast(other.top - highest);
        add(all.sum, other.sum, factor);
        all.weight += other.weight * factor;
      }
      store(out + threadIdx.x * 4, scaled(all.sum, 1.0f / all.weight));
    }
  }
  __syncthreads();
}

// Counts an arrival, with all that the block wrote before; who arrives last sees what the others wrote.
__device__ __forceinline__ int arrive(int* arrivals) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(arrivals) : "memory");
  return before;
}

// Writes what this block has of an item, and the whole item where it is the last to arrive. For all threads of a block.
template <int D, int kTiles>
__device__ __forceinline__ void finish_item(Shared<D, kTiles>& s, Warp<D, kTiles>& w, const Arguments& a,
                                            const Division& division, const Place& here, const Item& item, int unit) {
  constexpr int kHeads = Shape<D, kTiles>::kHeads;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const bool is_whole = here.unit + 1 == here.units && item.begin == 0;
  float* part = is_whole ? nullptr : a.parts + (int64_t(blockIdx.x) * 2 + (item.begin == 0)) * kPartSize<D, kTiles>;
  bf16* out = a.out + item.query * D;
  w.leave(s.sums + warp * kHeads * (D + kPadding), s.tops[warp], s.weights[warp], item.heads, g, t);
  __syncthreads();
  add_warps<D, kTiles>(s, out, part, item.heads);
  __syncthreads();
  if (is_whole) return;
  const int item_begin = unit - here.unit;
  const int first_worker = division.worker_of(item_begin);
  const int count = division.worker_of(item_begin + here.units - 1) - first_worker + 1;
  if (threadIdx.x == 0) {
    int* arrivals = a.arrivals + here.row * item.heads_per_row + here.head;
    s.is_last = arrive(arrivals) == count - 1;
    if (s.is_last) *arrivals = 0;
  }
  __syncthreads();
  if (s.is_last) add_parts<D, kTiles>(s, a.parts, first_worker, count, out, item.heads);
}

}  // namespace attention
