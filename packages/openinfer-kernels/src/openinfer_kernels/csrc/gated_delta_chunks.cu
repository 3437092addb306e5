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
constexpr int kThreads = 128, kWarps = 4;
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
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

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
  float inverse[kTogether][kChunk * kNarrow];  // A; then diag-scaled M for U and for W, as BF16
  float total[kTogether][kChunk], beta[kTogether][kChunk];
  float of_query[kChunk], of_key[kChunk];
};

// 1 / |q_i| and 1 / |k_i|; two neighbouring threads share a token.
__device__ __forceinline__ void lengths(PrepareShared& s, const bf16* queries) {
  const int i = threadIdx.x / 2, begin = i * kWide + threadIdx.x % 2 * (kDim / 2);
  float of_query = 0, of_key = 0;
#pragma unroll
  for (int j = 0; j < kDim / 2; j += 8) {
    float q[8], k[8];
    unpack(load<8>(queries + begin + j), q);
    unpack(load<8>(s.keys + begin + j), k);
#pragma unroll
    for (int c = 0; c < 8; c++) {
      of_query += q[c] * q[c];
      of_key += k[c] * k[c];
    }
  }
  of_query += __shfl_xor_sync(~0u, of_query, 1);
  of_key += __shfl_xor_sync(~0u, of_key, 1);
  if (threadIdx.x % 2 == 0) {
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

// Column `column` of (I + A)^-1, by forward substitution.
__device__ __forceinline__ void invert(float (&m)[kChunk], const float* overlaps, int column) {
#pragma unroll
  for (int i = 0; i < kChunk; i++) {
    float sums[4] = {i == column ? 1.0f : 0.0f, 0, 0, 0};
#pragma unroll
    for (int j = 0; j < i; j += 4) {
      const float4 row = *reinterpret_cast<const float4*>(overlaps + i * kNarrow + j);
      sums[0] -= row.x * m[j];
      if (j + 1 < i) sums[1] -= row.y * m[j + 1];
      if (j + 2 < i) sums[2] -= row.z * m[j + 2];
      if (j + 3 < i) sums[3] -= row.w * m[j + 3];
    }
    m[i] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }
}

// Rows of `left [64, 64]`, lower triangular, times `right [64, 128]`, to `to` [T, N, 128] of this chunk. A warp reads 16
// rows of `left`, and afterwards collects its result there, half of the columns at a time, to write them 16 bytes each.
__device__ __forceinline__ void multiply_lower(bf16* left, const bf16* right, bf16* to, int64_t stride, int count,
                                               int warp, int lane) {
  float sums[kDim / 8][4];
  clear(sums);
  for (int k = 0; k <= warp; k++) {
    uint32_t x[4];
    Matrix<kNarrow>{left, lane}.a(x, warp * 16, k * 16);
#pragma unroll
    for (int n = 0; n < kDim / 16; n++) {
      uint32_t y[4];
      Matrix<kWide>{right, lane}.b_turned(y, k * 16, n * 16);
      multiply(sums[2 * n], sums[2 * n + 1], x, y);
    }
  }
  bf16* mine = left + warp * 16 * kNarrow;
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
      if (warp * 16 + row < count)
        store(to + (warp * 16 + row) * stride + half * kChunk + column, load<8>(mine + row * kNarrow + column));
    }
  }
}

__device__ void prepare(const Arguments& a, const Scratch& to) {
  extern __shared__ __align__(128) uint8_t raw[];
  __shared__ int scratch[attention::kTileScratch(kWarps)];
  PrepareShared& s = *reinterpret_cast<PrepareShared*>(raw);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, key_head = blockIdx.x % a.key_heads;
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

  float of_keys[kChunk / 8][4], of_queries[kChunk / 8][4];  // k_i . k_j and q_i . k_j of 16 rows
  clear(of_keys);
  clear(of_queries);
#pragma unroll
  for (int k = 0; k < kDim; k += 16) {
    uint32_t q[4], key[4];
    Matrix<kWide>{queries, lane}.a(q, warp * 16, k);
    Matrix<kWide>{s.keys, lane}.a(key, warp * 16, k);
#pragma unroll
    for (int n = 0; n < kChunk / 16; n++) {
      uint32_t b[4];
      Matrix<kWide>{s.keys, lane}.b(b, n * 16, k);
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
        const int i = warp * 16 + lane / 4 + half * 8;
        const float total = s.total[h][i], of_query = s.of_query[i], of_row = s.of_key[i] * s.beta[h][i];
#pragma unroll
        for (int n = 0; n < kChunk / 8; n++) {
          float weights[2], overlaps[2];
#pragma unroll
          for (int c = 0; c < 2; c++) {
            const int j = n * 8 + lane % 4 * 2 + c;
            const float decay = j <= i ? __expf(total - s.total[h][j]) * s.of_key[j] : 0.0f;
            weights[c] = of_queries[n][half * 2 + c] * decay * of_query;
            overlaps[c] = j < i ? of_keys[n][half * 2 + c] * decay * of_row : 0.0f;
          }
          const int j = n * 8 + lane % 4 * 2;
          if (i < count) store2(p + int64_t(i) * a.heads * kChunk + j, weights[0], weights[1]);
          *reinterpret_cast<float2*>(s.inverse[h] + i * kNarrow + j) = make_float2(overlaps[0], overlaps[1]);
        }
      }
    }
    __syncthreads();
    const int mine = threadIdx.x / kChunk, column = threadIdx.x % kChunk;
    float m[kChunk];
    if (mine < num_heads) invert(m, s.inverse[mine], column);
    __syncthreads();
    if (mine < num_heads) {
      bf16* scaled = reinterpret_cast<bf16*>(s.inverse[mine]);
      const float of_value = s.beta[mine][column];
      const float of_key = of_value * __expf(s.total[mine][column]) * s.of_key[column];
#pragma unroll
      for (int i = 0; i < kChunk; i++) {
        scaled[i * kNarrow + column] = __float2bfloat16_rn(m[i] * of_value);
        scaled[(kChunk + i) * kNarrow + column] = __float2bfloat16_rn(m[i] * of_key);
      }
    }
    wait_for_copies();
    __syncthreads();
    for (int h = 0; h < num_heads; h++) {
      bf16* scaled = reinterpret_cast<bf16*>(s.inverse[h]);
      const int64_t place = (int64_t(first) * a.heads + first_head + h) * kDim;
      multiply_lower(scaled, s.values[h], to.u + place, row_values, count, warp, lane);
      multiply_lower(scaled + kChunk * kNarrow, s.keys, to.w + place, row_values, count, warp, lane);
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
  else copy4(s.until_end + i, from.until_end + row + (is_there ? i : 0), is_there);
  if (threadIdx.x == 0) copy4(&s.of_chunk, from.of_chunk + row, true);
  commit();
}

using StateTiles = float[2][kColumns / 8][4];  // 32 rows and 32 columns of a warp

__device__ __forceinline__ void share_state(bf16* shared, const StateTiles& state, int warp, int lane) {
#pragma unroll
  for (int m = 0; m < 2; m++)
#pragma unroll
    for (int n = 0; n < kColumns / 8; n++) {
      bf16* to = shared + (warp * 32 + m * 16 + lane / 4) * kSlim + n * 8 + lane % 4 * 2;
      store2(to, state[m][n][0], state[m][n][1]);
      store2(to + 8 * kSlim, state[m][n][2], state[m][n][3]);
    }
}

// With two stages a chunk is on its way while the one before is computed.
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
  load_chunk(shared.stages[0], a, from, head, slice, row.first, min(kChunk, row.count));

  const int line = lane / 4, column = lane % 4 * 2;
  float* at = a.state + row.slot * a.slot_stride + (int64_t(head) * kDim + warp * 32 + line) * kDim + slice * kColumns + column;
  StateTiles state;
#pragma unroll
  for (int m = 0; m < 2; m++)
#pragma unroll
    for (int n = 0; n < kColumns / 8; n++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float2 pair = make_float2(0, 0);
        if (!row.begins) pair = *reinterpret_cast<const float2*>(at + (m * 16 + half * 8) * kDim + n * 8);
        state[m][n][half * 2] = pair.x;
        state[m][n][half * 2 + 1] = pair.y;
      }
  share_state(shared.state, state, warp, lane);
  wait_for_copies();
  __syncthreads();

  for (int begin = 0, turn = 0; begin < row.count; begin += kChunk, turn = (turn + 1) % kStages) {
    Stage& s = shared.stages[turn];
    const int first = row.first + begin, count = min(kChunk, row.count - begin), next = begin + kChunk;
    if (kStages > 1 && next < row.count)
      load_chunk(shared.stages[(turn + 1) % kStages], a, from, head, slice, row.first + next, min(kChunk, row.count - next));
    float held[kColumns / 8][4], out[kColumns / 8][4];  // W S and Q S of 16 tokens
    clear(held);
    clear(out);
#pragma unroll
    for (int k = 0; k < kDim; k += 16) {
      uint32_t w[4], q[4];
      Matrix<kWide>{s.w, lane}.a(w, warp * 16, k);
      Matrix<kWide>{s.queries, lane}.a(q, warp * 16, k);
#pragma unroll
      for (int n = 0; n < kColumns / 16; n++) {
        uint32_t b[4];
        Matrix<kSlim>{shared.state, lane}.b_turned(b, k, n * 16);
        multiply(held[2 * n], held[2 * n + 1], w, b);
        multiply(out[2 * n], out[2 * n + 1], q, b);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int i = warp * 16 + line + half * 8;
      const float of_query = s.of_query[i], until_end = s.until_end[i];
#pragma unroll
      for (int n = 0; n < kColumns / 8; n++) {
        const int place = i * kSlim + n * 8 + column;
        const float2 u = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(s.u + place));
        const float left = u.x - held[n][half * 2], right = u.y - held[n][half * 2 + 1];
        store2(shared.corrections + place, left, right);
        store2(shared.decayed + place, left * until_end, right * until_end);
        out[n][half * 2] *= of_query;
        out[n][half * 2 + 1] *= of_query;
      }
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
      for (int n = 0; n < kColumns / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) state[m][n][i] *= s.of_chunk;
#pragma unroll
    for (int k = 0; k < kChunk; k += 16) {
      uint32_t keys[2][4], p[4];
      Matrix<kWide>{s.keys, lane}.a_turned(keys[0], k, warp * 32);
      Matrix<kWide>{s.keys, lane}.a_turned(keys[1], k, warp * 32 + 16);
      Matrix<kNarrow>{s.p, lane}.a(p, warp * 16, k);
#pragma unroll
      for (int n = 0; n < kColumns / 16; n++) {
        uint32_t b[4];
        Matrix<kSlim>{shared.decayed, lane}.b_turned(b, k, n * 16);
        multiply(state[0][2 * n], state[0][2 * n + 1], keys[0], b);
        multiply(state[1][2 * n], state[1][2 * n + 1], keys[1], b);
        Matrix<kSlim>{shared.corrections, lane}.b_turned(b, k, n * 16);
        multiply(out[2 * n], out[2 * n + 1], p, b);
      }
    }
    share_state(shared.state, state, warp, lane);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int i = warp * 16 + line + half * 8;
      if (i >= count) continue;
      bf16* to = a.out + (int64_t(first + i) * a.heads + head) * kDim + slice * kColumns + column;
#pragma unroll
      for (int n = 0; n < kColumns / 8; n++) store2(to + n * 8, out[n][half * 2], out[n][half * 2 + 1]);
    }
    if (kStages == 1 && next < row.count) {
      __syncthreads();
      load_chunk(s, a, from, head, slice, row.first + next, min(kChunk, row.count - next));
    }
    wait_for_copies();
    __syncthreads();
  }

#pragma unroll
  for (int m = 0; m < 2; m++)
#pragma unroll
    for (int n = 0; n < kColumns / 8; n++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        *reinterpret_cast<float2*>(at + (m * 16 + half * 8) * kDim + n * 8) =
            make_float2(state[m][n][half * 2], state[m][n][half * 2 + 1]);
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
  extern "C" __global__ void __launch_bounds__(kThreads)                                     \
      gated_delta_chunks_walk_##STAGES(const __grid_constant__ Arguments a,                  \
                                       const __grid_constant__ Scratch from) {               \
    allow_next_kernel();                                                                     \
    wait_for_previous_kernel();                                                              \
    walk<STAGES>(a, from);                                                                   \
  }

GATED_DELTA_CHUNKS_WALK(1)
GATED_DELTA_CHUNKS_WALK(2)
