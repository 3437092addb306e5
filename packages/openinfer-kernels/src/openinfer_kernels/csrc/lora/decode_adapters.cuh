// Adapters in a product of few tokens: y = x W^T + (A x) B^T, summed in float32 and rounded once.
//
//   the grid's first blocks:  16 rows of A of one slot x one split of K ─► shrunk ─► a part is ready
//   blocks of tiles:
//     producer warp:          chunks of W ─► chunks of B, the last ones of a tile
//     delivering warp:        all parts are ready ─► A x, in the stages of B's chunks
//     consumer warpgroup:     the products with W ─► + B (A x) ─► epilogue
//
// What a step loses to adapters is not bytes but the time of one more kernel between two products. So A x is made next to
// the product, while its weights are on their way, B comes on the way of the weights, and who waits for A x is a warp
// that has nothing else to do: the sums of a tile find both in shared memory. A block of a tile waits for blocks with
// smaller numbers, which began before it and wait for nothing but the kernel ahead.
//
// The sum over splits has one order, and a column of the tensor cores' product is computed by itself: one run twice is
// bit-identical.
#pragma once
#include <cstdint>
#include <cuda.h>

#include "common/hopper.cuh"
#include "lora/halves.cuh"
#include "lora/lora_mma.cuh"

namespace lora {

constexpr int kMostDecodePieces = 3, kMostDecodeColumns = 128;  // of B's, of all slots
constexpr int kColumnStep = 16;                                 // of the tensor cores
constexpr int kDeltaColumns = 64, kDeltaSteps = kDeltaColumns / kColumnStep;  // of a chunk of B
constexpr int kMostPlanes = 2;  // pieces of which a tile has rows
constexpr int kTileRows = 16;      // of A
constexpr int kShrinkWarps = 4, kStepColumns = 32;  // of K, that a warp loads at once: four lanes have 8 each
constexpr int kHeldSteps = 10, kLoadedSteps = 5;    // of A that wait for x, and that are loaded together
template <int kTokens>  // of x: registers are what there is least of
constexpr int kHeldXSteps = kTokens == 8 ? kHeldSteps : kHeldSteps / 2;

// cuda/lora/decode_adapters.py repeats it.
struct alignas(128) DecodeAdapters {
  CUtensorMap b;      // [n, E], the B's of all slots next to each other, in tiles of rows like those of W
  const uint16_t* x;  // [T, k]
  const uint16_t* a;  // [slots, P r, k]
  const int* slots;   // [T]
  float* shrunk;      // [splits, T, P r]
  int pieces, rank, num_slots, num_columns;
  int row_tiles, splits, split_columns;  // the last a multiple of kShrinkWarps * kStepColumns
  int shrink_blocks;                     // with those that fill up a cluster
  int starts[kMostDecodePieces];         // row of W of each piece, multiples of 16

  __device__ __forceinline__ int parts() const { return row_tiles * num_slots * splits; }

  // Of the chunks of B.
  __device__ __forceinline__ int delta_chunks() const { return num_columns / kDeltaColumns; }

  __device__ __forceinline__ int piece_of(int row) const {
    int piece = 0;
#pragma unroll
    for (int i = 1; i < kMostDecodePieces; i++) piece += i < pieces && row >= starts[i];
    return piece;
  }
};

// Of the product that runs: products that have adapters do so one after the other, since each one's parts wait for the
// end of the kernel ahead. The last warp that has waited leaves zeros: `leave_shrunk`.
__device__ unsigned parts_ready, warps_served;  // of warps that deliver

__device__ __forceinline__ int slot_of(const DecodeAdapters& given, int token, int num_tokens) {
  const int slot = token < num_tokens ? __ldcg(given.slots + token) : -1;
  return slot < given.num_slots ? slot : -1;
}

// A waits in shared memory, where a thread reads what it has written itself: in registers it took so many that the
// kernel ahead and the next one found no room next to two blocks of this one. (Not by `cp.async`: in a cluster the
// launch failed.)
template <int kTokens>
struct ShrinkShared {
  uint4 a[kHeldSteps][2][kShrinkWarps * 32];
  float sums[kShrinkWarps][kTokens][kTileRows + 1];
};

// One part of A x, of tokens from `first_token` on, by all threads of a block. The caller tells those who wait for it.
template <int kTokens>
__device__ __forceinline__ void shrink_part(const DecodeAdapters& given, int num_tokens, int inner, int part,
                                            ShrinkShared<kTokens>& s, int first_token = 0) {
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
  auto load_a = [&](int from) {
    if (warp >= kShrinkWarps) return;
#pragma unroll 1
    for (int first = 0; first < kHeldSteps; first += kLoadedSteps) {
      uint4 loaded[kLoadedSteps][2];
#pragma unroll
      for (int step = 0; step < kLoadedSteps; step++) {
        const int column = from + (first + step) * kStepColumns;
        const bool is_there = column < end;
        loaded[step][0] = is_there && has_upper ? *reinterpret_cast<const uint4*>(a + column) : make_uint4(0, 0, 0, 0);
        loaded[step][1] =
            is_there && has_lower ? *reinterpret_cast<const uint4*>(lower_a + column) : make_uint4(0, 0, 0, 0);
      }
#pragma unroll
      for (int step = 0; step < kLoadedSteps; step++) {
        s.a[first + step][0][threadIdx.x] = loaded[step][0];
        s.a[first + step][1][threadIdx.x] = loaded[step][1];
      }
    }
  };
  auto tokens_of_slot = [&] { return __ballot_sync(~0u, lane < kTokens && slot_of(given, first_token + lane, num_tokens) == slot); };
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
    constexpr int kXSteps = kHeldXSteps<kTokens>;
    for (int from = begin; from < end; from += kHeldSteps * kStepColumns) {
      if (from != begin) load_a(from);
#pragma unroll
      for (int first = 0; first < kHeldSteps; first += kXSteps) {
        uint4 x[kXSteps][kGroups];
#pragma unroll
        for (int step = 0; step < kXSteps; step++) {
          const int column = from + (first + step) * kStepColumns;
#pragma unroll
          for (int i = 0; i < kGroups; i++) {
            const int token = i * 8 + group;
            const uint16_t* own = given.x + int64_t(first_token + token) * inner + column + quarter * 8;
            x[step][i] =
                asked >> token & 1 && column < end ? *reinterpret_cast<const uint4*>(own) : make_uint4(0, 0, 0, 0);
          }
        }
#pragma unroll
        for (int step = 0; step < kXSteps; step++) {
          // A lane's eight columns are four of each of two products: as long as A and x have them alike, the order of
          // the columns within a sum is free.
          const uint4 upper = s.a[first + step][0][threadIdx.x], lower = s.a[first + step][1][threadIdx.x];
#pragma unroll
          for (int i = 0; i < kGroups; i++) {
            if (!(asked >> (i * 8) & 0xff)) continue;
            mma(d[i], upper.x, lower.x, upper.y, lower.y, x[step][i].x, x[step][i].y);
            mma(d[i], upper.z, lower.z, upper.w, lower.w, x[step][i].z, x[step][i].w);
          }
        }
      }
    }
    if (warp < kShrinkWarps) {
#pragma unroll
      for (int i = 0; i < kGroups; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) s.sums[warp][i * 8 + quarter * 2 + j % 2][group + j / 2 * 8] = d[i][j];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kTokens * kTileRows; i += blockDim.x) {
      const int token = i / kTileRows, row = i % kTileRows;
      if (!(asked >> token & 1) || tile * kTileRows + row >= rows) continue;
      float sum = 0;
#pragma unroll
      for (int each = 0; each < kShrinkWarps; each++) sum += s.sums[each][token][row];
      given.shrunk[(int64_t(split) * num_tokens + first_token + token) * rows + tile * kTileRows + row] = sum;
    }
  }
}

// Which 16 columns of B some token needs: a bit each, of the first eight tokens, and from kGroupBits on of the others.
constexpr int kGroupBits = kMostDecodeColumns / kColumnStep;

// Of the pieces of a tile of 64 rows of W; with kGated, where rows of gate and up alternate, both.
struct Planes {
  int first, count;

  template <bool kGated>
  static __device__ __forceinline__ Planes of(const DecodeAdapters& given, int tile) {
    if (kGated) return {0, 2};
    const int first = given.piece_of(tile * 64);
    return {first, given.piece_of(tile * 64 + 63) - first + 1};
  }
};

// A x of all tokens in the columns of a chunk of B, as the tensor cores take them: of four columns two BF16 halves each
// that make up the float32 sum. [planes][tokens][columns / 4]
template <int kTokens>
using Halved = uint4[kMostPlanes][kTokens][kDeltaColumns / 4];

// The warp that waits for A x.
template <int kTokens>
struct Delivery {
  static constexpr int kLanes = 32, kFours = kDeltaColumns / 4, kTogether = kTokens / 8;
  const DecodeAdapters& given;
  int num_tokens, slot;  // the latter of this lane's token

  // After the kernel ahead.
  __device__ __forceinline__ Delivery(const DecodeAdapters& given, int num_tokens)
      : given(given), num_tokens(num_tokens) {
    const int lane = threadIdx.x % kLanes;
    slot = lane < kTokens ? slot_of(given, lane, num_tokens) : -1;
  }

  __device__ __forceinline__ uint32_t asked() const {
    uint32_t found = 0;
    if (slot >= 0) {
      const int first = slot * given.rank / kColumnStep, last = (slot * given.rank + given.rank - 1) / kColumnStep;
      found = ((2u << last) - (1u << first)) << (threadIdx.x % kLanes / 8 * kGroupBits);
    }
#pragma unroll
    for (int mask = 1; mask < kLanes; mask *= 2) found |= __shfl_xor_sync(~0u, found, mask);
    return found;
  }

  // Four columns of a token, and where they go.
  struct Four {
    int place;  // -1: nothing
    uint4 halves;
  };

  // A token has only the columns of its own slot: of 8 tokens and rank 16 each lane brings one four, all at once. By
  // lanes of all columns it took four rounds, each of which waited for memory.
  __device__ __forceinline__ int fours() const { return min(given.rank, kDeltaColumns) / 4; }
  __device__ __forceinline__ int rounds() const { return (kTokens * fours() + kLanes - 1) / kLanes; }

  __device__ __forceinline__ Four read(int piece, int chunk, int round) const {
    const int item = round * kLanes + threadIdx.x % kLanes, rows = given.pieces * given.rank;
    const int token = item / fours(), four = item % fours();
    const int own = __shfl_sync(~0u, slot, token % kTokens), begin = own * given.rank - chunk * kDeltaColumns;
    const int at = max(begin, 0) + four * 4;  // in the chunk
    float4 sum = make_float4(0, 0, 0, 0);
    const bool is_there = token < kTokens && own >= 0 && at < min(begin + given.rank, kDeltaColumns);
    if (is_there) {
      const float* from = given.shrunk + int64_t(token) * rows + piece * given.rank + at - begin;
#pragma unroll 4
      for (int split = 0; split < given.splits; split++, from += int64_t(num_tokens) * rows) {
        const float4 part = __ldcg(reinterpret_cast<const float4*>(from));
        sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
      }
    }
    const Halves one(sum.x, sum.y), other(sum.z, sum.w);
    return {is_there ? token * kFours + at / 4 : -1, make_uint4(one.high, other.high, one.low, other.low)};
  }

  __device__ __forceinline__ void clear(Halved<kTokens>& to, int plane) const {
#pragma unroll
    for (int i = 0; i < kTokens * kFours / kLanes; i++)
      (&to[plane][0][0])[i * kLanes + threadIdx.x % kLanes] = make_uint4(0, 0, 0, 0);
    __syncwarp();
  }

  __device__ __forceinline__ void write(const Four& four, Halved<kTokens>& to, int plane) const {
    if (four.place >= 0) (&to[plane][0][0])[four.place] = four.halves;
  }

  __device__ __forceinline__ void wait() const { wait_for_parts(&parts_ready, given.parts()); }

  // Once in each of `warps` that deliver, after it has waited: nothing waits for the answer.
  __device__ __forceinline__ void leave_shrunk(int warps) const {
    __syncwarp();
    if (threadIdx.x % kLanes == 0 && is_last_served(&warps_served, warps)) parts_ready = 0;
  }
};

// Four columns of a row of a box of B in shared memory, swizzled by 128 bytes.
__device__ __forceinline__ uint2 four_of(const uint8_t* box, int row, int column) {
  const int chunk = column / 8 ^ row % 8;
  return *reinterpret_cast<const uint2*>(box + row * 128 + chunk * 16 + column % 8 * 2);
}

// Adds what a chunk of B makes of A x to a tile's sums, in a warp's accumulators as wgmma leaves them: 16 rows, or with
// kGated 8 of gate and the 8 of up that belong to them. `asked`: of the chunk's columns.
template <int kTokens, bool kGated>
__device__ __forceinline__ void add_delta(float (&d)[kTokens / 2], const uint8_t* box, const Halved<kTokens>& shrunk,
                                          int plane, uint32_t asked) {
  const int warp = threadIdx.x / 32, group = threadIdx.x % 32 / 4, quarter = threadIdx.x % 4;
#pragma unroll
  for (int step = 0; step < kDeltaSteps; step++) {
    const int column = step * kColumnStep + quarter * 4;
    uint2 upper = make_uint2(0, 0), lower = make_uint2(0, 0);
    if (asked & (1u << step | 1u << (step + kGroupBits))) {
      upper = four_of(box, warp * 16 + group, column);
      lower = four_of(box, warp * 16 + group + 8, column);
    }
#pragma unroll
    for (int i = 0; i < kTokens / 8; i++) {
      if (!(asked >> (i * kGroupBits + step) & 1)) continue;
      float own[4] = {d[i * 4], d[i * 4 + 1], d[i * 4 + 2], d[i * 4 + 3]};
      if constexpr (kGated) {
        const uint4 gate = shrunk[0][i * 8 + group][column / 4], up = shrunk[1][i * 8 + group][column / 4];
        mma(own, upper.x, 0, upper.y, 0, gate.x, gate.y);
        mma(own, upper.x, 0, upper.y, 0, gate.z, gate.w);
        mma(own, 0, lower.x, 0, lower.y, up.x, up.y);
        mma(own, 0, lower.x, 0, lower.y, up.z, up.w);
      } else {
        const uint4 halves = shrunk[plane][i * 8 + group][column / 4];
        mma(own, upper.x, lower.x, upper.y, lower.y, halves.x, halves.y);
        mma(own, upper.x, lower.x, upper.y, lower.y, halves.z, halves.w);
      }
#pragma unroll
      for (int j = 0; j < 4; j++) d[i * 4 + j] = own[j];
    }
  }
}

}  // namespace lora
