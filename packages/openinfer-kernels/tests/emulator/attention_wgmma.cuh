// `csrc/attention/attention_wgmma.cuh` for a host compiler: products of what descriptors name in shared memory.
#pragma once
#include "common/hopper.cuh"
#include "cuda.hpp"

namespace attention {

inline float shared_value(uint32_t address) {
  uint16_t bits;
  memcpy(&bits, raw + hopper::swizzled(address), 2);
  return emulated::from_bfloat16(bits);
}
inline uint32_t begin_of(uint64_t descriptor) { return (descriptor & 0x3FFF) << 4; }
inline uint32_t leading_bytes_of(uint64_t descriptor) { return (descriptor >> 16 & 0x3FFF) << 4; }

template <int N>
inline void multiply_keys(float (&d)[N / 2], uint64_t a, uint64_t b, int adds) {
  const int thread = threadIdx.x % 128, first_row = 16 * (thread / 32) + thread % 32 / 4;
  for (int i = 0; i < N / 2; i++) {
    const int row = first_row + 8 * (i / 2 % 2), column = i / 4 * 8 + 2 * (thread % 4) + i % 2;
    float sum = adds ? d[i] : 0.0f;
    for (int k = 0; k < 16; k++)
      sum += shared_value(begin_of(a) + row * 128 + k * 2) * shared_value(begin_of(b) + column * 128 + k * 2);
    d[i] = sum;
  }
}

template <int N>
inline void multiply_values(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b) {
  const emulated::Words words = emulated::shown(a);
  const int lane = emulated::lane();
  for (int i = 0; i < N / 2; i++) {
    const int column = i / 4 * 8 + 2 * (lane % 4) + i % 2;
    for (int k = 0; k < 16; k++) {
      const uint32_t pair = words[lane / 4 * 4 + k % 8 / 2][i / 2 % 2 + 2 * (k / 8)];
      d[i] += emulated::half_of(pair, k) *
              shared_value(begin_of(b) + column / 64 * leading_bytes_of(b) + k * 128 + column % 64 * 2);
    }
  }
}

constexpr int kConsumers = 2;

inline void warpgroup_sync(int group) { emulated::barriers[group + 1].sync(128); }
inline void copies_see_writes() {}
inline void warp_scheduler_barrier_sync(int group) { emulated::barriers[kConsumers + 1 + group].sync(kConsumers * 128); }
inline void warp_scheduler_barrier_arrive(int group) {
  emulated::barriers[kConsumers + 1 + group].arrive(kConsumers * 128);
}

}  // namespace attention
