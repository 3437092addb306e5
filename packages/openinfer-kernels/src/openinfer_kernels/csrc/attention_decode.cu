// Attention of rows with one query token over their paged context: every key and value is read once, at the speed of memory.
//
// A turn is 16 tokens of one KV head: a warp reads their keys and values straight into registers, in the order that the
// tensor cores want, without shared memory. The products are turned around, so that the narrow side of 8 is the query
// heads that share the KV head:
//
//   S^T [16 tokens x 8 heads] = K Q^T        K: 16 bytes of one token per load, the head dimension permuted alike in Q
//   O^T [D x 8 heads]        += V^T P^T      V: two tokens' loads interleaved by byte permutes; P^T by `movmatrix`
//
// The next turn's keys are asked for when this turn's have been multiplied, and so for values: each warp has a turn or
// more in flight.
//
// Work is divided on the device. A unit is 64 tokens (a turn for each warp of a block) of one item, a (row, KV head,
// tile of query heads); all units stand in one line, which is cut into equal pieces, one per block. A block that has all
// of an item writes its result; else it leaves its part (unnormalised sum, maximum, sum of exponentials per head) in the
// workspace, and the block that arrives last adds all parts in their order, so that results do not depend on timing.
#include "attention.cuh"
#include "overlap.cuh"

using namespace attention;

namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * 32;
constexpr int kTurn = 16;               // tokens
constexpr int kUnit = kTurn * kWarps;   // tokens
constexpr int kPadding = 8;             // floats between the heads of a sum in shared memory, against bank conflicts
constexpr int kPartsAtOnce = 8;         // parts in flight while a block adds them
constexpr unsigned kAll = ~0u;

struct Arguments {
  const bf16* q;            // [T, H, D]
  bf16* out;                // [T, H D]
  LayerCache cache;
  const int* block_tables;  // [R, table_stride]
  const int* query_starts;  // [R + 1]
  const int* context_lens;  // [R]
  float* parts;             // [blocks, 2, part size]
  int* arrivals;            // [items], zero before and after
  int num_rows, table_stride, group;
  int early;                // nonzero: batch and older tokens may be read before the previous kernel has ended
  float scale;              // of scores, times log2(e)
};

template <int D, int kTiles>
struct Shape {
  static constexpr int kPiece = D < 128 ? D : 128;  // values of a token that are loaded together
  static constexpr int kPieces = D / kPiece;
  static constexpr int kRegisters = kPiece / 4;     // of a thread, for the piece of 16 tokens
  static constexpr int kBlocks16 = kPiece / 16;     // tensor core tiles of a piece
  static constexpr int kHeads = 8 * kTiles;         // query heads of an item, at most
};

// One thread's 16 bytes. Not through the first-level cache: it may hold what was there before an overlapping kernel wrote.
__device__ __forceinline__ void load16(uint32_t* to, const bf16* from) {
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "l"(from)
               : "memory");
}

__device__ __forceinline__ uint32_t transposed(uint32_t matrix) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(matrix));
  return result;
}

// --- the line of units ----------------------------------------------------------------------------------------

struct Rows {
  int* starts;    // [R + 1] first unit of each row
  int* contexts;  // [R] 0 for rows of several tokens: those are not ours
};

__device__ __forceinline__ int units_of(int context) { return (context + kUnit - 1) / kUnit; }

// Sums up the units of all rows; every thread takes consecutive rows. Returns the number of units.
__device__ int count_units(const Arguments& a, int heads, const Rows& rows, int* sums) {
  const int thread = threadIdx.x, each = (a.num_rows + kThreads - 1) / kThreads;
  const int first = min(thread * each, a.num_rows), last = min(first + each, a.num_rows);
  int mine = 0;
  for (int row = first; row < last; row++) {
    const int num_tokens = __ldcg(a.query_starts + row + 1) - __ldcg(a.query_starts + row);
    int context = __ldcg(a.context_lens + row);
    if (num_tokens != 1) context = 0;
    rows.contexts[row] = context;
    mine += units_of(context) * heads;
  }
  int sum = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(kAll, sum, step);
    if (thread % 32 >= step) sum += other;
  }
  if (thread % 32 == 31) sums[thread / 32] = sum;
  __syncthreads();
  int before = sum - mine, total = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; warp++) {
    if (warp < thread / 32) before += sums[warp];
    total += sums[warp];
  }
  for (int row = first; row < last; row++) {
    rows.starts[row] = before;
    before += units_of(rows.contexts[row]) * heads;
  }
  if (thread == 0) rows.starts[a.num_rows] = total;
  __syncthreads();
  return total;
}

// The first `units % workers` workers have one unit more.
struct Division {
  int units, workers;

  __device__ __forceinline__ int first_of(int worker) const {
    return worker * (units / workers) + min(worker, units % workers);
  }
  __device__ __forceinline__ int worker_of(int unit) const {
    const int each = units / workers, more = units % workers;
    return unit < more * (each + 1) ? unit / (each + 1) : more + (unit - more * (each + 1)) / each;
  }
};

// A place in the line.
struct Place {
  int row, head, unit, units, context;  // `unit` of the `units` of this item; `head`: KV head and tile of query heads

  __device__ __forceinline__ void enter(int new_row, const Rows& rows) {
    row = new_row;
    context = rows.contexts[row];
    units = units_of(context);
  }
  __device__ __forceinline__ void find(int in_line, int num_rows, const Rows& rows) {
    int low = 0, high = num_rows;  // starts[low] <= in_line < starts[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (rows.starts[middle] <= in_line) low = middle;
      else high = middle;
    }
    enter(low, rows);
    head = (in_line - rows.starts[low]) / units;
    unit = (in_line - rows.starts[low]) % units;
  }
  __device__ __forceinline__ void advance(int heads, int num_rows, const Rows& rows) {
    if (++unit < units) return;
    unit = 0;
    if (++head < heads) return;
    head = 0;
    do row++;
    while (row < num_rows && rows.contexts[row] == 0);
    if (row < num_rows) enter(row, rows);
  }
  // Tokens of the context from this warp's turn on; nothing to do where it is not positive.
  __device__ __forceinline__ int left(int warp) const { return context - (unit * kUnit + warp * kTurn); }
};

// --- one turn -------------------------------------------------------------------------------------------------

template <int D, int kTiles>
struct Warp {
  using S = Shape<D, kTiles>;
  using Buffer = uint32_t[S::kRegisters];

  uint32_t q[S::kPieces][kTiles][S::kPiece / 8];     // Q^T, as b
  float sum[S::kPieces][S::kBlocks16][kTiles][4];    // O^T
  float top[kTiles][2], weight[kTiles][2];           // per head 8 tile + 2t + {0, 1}: maximum; this thread's exponentials

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int p = 0; p < S::kPieces; p++)
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
    for (int p = 0; p < S::kPieces; p++)
#pragma unroll
      for (int n = 0; n < kTiles; n++)
#pragma unroll
        for (int j = 0; j < S::kPiece / 32; j++) {
          uint32_t* to = &q[p][n][4 * j];
          if (8 * n + g < heads) load16(to, from + (8 * n + g) * D + p * S::kPiece + (4 * j + t) * 8);
          else to[0] = to[1] = to[2] = to[3] = 0;
        }
  }

  // Tokens g and g + 8: 16 bytes at 8 (4 j + t).
  static __device__ __forceinline__ void load_k(Buffer& k, const bf16* from, int piece, int g, int t) {
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int j = 0; j < S::kPiece / 32; j++)
        load16(k + (half * (S::kPiece / 32) + j) * 4, from + (g + 8 * half) * D + piece * S::kPiece + (4 * j + t) * 8);
  }

  // Tokens 2t, 2t + 1, 2t + 8, 2t + 9: 16 bytes at 8 g, and at 64 + 8 g.
  static __device__ __forceinline__ void load_v(Buffer& v, const bf16* from, int piece, int g, int t) {
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int h = 0; h < S::kPiece / 64; h++)
        load16(v + (i * (S::kPiece / 64) + h) * 4,
               from + (2 * t + (i & 1) + 8 * (i >> 1)) * D + piece * S::kPiece + h * 64 + 8 * g);
  }

  __device__ __forceinline__ void multiply_k(float (&s)[kTiles][4], const Buffer& k, int piece) {
#pragma unroll
    for (int step = 0; step < S::kPiece / 16; step++) {
      const int j = step / 2, r = (step % 2) * 2;
      const uint32_t* first = k + j * 4 + r;
      const uint32_t* second = first + S::kPiece / 8;
#pragma unroll
      for (int n = 0; n < kTiles; n++)
        mma(s[n], first[0], second[0], first[1], second[1], q[piece][n][4 * j + r], q[piece][n][4 * j + r + 1]);
    }
  }

  // Scores to exponentials under a running maximum; `p` is P^T, as b.
  __device__ __forceinline__ void exponentials(uint32_t (&p)[kTiles][2], float (&s)[kTiles][4], int left, float scale,
                                               int g) {
#pragma unroll
    for (int n = 0; n < kTiles; n++) {
#pragma unroll
      for (int i = 0; i < 4; i++) s[n][i] *= scale;
      if (left < kTurn) {
#pragma unroll
        for (int i = 0; i < 4; i++)
          if (g + 8 * (i >> 1) >= left) s[n][i] = kMinusInfinity;
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
      if (__any_sync(kAll, !(factor[0] == 1.0f) || !(factor[1] == 1.0f))) {
#pragma unroll
        for (int piece = 0; piece < S::kPieces; piece++)
#pragma unroll
          for (int b = 0; b < S::kBlocks16; b++)
#pragma unroll
            for (int i = 0; i < 4; i++) sum[piece][b][n][i] *= factor[i & 1];
      }
      p[n][0] = transposed(packed(s[n][0], s[n][1]));
      p[n][1] = transposed(packed(s[n][2], s[n][3]));
    }
  }

  __device__ __forceinline__ void multiply_v(const uint32_t (&p)[kTiles][2], Buffer& v, int piece, int left, int t) {
    if (left < kTurn) {
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (2 * t + (i & 1) + 8 * (i >> 1) >= left)
#pragma unroll
          for (int r = 0; r < S::kPiece / 16; r++) v[i * (S::kPiece / 16) + r] = 0;
    }
    constexpr int kToken = S::kPiece / 16;  // registers of one token
#pragma unroll
    for (int b = 0; b < S::kBlocks16; b++) {
      uint32_t a[4];
      if constexpr (S::kPiece == 128) {  // rows g: value 8 g + b, rows g + 8: value 64 + 8 g + b
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
      for (int n = 0; n < kTiles; n++) mma(sum[piece][b][n], a[0], a[1], a[2], a[3], p[n][0], p[n][1]);
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
        for (int p = 0; p < S::kPieces; p++) {
          if constexpr (S::kPiece == 128) {
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

// --- the end of an item ---------------------------------------------------------------------------------------

template <int D, int kTiles>
struct Shared {
  static constexpr int kHeads = Shape<D, kTiles>::kHeads;
  float tops[kWarps][kHeads], weights[kWarps][kHeads];
  int counts[kWarps];
  int is_last;
  alignas(16) float sums[kWarps * kHeads * (D + kPadding)];  // per warp; then what `add_parts` shares
};

__device__ __forceinline__ float4 scaled(float4 v, float f) { return make_float4(v.x * f, v.y * f, v.z * f, v.w * f); }
__device__ __forceinline__ void add(float4& to, float4 v, float f) {
  to.x += v.x * f;
  to.y += v.y * f;
  to.z += v.z * f;
  to.w += v.w * f;
}
__device__ __forceinline__ void store(bf16* to, float4 v) {
  *reinterpret_cast<uint2*>(to) = make_uint2(packed(v.x, v.y), packed(v.z, v.w));
}

// A part in the workspace: sums [heads, D], then maxima [heads], then exponentials [heads].
template <int D, int kTiles>
constexpr int kPartSize = Shape<D, kTiles>::kHeads * (D + 2);

// Adds the warps' sums: to `out` where they are all of the item, else to `part`.
template <int D, int kTiles>
__device__ void add_warps(const Shared<D, kTiles>& s, bf16* out, float* part, int heads) {
  constexpr int kHeads = Shape<D, kTiles>::kHeads;
  for (int i = threadIdx.x; i < heads * (D / 4); i += kThreads) {
    const int head = i / (D / 4), at = i % (D / 4) * 4;
    float highest = s.tops[0][head];
#pragma unroll
    for (int w = 1; w < kWarps; w++) highest = fmaxf(highest, s.tops[w][head]);
    float4 sum = make_float4(0, 0, 0, 0);
    float weight = 0;
#pragma unroll
    for (int w = 0; w < kWarps; w++) {
      const float factor = exp2_fast(s.tops[w][head] - highest);
      add(sum, *reinterpret_cast<const float4*>(s.sums + (w * kHeads + head) * (D + kPadding) + at), factor);
      weight += s.weights[w][head] * factor;
    }
    if (part == nullptr) {
      store(out + head * D + at, scaled(sum, 1.0f / weight));
      continue;
    }
    __stcg(reinterpret_cast<float4*>(part + head * D + at), sum);
    if (at == 0) {
      __stcg(part + kHeads * D + head, highest);
      __stcg(part + kHeads * (D + 1) + head, weight);
    }
  }
}

// A thread's share of four values of a head: parts added so far, under their maximum.
struct Running {
  float4 sum = make_float4(0, 0, 0, 0);
  float top = kMinusInfinity, weight = 0;

  __device__ __forceinline__ void raise(float highest) {
    const float factor = highest == top ? 1.0f : exp2_fast(top - highest);
    sum = scaled(sum, factor);
    weight *= factor;
    top = highest;
  }
};

// Adds the parts of an item in the order of workers. The first worker's part lies in its second slot, as it begins the
// item; the others' in their first. Where threads are many, several share four values, each with every so many parts.
template <int D, int kTiles>
__device__ __noinline__ void add_parts(Shared<D, kTiles>& s, const float* parts, int first, int count, bf16* out, int heads) {
  constexpr int kHeads = Shape<D, kTiles>::kHeads;
  const int fours = heads * (D / 4), ways = max(1, kThreads / fours), way = ways == 1 ? 0 : threadIdx.x / fours;
  const float* begin = parts + int64_t(first) * 2 * kPartSize<D, kTiles>;
  Running* shared = reinterpret_cast<Running*>(s.sums);  // [ways, fours]
  for (int i = threadIdx.x - way * fours; i < fours && way < ways; i += kThreads) {
    const int head = i / (D / 4), at = i % (D / 4) * 4;
    Running all;
    for (int c = way; c < count; c += ways * kPartsAtOnce) {
      float4 sums[kPartsAtOnce];
      float tops[kPartsAtOnce], weights[kPartsAtOnce];
      float highest = all.top;
#pragma unroll
      for (int j = 0; j < kPartsAtOnce; j++) {
        const int index = min(c + j * ways, count - 1);
        const float* part = begin + (int64_t(index) * 2 + (index == 0)) * kPartSize<D, kTiles>;
        sums[j] = __ldcg(reinterpret_cast<const float4*>(part + head * D + at));
        tops[j] = __ldcg(part + kHeads * D + head);
        weights[j] = __ldcg(part + kHeads * (D + 1) + head);
      }
#pragma unroll
      for (int j = 0; j < kPartsAtOnce; j++) highest = fmaxf(highest, tops[j]);
      all.raise(highest);
#pragma unroll
      for (int j = 0; j < kPartsAtOnce; j++) {
        if (c + j * ways >= count) continue;
        const float factor = exp2_fast(tops[j] - highest);
        add(all.sum, sums[j], factor);
        all.weight += weights[j] * factor;
      }
    }
    if (ways == 1) store(out + head * D + at, scaled(all.sum, 1.0f / all.weight));
    else shared[way * fours + i] = all;
  }
  if (ways > 1) {
    __syncthreads();
    if (int(threadIdx.x) < fours) {
      Running all = shared[threadIdx.x];
      for (int w = 1; w < ways; w++) {
        const Running other = shared[w * fours + threadIdx.x];
        const float highest = fmaxf(all.top, other.top);
        all.raise(highest);
        const float factor = other.top == kMinusInfinity ? 0.0f : exp2_fast(other.top - highest);
        add(all.sum, other.sum, factor);
        all.weight += other.weight * factor;
      }
      store(out + threadIdx.x * 4, scaled(all.sum, 1.0f / all.weight));
    }
  }
  __syncthreads();
}

// --- the kernel -----------------------------------------------------------------------------------------------

template <int D, int kTiles>
__device__ void run(const Arguments& a) {
  using W = Warp<D, kTiles>;
  constexpr int kHeads = Shape<D, kTiles>::kHeads;
  extern __shared__ __align__(16) uint8_t raw[];
  auto& s = *reinterpret_cast<Shared<D, kTiles>*>(raw);
  const Rows rows = {reinterpret_cast<int*>(raw + sizeof(s)), reinterpret_cast<int*>(raw + sizeof(s)) + a.num_rows + 1};
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int tiles = (a.group + kHeads - 1) / kHeads, heads = a.cache.num_heads * tiles;
  const int64_t value_offset = a.cache.value_offset(D);
  const int block_mask = (1 << a.cache.block_shift) - 1;

  allow_next_kernel();
  if (!a.early) wait_for_previous_kernel();
  const int units = count_units(a, heads, rows, s.counts);
  const Division division = {units, min(units, int(gridDim.x))};
  if (int(blockIdx.x) >= division.workers) {
    if (a.early) wait_for_previous_kernel();
    return;
  }
  const int first = division.first_of(blockIdx.x), last = division.first_of(blockIdx.x + 1);

  auto block_at = [&](const Place& place) {
    const int token = place.unit * kUnit + warp * kTurn;
    return token < place.context
               ? __ldcg(a.block_tables + int64_t(place.row) * a.table_stride + (token >> a.cache.block_shift))
               : 0;
  };
  auto key_at = [&](const Place& place, int block) {
    const int token = place.unit * kUnit + warp * kTurn;
    return a.cache.key(block, place.head / tiles, token & block_mask, D);
  };

  Place here;
  here.find(first, a.num_rows, rows);
  Place ahead = here;
  typename W::Buffer buffers[2];
  const bf16* keys = key_at(here, block_at(here));
  // What is read before the previous kernel has ended does not include the newest token.
  const bool prefetched = a.early && here.left(warp) > kTurn;
  if (prefetched) {
    W::load_k(buffers[0], keys, 0, g, t);
    if constexpr (D <= 128) W::load_v(buffers[1], keys + value_offset, 0, g, t);
    else W::load_k(buffers[1], keys, 1, g, t);
  }
  if (a.early) wait_for_previous_kernel();
  if (!prefetched && here.left(warp) > 0) {
    W::load_k(buffers[0], keys, 0, g, t);
    if constexpr (D <= 128) W::load_v(buffers[1], keys + value_offset, 0, g, t);
    else W::load_k(buffers[1], keys, 1, g, t);
  }
  int next_block = 0;
  if (first + 1 < last) {
    ahead.advance(heads, a.num_rows, rows);
    next_block = block_at(ahead);
  }

  W w;
  bool is_new = true;
  int begin, item_heads;
  int64_t query;  // first query head of the item in q and out
  for (int unit = first; unit < last; unit++) {
    if (is_new) {
      const int head_begin = here.head % tiles * kHeads;
      item_heads = min(a.group - head_begin, kHeads);
      query = __ldcg(a.query_starts + here.row) * int64_t(a.cache.num_heads * a.group) + here.head / tiles * a.group +
              head_begin;
      w.load_q(a.q + query * D, item_heads, g, t);
      w.clear();
      begin = here.unit;
    }
    const int left = here.left(warp);
    const bool has_next = unit + 1 < last && ahead.left(warp) > 0;
    float scores[kTiles][4];
    uint32_t p[kTiles][2];
#pragma unroll
    for (int n = 0; n < kTiles; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) scores[n][i] = 0;
    if constexpr (D <= 128) {
      if (left > 0) w.multiply_k(scores, buffers[0], 0);
      const bf16* next = key_at(ahead, next_block);
      if (has_next) W::load_k(buffers[0], next, 0, g, t);
      if (left > 0) {
        w.exponentials(p, scores, left, a.scale, g);
        w.multiply_v(p, buffers[1], 0, left, t);
      }
      if (has_next) W::load_v(buffers[1], next + value_offset, 0, g, t);
    } else {
      if (left > 0) {
        w.multiply_k(scores, buffers[0], 0);
        W::load_v(buffers[0], keys + value_offset, 0, g, t);
        w.multiply_k(scores, buffers[1], 1);
        W::load_v(buffers[1], keys + value_offset, 1, g, t);
        w.exponentials(p, scores, left, a.scale, g);
        w.multiply_v(p, buffers[0], 0, left, t);
      }
      keys = key_at(ahead, next_block);
      if (has_next) W::load_k(buffers[0], keys, 0, g, t);
      if (left > 0) w.multiply_v(p, buffers[1], 1, left, t);
      if (has_next) W::load_k(buffers[1], keys, 1, g, t);
    }

    const bool ends_item = here.unit + 1 == here.units;
    is_new = ends_item || unit + 1 == last;
    if (is_new) {
      const bool is_whole = ends_item && begin == 0;
      float* part = is_whole ? nullptr : a.parts + (int64_t(blockIdx.x) * 2 + (begin == 0)) * kPartSize<D, kTiles>;
      w.leave(s.sums + warp * kHeads * (D + kPadding), s.tops[warp], s.weights[warp], item_heads, g, t);
      __syncthreads();
      add_warps<D, kTiles>(s, a.out + query * D, part, item_heads);
      __syncthreads();
      if (!is_whole) {
        const int item_begin = unit - here.unit;
        const int first_worker = division.worker_of(item_begin);
        const int count = division.worker_of(item_begin + here.units - 1) - first_worker + 1;
        if (threadIdx.x == 0) {
          int* arrivals = a.arrivals + here.row * heads + here.head;
          __threadfence();
          s.is_last = atomicAdd(arrivals, 1) == count - 1;
          if (s.is_last) {
            __threadfence();
            *arrivals = 0;
          }
        }
        __syncthreads();
        if (s.is_last) add_parts<D, kTiles>(s, a.parts, first_worker, count, a.out + query * D, item_heads);
      }
    }
    here = ahead;
    if (unit + 2 < last) {
      ahead.advance(heads, a.num_rows, rows);
      next_block = block_at(ahead);
    }
  }
}

}  // namespace

#define ATTENTION_DECODE(D, TILES, BLOCKS)                                                                \
  extern "C" __global__ void __launch_bounds__(kThreads, BLOCKS) attention_decode_##D##_##TILES(Arguments arguments) { \
    run<D, TILES>(arguments);                                                                             \
  }

ATTENTION_DECODE(64, 1, 3)
ATTENTION_DECODE(64, 2, 3)
ATTENTION_DECODE(128, 1, 2)
ATTENTION_DECODE(128, 2, 2)
ATTENTION_DECODE(256, 1, 2)
