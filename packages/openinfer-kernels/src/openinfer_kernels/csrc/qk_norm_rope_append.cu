// From the projection of a step's tokens to what attention reads: Q and K are normed per head and rotated, Q is
// returned, K and V are written to their slots of the paged cache.
//
//     qkv [T, (H + 2 K) D]  ─►  q [T, H, D],  cache [blocks, layers, 2, K, B, D]
//
//     norm   n = bf16(w * bf16(x / sqrt(mean(x^2) + eps)))          over a head, Zhang and Sennrich 2019, eq. 4
//     rope   bf16(n_i cos - n_{i + D/2} sin), bf16(n_{i + D/2} cos + n_i sin)      Su et al. 2021, eq. 34, float32
//
// A slot is block * B + offset; a token with a negative slot is padding, whose K and V are written nowhere.
#include "overlap.cuh"
#include "vectors.cuh"

namespace {

struct Arguments {
  const bf16* qkv;
  const bf16* q_norm;
  const bf16* k_norm;
  const float* rope;         // [2, rope_positions, D / 2]
  const int* positions;      // [T]
  const int64_t* slots;      // [T]
  bf16* q;
  bf16* cache;               // this layer of block 0: [2, K, B, D]
  int64_t block_stride;      // values from one block of the cache to the next
  int num_heads, num_kv_heads, block_tokens, rope_positions;
  float eps;

  __device__ int all_heads() const { return num_heads + 2 * num_kv_heads; }
};

enum class Kind { kQuery, kKey, kValue };

__device__ __forceinline__ Kind kind_of(int head, const Arguments& a) {
  return head < a.num_heads ? Kind::kQuery : head < a.num_heads + a.num_kv_heads ? Kind::kKey : Kind::kValue;
}

// Where a head of a token goes; null where it goes nowhere.
__device__ __forceinline__ bf16* target_of(int token, int head, int head_dim, const Arguments& a) {
  if (head < a.num_heads) return a.q + (int64_t(token) * a.num_heads + head) * head_dim;
  const int64_t slot = a.slots[token];
  if (slot < 0) return nullptr;
  const int64_t block = slot / a.block_tokens;
  const int offset = int(slot - block * a.block_tokens);
  return a.cache + block * a.block_stride + (int64_t(head - a.num_heads) * a.block_tokens + offset) * head_dim;
}

// Head dimensions of 8 * kLanes: kLanes neighbouring threads hold a head, 8 values each; blocks (T, pieces of heads).
template <int kLanes>
__device__ void run_vectors(const Arguments& a) {
  constexpr int kHeadDim = 8 * kLanes;
  const int token = blockIdx.x, lane = threadIdx.x % kLanes;
  const int wanted = (blockIdx.y * blockDim.x + threadIdx.x) / kLanes;
  const int head = min(wanted, a.all_heads() - 1);  // all threads of a warp take part in its shuffles
  const Kind kind = kind_of(head, a);
  float weight[8], values[8], squares = 0;
  unpack(load<8>((kind == Kind::kQuery ? a.q_norm : a.k_norm) + lane * 8), weight);
  wait_for_previous_kernel();
  allow_next_kernel();
  const Vector<8> given = load<8>(a.qkv + (int64_t(token) * a.all_heads() + head) * kHeadDim + lane * 8);
  const float* cosines = a.rope + int64_t(a.positions[token]) * (kHeadDim / 2) + lane * 8 % (kHeadDim / 2);
  const float* sines = cosines + int64_t(a.rope_positions) * (kHeadDim / 2);
  unpack(given, values);
#pragma unroll
  for (int i = 0; i < 8; i++) squares += values[i] * values[i];
#pragma unroll
  for (int mask = 1; mask < kLanes; mask *= 2) squares += __shfl_xor_sync(~0u, squares, mask);
  const float scale = rsqrtf(squares / kHeadDim + a.eps);
#pragma unroll
  for (int i = 0; i < 8; i++) values[i] = rounded(weight[i] * rounded(values[i] * scale));
  Vector<8> other = pack(values);
  uint32_t* words = reinterpret_cast<uint32_t*>(&other.bits);
#pragma unroll
  for (int i = 0; i < 4; i++) words[i] = __shfl_xor_sync(~0u, words[i], kLanes / 2);
  float partners[8];
  unpack(other, partners);
  const float sign = lane < kLanes / 2 ? -1.0f : 1.0f;
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    const float4 c = *reinterpret_cast<const float4*>(cosines + i), s = *reinterpret_cast<const float4*>(sines + i);
    values[i] = values[i] * c.x + sign * partners[i] * s.x;
    values[i + 1] = values[i + 1] * c.y + sign * partners[i + 1] * s.y;
    values[i + 2] = values[i + 2] * c.z + sign * partners[i + 2] * s.z;
    values[i + 3] = values[i + 3] * c.w + sign * partners[i + 3] * s.w;
  }
  if (wanted != head) return;
  bf16* target = target_of(token, head, kHeadDim, a);
  if (target != nullptr) store(target + lane * 8, kind == Kind::kValue ? given : pack(values));
}

constexpr int kMaxPairs = 8;  // per thread: head dimensions up to 512

// Any even head dimension: a warp holds a head, its threads take turns at the pairs; blocks (T, heads).
__device__ void run_pairs(const Arguments& a, int head_dim) {
  const int token = blockIdx.x, head = blockIdx.y, half = head_dim / 2;
  const Kind kind = kind_of(head, a);
  wait_for_previous_kernel();
  allow_next_kernel();
  const bf16* given = a.qkv + (int64_t(token) * a.all_heads() + head) * head_dim;
  bf16* target = target_of(token, head, head_dim, a);
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
    const float x = rounded(__bfloat162float(weight[i]) * rounded(first[j] * scale));
    const float y = rounded(__bfloat162float(weight[i + half]) * rounded(second[j] * scale));
    target[i] = __float2bfloat16_rn(x * cosines[i] - y * sines[i]);
    target[i + half] = __float2bfloat16_rn(y * cosines[i] + x * sines[i]);
  }
}

}  // namespace

#define QK_NORM_ROPE_APPEND(HEAD_DIM)                                                              \
  extern "C" __global__ void qk_norm_rope_append_##HEAD_DIM(const __grid_constant__ Arguments a) { \
    run_vectors<HEAD_DIM / 8>(a);                                                                  \
  }

QK_NORM_ROPE_APPEND(32)
QK_NORM_ROPE_APPEND(64)
QK_NORM_ROPE_APPEND(128)
QK_NORM_ROPE_APPEND(256)

extern "C" __global__ void qk_norm_rope_append_pairs(const __grid_constant__ Arguments a, int head_dim) {
  run_pairs(a, head_dim);
}
