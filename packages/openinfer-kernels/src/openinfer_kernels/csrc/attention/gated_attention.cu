// What gated attention does around the attention itself: split the projection, norm and rotate, gate the output.
//
//     projected [T, (2 H + 2 K) D]  ─►  q [T, H, D],  cache [blocks, layers, 2, K, B, D]
//     attended [T, H D], gates of projected  ─►  bf16(attended * sigmoid(gate))
//
// Per query head the projection has D query values, then D gates; key heads and value heads follow. Norms are
// zero-centred, n = (1 + w) x / sqrt(mean(x^2) + eps). The first r dimensions rotate in pairs (i, i + r/2) (Black et
// al. 2022, "GPT-NeoX-20B", section 2.1). All of it is float32 and rounded once. A token with a negative KV slot is
// padding: its K and V go nowhere.
#include "common/pdl.cuh"
#include "common/vectors.cuh"

namespace {

struct Arguments {
  const bf16* projected;
  const bf16* q_norm;
  const bf16* k_norm;
  const float* rope;         // [2, rope_positions, r / 2]
  const int* positions;      // [T]
  const int64_t* kv_slots;   // [T]
  bf16* q;
  bf16* cache;               // this layer of block 0: [2, K, B, D]
  int64_t block_stride;      // values from one block of the cache to the next
  int num_heads, num_kv_heads, block_tokens, rope_positions, rotated;
  float eps;

  __device__ int all_heads() const { return num_heads + 2 * num_kv_heads; }
};

// One head of one token: where it comes from and goes to; `to` is null where that is nowhere.
struct Head {
  const bf16* from;
  bf16* to;
  const bf16* weight;  // null for values
};

__device__ __forceinline__ Head find_head(const Arguments& a, int token, int head, int head_dim) {
  const bf16* row = a.projected + int64_t(token) * 2 * (a.num_heads + a.num_kv_heads) * head_dim;
  if (head < a.num_heads) {
    bf16* to = a.q + (int64_t(token) * a.num_heads + head) * head_dim;
    return {row + 2 * head * head_dim, to, a.q_norm};
  }
  const int kv = head - a.num_heads;  // keys, then values, as in a block of the cache
  const int64_t kv_slot = a.kv_slots[token];
  const uint32_t block = uint32_t(kv_slot) / uint32_t(a.block_tokens);
  const uint32_t offset = uint32_t(kv_slot) - block * a.block_tokens;
  bf16* to = a.cache + block * a.block_stride + (int64_t(kv) * a.block_tokens + offset) * head_dim;
  return {row + (2 * a.num_heads + kv) * head_dim, kv_slot < 0 ? nullptr : to,
          kv < a.num_kv_heads ? a.k_norm : nullptr};
}

// Head dimensions of 8 * kLanes, rotated ones a multiple of 16: kLanes neighbouring threads hold a head.
template <int kLanes>
__device__ void run_vectors(const Arguments& a) {
  constexpr int kHeadDim = 8 * kLanes;
  const int lane = threadIdx.x % kLanes, token = blockIdx.x, heads = a.all_heads();
  const int index = (blockIdx.y * blockDim.x + threadIdx.x) / kLanes;
  launch_dependents();
  wait_for_previous_kernel();
  const Head head = find_head(a, token, min(index, heads - 1), kHeadDim);  // a warp shuffles together
  const Vector<8> given = load<8>(head.from + lane * 8);
  float values[8], squares = 0;
  unpack(given, values);
#pragma unroll
  for (int i = 0; i < 8; i++) squares += values[i] * values[i];
#pragma unroll
  for (int mask = 1; mask < kLanes; mask *= 2) squares += __shfl_xor_sync(~0u, squares, mask);
  const float scale = rsqrtf(squares / kHeadDim + a.eps);
  if (head.weight != nullptr) {
    float factors[8];
    unpack(load<8>(head.weight + lane * 8), factors);
#pragma unroll
    for (int i = 0; i < 8; i++) values[i] *= scale * (1.0f + factors[i]);
  }
  const int half_lanes = a.rotated / 16;  // threads that hold the first values of the pairs
  const bool is_first = lane < half_lanes, rotates = lane < 2 * half_lanes && head.weight != nullptr;
  const int partner = threadIdx.x % 32 + (is_first ? half_lanes : -half_lanes);
  const int column = (is_first ? lane : lane - half_lanes) * 8;
  const float* table = a.rope + int64_t(a.positions[token]) * (a.rotated / 2) + column;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const float other = __shfl_sync(~0u, values[i], rotates ? partner : threadIdx.x % 32);
    if (rotates) {
      const float cosine = table[i], sine = table[int64_t(a.rope_positions) * (a.rotated / 2) + i];
      values[i] = is_first ? values[i] * cosine - other * sine : values[i] * cosine + other * sine;
    }
  }
#ifdef APPEND_FP8
  attention::append_fp8<kLanes>(index < heads ? a.kv_slots[token] : -1, index - a.num_heads, a, values, lane);
  if (index < a.num_heads) store(head.to + lane * 8, pack(values));
#else
  if (index < heads && head.to != nullptr) store(head.to + lane * 8, head.weight == nullptr ? given : pack(values));
#endif
}

constexpr int kMostValues = 512;

// Any head dimension: a warp holds a head in shared memory; blocks are (T, heads).
__device__ void run_singles(const Arguments& a, int head_dim) {
  __shared__ float values[kMostValues];
  const int lane = threadIdx.x, token = blockIdx.x, half = a.rotated / 2;
  launch_dependents();
  wait_for_previous_kernel();
  const Head head = find_head(a, token, blockIdx.y, head_dim);
  if (head.to == nullptr) return;
  if (head.weight == nullptr) {
    for (int i = lane; i < head_dim; i += 32) head.to[i] = head.from[i];
    return;
  }
  float squares = 0;
  for (int i = lane; i < head_dim; i += 32) {
    values[i] = __bfloat162float(head.from[i]);
    squares += values[i] * values[i];
  }
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) squares += __shfl_xor_sync(~0u, squares, mask);
  const float scale = rsqrtf(squares / head_dim + a.eps);
  for (int i = lane; i < head_dim; i += 32) values[i] *= scale * (1.0f + __bfloat162float(head.weight[i]));
  __syncwarp();
  const float* cosines = a.rope + int64_t(a.positions[token]) * half;
  const float* sines = cosines + int64_t(a.rope_positions) * half;
  for (int i = lane; i < head_dim; i += 32) {
    float value = values[i];
    if (i < half) value = value * cosines[i] - values[i + half] * sines[i];
    else if (i < 2 * half) value = value * cosines[i - half] + values[i - half] * sines[i - half];
    head.to[i] = __float2bfloat16_rn(value);
  }
}

__device__ __forceinline__ float sigmoid(float value) { return __fdividef(1.0f, 1.0f + __expf(-value)); }

// `kWidth` neighbouring values per thread; blocks are (T, chunks of H D).
template <int kWidth>
__device__ void gate_output(const bf16* attended, const bf16* projected, bf16* out, int num_values, int row_values,
                            int head_dim) {
  const int i = (blockIdx.y * blockDim.x + threadIdx.x) * kWidth;
  const int64_t token = blockIdx.x;
  launch_dependents();
  wait_for_previous_kernel();
  if (i >= num_values) return;
  float values[kWidth], gates[kWidth];
  unpack(load<kWidth>(attended + token * num_values + i), values);
  unpack(load<kWidth>(projected + token * row_values + i + (i / head_dim + 1) * head_dim), gates);
#pragma unroll
  for (int j = 0; j < kWidth; j++) values[j] *= sigmoid(gates[j]);
  store(out + token * num_values + i, pack(values));
}

}  // namespace

#define GATED_QK_NORM_ROPE_APPEND(HEAD_DIM)                                                                     \
  extern "C" __global__ void gated_qk_norm_rope_append_##HEAD_DIM(const __grid_constant__ Arguments a) {        \
    run_vectors<HEAD_DIM / 8>(a);                                                                               \
  }

#ifndef APPEND_FP8  // attention_fp8/gated_attention_fp8.cu
GATED_QK_NORM_ROPE_APPEND(64)
GATED_QK_NORM_ROPE_APPEND(128)
GATED_QK_NORM_ROPE_APPEND(256)

extern "C" __global__ void gated_qk_norm_rope_append_singles(const __grid_constant__ Arguments a, int head_dim) {
  run_singles(a, head_dim);
}

extern "C" __global__ void output_gate_vectors(const bf16* attended, const bf16* projected, bf16* out, int num_values,
                                               int row_values, int head_dim) {
  gate_output<8>(attended, projected, out, num_values, row_values, head_dim);
}

extern "C" __global__ void output_gate_singles(const bf16* attended, const bf16* projected, bf16* out, int num_values,
                                               int row_values, int head_dim) {
  gate_output<1>(attended, projected, out, num_values, row_values, head_dim);
}
#endif
