// swiglu of a product of gate and up of which the adapters are deferred: lora/deferred_tiles.cuh.
//
//     out = bf16(silu(gate') * up'),  gate' = bf16(gate + B (A x)),  up' likewise
//
// Both are rounded as lora_expand_swiglu of lora.cu rounds them. A block has 32 values of up to 64 tokens, a warp 16
// tokens: its warps read the same rows of B.
#include "common/pdl.cuh"
#include "lora/deferred_tiles.cuh"

namespace {

template <int kMostRank>
__device__ __forceinline__ void run_gates(const bf16* gate_up, bf16* out, int width, const lora::DeferredDelta& delta) {
  launch_dependents();  // at once: the next product has its weights fetched while this waits
  const int first = blockIdx.x * lora::kDeferredHalf;
  lora::DeferredTiles<kMostRank, 2> tiles(delta, threadIdx.x / 32 * lora::kDeferredTokens, first, width + first);
  // Blocks that find no room next to the product, 40 of 304 of Qwen3-4B's, then have their rows nearby.
  const int other = first + (gridDim.x + 1) / 2 * lora::kDeferredHalf;
  if (other < width) lora::prefetch_halves(delta, other, width + other);
  wait_for_previous_kernel();
  float values[2][2][8];
  tiles.sum(gate_up, int64_t(width) * 2, 0, values);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    if (!tiles.is_there(i)) continue;
    float gated[8];
#pragma unroll
    for (int j = 0; j < 8; j++) gated[j] = silu(rounded(values[i][0][j])) * rounded(values[i][1][j]);
    store(out + int64_t(tiles.token(i)) * width + first + tiles.column(), pack(gated));
  }
}

}  // namespace

#define ADAPTED_SWIGLU(RANK)                                                                                       \
  extern "C" __global__ void __launch_bounds__(lora::kDeferredThreads, lora::kDeferredBlocks<RANK>)                \
      adapted_swiglu_##RANK(const bf16* gate_up, bf16* out, int width, const __grid_constant__ lora::DeferredDelta delta) { \
    run_gates<RANK>(gate_up, out, width, delta);                                                                   \
  }

ADAPTED_SWIGLU(16)
ADAPTED_SWIGLU(64)
