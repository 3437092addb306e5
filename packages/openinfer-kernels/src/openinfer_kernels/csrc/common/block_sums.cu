// Sums of KV blocks' bytes, 128 bits each, by which a copy of a block is compared with the block.
//
//   word i of a block: x = w[i] + (i + 1) * 0x9E3779B97F4A7C15,  m = MurmurHash3's 64-bit finaliser of x
//   sum: (Σ m, Σ m * (2 i + 1)), both modulo 2^64
//
// Any order of summation gives the same bits. blockIdx.y is the KV block, blockIdx.x one of the chunks that it is split
// into.
#include <cstdint>

namespace {

constexpr uint64_t kStep = 0x9E3779B97F4A7C15ull;

struct Sums {
  uint64_t plain, weighted;
};

__device__ void add_word(Sums& sums, uint64_t word, uint64_t index) {
  uint64_t x = word + (index + 1) * kStep;
  x ^= x >> 33;
  x *= 0xFF51AFD7ED558CCDull;
  x ^= x >> 33;
  x *= 0xC4CEB9FE1A85EC53ull;
  x ^= x >> 33;
  sums.plain += x;
  sums.weighted += x * (2 * index + 1);
}

__device__ uint64_t add_warp(uint64_t value) {
  for (int lane = 16; lane > 0; lane /= 2) value += __shfl_xor_sync(0xFFFFFFFFu, value, lane);
  return value;
}

}  // namespace

// addresses: of the KV blocks, each a multiple of 16; sums: [blocks, 2], zero; pairs: of 8-byte words, in one block.
extern "C" __global__ void block_sums(const uint64_t* addresses, unsigned long long* sums, int pairs) {
  const ulonglong2* block = reinterpret_cast<const ulonglong2*>(addresses[blockIdx.y]);
  Sums mine{0, 0};
  for (int pair = blockIdx.x * blockDim.x + threadIdx.x; pair < pairs; pair += gridDim.x * blockDim.x) {
    const ulonglong2 words = block[pair];
    add_word(mine, words.x, 2 * uint64_t(pair));
    add_word(mine, words.y, 2 * uint64_t(pair) + 1);
  }
  mine.plain = add_warp(mine.plain);
  mine.weighted = add_warp(mine.weighted);
  if (threadIdx.x % 32 == 0) {
    atomicAdd(&sums[2 * blockIdx.y], static_cast<unsigned long long>(mine.plain));
    atomicAdd(&sums[2 * blockIdx.y + 1], static_cast<unsigned long long>(mine.weighted));
  }
}
