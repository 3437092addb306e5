// What our kernels use of CUDA, for a host compiler: a block's threads are fibers (fibers.hpp) that take turns on one
// thread and let others go on where they wait. Copies land at once, so a wait for them that is missing is not seen.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define __device__
#define __host__
#define __global__ inline  // kernels that no test of a library calls are not compiled
#define __forceinline__ inline
#define __noinline__
#define __shared__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct __nv_bfloat16 {
  uint16_t bits;
};
struct alignas(64) CUtensorMap {  // here: address, columns and rows of a matrix of BF16
  unsigned long long opaque[16];
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }

struct Index {
  int x, y, z;
};
inline Index threadIdx, blockIdx, gridDim, blockDim;

template <class T>
inline T __ldcg(const T* from) {
  return *from;
}
template <class T>
inline T __ldg(const T* from) {
  return *from;
}
template <class T>
inline void __stcg(T* to, T value) {
  *to = value;
}
template <class T>
inline T atomicAdd(T* to, T value) {
  const T before = *to;
  *to += value;
  return before;
}
inline void __threadfence() {}
inline int __popc(uint32_t value) { return __builtin_popcount(value); }
inline int __ffs(uint32_t value) { return __builtin_ffs(int(value)); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return uint64_t(a) * b >> 32; }
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t both = uint64_t(high) << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; i++) result |= uint32_t(both >> (8 * (selector >> (4 * i) & 7)) & 255) << (8 * i);
  return result;
}

namespace emulated {

void let_others_run();

// A barrier of so many threads; the last one to come opens it.
struct Barrier {
  int arrived = 0;
  uint64_t rounds = 0;

  void arrive(int threads) {
    if (++arrived == threads) arrived = 0, rounds++;
  }
  void sync(int threads) {
    const uint64_t round = rounds;
    arrive(threads);
    while (rounds == round) let_others_run();
  }
};

// A warp, and what its lanes show each other. Rounds alternate between two copies: a lane may be one round ahead.
struct Warp {
  Barrier barrier;
  uint32_t words[2][32][8];
};

// What a block has for itself; those of the block whose turn it is.
constexpr int kBarriers = 16, kWarps = 32;
inline Barrier first_barriers[kBarriers];
inline Warp first_warps[kWarps];
inline Barrier* barriers = first_barriers;
inline Warp* warps = first_warps;

inline int lane() { return threadIdx.x % 32; }
inline Warp& warp() { return warps[threadIdx.x / 32]; }

using Words = uint32_t (*)[8];

// Shows this lane's words to its warp; the words of all lanes.
template <int kCount>
inline Words shown(const uint32_t (&mine)[kCount]) {
  static_assert(kCount <= 8);
  Warp& own = warp();
  auto& words = own.words[own.barrier.rounds & 1];
  for (int i = 0; i < kCount; i++) words[lane()][i] = mine[i];
  own.barrier.sync(32);
  return words;
}

template <class T>
inline T of_lane(T value, int other) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  uint32_t bits[sizeof(T) / 4];
  memcpy(bits, &value, sizeof(T));
  T result;
  memcpy(&result, shown(bits)[other], sizeof(T));
  return result;
}

inline float from_bfloat16(uint32_t bits) {
  bits <<= 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
inline float half_of(uint32_t pair, int index) { return from_bfloat16(index % 2 ? pair >> 16 : pair & 0xFFFF); }
inline uint32_t to_bfloat16(float value) {
  if (value != value) return 0x7FC0;
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

inline float half_float_of(uint32_t pair, int index) {
  const uint16_t bits = index % 2 ? pair >> 16 : pair & 0xFFFF;
  _Float16 value;
  memcpy(&value, &bits, 2);
  return value;
}
inline uint32_t to_half(float value) {
  const _Float16 half = _Float16(value);
  uint16_t bits;
  memcpy(&bits, &half, 2);
  return bits;
}

// --- what stands for inline assembly of attention's sources (conftest.py) --------------------------------------------

inline float exp2_flushed(float x) {
  const float y = exp2f(x);
  return fabsf(y) < 1.17549435e-38f ? 0.0f : y;
}

// The fragments are described at `attention::mma`.
inline void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1,
                float (*value_of)(uint32_t, int) = half_of) {
  const uint32_t mine[6] = {a0, a1, a2, a3, b0, b1};
  const Words words = shown(mine);
  for (int i = 0; i < 4; i++) {
    const int row = lane() / 4 + 8 * (i / 2), column = 2 * (lane() % 4) + i % 2;
    for (int k = 0; k < 16; k++) {
      const uint32_t a = words[row % 8 * 4 + k % 8 / 2][row / 8 + 2 * (k / 8)];
      const uint32_t b = words[column * 4 + k % 8 / 2][4 + k / 8];
      d[i] += value_of(a, k) * value_of(b, k);
    }
  }
}

// `movmatrix`: a lane has columns 2 (lane % 4), + 1 of row lane / 4 of 8 x 8 values, and gets those of the transpose.
inline uint32_t transposed(uint32_t matrix) {
  const uint32_t mine[1] = {matrix};
  const Words words = shown(mine);
  const int column = lane() / 4, row = 2 * (lane() % 4);
  auto at = [&](int r) { return words[r * 4 + column / 2][0] >> (column % 2 * 16) & 0xFFFF; };
  return at(row) | at(row + 1) << 16;
}

}  // namespace emulated

inline void __syncthreads() { emulated::barriers[0].sync(blockDim.x); }
inline void __syncwarp() { emulated::warp().barrier.sync(32); }
template <class T>
inline T __shfl_sync(unsigned, T value, int from) {
  return emulated::of_lane(value, from);
}
template <class T>
inline T __shfl_xor_sync(unsigned, T value, int mask) {
  return emulated::of_lane(value, emulated::lane() ^ mask);
}
template <class T>
inline T __shfl_up_sync(unsigned, T value, int step) {
  return emulated::of_lane(value, emulated::lane() < step ? emulated::lane() : emulated::lane() - step);
}
template <class T>
inline T __reduce_max_sync(unsigned, T value) {
  for (int step = 16; step; step /= 2) value = std::max(value, __shfl_xor_sync(~0u, value, step));
  return value;
}
template <class T>
inline T __reduce_min_sync(unsigned, T value) {
  for (int step = 16; step; step /= 2) value = std::min(value, __shfl_xor_sync(~0u, value, step));
  return value;
}
inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}
inline float __uint_as_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(bits));
  return value;
}
inline bool __any_sync(unsigned, bool value) {
  const uint32_t mine[1] = {value};
  const emulated::Words words = emulated::shown(mine);
  bool any = false;
  for (int i = 0; i < 32; i++) any |= words[i][0] != 0;
  return any;
}
inline uint32_t __ballot_sync(unsigned, bool value) {
  const uint32_t mine[1] = {value};
  const emulated::Words words = emulated::shown(mine);
  uint32_t all = 0;
  for (int i = 0; i < 32; i++) all |= (words[i][0] != 0) << i;
  return all;
}

namespace {
alignas(1024) uint8_t raw[227 * 1024];  // dynamic shared memory, by the name that kernels declare it with
}
