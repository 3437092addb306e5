// The gated delta rule for prefill chunks: the walk over a row's chunks, with the state in registers.
//
//     V' = U - W S     O = diag(e^G) Q S + P V'     S <- e^{G_C} S + (diag(e^{G_C - G}) K)^T V'
//
// U, W, P and the decays are left by `gated_delta_prepare.cu`, which says what they are. Operands are BF16, sums and
// the state float32.
#include "attention/attention_query_tile.cuh"
#include "common/pdl.cuh"
#include "linear_attention/gated_delta_tiles.cuh"

using namespace gated_delta;

namespace {

constexpr int kColumns = 32, kSlices = kDim / kColumns, kSlim = kColumns + 8;

// One chunk's operands.
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

// Each warp holds 16 rows of the state. Four of them find corrections, of 16 tokens each, the others outputs. Of
// several stages, one is computed while the next chunks are copied to the others.
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
  constexpr int kAhead = kStages > 1 ? kStages - 1 : 1;  // chunks in flight before the first is computed
  const auto load = [&](int begin) {  // chunk by chunk, a group of copies each, also after the last one
    Stage& stage = shared.stages[begin / kChunk % kStages];
    if (begin < row.count) load_chunk(stage, a, from, head, slice, row.first + begin, min(kChunk, row.count - begin));
    commit_copies();
  };
#pragma unroll
  for (int i = 0; i < kAhead; i++) load(i * kChunk);

  const int lane_row = lane / 4, column = lane % 4 * 2, tokens = warp % 4 * 16;
  const bool corrects = warp < 4;
  float* at = a.state + row.slot * a.slot_stride + (int64_t(head) * kDim + warp * 16 + lane_row) * kDim +
              slice * kColumns + column;
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
        Matrix<kSlim>{shared.state, lane}.b_transposed(b, k, n * 16);
        multiply(sums[2 * n], sums[2 * n + 1], x, b);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int i = tokens + lane_row + half * 8;
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
      Matrix<kWide>{s.keys, lane}.a_transposed(keys, k, warp * 16);
#pragma unroll
      for (int n = 0; n < kColumns / 16; n++) {
        uint32_t b[4];
        Matrix<kSlim>{shared.decayed, lane}.b_transposed(b, k, n * 16);
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
          Matrix<kSlim>{shared.corrections, lane}.b_transposed(b, k, n * 16);
          multiply(sums[2 * n], sums[2 * n + 1], p, b);
        }
      }
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int i = tokens + lane_row + half * 8;
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
      *reinterpret_cast<float2*>(at + half * 8 * kDim + n * 8) =
          make_float2(state[n][half * 2], state[n][half * 2 + 1]);
}

}  // namespace

// Grid: heads in slices of 32 columns, as many long rows as there can be. With one stage two blocks share a
// multiprocessor, which is best for several prompts (8 x 1,024 tokens: 496 us a layer, 611 with three stages).
#define GATED_DELTA_WALK(STAGES)                                                                             \
  extern "C" __global__ void __launch_bounds__(kThreads)                                                     \
      gated_delta_walk_##STAGES(const __grid_constant__ Arguments a, const __grid_constant__ Scratch from) { \
    launch_dependents();                                                                                     \
    wait_for_previous_kernel();                                                                              \
    walk<STAGES>(a, from);                                                                                   \
  }

GATED_DELTA_WALK(1)
GATED_DELTA_WALK(2)
GATED_DELTA_WALK(3)
