// RMSNorm of each vector, or none, then RoPE of its last dimensions in neighbouring pairs; float32, rounded once.
//
//     y = x / sqrt(mean(x^2) + eps) * w        (y_2i, y_2i+1) rotated by the token's position: Su et al. 2021, eq. 34
//
// A warp holds one vector, 8 values per access.
#include "attention/sparse.cuh"
#include "common/pdl.cuh"

namespace {

constexpr int kThreads = 256;
constexpr int kHeld = 4;  // accesses of a lane: vectors of up to 1024 values

struct Arguments {
  const bf16* x;       // [T, n, d]
  const bf16* weight;  // [d] or null
  const int* positions;
  bf16* y;
  sparse::Rope rope;
  int num_vectors, per_token, size;
  float eps;
};

template <bool kNorm>
__device__ void run(const Arguments& a) {
  const int vector = (blockIdx.x * kThreads + threadIdx.x) / 32, lane = threadIdx.x % 32;
  wait_for_previous_kernel();
  launch_dependents();
  if (vector >= a.num_vectors) return;
  const int accesses = a.size / 8, tail = a.size - 2 * a.rope.pairs;
  const int position = a.positions[vector / a.per_token];
  float values[kHeld][8], squares = 0;
#pragma unroll
  for (int i = 0; i < kHeld; i++) {
    const int at = lane + 32 * i;
    if (at >= accesses) break;
    unpack(load<8>(a.x + int64_t(vector) * a.size + at * 8), values[i]);
#pragma unroll
    for (int j = 0; j < 8; j++) squares += values[i][j] * values[i][j];
  }
  const float scale = kNorm ? rsqrtf(sparse::warp_sum(squares) / a.size + a.eps) : 1.0f;
#pragma unroll
  for (int i = 0; i < kHeld; i++) {
    const int at = lane + 32 * i;
    if (at >= accesses) break;
    if (kNorm) {
      float factors[8] = {1, 1, 1, 1, 1, 1, 1, 1};
      if (a.weight != nullptr) unpack(load<8>(a.weight + at * 8), factors);
#pragma unroll
      for (int j = 0; j < 8; j++) values[i][j] *= scale * factors[j];
    }
    if (at * 8 >= tail) {
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        const float2 rotation = a.rope.at(position, (at * 8 + j - tail) / 2);
        const float2 pair = sparse::rotated({values[i][j], values[i][j + 1]}, rotation, 1.0f);
        values[i][j] = pair.x;
        values[i][j + 1] = pair.y;
      }
    }
    store(a.y + int64_t(vector) * a.size + at * 8, pack(values[i]));
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads) norm_rope_tail(const __grid_constant__ Arguments a) { run<true>(a); }
extern "C" __global__ void __launch_bounds__(kThreads) rope_tail(const __grid_constant__ Arguments a) { run<false>(a); }
