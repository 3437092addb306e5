// Codes of quantised weights on their way into the order that kernels read, and random ones, made where they are used.
#include "philox.cuh"

// `to [size / columns, columns]` bytes, the piece of a tensor with rows of `row_bytes` that begins at byte `origin`.
// `openinfer_kernels.quantised_parts.RandomCodes` says which byte stands where.
extern "C" __global__ void random_codes(uint8_t* to, int64_t size, int64_t columns, int64_t row_bytes, int64_t origin,
                                        uint64_t seed, uint32_t mask) {
  const int64_t at = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= size) return;
  const uint64_t place = origin + at / columns * row_bytes + at % columns;
  const uint4 words = philox_words(seed, place / 16);
  const int index = place / 4 % 4;
  const uint32_t word = index == 0 ? words.x : index == 1 ? words.y : index == 2 ? words.z : words.w;
  to[at] = word >> place % 4 * 8 & mask;
}

// In each word, the even nibbles in order into the lower half, the odd ones into the upper half.
extern "C" __global__ void interleave_nibbles(uint32_t* words, int64_t count) {
  const int64_t at = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= count) return;
  const uint32_t word = words[at];
  uint32_t result = 0;
  for (int i = 0; i < 4; i++) {
    result |= (word >> 8 * i & 15) << 4 * i;
    result |= (word >> (8 * i + 4) & 15) << (16 + 4 * i);
  }
  words[at] = result;
}
