// One warp's KV tile of 16 tokens of a KV head: keys and values go to registers in the order that the tensor cores
// want. Operands of the products are swapped (swap-AB), so that the narrow side of 8 is the query heads that share the
// KV head:
//
//   S^T [16 tokens x 8 heads] = K Q^T        K: 16 bytes of one token per load, the head dimension permuted alike in Q
//   O^T [D x 8 heads]        += V^T P^T      V: two tokens' loads interleaved by byte permutes; P^T by `movmatrix`
#pragma once
#include "attention/attention_decode_scheduler.cuh"

namespace attention {

constexpr int kPadding = 8;             // floats between the heads of a sum in shared memory, against bank conflicts

template <int D, int kTiles>
struct Shape {
  static constexpr int kChunk = D < 128 ? D : 128;  // values of a token that are loaded together
  static constexpr int kChunks = D / kChunk;
  static constexpr int kRegisters = kChunk / 4;     // of a thread, for the chunk of 16 tokens
  static constexpr int kBlocks16 = kChunk / 16;     // tensor core tiles of a chunk
  static constexpr int kHeads = 8 * kTiles;         // query heads of an item, at most
};

// One thread's 16 bytes. Not through the first-level cache: it may hold what was there before an overlapping kernel
// wrote.
struct FromMemory {
  static __device__ __forceinline__ void load(uint32_t* to, const bf16* from) {
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "l"(from)
                 : "memory");
  }
  template <int D>
  static __device__ __forceinline__ void load_at(uint32_t* to, const bf16* tile, int token, int at) {
    load(to, tile + token * D + at);
  }
};

struct FromShared {
  static __device__ __forceinline__ void load(uint32_t* to, const bf16* from) {
    const uint4 v = *reinterpret_cast<const uint4*>(from);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  }
  template <int D>
  static __device__ __forceinline__ void load_at(uint32_t* to, const bf16* tile, int token, int at) {
    load(to, tile + token * D + at);
  }
};

__device__ __forceinline__ uint32_t transposed(uint32_t matrix) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(matrix));
  return result;
}

template <int D, int kTiles>
struct Warp {
  using S = Shape<D, kTiles>;
  using Buffer = uint32_t[S::kRegisters];

  uint32_t q[S::kChunks][kTiles][S::kChunk / 8];     // Q^T, as b
  float sum[S::kChunks][S::kBlocks16][kTiles][4];    // O^T
  float top[kTiles][2], weight[kTiles][2];           // per head 8 tile + 2t + {0, 1}: maximum; this thread's exponentials

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int p = 0; p < S::kChunks; p++)
#pragma unroll
      for (int b = 0; b < S::kBlocks16; b++)
#pragma unroll
        for (int n = 0; n < kTiles; n++)
#pragma unroll
          for (int i = 0; i < 4; i++) sum[p][b][n][i] = 0;
#pragma unroll
    for (int n = 0; n < kTiles; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        top[n][e] = kMinusInfinity;
        weight[n][e] = 0;
      }
  }

  // Queries of `heads` heads from `from` on; absent heads are zero.
  __device__ __forceinline__ void load_q(const bf16* from, int heads, int g, int t) {
#pragma unroll
    for (int p = 0; p < S::kChunks; p++)
#pragma unroll
      for (int n = 0; n < kTiles; n++)
#pragma unroll
        for (int j = 0; j < S::kChunk / 32; j++) {
          uint32_t* to = &q[p][n][4 * j];
          if (8 * n + g < heads)
            FromMemory::load(to, from + (8 * n + g) * D + p * S::kChunk + (4 * j + t) * 8);
          else to[0] = to[1] = to[2] = to[3] = 0;
        }
  }

  // Tokens g and g + 8: 16 bytes at 8 (4 j + t).
  template <class From, class Tile>
  static __device__ __forceinline__ void load_k(Buffer& k, Tile from, int chunk, int g, int t) {
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int j = 0; j < S::kChunk / 32; j++)
        From::template load_at<D>(k + (half * (S::kChunk / 32) + j) * 4, from, g + 8 * half,
                                  chunk * S::kChunk + (4 * j + t) * 8);
  }

  // Tokens 2t, 2t + 1, 2t + 8, 2t + 9: 16 bytes at 8 g, and at 64 + 8 g.
  template <class From, class Tile>
  static __device__ __forceinline__ void load_v(Buffer& v, Tile from, int chunk, int g, int t) {
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int h = 0; h < S::kChunk / 64; h++)
        From::template load_at<D>(v + (i * (S::kChunk / 64) + h) * 4, from, 2 * t + (i & 1) + 8 * (i >> 1),
                                  chunk * S::kChunk + h * 64 + 8 * g);
  }

  __device__ __forceinline__ void multiply_k(float (&s)[kTiles][4], const Buffer& k, int chunk) {
#pragma unroll
    for (int step = 0; step < S::kChunk / 16; step++) {
      const int j = step / 2, r = (step % 2) * 2;
      const uint32_t* first = k + j * 4 + r;
      const uint32_t* second = first + S::kChunk / 8;
#pragma unroll
      for (int n = 0; n < kTiles; n++)
        mma(s[n], first[0], second[0], first[1], second[1], q[chunk][n][4 * j + r], q[chunk][n][4 * j + r + 1]);
    }
  }

  // Products to exponentials under a running maximum; `p` is P^T, as b.
  template <class V>
  __device__ __forceinline__ void exponentials(uint32_t (&p)[kTiles][2], float (&s)[kTiles][4], int left, int unseen,
                                               float scale, const V& variant, int g) {
#pragma unroll
    for (int n = 0; n < kTiles; n++) {
      variant.cap_scores(s[n]);
#pragma unroll
      for (int i = 0; i < 4; i++) s[n][i] *= scale;
      if (left < kKvTile) {
#pragma unroll
        for (int i = 0; i < 4; i++)
          if (g + 8 * (i >> 1) >= left) s[n][i] = kMinusInfinity;
      }
      if constexpr (V::kIsVariant) {
#pragma unroll
        for (int i = 0; i < 4; i++)
          if (g + 8 * (i >> 1) < unseen) s[n][i] = kMinusInfinity;
      }
      float factor[2];
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float highest = fmaxf(s[n][e], s[n][2 + e]);
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) highest = fmaxf(highest, __shfl_xor_sync(kAll, highest, mask));
        highest = fmaxf(highest, top[n][e]);
        factor[e] = exp2_fast(top[n][e] - highest);
        top[n][e] = highest;
        s[n][e] = exp2_fast(s[n][e] - highest);
        s[n][2 + e] = exp2_fast(s[n][2 + e] - highest);
        weight[n][e] = weight[n][e] * factor[e] + (s[n][e] + s[n][2 + e]);
      }
      // Mostly no maximum has changed, and the sums may stay as they are.
      if (__any_sync(kAll, !(factor[0] == 1.0f) || !(factor[1] == 1.0f))) {
#pragma unroll
        for (int chunk = 0; chunk < S::kChunks; chunk++)
#pragma unroll
          for (int b = 0; b < S::kBlocks16; b++)
#pragma unroll
            for (int i = 0; i < 4; i++) sum[chunk][b][n][i] *= factor[i & 1];
      }
      p[n][0] = transposed(packed(s[n][0], s[n][1]));
      p[n][1] = transposed(packed(s[n][2], s[n][3]));
    }
  }

  // What is not seen may be NaN, and 0 * NaN is not 0.
  template <class V>
  __device__ __forceinline__ void multiply_v(const uint32_t (&p)[kTiles][2], Buffer& v, int chunk, int left,
                                             int unseen, const V&, int t) {
    if (left < kKvTile) {
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (2 * t + (i & 1) + 8 * (i >> 1) >= left)
#pragma unroll
          for (int r = 0; r < S::kChunk / 16; r++) v[i * (S::kChunk / 16) + r] = 0;
    }
    if constexpr (V::kIsVariant) {
      if (unseen > 0) {
#pragma unroll
        for (int i = 0; i < 4; i++)
          if (2 * t + (i & 1) + 8 * (i >> 1) < unseen)
#pragma unroll
            for (int r = 0; r < S::kChunk / 16; r++) v[i * (S::kChunk / 16) + r] = 0;
      }
    }
    constexpr int kToken = S::kChunk / 16;  // registers of one token
#pragma unroll
    for (int b = 0; b < S::kBlocks16; b++) {
      uint32_t a[4];
      if constexpr (S::kChunk == 128) {  // rows g: value 8 g + b, rows g + 8: value 64 + 8 g + b
        const int r = b / 2, selector = b % 2 ? 0x7632 : 0x5410;
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const uint32_t* pair = v + (i / 2) * 2 * kToken + (i % 2) * 4 + r;
          a[i] = __byte_perm(pair[0], pair[kToken], selector);
        }
      } else {  // rows g: value 8 g + 2 b, rows g + 8: value 8 g + 2 b + 1
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const uint32_t* pair = v + (i / 2) * 2 * kToken + b;
          a[i] = __byte_perm(pair[0], pair[kToken], i % 2 ? 0x7632 : 0x5410);
        }
      }
#pragma unroll
      for (int n = 0; n < kTiles; n++) mma(sum[chunk][b][n], a[0], a[1], a[2], a[3], p[n][0], p[n][1]);
    }
  }

  // Leaves this warp's sums in `sums [heads, D + padding]`, its maxima and exponentials in `tops`, `weights` [heads].
  __device__ __forceinline__ void leave(float* sums, float* tops, float* weights, int heads, int g, int t) {
#pragma unroll
    for (int n = 0; n < kTiles; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int head = 8 * n + 2 * t + e;
        float all = weight[n][e];
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) all += __shfl_xor_sync(kAll, all, mask);
        if (head >= heads) continue;
        if (g == 0) {
          tops[head] = top[n][e];
          weights[head] = all;
        }
        float* row = sums + head * (D + kPadding) + 8 * g;
#pragma unroll
        for (int p = 0; p < S::kChunks; p++) {
          if constexpr (S::kChunk == 128) {
#pragma unroll
            for (int h = 0; h < 2; h++)
#pragma unroll
              for (int b = 0; b < 8; b += 4)
                *reinterpret_cast<float4*>(row + p * 128 + h * 64 + b) =
                    make_float4(sum[p][b][n][2 * h + e], sum[p][b + 1][n][2 * h + e], sum[p][b + 2][n][2 * h + e],
                                sum[p][b + 3][n][2 * h + e]);
          } else {
#pragma unroll
            for (int b = 0; b < 4; b += 2)
              *reinterpret_cast<float4*>(row + 2 * b) =
                  make_float4(sum[p][b][n][e], sum[p][b][n][2 + e], sum[p][b + 1][n][e], sum[p][b + 1][n][2 + e]);
          }
        }
      }
  }
};

}  // namespace attention
