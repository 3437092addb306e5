// Hyper-connections: how sublayers read and write several residual streams. Xie et al. 2026, "mHC", eq. 8; float32.
//
//     projected [T, outputs + 1]: fn @ flat(X), and the sum of squares of flat(X), in splits of the columns
//     read:  weights from them, the mixing matrix by Sinkhorn's iterations, x = sum_i pre_i X_i
//     write: X_k = post_k y + sum_j M[j, k] X_j
//
// Four streams. Outputs are 24 (read, write, mixing) or 4 (the head's read).
#include "attention/sparse.cuh"
#include "common/pdl.cuh"

namespace {

constexpr int kStreams = 4, kMixes = kStreams * (2 + kStreams);
constexpr int kThreads = 256;
constexpr int kTileColumns = 256;

// Grid: (tiles of tokens, splits of the columns). A lane has columns lane * 4 of each 128; a warp has kTokens tokens
// and an equal share of the outputs. What bounds it is reading weights from shared memory, which kTokens tokens do
// together. partials: [splits, T, kOutputs + 1].
template <int kOutputs, int kTokens, int kShares>
__device__ void project(const bf16* x, const float* fn, float* partials, int num_tokens, int columns,
                        int split_columns) {
  constexpr int kOwn = kOutputs / kShares, kTileTokens = kThreads / 32 / kShares * kTokens;
  __shared__ float weights[kOutputs][kTileColumns];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, share = warp % kShares;
  const int token = blockIdx.x * kTileTokens + warp / kShares * kTokens, begin = blockIdx.y * split_columns;
  float sums[kTokens][kOwn] = {}, squares[kTokens] = {};
  for (int column = begin; column < begin + split_columns; column += kTileColumns) {
    __syncthreads();
    for (int i = threadIdx.x; i < kOutputs * kTileColumns / 4; i += kThreads) {
      const int o = i / (kTileColumns / 4), at = i % (kTileColumns / 4) * 4;
      *reinterpret_cast<float4*>(&weights[o][at]) = *reinterpret_cast<const float4*>(fn + int64_t(o) * columns + column + at);
    }
    if (column == begin) {
      wait_for_previous_kernel();
      launch_dependents();
    }
    __syncthreads();
    if (token >= num_tokens) continue;
    // A lane's values are 4 neighbours, twice, so that a warp reads shared memory without conflicts.
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int at = half * 128 + lane * 4;
      float4 values[kTokens];
#pragma unroll
      for (int t = 0; t < kTokens; t++) {
        const int row = min(token + t, num_tokens - 1);
        const uint2 bits = *reinterpret_cast<const uint2*>(x + int64_t(row) * columns + column + at);
        const float2 low = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&bits.x));
        const float2 high = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&bits.y));
        squares[t] += low.x * low.x + low.y * low.y + high.x * high.x + high.y * high.y;
        values[t] = {low.x, low.y, high.x, high.y};
      }
#pragma unroll
      for (int o = 0; o < kOwn; o++) {
        const float4 w = *reinterpret_cast<const float4*>(&weights[share * kOwn + o][at]);
#pragma unroll
        for (int t = 0; t < kTokens; t++)
          sums[t][o] += w.x * values[t].x + w.y * values[t].y + w.z * values[t].z + w.w * values[t].w;
      }
    }
  }
#pragma unroll
  for (int t = 0; t < kTokens; t++) {
    if (token + t >= num_tokens) return;
    float* out = partials + (int64_t(blockIdx.y) * num_tokens + token + t) * (kOutputs + 1);
#pragma unroll
    for (int o = 0; o < kOwn; o++) {
      const float sum = sparse::warp_sum(sums[t][o]);
      if (lane == 0) out[share * kOwn + o] = sum;
    }
    const float sum = sparse::warp_sum(squares[t]);
    if (lane == 0 && share == 0) out[kOutputs] = sum;
  }
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

struct Read {
  const bf16* residual;  // [T, 4, h]
  const float* partials;  // [partials, T, outputs + 1]
  const float* base;
  const float* scale;
  bf16* x;               // [T, h]
  float* post;           // [T, 4]
  float* mixing;         // [T, 4, 4]
  int num_splits, size, iterations;
  float eps, mix_eps;
};

// The mixing matrix by 16 lanes, lane 4 i + j has element [i, j].
__device__ float doubly_stochastic(float logit, float eps, int iterations) {
  float top = logit;
  top = fmaxf(top, __shfl_xor_sync(0xffff, top, 1));
  top = fmaxf(top, __shfl_xor_sync(0xffff, top, 2));
  float value = expf(logit - top);
  const auto row_sum = [&] {
    const float pair = value + __shfl_xor_sync(0xffff, value, 1);
    return pair + __shfl_xor_sync(0xffff, pair, 2);
  };
  const auto column_sum = [&] {
    const float pair = value + __shfl_xor_sync(0xffff, value, 4);
    return pair + __shfl_xor_sync(0xffff, pair, 8);
  };
  value = value / row_sum() + eps;
  value /= column_sum() + eps;
  for (int i = 1; i < iterations; i++) {
    value /= row_sum() + eps;
    value /= column_sum() + eps;
  }
  return value;
}

// Grid: tokens.
template <int kOutputs>
__device__ void read(const Read& a) {
  __shared__ float projected[kOutputs + 1];
  __shared__ float weights[kStreams];
  const int token = blockIdx.x, thread = threadIdx.x;
  wait_for_previous_kernel();
  launch_dependents();
  if (thread <= kOutputs) {
    float sum = 0;
    for (int split = 0; split < a.num_splits; split++)
      sum += a.partials[(int64_t(split) * gridDim.x + token) * (kOutputs + 1) + thread];
    projected[thread] = sum;
  }
  __syncthreads();
  const float scale = rsqrtf(projected[kOutputs] / (kStreams * a.size) + a.eps);
  if (thread < kStreams) weights[thread] = sigmoid(projected[thread] * scale * a.scale[0] + a.base[thread]) + a.mix_eps;
  if constexpr (kOutputs == kMixes) {
    if (thread < 16) {
      const int at = 2 * kStreams + thread;
      const float logit = projected[at] * scale * a.scale[2] + a.base[at];
      a.mixing[int64_t(token) * 16 + thread] = doubly_stochastic(logit, a.mix_eps, a.iterations);
    } else if (thread >= 32 && thread < 32 + kStreams) {
      const int at = kStreams + thread - 32;
      a.post[int64_t(token) * kStreams + thread - 32] = 2.0f * sigmoid(projected[at] * scale * a.scale[1] + a.base[at]);
    }
  }
  __syncthreads();
  const bf16* streams = a.residual + int64_t(token) * kStreams * a.size;
  for (int at = thread * 8; at < a.size; at += kThreads * 8) {
    float sums[8] = {};
#pragma unroll
    for (int stream = 0; stream < kStreams; stream++) {
      float values[8];
      unpack(load<8>(streams + int64_t(stream) * a.size + at), values);
#pragma unroll
      for (int i = 0; i < 8; i++) sums[i] += weights[stream] * values[i];
    }
    store(a.x + int64_t(token) * a.size + at, pack(sums));
  }
}

__device__ __forceinline__ void load8(const bf16* from, float (&values)[8]) { unpack(load<8>(from), values); }
__device__ __forceinline__ void load8(const float* from, float (&values)[8]) {
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(from + i);
    values[i] = four.x, values[i + 1] = four.y, values[i + 2] = four.z, values[i + 3] = four.w;
  }
}

// Grid: (tokens, chunks of h).
template <class Output>
__device__ void write(const Output* y, bf16* residual, const float* post, const float* mixing, int size) {
  const int token = blockIdx.x, at = (blockIdx.y * kThreads + threadIdx.x) * 8;
  wait_for_previous_kernel();
  launch_dependents();
  if (at >= size) return;
  float values[8], streams[kStreams][8];
  load8(y + int64_t(token) * size + at, values);
  bf16* rows = residual + int64_t(token) * kStreams * size + at;
#pragma unroll
  for (int j = 0; j < kStreams; j++) load8(rows + int64_t(j) * size, streams[j]);
#pragma unroll
  for (int k = 0; k < kStreams; k++) {
    float sums[8];
    const float share = post[int64_t(token) * kStreams + k];
#pragma unroll
    for (int i = 0; i < 8; i++) sums[i] = share * values[i];
#pragma unroll
    for (int j = 0; j < kStreams; j++) {
      const float mix = mixing[(int64_t(token) * kStreams + j) * kStreams + k];
#pragma unroll
      for (int i = 0; i < 8; i++) sums[i] += mix * streams[j][i];
    }
    store(rows + int64_t(k) * size, pack(sums));
  }
}

}  // namespace

// Tokens and shares of a warp; hyper_connections.py repeats the tokens of a block.
#define PROJECT(NAME, OUTPUTS, TOKENS, SHARES)                                                           \
  extern "C" __global__ void __launch_bounds__(kThreads) hyper_project_##NAME(                           \
      const bf16* x, const float* fn, float* partials, int num_tokens, int columns, int split_columns) { \
    project<OUTPUTS, TOKENS, SHARES>(x, fn, partials, num_tokens, columns, split_columns);               \
  }

PROJECT(mix, kMixes, 1, 1)
PROJECT(mix_many, kMixes, 4, 2)
PROJECT(head, kStreams, 1, 1)
PROJECT(head_many, kStreams, 4, 1)

extern "C" __global__ void __launch_bounds__(kThreads) hyper_read_mix(const __grid_constant__ Read a) { read<kMixes>(a); }
extern "C" __global__ void __launch_bounds__(kThreads) hyper_read_head(const __grid_constant__ Read a) {
  read<kStreams>(a);
}

extern "C" __global__ void __launch_bounds__(kThreads) hyper_write_bf16(
    const bf16* y, bf16* residual, const float* post, const float* mixing, int size) {
  write(y, residual, post, mixing, size);
}
extern "C" __global__ void __launch_bounds__(kThreads) hyper_write_float(
    const float* y, bf16* residual, const float* post, const float* mixing, int size) {
  write(y, residual, post, mixing, size);
}

// `x [T, h]` in every stream. Grid: (tokens, streams).
extern "C" __global__ void __launch_bounds__(kThreads) hyper_streams(const bf16* x, bf16* residual, int size) {
  const bf16* from = x + int64_t(blockIdx.x) * size;
  bf16* to = residual + (int64_t(blockIdx.x) * gridDim.y + blockIdx.y) * size;
  wait_for_previous_kernel();
  launch_dependents();
  for (int at = threadIdx.x * 8; at < size; at += kThreads * 8) store(to + at, load<8>(from + at));
}

// `x [T, h]` onto every stream. Grid: (tokens, streams).
extern "C" __global__ void __launch_bounds__(kThreads) hyper_add(const bf16* x, bf16* residual, int size) {
  const bf16* from = x + int64_t(blockIdx.x) * size;
  bf16* to = residual + (int64_t(blockIdx.x) * gridDim.y + blockIdx.y) * size;
  wait_for_previous_kernel();
  launch_dependents();
  for (int at = threadIdx.x * 8; at < size; at += kThreads * 8) {
    float left[8], right[8];
    load8(from + at, left);
    load8(to + at, right);
#pragma unroll
    for (int i = 0; i < 8; i++) right[i] += left[i];
    store(to + at, pack(right));
  }
}
