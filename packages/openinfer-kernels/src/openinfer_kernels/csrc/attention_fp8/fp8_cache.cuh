// A paged cache in FP8: what a head of one block is, and its numbers to and from E4M3.
//
//     piece [codes B x D][float32 scales B]        s = max |x| / 448 (1 for zeros, 2^-126 at least),  code = E4M3(x / s)
//
// Micikevicius et al. 2022, "FP8 Formats for Deep Learning", table 1. Hopper and Ada convert by instructions; elsewhere
// integers do the same, bit for bit.
#pragma once
#include "attention/attention_variant.cuh"

namespace attention {

constexpr float kLargestE4m3 = 448.0f;
constexpr float kSmallestScale = 1.17549435e-38f;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define OPENINFER_CONVERTS_E4M3
#endif

// The nearest code, ties to even; beyond 448 that of 448.
__device__ __forceinline__ uint32_t e4m3_code(float x) {
  const uint32_t bits = __float_as_uint(x), size = bits & 0x7FFFFFFF;
  uint32_t code;
  if (size > 0x7F800000) {
    code = 0x7F;
  } else if (size < 0x3C800000) {  // below the smallest normal number, 2^-6, codes are 2^-9 apart
    const float shifted = __uint_as_float(size) + 16384.0f;  // whose last bit is 2^-9
    code = __float_as_uint(shifted) & 15;
  } else {
    code = min((size + 0x7FFFF + (size >> 20 & 1)) >> 20, 0x7Eu + (120u << 3)) - (120u << 3);
  }
  return code | (bits >> 24 & 0x80);
}

// Codes of two numbers, `low` in the low byte.
__device__ __forceinline__ uint32_t e4m3_codes(float low, float high) {
#ifdef OPENINFER_CONVERTS_E4M3
  uint16_t codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
#else
  return e4m3_code(low) | e4m3_code(high) << 8;
#endif
}

// Two codes, in the low half of `codes`, as float16, which has all values of E4M3: the low byte's in the low half.
__device__ __forceinline__ uint32_t e4m3_halves(uint32_t codes) {
#ifdef OPENINFER_CONVERTS_E4M3
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(uint16_t(codes)));
  return halves;
#else
  uint32_t halves = 0;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint32_t code = codes >> (8 * i) & 0xFF, exponent = code >> 3 & 15, fraction = code & 7;
    uint32_t half = (exponent + 8) << 10 | fraction << 7;
    if (exponent == 0) {  // fraction * 2^-9: 2^-7, 2^-8 or 2^-9 times a number from 1 on
      half = fraction == 0 ? 0 : fraction >= 4 ? 0x2000 | (fraction & 3) << 8 : fraction >= 2 ? 0x1C00 | (fraction & 1) << 9 : 0x1800;
    }
    if ((code & 0x7F) == 0x7F) half = 0x7FFF;
    halves |= (half | (code & 0x80) << 8) << (16 * i);
  }
  return halves;
#endif
}

__device__ __forceinline__ float e4m3_value(uint32_t code) {
  // Its bits lie where a float has the end of its exponent and the begin of its fraction, 2^-120 times too small.
  const float value = __uint_as_float((code & 0x80) << 24 | (code & 0x7F) << 20) * 1.32922800e36f;
  return (code & 0x7F) == 0x7F ? __uint_as_float(0x7FC00000) : value;
}

// Two codes, in the low half of `codes`, times their scale, rounded to BF16.
__device__ __forceinline__ uint32_t e4m3_times(uint32_t codes, float scale) {
#ifdef OPENINFER_CONVERTS_E4M3
  float low, high;
  asm("{\n.reg .b16 l, h;\n.reg .b32 both;\ncvt.rn.f16x2.e4m3x2 both, %2;\nmov.b32 {l, h}, both;\n"
      "cvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}"
      : "=f"(low), "=f"(high)
      : "h"(uint16_t(codes)));
  return packed(low * scale, high * scale);
#else
  return packed(e4m3_value(codes & 0xFF) * scale, e4m3_value(codes >> 8 & 0xFF) * scale);
#endif
}

// Four codes times their scale, rounded to BF16.
__device__ __forceinline__ uint2 e4m3_times_four(uint32_t codes, float scale) {
  return make_uint2(e4m3_times(codes & 0xFFFF, scale), e4m3_times(codes >> 16, scale));
}

// The scale of numbers whose largest size has these bits; of what is not finite, so is the scale.
__device__ __forceinline__ float scale_of(uint32_t largest) {
  const float scale = __uint_as_float(largest) / kLargestE4m3;
  return largest == 0 ? 1.0f : scale < kSmallestScale ? kSmallestScale : scale;
}

// Keys, or values, of a head in one block, from some token on.
struct Fp8Tile {
  const uint8_t* codes;
  const float* scales;

  // Eight numbers of a token, rounded to BF16, from code `at` on. Not through the first-level cache.
  __device__ __forceinline__ uint4 eight(int token, int at) const {
    const uint2 given = __ldcg(reinterpret_cast<const uint2*>(codes + at));
    const float scale = __ldcg(scales + token);
    const uint2 low = e4m3_times_four(given.x, scale), high = e4m3_times_four(given.y, scale);
    return make_uint4(low.x, low.y, high.x, high.y);
  }
};

// What stands for `FromMemory` of attention_kv_tile.cuh: eight numbers, rounded to BF16 on their way.
struct FromFp8 {
  template <int D>
  static __device__ __forceinline__ void load_at(uint32_t* to, Fp8Tile tile, int token, int at) {
    const uint4 eight = tile.eight(token, token * D + at);
    to[0] = eight.x, to[1] = eight.y, to[2] = eight.z, to[3] = eight.w;
  }
};

// The cache of one layer: pieces [blocks, 2, heads] with `block_stride` bytes between blocks.
struct Fp8LayerCache {
  using Tile = Fp8Tile;

  const uint8_t* data;
  int64_t block_stride;
  int num_heads, block_shift;  // a block has 1 << block_shift tokens

  __device__ __forceinline__ int64_t piece_bytes(int head_dim) const { return int64_t(head_dim + 4) << block_shift; }

  // Bytes from a head's keys to its values in one block.
  __device__ __forceinline__ int64_t value_offset(int head_dim) const { return num_heads * piece_bytes(head_dim); }

  // The codes of the key of a token of a block, for one head.
  __device__ __forceinline__ const uint8_t* key(int block, int head, int token, int head_dim) const {
    return data + block * block_stride + head * piece_bytes(head_dim) + token * head_dim;
  }
  // Bytes from there to the token's scale.
  __device__ __forceinline__ int scale_offset(int token, int head_dim) const {
    return (head_dim << block_shift) + token * (4 - head_dim);
  }
};

__device__ __forceinline__ Fp8Tile tile_of(const Fp8LayerCache& cache, int block, int head, int token, int head_dim) {
  const uint8_t* codes = cache.key(block, head, token, head_dim);
  return {codes, reinterpret_cast<const float*>(codes + cache.scale_offset(token, head_dim))};
}

__device__ __forceinline__ Fp8Tile values_of(Fp8Tile keys, int64_t value_offset) {
  return {keys.codes + value_offset, keys.scales + value_offset / 4};
}

// Attention over such a cache, as kernels are templates of it: nothing else is changed.
struct Fp8 : Plain {
  static constexpr bool kIsFp8 = true;
  using Cache = Fp8LayerCache;
};

// As `Fp8`, for kernels that copy what plain caches give them through a tensor map.
struct Fp8Pages : Fp8 {
  Fp8LayerCache cache;
};

}  // namespace attention
