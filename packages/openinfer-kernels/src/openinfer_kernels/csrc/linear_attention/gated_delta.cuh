// What the kernels of the gated delta rule share: their arguments, and the gates of a token.
#pragma once
#include "common/state_rows.cuh"
#include "common/vectors.cuh"

namespace gated_delta {

constexpr float kLengthEps = 1e-6f;

// What the tokens of some rows would change their states by, kept instead of changing them.
struct Kept {
  const int* rows;     // [R], 1 for such a row; null: there is none
  bf16* keys_values;   // this layer of state slot 0: [M, Hk dk + N dv]
  float* gates;        // this layer of state slot 0: [M, N, 2], the logarithm of the decay, and beta
  int64_t keys_values_stride, gates_stride;  // from slot to slot
};

struct Arguments {
  const bf16* qkv;        // [T, 2 Hk dk + N dv], rows `qkv_stride` apart
  const bf16* gates;      // [T, 2 N], b of each value head, then a; rows `gates_stride` apart
  const float* a_log;     // [N]
  const bf16* dt_bias;    // [N], or
  const float* dt_bias32; // where this is not null
  float* state;           // this layer of state slot 0: [N, dk, dv]
  bf16* out;              // [T, N dv]
  StateRows rows;
  int64_t qkv_stride, gates_stride, slot_stride;
  int key_heads, heads, key_dim, value_dim;
  int most_tokens, least_tokens;  // of a row: steps take rows of at most, chunks of at least so many
  Kept kept;                      // of rows that steps take

  __device__ __forceinline__ int reads(int head) const { return head / (heads / key_heads); }

  __device__ __forceinline__ const bf16* query(int64_t token, int key_head) const {
    return qkv + token * qkv_stride + key_head * key_dim;
  }
  __device__ __forceinline__ const bf16* key(int64_t token, int key_head) const {
    return query(token, key_heads + key_head);
  }
  __device__ __forceinline__ const bf16* value(int64_t token, int head) const {
    return qkv + token * qkv_stride + 2 * key_heads * key_dim + head * value_dim;
  }

  __device__ __forceinline__ float beta(int64_t token, int head) const {
    return 1.0f / (1.0f + __expf(-__bfloat162float(gates[token * gates_stride + head])));
  }

  // The logarithm of the decay, at most 0.
  __device__ __forceinline__ float log_decay(int64_t token, int head) const {
    const float bias = dt_bias32 != nullptr ? dt_bias32[head] : __bfloat162float(dt_bias[head]);
    const float x = __bfloat162float(gates[token * gates_stride + heads + head]) + bias;
    return -__expf(a_log[head]) * (x > 20.0f ? x : log1pf(__expf(x)));
  }
};

}  // namespace gated_delta
