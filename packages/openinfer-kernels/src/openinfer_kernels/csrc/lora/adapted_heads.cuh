// qk_norm_rope_append of a product of which the adapters are deferred: lora/deferred_tiles.cuh. The pieces are Q, K and V.
//
// A head of 16 tokens is a warp's, or that of two or four warps, which then have neighbouring values of both halves of it:
// of a value and of the one that it is rotated with. Sums of squares are added in the order of attention's own kernel, so
// that tokens without an adapter have its bits.
#pragma once
#include "attention/qk_norm_rope_append.cuh"
#include "lora/deferred_tiles.cuh"

namespace {

constexpr int kWarps = lora::kDeferredThreads / 32;

// What the warps of a head tell each other: of both tokens of each lane, in halves.
using OfWarps = float[kWarps][2][2][lora::kDeferredTokens / 2];

// Sums over the threads and warps that have a head, of both tokens; all threads of the block.
template <int kWarpsOfHead>
__device__ __forceinline__ void sum_heads(float (&squares)[2][2], float (&sums)[2], OfWarps& told) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 2; i++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
      for (int mask = 1; mask < 4; mask *= 2) squares[i][half] += __shfl_xor_sync(~0u, squares[i][half], mask);
      if (kWarpsOfHead > 1 && lane % 4 == 0) told[warp][i][half][lane / 4] = squares[i][half];
    }
  if constexpr (kWarpsOfHead > 1) {
    __syncthreads();
#pragma unroll
    for (int mask = 1; mask < kWarpsOfHead; mask *= 2)
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          float other = told[warp ^ mask][i][half][lane / 4];
          if (mask > 1) other += told[warp ^ mask ^ 1][i][half][lane / 4];
          squares[i][half] += other;
        }
  }
#pragma unroll
  for (int i = 0; i < 2; i++) sums[i] = squares[i][0] + squares[i][1];
}

template <int kMostRank, int kHeadDim>
__device__ __forceinline__ void run_adapted(const Arguments& a, const lora::DeferredDelta& delta) {
  constexpr int kWarpsOfHead = kHeadDim / (2 * lora::kDeferredHalf), kHeads = kWarps / kWarpsOfHead;
  constexpr int kHalf = kHeadDim / 2;
  __shared__ OfWarps told;
  launch_dependents();
  const int warp = threadIdx.x / 32, all_heads = a.all_heads();
  // Warps beyond the last head compute what is stored nowhere.
  const int own_head = blockIdx.y * kHeads + warp / kWarpsOfHead, head = min(own_head, all_heads - 1);
  const Kind kind = kind_of(head, a);
  const int part = warp % kWarpsOfHead * lora::kDeferredHalf, first_row = head * kHeadDim + part;
  lora::DeferredTiles<kMostRank, 1> tiles(delta, blockIdx.x * lora::kDeferredTokens, first_row, first_row + kHalf);
  const int column = part + tiles.column();  // of the head's first half
  const bf16* weight = (kind == Kind::kQuery ? a.q_norm : a.k_norm) + column;
  const Vector<8> weights[2] = {load<8>(weight), load<8>(weight + kHalf)};
  wait_for_previous_kernel();
  int positions[2];
  int64_t kv_slots[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int token = min(tiles.token(i), delta.num_tokens - 1);
    positions[i] = a.positions[token], kv_slots[i] = a.kv_slots[token];
  }
  float values[2][2][8];
  tiles.sum(a.qkv, int64_t(all_heads) * kHeadDim, int(kind), values);
  float squares[2][2] = {}, sums[2];
#pragma unroll
  for (int i = 0; i < 2; i++)
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int j = 0; j < 8; j++) squares[i][half] += values[i][half][j] * values[i][half][j];
  sum_heads<kWarpsOfHead>(squares, sums, told);
  if (kind != Kind::kValue) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float* table = a.rope + int64_t(positions[i]) * kHalf + column;
      float cosines[8], sines[8], factors[2][8];
      load_floats(table, 1.0f, cosines);
      load_floats(table + int64_t(a.rope_positions) * kHalf, 1.0f, sines);
      const float scale = rsqrtf(sums[i] / kHeadDim + a.eps);
#pragma unroll
      for (int half = 0; half < 2; half++) unpack(weights[half], factors[half]);
#pragma unroll
      for (int j = 0; j < 8; j++) {
        const float low = values[i][0][j] * (scale * factors[0][j]), high = values[i][1][j] * (scale * factors[1][j]);
        // As attention's own kernel rounds: left to the compiler the other product was part of the fma here.
        values[i][0][j] = fmaf(low, cosines[j], -sines[j] * high);
        values[i][1][j] = fmaf(high, cosines[j], sines[j] * low);
      }
    }
  }
#ifdef APPEND_FP8
  __shared__ uint32_t sizes[kWarps][2][lora::kDeferredTokens / 2];
  uint32_t largest[2] = {};
#pragma unroll
  for (int i = 0; i < 2; i++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      if (kind == Kind::kValue) unpack(pack(values[i][half]), values[i][half]);
      largest[i] = max(largest[i], attention::largest_size(values[i][half]));
    }
#pragma unroll
    for (int mask = 1; mask < 4; mask *= 2) largest[i] = max(largest[i], __shfl_xor_sync(~0u, largest[i], mask));
    if constexpr (kWarpsOfHead > 1) {
      if (threadIdx.x % 4 == 0) sizes[warp][i][threadIdx.x % 32 / 4] = largest[i];
    }
  }
  if constexpr (kWarpsOfHead > 1) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int j = 0; j < kWarpsOfHead; j++)
        largest[i] = max(largest[i], sizes[warp / kWarpsOfHead * kWarpsOfHead + j][i][threadIdx.x % 32 / 4]);
  }
#endif
#pragma unroll
  for (int i = 0; i < 2; i++) {
    if (!tiles.is_there(i) || own_head >= all_heads) continue;
    const Targets targets(tiles.token(i), kv_slots[i], kHeadDim, a);
#ifdef APPEND_FP8
    if (kind != Kind::kQuery) {
#pragma unroll
      for (int half = 0; half < 2; half++)
        attention::store_fp8<kHeadDim>(kv_slots[i], head - a.num_heads, a, values[i][half], column + half * kHalf,
                                       largest[i]);
      continue;
    }
#endif
    bf16* target = targets.of(head, kHeadDim, a);
    if (target == nullptr) continue;
    store(target + column, pack(values[i][0]));
    store(target + column + kHalf, pack(values[i][1]));
  }
}

}  // namespace

#define ADAPTED_HEADS(NAME, RANK, HEAD_DIM)                                                             \
  extern "C" __global__ void __launch_bounds__(lora::kDeferredThreads, lora::kDeferredBlocks<RANK>)     \
      NAME##_##RANK##_##HEAD_DIM(const __grid_constant__ Arguments a,                                   \
                                 const __grid_constant__ lora::DeferredDelta delta) {                   \
    run_adapted<RANK, HEAD_DIM>(a, delta);                                                              \
  }
#define ADAPTED_HEADS_ANY(NAME) \
  ADAPTED_HEADS(NAME, 16, 64)   \
  ADAPTED_HEADS(NAME, 16, 128)  \
  ADAPTED_HEADS(NAME, 16, 256)  \
  ADAPTED_HEADS(NAME, 64, 64)   \
  ADAPTED_HEADS(NAME, 64, 128)  \
  ADAPTED_HEADS(NAME, 64, 256)
