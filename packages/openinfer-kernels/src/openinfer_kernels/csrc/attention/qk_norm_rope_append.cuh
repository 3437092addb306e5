// From the projection of a step's tokens to what attention reads: Q and K are normed per head and rotated, Q is
// returned, K and V are written to their KV slots of the paged cache.
//
//     qkv [T, (H + 2 K) D]  ─►  q [T, H, D],  cache [blocks, layers, 2, K, B, D]
//
//     norm   n = w * x / sqrt(mean(x^2) + eps)          over a head, Zhang and Sennrich 2019, eq. 4; zero-centred: 1 + w
//     rope   bf16(n_i cos - n_{i + D/2} sin), bf16(n_{i + D/2} cos + n_i sin)      Su et al. 2021, eq. 34
//
// All of it is float32, rounded once. rope_append does the same without the norm.
//
// A KV slot is block * B + offset; a token with a negative KV slot is padding, whose K and V are written nowhere.
#pragma once
#include "common/pdl.cuh"
#include "common/vectors.cuh"

namespace {

struct Arguments {
  const bf16* qkv;
  const bf16* q_norm;
  const bf16* k_norm;
  const float* rope;         // [2, rope_positions, D / 2]
  const int* positions;      // [T]
  const int64_t* kv_slots;   // [T]
  bf16* q;
  bf16* cache;               // this layer of block 0: [2, K, B, D]
  int64_t block_stride;      // values from one block of the cache to the next
  int num_heads, num_kv_heads, block_tokens, rope_positions;
  float eps;

  __device__ int all_heads() const { return num_heads + 2 * num_kv_heads; }
};

enum class Kind { kQuery, kKey, kValue };

enum class Norm { kNone, kPlain, kZeroCentred };

__device__ __forceinline__ Kind kind_of(int head, const Arguments& a) {
  return head < a.num_heads ? Kind::kQuery : head < a.num_heads + a.num_kv_heads ? Kind::kKey : Kind::kValue;
}

// Where the heads of one token go.
struct Targets {
  bf16* q;      // its first query head
  bf16* cache;  // its first key head; null for padding
  int64_t cache_stride;

  // A cache has fewer than 2^32 KV slots: the short division is many times faster.
  __device__ Targets(int token, int64_t kv_slot, int head_dim, const Arguments& a)
      : q(a.q + int64_t(token) * a.num_heads * head_dim),
        cache(nullptr),
        cache_stride(int64_t(a.block_tokens) * head_dim) {
    const uint32_t block = uint32_t(kv_slot) / uint32_t(a.block_tokens);
    const uint32_t offset = uint32_t(kv_slot) - block * a.block_tokens;
    if (kv_slot >= 0) cache = a.cache + block * a.block_stride + int64_t(offset) * head_dim;
  }

  // Null where the head goes nowhere.
  __device__ bf16* of(int head, int head_dim, const Arguments& a) const {
    if (head < a.num_heads) return q + head * head_dim;
    return cache == nullptr ? nullptr : cache + (head - a.num_heads) * cache_stride;
  }
};

// What a norm's weight multiplies by.
template <Norm kNorm>
__device__ __forceinline__ float factor_of(float weight) {
  return kNorm == Norm::kZeroCentred ? 1.0f + weight : weight;
}

// RMSNorm of the part of a head that this thread holds; kLanes neighbouring threads hold the head.
template <int kLanes, Norm kNorm>
__device__ __forceinline__ void norm(float (&values)[8], Vector<8> weight, float eps) {
  float factors[8], squares = 0;
  unpack(weight, factors);
#pragma unroll
  for (int i = 0; i < 8; i++) squares += values[i] * values[i];
#pragma unroll
  for (int mask = 1; mask < kLanes; mask *= 2) squares += __shfl_xor_sync(~0u, squares, mask);
  const float scale = rsqrtf(squares / (8 * kLanes) + eps);
#pragma unroll
  for (int i = 0; i < 8; i++) values[i] *= scale * factor_of<kNorm>(factors[i]);
}

// The partner of each value is half a head away, in another thread; its sine has the sign of this thread's half.
template <int kLanes>
__device__ __forceinline__ void rotate(float (&values)[8], const float (&cosines)[8], const float (&sines)[8]) {
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float partner = __shfl_xor_sync(~0u, values[i], kLanes / 2);
    values[i] = fmaf(values[i], cosines[i], partner * sines[i]);  // lora/adapted_heads.cuh has its bits
  }
}

template <int kCount>
__device__ __forceinline__ void load_floats(const float* from, float factor, float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(from + i);
    values[i] = factor * four.x;
    values[i + 1] = factor * four.y;
    values[i + 2] = factor * four.z;
    values[i + 3] = factor * four.w;
  }
}

// Head dimensions of 8 * kLanes: kLanes neighbouring threads hold a head, 8 values each, and then the next of kHeads
// heads, all of whose loads are under way at once. Blocks are (T, chunks of a token's heads).
template <int kLanes, int kHeads, Norm kNorm>
__device__ void run_vectors(const Arguments& a) {
  constexpr int kHeadDim = 8 * kLanes;
  const int token = blockIdx.x, lane = threadIdx.x % kLanes, all_heads = a.all_heads();
  const int at_once = blockDim.x / kLanes, first = blockIdx.y * at_once * kHeads + threadIdx.x / kLanes;
  Vector<8> q_weight, k_weight;
  if constexpr (kNorm != Norm::kNone) {
    q_weight = load<8>(a.q_norm + lane * 8);
    k_weight = load<8>(a.k_norm + lane * 8);
  }
  // The trigger comes first: attention reads the batch and older tokens before this kernel has ended, the product after
  // it its weights, which saves 2 us a layer up to 16 rows.
  launch_dependents();
  wait_for_previous_kernel();
  const int position = a.positions[token];
  const int64_t kv_slot = a.kv_slots[token];
  const bf16* heads = a.qkv + int64_t(token) * all_heads * kHeadDim + lane * 8;
  Vector<8> given[kHeads];
#pragma unroll
  for (int i = 0; i < kHeads; i++) given[i] = load<8>(heads + min(first + i * at_once, all_heads - 1) * kHeadDim);
  const float* table = a.rope + int64_t(position) * (kHeadDim / 2) + lane * 8 % (kHeadDim / 2);
  float cosines[8], sines[8];
  load_floats(table, 1.0f, cosines);
  load_floats(table + int64_t(a.rope_positions) * (kHeadDim / 2), lane < kLanes / 2 ? -1.0f : 1.0f, sines);
  const Targets targets(token, kv_slot, kHeadDim, a);
#pragma unroll
  for (int i = 0; i < kHeads; i++) {  // also beyond the last head, as a warp shuffles together
    const int head = first + i * at_once;
    const Kind kind = kind_of(head, a);
    float values[8];
    unpack(given[i], values);
    if constexpr (kNorm != Norm::kNone) norm<kLanes, kNorm>(values, kind == Kind::kQuery ? q_weight : k_weight, a.eps);
    rotate<kLanes>(values, cosines, sines);
#ifdef APPEND_FP8
    if (kind == Kind::kValue) unpack(given[i], values);
    attention::append_fp8<kLanes>(head < all_heads ? kv_slot : -1, head - a.num_heads, a, values, lane);
    if (kind == Kind::kQuery) store(targets.q + head * kHeadDim + lane * 8, pack(values));
#else
    bf16* target = head < all_heads ? targets.of(head, kHeadDim, a) : nullptr;
    if (target != nullptr) store(target + lane * 8, kind == Kind::kValue ? given[i] : pack(values));
#endif
  }
}

constexpr int kMaxPairs = 8;  // per thread: head dimensions up to 512

// Any even head dimension: a warp holds a head, every 32nd pair is of one thread; blocks (T, heads).
template <Norm kNorm>
__device__ void run_pairs(const Arguments& a, int head_dim) {
  const int token = blockIdx.x, head = blockIdx.y, half = head_dim / 2;
  const Kind kind = kind_of(head, a);
  launch_dependents();
  wait_for_previous_kernel();
  const bf16* given = a.qkv + (int64_t(token) * a.all_heads() + head) * head_dim;
  bf16* target = Targets(token, a.kv_slots[token], head_dim, a).of(head, head_dim, a);
  if (target == nullptr) return;
  if (kind == Kind::kValue) {
    for (int i = threadIdx.x; i < head_dim; i += 32) target[i] = given[i];
    return;
  }
  const bf16* weight = kind == Kind::kQuery ? a.q_norm : a.k_norm;
  const float* cosines = a.rope + int64_t(a.positions[token]) * half;
  const float* sines = cosines + int64_t(a.rope_positions) * half;
  float first[kMaxPairs], second[kMaxPairs], squares = 0;
#pragma unroll
  for (int j = 0; j < kMaxPairs; j++) {
    const int i = threadIdx.x + 32 * j;
    first[j] = i < half ? __bfloat162float(given[i]) : 0.0f;
    second[j] = i < half ? __bfloat162float(given[i + half]) : 0.0f;
    squares += first[j] * first[j] + second[j] * second[j];
  }
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) squares += __shfl_xor_sync(~0u, squares, mask);
  const float scale = rsqrtf(squares / head_dim + a.eps);
#pragma unroll
  for (int j = 0; j < kMaxPairs; j++) {
    const int i = threadIdx.x + 32 * j;
    if (i >= half) break;
    float x = first[j], y = second[j];
    if constexpr (kNorm != Norm::kNone) {
      x *= scale * factor_of<kNorm>(__bfloat162float(weight[i]));
      y *= scale * factor_of<kNorm>(__bfloat162float(weight[i + half]));
    }
    target[i] = __float2bfloat16_rn(x * cosines[i] - y * sines[i]);
    target[i + half] = __float2bfloat16_rn(y * cosines[i] + x * sines[i]);
  }
}

}  // namespace

#define APPEND(NAME, HEAD_DIM, NORM)                                                          \
  extern "C" __global__ void NAME##_few_##HEAD_DIM(const __grid_constant__ Arguments a) {     \
    run_vectors<HEAD_DIM / 8, 1, NORM>(a);                                                    \
  }                                                                                           \
  extern "C" __global__ void NAME##_many_##HEAD_DIM(const __grid_constant__ Arguments a) {    \
    run_vectors<HEAD_DIM / 8, 3, NORM>(a);                                                    \
  }
#define APPEND_ANY(NAME, NORM)                                                                \
  APPEND(NAME, 32, NORM)                                                                      \
  APPEND(NAME, 64, NORM)                                                                      \
  APPEND(NAME, 128, NORM)                                                                     \
  APPEND(NAME, 256, NORM)                                                                     \
  extern "C" __global__ void NAME##_pairs(const __grid_constant__ Arguments a, int head_dim) {\
    run_pairs<NORM>(a, head_dim);                                                             \
  }
