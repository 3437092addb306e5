// Philox-4x32-10: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
#pragma once
#include <cstdint>

// Four words, with the seed as key and the position as counter (low words first, the upper two words 0).
__device__ __forceinline__ uint4 philox_words(uint64_t seed, uint64_t position) {
  uint32_t c0 = position, c1 = position >> 32, c2 = 0, c3 = 0, k0 = seed, k1 = seed >> 32;
#pragma unroll
  for (int round = 0; round < 10; round++) {
    const uint64_t left = uint64_t(0xD2511F53u) * c0, right = uint64_t(0xCD9E8D57u) * c2;
    c0 = uint32_t(right >> 32) ^ c1 ^ k0;
    c1 = right;
    c2 = uint32_t(left >> 32) ^ c3 ^ k1;
    c3 = left;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {c0, c1, c2, c3};
}

__device__ __forceinline__ uint32_t philox_word(uint64_t seed, uint64_t position) {
  return philox_words(seed, position).x;
}
