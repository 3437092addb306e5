// The end of an item of split-KV attention: a block adds its warps' sums. What is all of an item is written; else it is
// a partial in the workspace (unnormalised sum, maximum, sum of exponentials per head), and the block that arrives last
// reduces all partials in their order, so that results do not depend on timing.
#pragma once
#include "attention/attention_kv_tile.cuh"

namespace attention {

constexpr int kPartialsAtOnce = 8;  // partials in flight while a block reduces them

template <int D, int kTiles>
struct Shared {
  static constexpr int kHeads = Shape<D, kTiles>::kHeads;
  float tops[kWarps][kHeads], weights[kWarps][kHeads];
  int counts[kWarps];
  int is_last;
  alignas(16) float sums[kWarps * kHeads * (D + kPadding)];  // per warp; then what `reduce_partials` shares
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

// A partial in the workspace: sums [heads, D], then maxima [heads], then exponentials [heads].
template <int D, int kTiles>
constexpr int kPartialSize = Shape<D, kTiles>::kHeads * (D + 2);

// Adds the warps' sums: to `out` where they are all of the item, else to `partial`. The sinks of the heads from
// `first_head` on are one more logit; -1: there are none.
template <int D, int kTiles, class V>
__device__ void add_warps(const Shared<D, kTiles>& s, bf16* out, float* partial, int heads, const V& variant,
                          int first_head) {
  constexpr int kHeads = Shape<D, kTiles>::kHeads;
  for (int i = threadIdx.x; i < heads * (D / 4); i += kThreads) {
    const int head = i / (D / 4), at = i % (D / 4) * 4;
    float highest = s.tops[0][head];
#pragma unroll
    for (int w = 1; w < kWarps; w++) highest = fmaxf(highest, s.tops[w][head]);
    float4 sum = make_float4(0, 0, 0, 0);
    float weight = 0;
    if constexpr (V::kIsVariant) {
      const float sink = first_head >= 0 ? variant.sink_of(first_head + head) : kMinusInfinity;
      highest = fmaxf(highest, sink);
      weight = exp2_fast(sink - highest);
    }
#pragma unroll
    for (int w = 0; w < kWarps; w++) {
      const float factor = exp2_fast(s.tops[w][head] - highest);
      add(sum, *reinterpret_cast<const float4*>(s.sums + (w * kHeads + head) * (D + kPadding) + at), factor);
      weight += s.weights[w][head] * factor;
    }
    if (partial == nullptr) {
      store(out + head * D + at, scaled(sum, 1.0f / weight));
      continue;
    }
    // Past the first-level cache: a block on another multiprocessor reads it.
    __stcg(reinterpret_cast<float4*>(partial + head * D + at), sum);
    if (at == 0) {
      __stcg(partial + kHeads * D + head, highest);
      __stcg(partial + kHeads * (D + 1) + head, weight);
    }
  }
}

// A thread's share of four values of a head: partials added so far, under their maximum.
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

// Reduces the partials of an item in the order of workers. The first worker's lies in the second place of its
// workspace, as it begins the item; the others' in their first. Where threads are many, several share four values, each
// with every `ways`-th partial.
template <int D, int kTiles>
__device__ __noinline__ void reduce_partials(Shared<D, kTiles>& s, const float* partials, int first, int count,
                                             bf16* out, int heads) {
  constexpr int kHeads = Shape<D, kTiles>::kHeads;
  const int fours = heads * (D / 4), ways = max(1, kThreads / fours), way = ways == 1 ? 0 : threadIdx.x / fours;
  const float* begin = partials + int64_t(first) * 2 * kPartialSize<D, kTiles>;
  Running* shared = reinterpret_cast<Running*>(s.sums);  // [ways, fours]
  for (int i = threadIdx.x - way * fours; i < fours && way < ways; i += kThreads) {
    const int head = i / (D / 4), at = i % (D / 4) * 4;
    Running all;
    for (int c = way; c < count; c += ways * kPartialsAtOnce) {
      float4 sums[kPartialsAtOnce];
      float tops[kPartialsAtOnce], weights[kPartialsAtOnce];
      float highest = all.top;
#pragma unroll
      for (int j = 0; j < kPartialsAtOnce; j++) {
        const int index = min(c + j * ways, count - 1);
        const float* partial = begin + (int64_t(index) * 2 + (index == 0)) * kPartialSize<D, kTiles>;
        sums[j] = __ldcg(reinterpret_cast<const float4*>(partial + head * D + at));
        tops[j] = __ldcg(partial + kHeads * D + head);
        weights[j] = __ldcg(partial + kHeads * (D + 1) + head);
      }
#pragma unroll
      for (int j = 0; j < kPartialsAtOnce; j++) highest = fmaxf(highest, tops[j]);
      all.raise(highest);
#pragma unroll
      for (int j = 0; j < kPartialsAtOnce; j++) {
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

// Writes what this block has of an item, and the whole item where it is the last to arrive. For all threads of a block.
template <int D, int kTiles, class V>
__device__ __forceinline__ void finish_item(Shared<D, kTiles>& s, Warp<D, kTiles>& w, const Arguments<V>& a,
                                            const Partition& partition, const WorkTile<V>& here, const Item<V>& item,
                                            int work_tile) {
  constexpr int kHeads = Shape<D, kTiles>::kHeads;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const bool is_whole = here.index + 1 == here.count && item.begin == 0;
  float* partial =
      is_whole ? nullptr : a.partials + (int64_t(blockIdx.x) * 2 + (item.begin == 0)) * kPartialSize<D, kTiles>;
  bf16* out = a.out + item.query * D;
  w.leave(s.sums + warp * kHeads * (D + kPadding), s.tops[warp], s.weights[warp], item.heads, g, t);
  __syncthreads();
  if constexpr (V::kIsVariant) {
    const int tiles = item.heads_per_row / a.cache.num_heads;
    const int first_head = here.head / tiles * a.group + here.head % tiles * kHeads;
    add_warps<D, kTiles, V>(s, out, partial, item.heads, a, item.begin == 0 ? first_head : -1);
  } else {
    add_warps<D, kTiles, V>(s, out, partial, item.heads, a, -1);
  }
  __syncthreads();
  if (is_whole) return;
  const int item_begin = work_tile - here.index;
  const int first_worker = partition.worker_of(item_begin);
  const int count = partition.worker_of(item_begin + here.count - 1) - first_worker + 1;
  if (threadIdx.x == 0) {
    int* arrivals = a.arrivals + here.row * item.heads_per_row + here.head;
    s.is_last = arrive(arrivals) == count - 1;
    if (s.is_last) *arrivals = 0;  // for the next launch, which may be the replay of a graph
  }
  __syncthreads();
  if (s.is_last) reduce_partials<D, kTiles>(s, a.partials, first_worker, count, out, item.heads);
}

}  // namespace attention
