// Codes of quantised weights on their way into the order that weight_formats.cuh reads; random ones, made where they
// are used; and all of a weight dequantised to BF16.
//
// 64 bytes of a row are 16 fragments' worth for four threads: fragment p of thread t, which stands at p * 4 + t in the
// row, comes to t * kFragments + p. Inside a fragment the bits are put where few instructions dequantise them.
#include "common/pdl.cuh"
#include "common/philox.cuh"
#include "gemm/weight_formats.cuh"

namespace {

constexpr int kWords = 16;

// Even nibbles in order into the lower half, odd ones into the upper half.
struct ArrangeInt4 {
  static constexpr int kFragments = 4;
  static __device__ uint32_t arranged(uint32_t word) {
    uint32_t result = 0;
    for (int i = 0; i < 4; i++) {
      result |= (word >> 8 * i & 15) << 4 * i;
      result |= (word >> (8 * i + 4) & 15) << (16 + 4 * i);
    }
    return result;
  }
};

struct ArrangeFp4 {
  static constexpr int kFragments = 4;
  static __device__ uint32_t arranged(uint32_t word) {
    uint32_t result = 0;
    for (int i = 0; i < 8; i++) {
      const uint32_t code = word >> 4 * i & 15, sign = code >> 3, size = code & 7, value = i / 2;
      const uint32_t half = value == 3 ? sign << 14 | size >> 2 << 13 | (size & 3) << 10
                                       : sign << (15 - 3 * value) | size << (6 - 3 * value);
      result |= half << 16 * (i % 2);
    }
    return result;
  }
};

// Bytes 2, 0, 3, 1: codes 0 and 1 are the upper bytes of both halves, and codes 2 and 3 after one shift.
struct ArrangeFp8 {
  static constexpr int kFragments = 2;
  static __device__ uint32_t arranged(uint32_t word) { return __byte_perm(word, 0, 0x1302); }
};

template <typename Format>
__device__ void arrange(const uint32_t* from, uint32_t* to, int64_t count) {
  constexpr int kFragmentWords = 4 / Format::kFragments;
  const int64_t at = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * kWords;
  if (at >= count) return;
  uint32_t words[kWords];
#pragma unroll
  for (int i = 0; i < kWords; i++) words[i] = from[at + i];
#pragma unroll
  for (int thread = 0; thread < 4; thread++)
#pragma unroll
    for (int fragment = 0; fragment < Format::kFragments; fragment++)
#pragma unroll
      for (int i = 0; i < kFragmentWords; i++)
        to[at + (thread * Format::kFragments + fragment) * kFragmentWords + i] =
            Format::arranged(words[(fragment * 4 + thread) * kFragmentWords + i]);
}

// Each thread dequantises 16 bytes of a row; rows are the first axis of the grid: another one holds 65,535. The next kernel
// may not begin before: it would read what is written here
// as a weight, which is read before any wait.
template <typename Format>
__device__ void dequantise(const uint8_t* codes, const uint8_t* scales, __nv_bfloat16* to, int k, int row_bytes,
                           int scale_rows, int scale_pitch) {
  const int vectors = row_bytes / 16, vector = blockIdx.y * blockDim.x + threadIdx.x, row = blockIdx.x;
  if (vector >= vectors) return;
  const uint4 held = *reinterpret_cast<const uint4*>(codes + int64_t(row) * row_bytes + vector * 16);
  const int first = vector / 4 * Format::kFragments;  // of 32 columns
  const uint8_t* from = scales + int64_t(row / scale_rows) * scale_pitch + first * Format::kScaleBytes;
  const typename Format::Scales scale = *reinterpret_cast<const typename Format::Scales*>(from);
  wait_for_previous_kernel();
#pragma unroll
  for (int fragment = 0; fragment < Format::kFragments; fragment++) {
    const int column = (first + fragment) * 32 + vector % 4 * 8;
    if (column < k)
      *reinterpret_cast<uint4*>(to + int64_t(row) * k + column) =
          Format::eight(held, fragment, Format::scale(scale, fragment));
  }
}

}  // namespace

// `to [size / columns, columns]` bytes, the shard of a tensor with rows of `row_bytes` that begins at byte `origin`.
// `openinfer_kernels.weights.quantised.RandomCodes` says which byte stands where.
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

// `count` words, a multiple of 16; in place as well.
extern "C" __global__ void arrange_int4(const uint32_t* from, uint32_t* to, int64_t count) {
  arrange<ArrangeInt4>(from, to, count);
}

extern "C" __global__ void arrange_fp4(const uint32_t* from, uint32_t* to, int64_t count) {
  arrange<ArrangeFp4>(from, to, count);
}

extern "C" __global__ void arrange_fp8(const uint32_t* from, uint32_t* to, int64_t count) {
  arrange<ArrangeFp8>(from, to, count);
}

// `to [rows, k]` BF16 from codes in the kernels' order; arguments as in `grouped::Problem`.
#define DEQUANTISE(NAME, FORMAT)                                                                                      \
  extern "C" __global__ void dequantise_##NAME(const uint8_t* codes, const uint8_t* scales, __nv_bfloat16* to, int k, \
                                               int row_bytes, int scale_rows, int scale_pitch) {                      \
    dequantise<formats::FORMAT>(codes, scales, to, k, row_bytes, scale_rows, scale_pitch);                            \
  }

DEQUANTISE(fp8, Fp8)
DEQUANTISE(int4, Int4)
DEQUANTISE(fp4, Fp4)
