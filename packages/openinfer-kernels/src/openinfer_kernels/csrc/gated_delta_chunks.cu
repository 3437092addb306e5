// The gated delta rule for pieces of prompts, 64 tokens at a time, heads of 128 x 128: everything but the decays on the
// tensor cores.
//
//     A = strict_lower(beta_i (k_i . k_j) e^{G_i - G_j})     M = (I + A)^-1     G_i: log decays summed since the chunk began
//     U = M diag(beta) V     W = M diag(beta e^G) K          P = lower((q_i . k_j) e^{G_i - G_j})
//     V' = U - W S     O = diag(e^G) Q S + P V'     S <- e^{G_C} S + (diag(e^{G_C - G}) K)^T V'
//
// Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks", section 3.3. U, W and P do not depend on the state: one kernel
// makes them of all chunks at once, and another walks over each row's chunks with the state in registers. Operands are
// BF16, sums, M and the state float32. Lengths of q and k, and decays, multiply sums or rows of float32 operands, so that
// q and k enter the products as they are.
#include "attention.cuh"
#include "attention_tiles.cuh"
#include "gated_delta.cuh"
#include "overlap.cuh"

using namespace gated_delta;
using attention::mma;
using attention::packed;

namespace {

constexpr int kDim = 128, kChunk = 64;
constexpr int kThreads = 256, kWarps = 8;
constexpr int kWide = kDim + 8, kNarrow = kChunk + 8;  // rows in shared memory, in values, against bank conflicts
constexpr int kColumns = 32, kSlices = kDim / kColumns, kSlim = kColumns + 8;
constexpr int kTogether = 2;  // value heads that `prepare` inverts at a time

struct Scratch {
  bf16 *u, *w;            // [T, N, 128]
  bf16* p;                // [T, N, 64]
  float *of_query;        // [N, T]: e^{G_i} / (|q_i| sqrt(128))
  float *until_end;       // [N, T]: e^{G_C - G_i} / |k_i|
  float *of_chunk;        // [N, T], at a chunk's first token: e^{G_C}
  int num_tokens;
};

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 16 bytes; zeros where there is nothing.
__device__ __forceinline__ void copy16(bf16* to, const bf16* from, bool is_there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(is_there ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void copy4(float* to, const float* from, bool is_there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from), "r"(is_there ? 4 : 0)
               : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all groups but the last `kPending` have come.
template <int kPending = 0>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// `count` of 64 rows of kValues values, `stride` apart, to rows of kRow values; the others become zeros.
template <int kValues, int kRow>
__device__ __forceinline__ void copy_rows(bf16* to, const bf16* from, int64_t stride, int count) {
  constexpr int kPieces = kValues / 8;
#pragma unroll
  for (int i = threadIdx.x; i < kChunk * kPieces; i += kThreads) {
    const int row = i / kPieces, piece = i % kPieces;
    copy16(to + row * kRow + piece * 8, from + (row < count ? row * stride : 0) + piece * 8, row < count);
  }
}

__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], const bf16* from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(from))
               : "memory");
}
__device__ __forceinline__ void load_transposed(uint32_t (&r)[4], const bf16* from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(from))
               : "memory");
}

// Operands of `mma` from matrices in shared memory, in the thread's lane: 16 x 16 values from (row, column) on.
//   a        of a matrix [m, k]              a_turned   of a matrix [k, m]
//   b        of a matrix [n, k]              b_turned   of a matrix [k, n]     both for two products, 8 columns each
template <int kRow>
struct Matrix {
  const bf16* data;
  int lane;

  __device__ __forceinline__ void a(uint32_t (&r)[4], int row, int column) const {
    load_matrices(r, data + (row + lane % 16) * kRow + column + lane / 16 * 8);
  }
  __device__ __forceinline__ void a_turned(uint32_t (&r)[4], int k, int m) const {
    load_transposed(r, data + (k + lane % 8 + lane / 16 * 8) * kRow + m + lane / 8 % 2 * 8);
  }
  __device__ __forceinline__ void b(uint32_t (&r)[4], int n, int k) const {
    load_matrices(r, data + (n + lane % 8 + lane / 16 * 8) * kRow + k + lane / 8 % 2 * 8);
  }
  __device__ __forceinline__ void b_turned(uint32_t (&r)[4], int k, int n) const {
    load_transposed(r, data + (k + lane % 16) * kRow + n + lane / 16 * 8);
  }
};

template <int kTiles>
__device__ __forceinline__ void clear(float (&sums)[kTiles][4]) {
#pragma unroll
  for (int j = 0; j < kTiles; j++)
#pragma unroll
    for (int i = 0; i < 4; i++) sums[j][i] = 0;
}

__device__ __forceinline__ void multiply(float (&left)[4], float (&right)[4], const uint32_t (&a)[4], const uint32_t (&b)[4]) {
  mma(left, a[0], a[1], a[2], a[3], b[0], b[1]);
  mma(right, a[0], a[1], a[2], a[3], b[2], b[3]);
}

__device__ __forceinline__ void store2(bf16* to, float low, float high) {
  *reinterpret_cast<uint32_t*>(to) = packed(low, high);
}

// --- what does not depend on the state ----------------------------------------------------------------------------

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

// --- (I + A)^-1 of a head by 128 threads, in blocks of 16 x 16 of `m` [64, kNarrow], which holds A ----------------------
//
// Blocks on the diagonal are inverted by forward substitution, in place. Those below follow from them, nearest to the
// diagonal first: M_ij = -M_ii sum_k A_ik M_kj, k from j to i - 1. As A is needed until the end, M_ij is kept where its
// transposed block is, above the diagonal, where A is zero.

constexpr int kBlock = 16;

__device__ __forceinline__ int block_at(int row, int column) { return row * kBlock * kNarrow + column * kBlock; }

__device__ __forceinline__ void invert_diagonal(float* m, int thread) {
  float* block = m + block_at(thread / kBlock, thread / kBlock);
  const int column = thread % kBlock;
  float solved[kBlock];
#pragma unroll
  for (int i = 0; i < kBlock; i++) {
    float sums[2] = {i == column ? 1.0f : 0.0f, 0};
#pragma unroll
    for (int j = 0; j < i; j++) sums[j % 2] -= block[i * kNarrow + j] * solved[j];
    solved[i] = sums[0] + sums[1];
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kBlock; i++) block[i * kNarrow + column] = solved[i];
}

__device__ __forceinline__ uint32_t tf32(float value) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
  return bits;
}

// sums[16 x 16] += left[16 x 16] right[16 x 16], by a warp; rows of both are kNarrow apart.
__device__ __forceinline__ void multiply_block(float (&sums)[2][4], const float* left, const float* right, int lane) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int k = 0; k < kBlock; k += 8) {
    const float* a = left + g * kNarrow + k + t;
    const uint32_t a0 = tf32(a[0]), a1 = tf32(a[8 * kNarrow]), a2 = tf32(a[4]), a3 = tf32(a[8 * kNarrow + 4]);
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const float* b = right + (k + t) * kNarrow + n * 8 + g;
      asm volatile(
          "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
          "{%0, %1, %2, %3};"
          : "+f"(sums[n][0]), "+f"(sums[n][1]), "+f"(sums[n][2]), "+f"(sums[n][3])
          : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(tf32(b[0])), "r"(tf32(b[4 * kNarrow])));
    }
  }
}

__device__ __forceinline__ void store_block(float* to, const float (&sums)[2][4], float sign, int lane) {
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int half = 0; half < 2; half++)
      *reinterpret_cast<float2*>(to + (lane / 4 + half * 8) * kNarrow + n * 8 + lane % 4 * 2) =
          make_float2(sign * sums[n][half * 2], sign * sums[n][half * 2 + 1]);
}

// M_ij of the block (i, j) below the diagonal, by a warp; those nearer to the diagonal are there.
__device__ __forceinline__ void invert_block(float* m, int i, int j, int lane) {
  float* place = m + block_at(j, i);
  float sums[2][4];
  clear(sums);
  for (int k = j; k < i; k++) multiply_block(sums, m + block_at(i, k), m + block_at(j, k), lane);
  store_block(place, sums, 1.0f, lane);
  __syncwarp();
  clear(sums);
  multiply_block(sums, m + block_at(i, i), place, lane);
  __syncwarp();
  store_block(place, sums, -1.0f, lane);
}

// By all threads of the block, 128 for each head; `is_there` says whether a thread has one.
__device__ __forceinline__ void invert(float* m, bool is_there, int thread, int lane) {
  const int warp = thread / 32;
  if (is_there && thread < kChunk) invert_diagonal(m, thread);
  __syncthreads();
  for (int away = 1; away < kChunk / kBlock; away++) {
    if (is_there && warp + away < kChunk / kBlock) invert_block(m, warp + away, warp, lane);
    __syncthreads();
  }
}

// Rows of `left [64, 64]`, lower triangular, times `right [64, 128]`, to `to` [T, N, 128] of this chunk. A warp reads 16
// rows of `left`, and afterwards collects its result there, half of the columns at a time, to write them 16 bytes each.
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
      Matrix<kWide>{right, lane}.b_turned(y, k, n * 16);
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
  const int first = tile.first_query + tile.first_line, count = min(kChunk, tile.num_lines - tile.first_line);
  const int64_t row_values = int64_t(a.heads) * kDim;
  bf16* queries = s.values[1];
  copy_rows<kDim, kWide>(queries, a.query(first, key_head), a.qkv_stride, count);
  copy_rows<kDim, kWide>(s.keys, a.key(first, key_head), a.qkv_stride, count);
  commit();
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
    commit();
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
      multiply_lower(scaled + side * kChunk * kNarrow, right, (side == 0 ? to.u : to.w) + place, row_values, count, rows, lane);
    }
  }
}

// --- the walk over a row's chunks ---------------------------------------------------------------------------------

// What is read of a chunk.
struct Stage {
  bf16 w[kChunk * kWide], queries[kChunk * kWide], keys[kChunk * kWide];
  bf16 p[kChunk * kNarrow];
  bf16 u[kChunk * kSlim];
  float of_query[kChunk], until_end[kChunk], of_chunk, unused[3];
};

template <int kStages>
struct WalkShared {
  Stage stages[kStages];
  bf16 corrections[kChunk * kSlim], decayed[kChunk * kSlim];
  bf16 state[kDim * kSlim];
};

__device__ __forceinline__ void load_chunk(Stage& s, const Arguments& a, const Scratch& from, int head, int slice,
                                           int first, int count) {
  const int64_t place = int64_t(first) * a.heads + head, row = int64_t(head) * from.num_tokens + first;
  const int64_t stride = int64_t(a.heads) * kDim;
  const int key_head = a.reads(head), i = threadIdx.x % kChunk;
  const bool is_there = i < count;
  copy_rows<kDim, kWide>(s.w, from.w + place * kDim, stride, count);
  copy_rows<kDim, kWide>(s.queries, a.query(first, key_head), a.qkv_stride, count);
  copy_rows<kDim, kWide>(s.keys, a.key(first, key_head), a.qkv_stride, count);
  copy_rows<kColumns, kSlim>(s.u, from.u + place * kDim + slice * kColumns, stride, count);
  copy_rows<kChunk, kNarrow>(s.p, from.p + place * kChunk, int64_t(a.heads) * kChunk, count);
  if (threadIdx.x < kChunk) copy4(s.of_query + i, from.of_query + row + (is_there ? i : 0), is_there);
  else if (threadIdx.x < 2 * kChunk) copy4(s.until_end + i, from.until_end + row + (is_there ? i : 0), is_there);
  else if (threadIdx.x == 2 * kChunk) copy4(&s.of_chunk, from.of_chunk + row, true);
}

using StateTile = float[kColumns / 8][4];  // 16 rows and 32 columns of a warp

__device__ __forceinline__ void share_state(bf16* shared, const StateTile& state, int warp, int lane) {
#pragma unroll
  for (int n = 0; n < kColumns / 8; n++) {
    bf16* to = shared + (warp * 16 + lane / 4) * kSlim + n * 8 + lane % 4 * 2;
    store2(to, state[n][0], state[n][1]);
    store2(to + 8 * kSlim, state[n][2], state[n][3]);
  }
}

// Each warp holds 16 rows of the state. Four of them find corrections, of 16 tokens each, the others outputs. Of several
// stages, one is computed while the chunks behind it are on their way to the others.
template <int kStages>
__device__ void walk(const Arguments& a, const Scratch& from) {
  extern __shared__ __align__(128) uint8_t raw[];
  __shared__ int scratch[attention::kTileScratch(kWarps)];
  WalkShared<kStages>& shared = *reinterpret_cast<WalkShared<kStages>*>(raw);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const attention::QueryTile whole =
      attention::find_tile<kWarps>(blockIdx.y, a.rows.query_starts, a.rows.context_lens, a.rows.num_rows,
                                       a.least_tokens, 1, 1 << 30, scratch);
  if (whole.row < 0) return;
  const StateRow row = state_row(a.rows, whole.row);
  const int head = blockIdx.x / kSlices, slice = blockIdx.x % kSlices;
  constexpr int kAhead = kStages > 1 ? kStages - 1 : 1;  // chunks on their way before the first is computed
  const auto load = [&](int begin) {  // chunk by chunk, a group of copies each, also behind the last one
    Stage& stage = shared.stages[begin / kChunk % kStages];
    if (begin < row.count) load_chunk(stage, a, from, head, slice, row.first + begin, min(kChunk, row.count - begin));
    commit();
  };
#pragma unroll
  for (int i = 0; i < kAhead; i++) load(i * kChunk);

  const int line = lane / 4, column = lane % 4 * 2, tokens = warp % 4 * 16;
  const bool corrects = warp < 4;
  float* at = a.state + row.slot * a.slot_stride + (int64_t(head) * kDim + warp * 16 + line) * kDim + slice * kColumns + column;
  StateTile state;
#pragma unroll
  for (int n = 0; n < kColumns / 8; n++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float2 pair = make_float2(0, 0);
      if (!row.begins) pair = *reinterpret_cast<const float2*>(at + half * 8 * kDim + n * 8);
      state[n][half * 2] = pair.x;
      state[n][half * 2 + 1] = pair.y;
    }
  share_state(shared.state, state, warp, lane);
  wait_for_copies<kAhead - 1>();
  __syncthreads();

  for (int begin = 0; begin < row.count; begin += kChunk) {
    const Stage& s = shared.stages[begin / kChunk % kStages];
    const int first = row.first + begin, count = min(kChunk, row.count - begin);
    if (kStages > 1) load(begin + kAhead * kChunk);
    float sums[kColumns / 8][4];  // W S or Q S of 16 tokens
    clear(sums);
    const bf16* left = corrects ? s.w : s.queries;
#pragma unroll
    for (int k = 0; k < kDim; k += 16) {
      uint32_t x[4];
      Matrix<kWide>{left, lane}.a(x, tokens, k);
#pragma unroll
      for (int n = 0; n < kColumns / 16; n++) {
        uint32_t b[4];
        Matrix<kSlim>{shared.state, lane}.b_turned(b, k, n * 16);
        multiply(sums[2 * n], sums[2 * n + 1], x, b);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int i = tokens + line + half * 8;
      const float factor = corrects ? s.until_end[i] : s.of_query[i];
#pragma unroll
      for (int n = 0; n < kColumns / 8; n++) {
        if (corrects) {
          const int place = i * kSlim + n * 8 + column;
          const float2 u = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(s.u + place));
          const float low = u.x - sums[n][half * 2], high = u.y - sums[n][half * 2 + 1];
          store2(shared.corrections + place, low, high);
          store2(shared.decayed + place, low * factor, high * factor);
        } else {
          sums[n][half * 2] *= factor;
          sums[n][half * 2 + 1] *= factor;
        }
      }
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < kColumns / 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) state[n][i] *= s.of_chunk;
#pragma unroll
    for (int k = 0; k < kChunk; k += 16) {
      uint32_t keys[4];
      Matrix<kWide>{s.keys, lane}.a_turned(keys, k, warp * 16);
#pragma unroll
      for (int n = 0; n < kColumns / 16; n++) {
        uint32_t b[4];
        Matrix<kSlim>{shared.decayed, lane}.b_turned(b, k, n * 16);
        multiply(state[2 * n], state[2 * n + 1], keys, b);
      }
    }
    share_state(shared.state, state, warp, lane);
    if (!corrects) {
      for (int k = 0; k <= tokens; k += 16) {  // P is lower triangular
        uint32_t p[4];
        Matrix<kNarrow>{s.p, lane}.a(p, tokens, k);
#pragma unroll
        for (int n = 0; n < kColumns / 16; n++) {
          uint32_t b[4];
          Matrix<kSlim>{shared.corrections, lane}.b_turned(b, k, n * 16);
          multiply(sums[2 * n], sums[2 * n + 1], p, b);
        }
      }
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int i = tokens + line + half * 8;
        if (i >= count) continue;
        bf16* to = a.out + (int64_t(first + i) * a.heads + head) * kDim + slice * kColumns + column;
#pragma unroll
        for (int n = 0; n < kColumns / 8; n++) store2(to + n * 8, sums[n][half * 2], sums[n][half * 2 + 1]);
      }
    }
    if (kStages == 1) {
      __syncthreads();
      load(begin + kChunk);
    }
    wait_for_copies<kAhead - 1>();
    __syncthreads();
  }

#pragma unroll
  for (int n = 0; n < kColumns / 8; n++)
#pragma unroll
    for (int half = 0; half < 2; half++)
      *reinterpret_cast<float2*>(at + half * 8 * kDim + n * 8) = make_float2(state[n][half * 2], state[n][half * 2 + 1]);
}

}  // namespace

// Grid: key heads of all chunks that there can be.
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    gated_delta_chunks_prepare(const __grid_constant__ Arguments a, const __grid_constant__ Scratch to) {
  allow_next_kernel();
  wait_for_previous_kernel();
  prepare(a, to);
}

// Grid: heads in slices of 32 columns, as many long rows as there can be.
#define GATED_DELTA_CHUNKS_WALK(STAGES)                                                      \
  extern "C" __global__ void __launch_bounds__(kThreads)                                 \
      gated_delta_chunks_walk_##STAGES(const __grid_constant__ Arguments a,                  \
                                       const __grid_constant__ Scratch from) {               \
    allow_next_kernel();                                                                     \
    wait_for_previous_kernel();                                                              \
    walk<STAGES>(a, from);                                                                   \
  }

GATED_DELTA_CHUNKS_WALK(1)
GATED_DELTA_CHUNKS_WALK(2)
GATED_DELTA_CHUNKS_WALK(3)
