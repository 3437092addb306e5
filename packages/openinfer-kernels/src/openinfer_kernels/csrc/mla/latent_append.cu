// What happens between the projections of latent attention and attention: the latent's norm, RoPE of pairs of
// neighbours, and the write of latent and shared key into the cache. A row of blocks per token: the first has the
// latent, the others 256 vectors each of the queries.
//
//     y = bf16(w * x / sqrt(mean(x^2) + eps))       in float32, rounded once
#include "common/block.cuh"
#include "common/pdl.cuh"
#include "common/vectors.cuh"

namespace {

struct Arguments {
  const bf16* q;           // [T] rows of `num_heads * head_dim`, `q_stride` apart
  const bf16* latent;      // [T] rows of `latent_dim + rope_dim`, `latent_stride` apart
  const bf16* norm;        // [latent_dim]
  const float* rope;       // [2, rope_positions, rope_dim / 2]
  const int* positions;    // [T]
  const int64_t* kv_slots; // [T]
  bf16* out;               // [T, num_heads, head_dim]
  bf16* cache;             // of the layer
  int64_t block_stride;    // values between blocks
  int q_stride, latent_stride, num_heads, head_dim, latent_dim, rope_dim, block_tokens, rope_positions;
  float eps;
};

// Four pairs of neighbours, the first being pair `pair` of a head.
__device__ __forceinline__ Vector<8> rotated(const Vector<8>& vector, const Arguments& a, int position, int pair) {
  const int pairs = a.rope_dim / 2;
  const float* row = a.rope + int64_t(position) * pairs + pair;
  const float4 cos = *reinterpret_cast<const float4*>(row);
  const float4 sin = *reinterpret_cast<const float4*>(row + int64_t(a.rope_positions) * pairs);
  const float c[4] = {cos.x, cos.y, cos.z, cos.w}, s[4] = {sin.x, sin.y, sin.z, sin.w};
  float x[8], y[8];
  unpack(vector, x);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    y[2 * i] = x[2 * i] * c[i] - x[2 * i + 1] * s[i];
    y[2 * i + 1] = x[2 * i + 1] * c[i] + x[2 * i] * s[i];
  }
  return pack(y);
}

__device__ void append(const Arguments& a, int token) {
  const int at = threadIdx.x * 8;
  const bf16* from = a.latent + int64_t(token) * a.latent_stride;
  const bool is_latent = at < a.latent_dim, is_key = !is_latent && at < a.latent_dim + a.rope_dim;
  Vector<8> vector, weight;
  float x[8], squares = 0;
  if (is_latent) weight = load<8>(a.norm + at);
  wait_for_previous_kernel();
  if (is_latent || is_key) vector = load<8>(from + at);
  if (is_latent) {
    unpack(vector, x);
#pragma unroll
    for (int i = 0; i < 8; i++) squares += x[i] * x[i];
  }
  __shared__ float partial[kWarps];
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) squares += __shfl_xor_sync(~0u, squares, mask);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = squares;
  __syncthreads();
  const int64_t kv_slot = a.kv_slots[token];
  if (kv_slot < 0 || !(is_latent || is_key)) return;
  bf16* to = a.cache + kv_slot / a.block_tokens * a.block_stride +
             kv_slot % a.block_tokens * (a.latent_dim + a.rope_dim) + at;
  if (is_key) {
    store(to, rotated(vector, a, a.positions[token], (at - a.latent_dim) / 2));
    return;
  }
  squares = 0;
#pragma unroll
  for (int i = 0; i < kWarps; i++) squares += partial[i];
  const float inverse = 1.0f / sqrtf(squares / a.latent_dim + a.eps);
  float factors[8];
  unpack(vector, x);
  unpack(weight, factors);
#pragma unroll
  for (int i = 0; i < 8; i++) x[i] *= inverse * factors[i];
  store(to, pack(x));
}

__device__ void rotate(const Arguments& a, int token, int vector_index) {
  const int at = vector_index * 8;
  wait_for_previous_kernel();
  if (at >= a.num_heads * a.head_dim) return;
  const Vector<8> vector = load<8>(a.q + int64_t(token) * a.q_stride + at);
  const int in_rope = at % a.head_dim - (a.head_dim - a.rope_dim);
  store(a.out + int64_t(token) * a.num_heads * a.head_dim + at,
        in_rope < 0 ? vector : rotated(vector, a, a.positions[token], in_rope / 2));
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads) latent_norm_rope_append(Arguments arguments) {
  launch_dependents();
  if (blockIdx.y == 0) append(arguments, blockIdx.x);
  else rotate(arguments, blockIdx.x, (blockIdx.y - 1) * kThreads + threadIdx.x);
}
