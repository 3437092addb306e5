// Adapters in a product of few tokens: y = x W^T + (A x) B^T, summed in float32 and rounded once.
//
//   the grid's first blocks:  16 rows of A of one slot x one split of K ─► shrunk ─► a part is ready
//   blocks of tiles:          the product of a tile ─► all parts are ready ─► + B shrunk ─► epilogue
//
// What a step loses to adapters is not bytes but the time of one more kernel between two products. So A x is made next to
// the product, while its weights are on their way, and B is in registers by the time that its tile has its sums. A block
// of a tile waits for blocks with smaller numbers, which began before it and wait for nothing but the kernel ahead.
//
// The sum over splits has one order, and a column of the tensor cores' product is computed by itself: one run twice is
// bit-identical.
#pragma once
#include <cstdint>

#include "common/hopper.cuh"
#include "lora/halves.cuh"
#include "lora/lora_mma.cuh"

namespace lora {

constexpr int kMostDecodePieces = 3, kMostDecodeColumns = 128;  // of B's, of all slots
constexpr int kColumnStep = 16;                                 // of the tensor cores
constexpr int kMostColumnSteps = kMostDecodeColumns / kColumnStep;
constexpr int kTileRows = 16;      // of A
constexpr int kShrinkWarps = 4, kStepColumns = 32;  // of K, that a warp loads at once: four lanes have 8 each
constexpr int kHeldSteps = 5;                       // that are loaded together

// cuda/lora/decode_adapters.py repeats it.
struct DecodeAdapters {
  const uint16_t* x;        // [T, k]
  const uint16_t* a;        // [slots, P r, k]
  const uint16_t* columns;  // [n, E], the B's of all slots next to each other
  const int* slots;         // [T]
  float* shrunk;            // [splits, T, P r]
  int pieces, rank, num_slots, num_columns;
  int row_tiles, splits, split_columns;  // the last a multiple of kShrinkWarps * kStepColumns
  int shrink_blocks;                     // with those that fill up a cluster
  int starts[kMostDecodePieces];         // row of W of each piece, multiples of 16

  __device__ __forceinline__ int parts() const { return row_tiles * num_slots * splits; }
};

// Of the product that runs: products that have adapters do so one after the other, since each one's parts wait for the
// end of the kernel ahead. The last warp that has waited leaves zeros: `leave_shrunk`.
__device__ unsigned parts_ready, warps_served;

__device__ __forceinline__ int slot_of(const DecodeAdapters& given, int token, int num_tokens) {
  const int slot = token < num_tokens ? __ldcg(given.slots + token) : -1;
  return slot < given.num_slots ? slot : -1;
}

template <int kTokens>
using PartSums = float[kShrinkWarps][kTokens][kTileRows + 1];

// One part of A x, by all threads of a block: `sums` lies in shared memory.
template <int kTokens>
__device__ __forceinline__ void shrink_part(const DecodeAdapters& given, int num_tokens, int inner, int part,
                                            PartSums<kTokens>& sums) {
  constexpr int kGroups = kTokens / 8;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;
  const int split = part % given.splits, tile = part / given.splits % given.row_tiles;
  const int slot = part / given.splits / given.row_tiles, rows = given.pieces * given.rank;
  const int columns = given.split_columns / kShrinkWarps;
  const int begin = split * given.split_columns + warp * columns;
  const int end = warp < kShrinkWarps ? min(begin + columns, inner) : begin;
  const int upper_row = tile * kTileRows + group;
  const uint16_t* a = given.a + (int64_t(slot) * rows + upper_row) * inner + quarter * 8;
  const uint16_t* lower_a = a + int64_t(8) * inner;
  const bool has_upper = upper_row < rows, has_lower = upper_row + 8 < rows;
  uint4 held[kHeldSteps][2];
  auto load_a = [&](int from) {
#pragma unroll
    for (int step = 0; step < kHeldSteps; step++) {
      const int column = from + step * kStepColumns;
      const bool is_there = column < end;
      held[step][0] = is_there && has_upper ? *reinterpret_cast<const uint4*>(a + column) : make_uint4(0, 0, 0, 0);
      held[step][1] = is_there && has_lower ? *reinterpret_cast<const uint4*>(lower_a + column) : make_uint4(0, 0, 0, 0);
    }
  };
  auto tokens_of_slot = [&] { return __ballot_sync(~0u, lane < kTokens && slot_of(given, lane, num_tokens) == slot); };
  const bool guessed = tokens_of_slot();  // it may be written by the kernel ahead
  if (guessed) {
    load_a(begin);
    // What is loaded later is read from memory now: after the wait it would be the longest way of all.
    for (int column = begin + (kHeldSteps + quarter) * kStepColumns; column < end; column += 4 * kStepColumns) {
      if (has_upper) prefetch(a + column);
      if (has_lower) prefetch(lower_a + column);
    }
  }
  hopper::wait_for_previous_kernel();
  const uint32_t asked = tokens_of_slot();
  if (asked) {
    if (!guessed) load_a(begin);
    float d[kGroups][4] = {};
    for (int from = begin; from < end; from += kHeldSteps * kStepColumns) {
      if (from != begin) load_a(from);
      uint4 x[kHeldSteps][kGroups];
#pragma unroll
      for (int step = 0; step < kHeldSteps; step++) {
        const int column = from + step * kStepColumns;
#pragma unroll
        for (int i = 0; i < kGroups; i++) {
          const int token = i * 8 + group;
          const uint16_t* own = given.x + int64_t(token) * inner + column + quarter * 8;
          x[step][i] =
              asked >> token & 1 && column < end ? *reinterpret_cast<const uint4*>(own) : make_uint4(0, 0, 0, 0);
        }
      }
#pragma unroll
      for (int step = 0; step < kHeldSteps; step++) {
        // A lane's eight columns are four of each of two products: as long as A and x have them alike, the order of the
        // columns within a sum is free.
        const uint4 &upper = held[step][0], &lower = held[step][1];
#pragma unroll
        for (int i = 0; i < kGroups; i++) {
          if (!(asked >> (i * 8) & 0xff)) continue;
          mma(d[i], upper.x, lower.x, upper.y, lower.y, x[step][i].x, x[step][i].y);
          mma(d[i], upper.z, lower.z, upper.w, lower.w, x[step][i].z, x[step][i].w);
        }
      }
    }
    if (warp < kShrinkWarps) {
#pragma unroll
      for (int i = 0; i < kGroups; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) sums[warp][i * 8 + quarter * 2 + j % 2][group + j / 2 * 8] = d[i][j];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kTokens * kTileRows; i += blockDim.x) {
      const int token = i / kTileRows, row = i % kTileRows;
      if (!(asked >> token & 1) || tile * kTileRows + row >= rows) continue;
      float sum = 0;
#pragma unroll
      for (int each = 0; each < kShrinkWarps; each++) sum += sums[each][token][row];
      given.shrunk[(int64_t(split) * num_tokens + token) * rows + tile * kTileRows + row] = sum;
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) count_part(&parts_ready);
}

// What adapters add to the sums of a tile of 64 rows of W, in a warp's accumulators as wgmma leaves them: 16 rows, or
// with kGated 8 of gate and the 8 of up that belong to them.
template <int kTokens, bool kGated>
struct Delta {
  static constexpr int kGroups = kTokens / 8;
  int slots[kGroups];       // of tokens 8 i + lane / 4; -1: none
  uint32_t asked[kGroups];  // a bit for each 16 columns of B that the tokens of a group need
  uint32_t loaded;
  uint2 b[kMostColumnSteps][2];  // of this thread's two rows

  __device__ __forceinline__ void read_slots(const DecodeAdapters& given, int num_tokens) {
    const int lane = threadIdx.x % 32;
    const int own = lane < kTokens ? slot_of(given, lane, num_tokens) : -1;
    uint32_t steps = 0;
    if (own >= 0) {
      const int first = own * given.rank / kColumnStep, last = (own * given.rank + given.rank - 1) / kColumnStep;
      steps = (2u << last) - (1u << first);
    }
#pragma unroll
    for (int mask = 1; mask < 8; mask *= 2) steps |= __shfl_xor_sync(~0u, steps, mask);
#pragma unroll
    for (int i = 0; i < kGroups; i++) {
      asked[i] = __shfl_sync(~0u, steps, i * 8);
      slots[i] = __shfl_sync(~0u, own, i * 8 + lane / 4);
    }
  }

  __device__ __forceinline__ uint32_t all_asked() const {
    uint32_t all = 0;
#pragma unroll
    for (int i = 0; i < kGroups; i++) all |= asked[i];
    return all;
  }

  __device__ __forceinline__ void load(const DecodeAdapters& given, int tile, int n) {
    const int warp = threadIdx.x / 32, group = threadIdx.x % 32 / 4, quarter = threadIdx.x % 4;
    const int upper = kGated ? tile * 32 + warp * 8 + group : tile * 64 + warp * 16 + group;
    const int lower = upper + (kGated ? n / 2 : 8);
    loaded = all_asked();
#pragma unroll
    for (int step = 0; step < kMostColumnSteps; step++) {
      if (!(loaded >> step & 1)) continue;
      const int column = step * kColumnStep + quarter * 4;
      b[step][0] = *reinterpret_cast<const uint2*>(given.columns + int64_t(upper) * given.num_columns + column);
      b[step][1] = *reinterpret_cast<const uint2*>(given.columns + int64_t(lower) * given.num_columns + column);
    }
  }

  // Four values of A x for each group: of token 8 i + lane / 4, of those columns of its slot that lie in `steps`.
  __device__ __forceinline__ void read_shrunk(const DecodeAdapters& given, int num_tokens, int piece, int pass,
                                              float4 (&sums)[kGroups], int (&steps)[kGroups]) const {
    const int rows = given.pieces * given.rank, quarter = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < kGroups; i++) {
      const int first = slots[i] * given.rank, token = i * 8 + threadIdx.x % 32 / 4;
      steps[i] = slots[i] < 0 ? -1 : first / kColumnStep + pass;
      const int column = steps[i] * kColumnStep + quarter * 4 - first;
      sums[i] = make_float4(0, 0, 0, 0);
      if (slots[i] < 0 || column < 0 || column >= given.rank) continue;
      const float* from = given.shrunk + int64_t(token) * rows + piece * given.rank + column;
#pragma unroll 4
      for (int split = 0; split < given.splits; split++, from += int64_t(num_tokens) * rows) {
        const float4 part = __ldcg(reinterpret_cast<const float4*>(from));
        sums[i].x += part.x, sums[i].y += part.y, sums[i].z += part.z, sums[i].w += part.w;
      }
    }
  }

  // kUpper, kLower: whether the sums are of a piece that has these rows.
  template <bool kUpper, bool kLower>
  __device__ __forceinline__ void add_piece(const DecodeAdapters& given, int num_tokens, int piece,
                                            float (&d)[kTokens / 2]) const {
    for (int pass = 0; pass < (given.rank + kColumnStep - 1) / kColumnStep; pass++) {
      float4 sums[kGroups];
      int steps[kGroups];
      read_shrunk(given, num_tokens, piece, pass, sums, steps);
#pragma unroll
      for (int step = 0; step < kMostColumnSteps; step++) {
        if (!(loaded >> step & 1)) continue;
        const uint2 zero = make_uint2(0, 0), upper = kUpper ? b[step][0] : zero, lower = kLower ? b[step][1] : zero;
#pragma unroll
        for (int i = 0; i < kGroups; i++) {
          if (!(asked[i] >> step & 1)) continue;
          const bool is_own = steps[i] == step;
          const Halves one(is_own ? sums[i].x : 0.0f, is_own ? sums[i].y : 0.0f);
          const Halves other(is_own ? sums[i].z : 0.0f, is_own ? sums[i].w : 0.0f);
          float own[4] = {d[i * 4], d[i * 4 + 1], d[i * 4 + 2], d[i * 4 + 3]};
          mma(own, upper.x, lower.x, upper.y, lower.y, one.low, other.low);
          mma(own, upper.x, lower.x, upper.y, lower.y, one.high, other.high);
#pragma unroll
          for (int j = 0; j < 4; j++) d[i * 4 + j] = own[j];
        }
      }
    }
  }

  // After `wait_for_shrunk`. `tile` is the one that was loaded.
  __device__ __forceinline__ void add(const DecodeAdapters& given, int num_tokens, int tile, int n,
                                      float (&d)[kTokens / 2]) {
    const uint32_t all = all_asked();
    if (!all) return;
    if (all & ~loaded) load(given, tile, n);
    if constexpr (kGated) {
      add_piece<true, false>(given, num_tokens, 0, d);
      add_piece<false, true>(given, num_tokens, 1, d);
    } else {
      const int row = tile * 64 + threadIdx.x / 32 * 16;
      int piece = 0;
#pragma unroll
      for (int i = 1; i < kMostDecodePieces; i++) piece += i < given.pieces && row >= given.starts[i];
      add_piece<true, true>(given, num_tokens, piece, d);
    }
  }
};

__device__ __forceinline__ void wait_for_shrunk(const DecodeAdapters& given) {
  wait_for_parts(&parts_ready, given.parts());
  __syncwarp();
}

// Each of `warps` in all calls it once, after it has waited: at the end, where nothing waits for the answer.
__device__ __forceinline__ void leave_shrunk(int warps) {
  __syncwarp();
  if (threadIdx.x % 32 == 0 && is_last_served(&warps_served, warps)) parts_ready = 0;
}

}  // namespace lora
