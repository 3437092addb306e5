// Low-rank adapters: what the adapter of each token adds to a product, several adapters and none in one batch.
//
//     shrink    s[t, p, k] = sum over i of x[t, i] A[slot(t)][p, k, i]        float32; 0 where slot(t) < 0
//     expand    y[t, o] = bf16(y[t, o] + sum over k of s[t, p(o), k] B[slot(t)][o, k])
//
// Hu et al. 2021, "LoRA", section 4.1; the two halves are those of Chen et al. 2023, "Punica". A token is computed by
// itself, its sums always in one order, so the result does not depend on the batch. One warp makes a value of `shrink`,
// one thread a value of `expand`. Slots are read on the device, so that a captured step serves any adapters.
#include <cstdint>

#include "common/pdl.cuh"

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kVector = 8;  // BF16 values in 16 bytes
constexpr int kMostPieces = 8;
constexpr int kMostShrunk = 4096;  // values of one token: 16 KB of shared memory

struct Shrink {
  const uint16_t* x;  // [T, in]
  const uint16_t* a;  // [slots, P r, in]
  const int* slots;   // [T]
  float* shrunk;      // [T, P r]
  int inner, rows, num_slots, blocks_of_token;
};

struct Expand {
  uint16_t* y;          // [T, out]
  const float* shrunk;  // [T, P, r]
  const uint16_t* b;    // [slots, out, r]
  const int* slots;     // [T]
  int outer, pieces, rank, num_slots, blocks_of_token;
  int starts[kMostPieces + 1];
};

__device__ __forceinline__ float value_of(uint32_t bits) { return __uint_as_float(bits << 16); }

// Sums two vectors' products in the order of their values.
__device__ __forceinline__ float dot(const uint4& left, const uint4& right, float sum) {
  const uint32_t lefts[4] = {left.x, left.y, left.z, left.w}, rights[4] = {right.x, right.y, right.z, right.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    sum = fmaf(value_of(lefts[i] & 0xffff), value_of(rights[i] & 0xffff), sum);
    sum = fmaf(value_of(lefts[i] >> 16), value_of(rights[i] >> 16), sum);
  }
  return sum;
}

// To the nearest BF16, ties to even; NaN stays NaN.
__device__ __forceinline__ uint16_t rounded_bits(float value) {
  const uint32_t bits = __float_as_uint(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace

extern "C" __global__ void lora_shrink(const Shrink given) {
  const int token = blockIdx.x / given.blocks_of_token;
  const int row = blockIdx.x % given.blocks_of_token * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  wait_for_previous_kernel();
  launch_dependents();
  if (row >= given.rows) return;
  const int slot = given.slots[token];
  float sum = 0;
  if (slot >= 0 && slot < given.num_slots) {
    const uint16_t* x = given.x + int64_t(token) * given.inner;
    const uint16_t* a = given.a + (int64_t(slot) * given.rows + row) * given.inner;
    if (given.inner % kVector == 0) {
      for (int i = lane * kVector; i < given.inner; i += 32 * kVector)
        sum = dot(*reinterpret_cast<const uint4*>(x + i), *reinterpret_cast<const uint4*>(a + i), sum);
    } else {
      for (int i = lane; i < given.inner; i += 32) sum = fmaf(value_of(x[i]), value_of(a[i]), sum);
    }
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(~0u, sum, mask);
  if (lane == 0) given.shrunk[int64_t(token) * given.rows + row] = sum;
}

extern "C" __global__ void lora_expand(const Expand given) {
  __shared__ float shrunk[kMostShrunk];
  const int token = blockIdx.x / given.blocks_of_token;
  const int out = blockIdx.x % given.blocks_of_token * kThreads + threadIdx.x;
  wait_for_previous_kernel();
  launch_dependents();
  const int slot = given.slots[token];
  if (slot < 0 || slot >= given.num_slots) return;  // all threads of the block have one token
  const int values = given.pieces * given.rank;
  for (int i = threadIdx.x; i < values; i += kThreads) shrunk[i] = given.shrunk[int64_t(token) * values + i];
  __syncthreads();
  if (out < given.starts[0] || out >= given.starts[given.pieces]) return;
  int piece = 0;
  while (out >= given.starts[piece + 1]) piece++;
  const uint16_t* b = given.b + (int64_t(slot) * given.outer + out) * given.rank;
  const float* s = shrunk + piece * given.rank;
  float sum = 0;
  for (int k = 0; k < given.rank; k += kVector) {  // the rank of a slot is a multiple
    const uint4 packed = *reinterpret_cast<const uint4*>(b + k);
    const uint32_t pairs[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      sum = fmaf(s[k + 2 * i], value_of(pairs[i] & 0xffff), sum);
      sum = fmaf(s[k + 2 * i + 1], value_of(pairs[i] >> 16), sum);
    }
  }
  uint16_t* y = given.y + int64_t(token) * given.outer + out;
  *y = rounded_bits(value_of(*y) + sum);
}
