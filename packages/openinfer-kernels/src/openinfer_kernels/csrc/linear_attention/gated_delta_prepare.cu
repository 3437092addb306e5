// The gated delta rule for prefill chunks, 64 tokens at a time, heads of 128 x 128: what does not depend on the
// state, of all chunks at once. `gated_delta_walk.cu` does the rest.
//
//     A = strict_lower(beta_i (k_i . k_j) e^{G_i - G_j})   M = (I + A)^-1   G_i: log decays summed from the chunk's begin
//     U = M diag(beta) V     W = M diag(beta e^G) K          P = lower((q_i . k_j) e^{G_i - G_j})
//
// Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks", section 3.3. Operands are BF16, sums and M float32. Lengths
// of q and k, and decays, multiply sums or rows of float32 operands, so that q and k enter the products as they are.
#include "attention/attention_query_tile.cuh"
#include "common/pdl.cuh"
#include "linear_attention/gated_delta_inverse.cuh"
#include "linear_attention/gated_delta_tiles.cuh"

using namespace gated_delta;

namespace {

constexpr int kTogether = 2;  // value heads that are inverted at a time

struct PrepareShared {
  bf16 keys[kChunk * kWide];
  bf16 values[kTogether][kChunk * kWide];    // the second one holds the queries before
  float inverse[kTogether][kChunk * kNarrow];  // A; then M; then M for U and for W, columns scaled, as BF16
  float total[kTogether][kChunk], beta[kTogether][kChunk];
  float of_query[kChunk], of_key[kChunk];
};

// 1 / |q_i| and 1 / |k_i|; four neighbouring threads share a token.
__device__ __forceinline__ void lengths(PrepareShared& s, const bf16* queries) {
  const int i = threadIdx.x / 4, begin = i * kWide + threadIdx.x % 4 * (kDim / 4);
  float of_query = 0, of_key = 0;
#pragma unroll
  for (int j = 0; j < kDim / 4; j += 8) {
    float q[8], k[8];
    unpack(load<8>(queries + begin + j), q);
    unpack(load<8>(s.keys + begin + j), k);
#pragma unroll
    for (int c = 0; c < 8; c++) {
      of_query += q[c] * q[c];
      of_key += k[c] * k[c];
    }
  }
#pragma unroll
  for (int mask = 1; mask < 4; mask *= 2) {
    of_query += __shfl_xor_sync(~0u, of_query, mask);
    of_key += __shfl_xor_sync(~0u, of_key, mask);
  }
  if (threadIdx.x % 4 == 0) {
    s.of_query[i] = rsqrtf(of_query + kLengthEps) * rsqrtf(float(kDim));
    s.of_key[i] = rsqrtf(of_key + kLengthEps);
  }
}

// The gates of one head's chunk, by one warp; leaves what the walk over the chunks needs of them.
__device__ __forceinline__ void gates_of(PrepareShared& s, const Arguments& a, const Scratch& to, int which, int head,
                                         int first, int count, int lane) {
  float before = 0, sums[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int i = half * 32 + lane;
    float sum = i < count ? a.log_decay(first + i, head) : 0.0f;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    sums[half] = before + sum;
    before = __shfl_sync(~0u, sums[half], 31);
    s.total[which][i] = sums[half];
    s.beta[which][i] = i < count ? a.beta(first + i, head) : 0.0f;
  }
  const int64_t place = int64_t(head) * to.num_tokens + first;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int i = half * 32 + lane;
    if (i >= count) continue;
    to.of_query[place + i] = __expf(sums[half]) * s.of_query[i];
    to.until_end[place + i] = __expf(before - sums[half]) * s.of_key[i];
    if (i == 0) to.of_chunk[place] = __expf(before);
  }
}

// Rows of `left [64, 64]`, lower triangular, times `right [64, 128]`, to `to` [T, N, 128] of this chunk. A warp reads
// 16 rows of `left`, and afterwards collects its result there, half of the columns at a time, to write them 16 bytes
// each.
__device__ __forceinline__ void multiply_lower(bf16* left, const bf16* right, bf16* to, int64_t stride, int count,
                                               int rows, int lane) {
  float sums[kDim / 8][4];
  clear(sums);
  for (int k = 0; k <= rows; k += 16) {
    uint32_t x[4];
    Matrix<kNarrow>{left, lane}.a(x, rows, k);
#pragma unroll
    for (int n = 0; n < kDim / 16; n++) {
      uint32_t y[4];
      Matrix<kWide>{right, lane}.b_transposed(y, k, n * 16);
      multiply(sums[2 * n], sums[2 * n + 1], x, y);
    }
  }
  bf16* mine = left + rows * kNarrow;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    __syncwarp();
#pragma unroll
    for (int n = 0; n < kChunk / 8; n++) {
      const float* sum = sums[half * (kChunk / 8) + n];
      bf16* place = mine + lane / 4 * kNarrow + n * 8 + lane % 4 * 2;
      store2(place, sum[0], sum[1]);
      store2(place + 8 * kNarrow, sum[2], sum[3]);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16; i += 4) {
      const int row = i + lane / 8, column = lane % 8 * 8;
      if (rows + row < count)
        store(to + (rows + row) * stride + half * kChunk + column, load<8>(mine + row * kNarrow + column));
    }
  }
}

__device__ void prepare(const Arguments& a, const Scratch& to) {
  extern __shared__ __align__(128) uint8_t raw[];
  __shared__ int scratch[attention::kTileScratch(kWarps)];
  PrepareShared& s = *reinterpret_cast<PrepareShared*>(raw);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, key_head = blockIdx.x % a.key_heads;
  const int rows = warp % 4 * 16, side = warp / 4;  // of this warp: 16 tokens; half of the others, or U or W
  const attention::QueryTile tile =
      attention::find_tile<kWarps>(blockIdx.x / a.key_heads, a.rows.query_starts, a.rows.context_lens, a.rows.num_rows,
                                   a.least_tokens, 1, kChunk, scratch);
  if (tile.row < 0) return;
  const int first = tile.first_query + tile.first_query_row,
            count = min(kChunk, tile.num_query_rows - tile.first_query_row);
  const int64_t row_values = int64_t(a.heads) * kDim;
  bf16* queries = s.values[1];
  copy_rows<kDim, kWide>(queries, a.query(first, key_head), a.qkv_stride, count);
  copy_rows<kDim, kWide>(s.keys, a.key(first, key_head), a.qkv_stride, count);
  commit_copies();
  wait_for_copies();
  __syncthreads();
  lengths(s, queries);

  float of_keys[kChunk / 16][4], of_queries[kChunk / 16][4];  // k_i . k_j and q_i . k_j of 16 i and 32 j
  clear(of_keys);
  clear(of_queries);
#pragma unroll
  for (int k = 0; k < kDim; k += 16) {
    uint32_t q[4], key[4];
    Matrix<kWide>{queries, lane}.a(q, rows, k);
    Matrix<kWide>{s.keys, lane}.a(key, rows, k);
#pragma unroll
    for (int n = 0; n < kChunk / 32; n++) {
      uint32_t b[4];
      Matrix<kWide>{s.keys, lane}.b(b, side * (kChunk / 2) + n * 16, k);
      multiply(of_queries[2 * n], of_queries[2 * n + 1], q, b);
      multiply(of_keys[2 * n], of_keys[2 * n + 1], key, b);
    }
  }

  const int ratio = a.heads / a.key_heads;
  for (int pair = 0; pair < ratio; pair += kTogether) {
    const int first_head = key_head * ratio + pair, num_heads = min(kTogether, ratio - pair);
    __syncthreads();
    for (int h = 0; h < num_heads; h++)
      copy_rows<kDim, kWide>(s.values[h], a.value(first, first_head + h), a.qkv_stride, count);
    commit_copies();
    if (warp < num_heads) gates_of(s, a, to, warp, first_head + warp, first, count, lane);
    __syncthreads();
    for (int h = 0; h < num_heads; h++) {
      bf16* p = to.p + (int64_t(first) * a.heads + first_head + h) * kChunk;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int i = rows + lane / 4 + half * 8;
        const float total = s.total[h][i], of_query = s.of_query[i], of_row = s.of_key[i] * s.beta[h][i];
#pragma unroll
        for (int n = 0; n < kChunk / 16; n++) {
          const int begin = side * (kChunk / 2) + n * 8 + lane % 4 * 2;
          float weights[2], overlaps[2];
#pragma unroll
          for (int c = 0; c < 2; c++) {
            const int j = begin + c;
            // G falls: up to the diagonal exponents are at most 0, beyond it they could overflow.
            const float decay = j <= i ? __expf(total - s.total[h][j]) * s.of_key[j] : 0.0f;
            weights[c] = of_queries[n][half * 2 + c] * decay * of_query;
            overlaps[c] = j < i ? of_keys[n][half * 2 + c] * decay * of_row : 0.0f;
          }
          if (i < count) store2(p + int64_t(i) * a.heads * kChunk + begin, weights[0], weights[1]);
          *reinterpret_cast<float2*>(s.inverse[h] + i * kNarrow + begin) = make_float2(overlaps[0], overlaps[1]);
        }
      }
    }
    __syncthreads();
    constexpr int kRows = kChunk / 2;  // that a thread scales of a column
    const int mine = threadIdx.x / 128, column = threadIdx.x % kChunk, block = column / kBlock;
    const int begin = threadIdx.x / kChunk % 2 * kRows;
    const bool is_there = mine < num_heads;
    float* inverse = s.inverse[mine];
    invert(inverse, is_there, threadIdx.x % 128, lane);
    float m[kRows];
    if (is_there) {
#pragma unroll
      for (int j = 0; j < kRows; j++) {
        const int i = begin + j;  // blocks above the diagonal are zero, and never read
        if (i / kBlock >= block) m[j] = inverse[block_at(block, i / kBlock) + i % kBlock * kNarrow + column % kBlock];
      }
    }
    __syncthreads();
    if (is_there) {
      bf16* scaled = reinterpret_cast<bf16*>(inverse);
      const float of_value = s.beta[mine][column];
      const float of_key = of_value * __expf(s.total[mine][column]) * s.of_key[column];
#pragma unroll
      for (int j = 0; j < kRows; j++) {
        const int i = begin + j;
        if (i / kBlock < block) continue;
        scaled[i * kNarrow + column] = __float2bfloat16_rn(m[j] * of_value);
        scaled[(kChunk + i) * kNarrow + column] = __float2bfloat16_rn(m[j] * of_key);
      }
    }
    wait_for_copies();
    __syncthreads();
    for (int h = 0; h < num_heads; h++) {
      bf16* scaled = reinterpret_cast<bf16*>(s.inverse[h]);
      const int64_t place = (int64_t(first) * a.heads + first_head + h) * kDim;
      const bf16* right = side == 0 ? s.values[h] : s.keys;
      bf16* target = (side == 0 ? to.u : to.w) + place;
      multiply_lower(scaled + side * kChunk * kNarrow, right, target, row_values, count, rows, lane);
    }
  }
}

}  // namespace

// Grid: key heads of all chunks that there can be.
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    gated_delta_prepare(const __grid_constant__ Arguments a, const __grid_constant__ Scratch to) {
  launch_dependents();
  wait_for_previous_kernel();
  prepare(a, to);
}
