// One warp's KV tile of 16 tokens in FP8, from shared memory (attention_kv_tile.cuh has it in BF16).
//
// E4M3 is exact in float16, to which one instruction brings two codes, so both products are of float16. Nothing else
// fits into its range by itself: queries are scaled by a power of two for each head, K's scales multiply scores, and V's
// are brought into the exponents,
//
//     sum_i exp2(s_i) v_i c_i / sum_i exp2(s_i),  exp2(s_i) v_i = exp2(u_i),  u_i = s_i + log2(v_i)
//
// with the running maximum of the u_i, so that what multiplies codes is at most 1. The sum below is made of exp2(s_i)
// under the same maximum, in float32.
#pragma once
#include "attention/attention_kv_tile.cuh"
#include "attention_fp8/fp8_cache.cuh"

namespace attention {

// As `mma`, of float16.
__device__ __forceinline__ void mma_halves(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                           uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Two floats rounded to float16 in one register, `low` in its low half.
__device__ __forceinline__ uint32_t packed_halves(float low, float high) {
  uint32_t both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

__device__ __forceinline__ float log2_fast(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

template <int D, int kTiles>
struct Fp8Warp : Warp<D, kTiles> {
  using Base = Warp<D, kTiles>;
  using S = Shape<D, kTiles>;
  static constexpr int kBytes = kKvTile * (D + 4);  // of keys, or of values, with their scales

  float q_scale[kTiles][2];  // of heads 8 tile + 2t + {0, 1}

  static __device__ __forceinline__ const float* scales(const uint8_t* tile) {
    return reinterpret_cast<const float*>(tile + kKvTile * D);
  }

  // Queries of `heads` heads from `from` on, absent heads zero; the largest of a head is between 128 and 256. A thread
  // has 16 neighbouring values of a chunk of 64, as it has of keys.
  __device__ __forceinline__ void load_q(const bf16* from, int heads, int g, int t) {
#pragma unroll
    for (int n = 0; n < kTiles; n++) {
      uint32_t largest = 0;
#pragma unroll
      for (int p = 0; p < S::kChunks; p++)
#pragma unroll
        for (int j = 0; j < S::kChunk / 32; j++) {
          uint32_t* to = &this->q[p][n][4 * j];
          if (8 * n + g < heads)
            FromMemory::load(to, from + (8 * n + g) * D + p * S::kChunk + (j / 2 * 4 + t) * 16 + j % 2 * 8);
          else to[0] = to[1] = to[2] = to[3] = 0;
#pragma unroll
          for (int i = 0; i < 4; i++) largest = max(largest, max(to[i] & 0x7FFF, to[i] >> 16 & 0x7FFF));
        }
      largest = max(largest, __shfl_xor_sync(kAll, largest, 1));
      largest = max(largest, __shfl_xor_sync(kAll, largest, 2));
      // Exponents of zeros and of what is not finite stay: 2^-120 and 2^120 are powers that floats have.
      const int exponent = min(max(int(largest >> 7), 14), 254) - 134;  // largest / 2^exponent is below 256
      const float down = __uint_as_float(uint32_t(127 - exponent) << 23);
      const float up = __uint_as_float(uint32_t(127 + exponent) << 23);
#pragma unroll
      for (int p = 0; p < S::kChunks; p++)
#pragma unroll
        for (int i = 0; i < S::kChunk / 8; i++) {
          uint32_t& pair = this->q[p][n][i];
          pair = packed_halves(__uint_as_float(pair << 16) * down, __uint_as_float(pair & 0xFFFF0000u) * down);
        }
#pragma unroll
      for (int e = 0; e < 2; e++) q_scale[n][e] = __shfl_sync(kAll, up, 4 * (2 * t + e));
    }
  }

  // Scores of a tile of keys, all but the softmax's scale.
  __device__ __forceinline__ void scores_of(float (&s)[kTiles][4], const uint8_t* tile, int g, int t) const {
#pragma unroll
    for (int chunk = 0; chunk < S::kChunks; chunk++)
#pragma unroll
      for (int j = 0; j < S::kChunk / 64; j++) {
        uint4 codes[2];
#pragma unroll
        for (int half = 0; half < 2; half++)
          codes[half] = *reinterpret_cast<const uint4*>(tile + (g + 8 * half) * D + chunk * S::kChunk + (4 * j + t) * 16);
        const uint32_t first[4] = {codes[0].x, codes[0].y, codes[0].z, codes[0].w};
        const uint32_t second[4] = {codes[1].x, codes[1].y, codes[1].z, codes[1].w};
#pragma unroll
        for (int word = 0; word < 4; word++) {
          const uint32_t a0 = e4m3_halves(first[word]), a1 = e4m3_halves(second[word]);
          const uint32_t a2 = e4m3_halves(first[word] >> 16), a3 = e4m3_halves(second[word] >> 16);
#pragma unroll
          for (int n = 0; n < kTiles; n++)
            mma_halves(s[n], a0, a1, a2, a3, this->q[chunk][n][8 * j + 2 * word], this->q[chunk][n][8 * j + 2 * word + 1]);
        }
      }
    const float key_scales[2] = {scales(tile)[g], scales(tile)[g + 8]};
#pragma unroll
    for (int n = 0; n < kTiles; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) s[n][i] *= key_scales[i >> 1] * q_scale[n][i & 1];
  }

  // Scores to exponentials under a running maximum; `p` is P^T with V's scales, as b.
  __device__ __forceinline__ void exponentials_of(uint32_t (&p)[kTiles][2], float (&s)[kTiles][4], const uint8_t* values,
                                                  int left, float scale, int g) {
    const float logs[2] = {log2_fast(scales(values)[g]), log2_fast(scales(values)[g + 8])};
#pragma unroll
    for (int n = 0; n < kTiles; n++) {
      float u[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        s[n][i] *= scale;
        u[i] = s[n][i] + logs[i >> 1];
      }
      if (left < kKvTile) {
#pragma unroll
        for (int i = 0; i < 4; i++)
          if (g + 8 * (i >> 1) >= left) s[n][i] = u[i] = kMinusInfinity;
      }
      float factor[2];
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float highest = fmaxf(u[e], u[2 + e]);
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) highest = fmaxf(highest, __shfl_xor_sync(kAll, highest, mask));
        highest = fmaxf(highest, this->top[n][e]);
        factor[e] = exp2_fast(this->top[n][e] - highest);
        this->top[n][e] = highest;
        const float weights = exp2_fast(s[n][e] - highest) + exp2_fast(s[n][2 + e] - highest);
        u[e] = exp2_fast(u[e] - highest);
        u[2 + e] = exp2_fast(u[2 + e] - highest);
        this->weight[n][e] = this->weight[n][e] * factor[e] + weights;
      }
      // Mostly no maximum has changed, and the sums may stay as they are.
      if (__any_sync(kAll, !(factor[0] == 1.0f) || !(factor[1] == 1.0f))) {
#pragma unroll
        for (int chunk = 0; chunk < S::kChunks; chunk++)
#pragma unroll
          for (int b = 0; b < S::kBlocks16; b++)
#pragma unroll
            for (int i = 0; i < 4; i++) this->sum[chunk][b][n][i] *= factor[i & 1];
      }
      p[n][0] = transposed(packed_halves(u[0], u[1]));
      p[n][1] = transposed(packed_halves(u[2], u[3]));
    }
  }

  // What is not seen may be a code of NaN, and 0 * NaN is not 0.
  __device__ __forceinline__ void add_values(const uint32_t (&p)[kTiles][2], const uint8_t* tile, int left, int g,
                                             int t) {
#pragma unroll
    for (int chunk = 0; chunk < S::kChunks; chunk++) {
      constexpr int kParts = S::kChunk / 64;
      uint2 codes[4][kParts];  // of tokens 2t, 2t + 1, 2t + 8, 2t + 9: 8 at 8 g, and at 64 + 8 g
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int h = 0; h < kParts; h++) {
          const int token = 2 * t + (i & 1) + 8 * (i >> 1);
          codes[i][h] = *reinterpret_cast<const uint2*>(tile + token * D + chunk * S::kChunk + h * 64 + 8 * g);
          if (left < kKvTile && token >= left) codes[i][h] = make_uint2(0, 0);
        }
      // Pairs of tokens of values 8 g + 2 k, + 1 (and 64 more): rows of two tensor core tiles, or of one.
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const uint32_t selector = k % 2 ? 0x7362 : 0x5140;
        uint32_t pairs[2][kParts];  // of tokens 2t and 2t + 8
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
          for (int h = 0; h < kParts; h++) {
            const uint2 first = codes[2 * i][h], second = codes[2 * i + 1][h];
            pairs[i][h] = __byte_perm(k < 2 ? first.x : first.y, k < 2 ? second.x : second.y, selector);
          }
        if constexpr (S::kChunk == 128) {  // rows g: value 8 g + b, rows g + 8: value 64 + 8 g + b
#pragma unroll
          for (int b = 0; b < 2; b++) {
            const uint32_t a0 = e4m3_halves(pairs[0][0] >> (16 * b)), a1 = e4m3_halves(pairs[0][1] >> (16 * b));
            const uint32_t a2 = e4m3_halves(pairs[1][0] >> (16 * b)), a3 = e4m3_halves(pairs[1][1] >> (16 * b));
#pragma unroll
            for (int n = 0; n < kTiles; n++)
              mma_halves(this->sum[chunk][2 * k + b][n], a0, a1, a2, a3, p[n][0], p[n][1]);
          }
        } else {  // rows g: value 8 g + 2 b, rows g + 8: value 8 g + 2 b + 1
          const uint32_t a0 = e4m3_halves(pairs[0][0]), a1 = e4m3_halves(pairs[0][0] >> 16);
          const uint32_t a2 = e4m3_halves(pairs[1][0]), a3 = e4m3_halves(pairs[1][0] >> 16);
#pragma unroll
          for (int n = 0; n < kTiles; n++) mma_halves(this->sum[chunk][k][n], a0, a1, a2, a3, p[n][0], p[n][1]);
        }
      }
    }
  }
};

}  // namespace attention
