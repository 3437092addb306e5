// qk_norm_rope_append of a product of which the adapters are deferred: lora/deferred_delta.cuh. The pieces are Q, K and V.
#pragma once
#include "attention/qk_norm_rope_append.cuh"
#include "lora/deferred_delta.cuh"

namespace {

struct HeadsDelta {
  static constexpr bool kAdds = true;
  lora::DeferredRows rows;
  lora::DeferredShrunk& shrunk;

  __device__ __forceinline__ void add(float (&values)[8], Kind kind) { rows.add(values, int(kind), shrunk); }
};

// Threads beyond the last head compute what is stored nowhere.
template <int kHeadDim>
__device__ __forceinline__ void run_adapted(const Arguments& a, const lora::DeferredDelta& delta,
                                            lora::DeferredShrunk& shrunk) {
  constexpr int kLanes = kHeadDim / 8;
  const int head = min(int(blockIdx.y * (blockDim.x / kLanes) + threadIdx.x / kLanes), a.all_heads() - 1);
  const int row = head * kHeadDim + threadIdx.x % kLanes * 8;
  run_vectors<kLanes, 1, Norm::kPlain>(a, HeadsDelta{lora::DeferredRows(delta, blockIdx.x, row), shrunk});
}

}  // namespace

#define ADAPTED_HEADS(NAME, HEAD_DIM)                                                                  \
  extern "C" __global__ void __launch_bounds__(256) NAME##_##HEAD_DIM(                                 \
      const __grid_constant__ Arguments a, const __grid_constant__ lora::DeferredDelta delta) {        \
    __shared__ lora::DeferredShrunk shrunk;                                                            \
    run_adapted<HEAD_DIM>(a, delta, shrunk);                                                           \
  }
#define ADAPTED_HEADS_ANY(NAME) \
  ADAPTED_HEADS(NAME, 64)       \
  ADAPTED_HEADS(NAME, 128)      \
  ADAPTED_HEADS(NAME, 256)
