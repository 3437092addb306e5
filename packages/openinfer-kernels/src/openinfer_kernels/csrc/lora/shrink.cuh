// The first half of an adapter: x times the A of each token's slot, 16 rows of A and some tokens in a block. lora.cu
// leaves the sums, shrink_halves.cu cuts them into BF16 halves for a product.
#pragma once
#include <cstdint>
#include <cuda_bf16.h>

#include "common/pdl.cuh"
#include "lora/halves.cuh"
#include "lora/lora_mma.cuh"

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kRows = 16;         // of A or B, of one tensor-core tile
constexpr int kVector = 8;        // BF16 values in 16 bytes
constexpr int kStep = 32;         // columns that a warp loads at once: four lanes have 8 each
// Few tokens have more warps, which load all of 2560 columns at once; cuda/lora/lora.py repeats their number.
template <int kGroups>
constexpr int kWarpsOf = kGroups == 1 ? 16 : 8;
template <int kGroups>
constexpr int kSteps = kGroups == 1 ? 5 : 4;  // that are loaded together

struct Shrink {
  const uint16_t* x;  // [T, in]
  const uint16_t* a;  // [slots, P r, in]
  const int* slots;   // [T]
  float* shrunk;      // [splits, T, P r]
  int num_tokens, inner, rows, num_slots;
  int row_tiles, splits, split_columns;  // the last a multiple of kStep * kWarpsOf
  int grid_slots;                        // slots that have blocks
};

using lora::Halves, lora::rounded_bits, lora::value_of;

__device__ __forceinline__ float rounded(float value) { return value_of(rounded_bits(value)); }

// Slots of a block's tokens: which of its groups of 8 have tokens of `own`, and whether any has none.
template <int kGroups>
struct Tokens {
  static constexpr int kCount = 8 * kGroups;
  int slots[kCount];

  // All threads; -1: no adapter; -2: no token.
  __device__ __forceinline__ void read(const int* from, int first, int num_tokens, int num_slots) {
    if (threadIdx.x >= kCount) return;
    const int token = first + threadIdx.x;
    const int slot = token < num_tokens ? __ldcg(from + token) : -2;
    slots[threadIdx.x] = slot < 0 ? max(slot, -2) : slot < num_slots ? slot : -1;
  }

  __device__ __forceinline__ bool has(int group, int own) const {
    bool found = false;
#pragma unroll
    for (int i = 0; i < 8; i++) found |= slots[group * 8 + i] == own;
    return found;
  }

  __device__ __forceinline__ bool has(int own) const {
    bool found = false;
#pragma unroll
    for (int group = 0; group < kGroups; group++) found |= has(group, own);
    return found;
  }
};

// Eight values of a row from `column` on; zeros beyond its end.
__device__ __forceinline__ uint4 eight(const uint16_t* row, int column, int end, bool is_there) {
  uint4 found = make_uint4(0, 0, 0, 0);
  if (!is_there || column >= end) return found;
  if (end % kVector == 0) return *reinterpret_cast<const uint4*>(row + column);
  uint32_t words[4] = {};
  for (int i = 0; i < kVector && column + i < end; i++) words[i / 2] |= uint32_t(row[column + i]) << (i % 2 * 16);
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// A lane's eight columns are four of each of two products: as long as A and x have them alike, the order of the columns
// within a sum is free.
__device__ __forceinline__ void multiply(float (&d)[4], const uint4& upper, const uint4& lower, const uint4& x) {
  lora::mma(d, upper.x, lower.x, upper.y, lower.y, x.x, x.y);
  lora::mma(d, upper.z, lower.z, upper.w, lower.w, x.z, x.w);
}

// What a block computes; blocks of one tile of A's rows that divide the columns stand next to each other.
struct Place {
  int split, tile, slot, first;  // the last: token

  __device__ __forceinline__ Place(const Shrink& given, int tokens) {
    int index = blockIdx.x;
    split = index % given.splits;
    index /= given.splits;
    tile = index % given.row_tiles;
    index /= given.row_tiles;
    slot = index % given.grid_slots, first = index / given.grid_slots * tokens;
  }
};

template <int kGroups>
using Sums = float[kWarpsOf<kGroups>][8 * kGroups][kRows + 1];

// Leaves each warp's sums, and the block's tokens, in shared memory; false where no token has the block's slot.
template <int kGroups>
__device__ __forceinline__ bool shrink_columns(const Shrink& given, const Place& place, Tokens<kGroups>& tokens,
                                               Sums<kGroups>& sums) {
  const int warp = threadIdx.x / 32, group = threadIdx.x % 32 / 4, quarter = threadIdx.x % 4;
  const int tile = place.tile, split = place.split, slot = place.slot, first = place.first;
  launch_dependents();

  const int upper_row = tile * kRows + group;
  const uint16_t* a = given.a + (int64_t(slot) * given.rows + upper_row) * given.inner;
  const uint16_t* lower_a = a + int64_t(8) * given.inner;
  const bool has_upper = upper_row < given.rows, has_lower = upper_row + 8 < given.rows;
  const int columns = given.split_columns / kWarpsOf<kGroups>;  // of a warp
  const int begin = split * given.split_columns + warp * columns;
  const int own_end = begin + columns;
  uint4 held[kSteps<kGroups>][2];
  auto load_a = [&](int from) {
#pragma unroll
    for (int step = 0; step < kSteps<kGroups>; step++) {
      const int column = from + step * kStep + quarter * kVector;
      held[step][0] = eight(a, column, given.inner, has_upper && column < own_end);
      held[step][1] = eight(lower_a, column, given.inner, has_lower && column < own_end);
    }
  };
  tokens.read(given.slots, first, given.num_tokens, given.num_slots);
  __syncthreads();
  const bool guessed = tokens.has(slot);
  if (guessed) {
    load_a(begin);
    for (int column = begin + (kSteps<kGroups> + quarter) * kStep; column < min(own_end, given.inner); column += 4 * kStep) {
      if (has_upper) lora::prefetch(a + column);
      if (has_lower) lora::prefetch(lower_a + column);
    }
  }
  __syncthreads();
  wait_for_previous_kernel();
  tokens.read(given.slots, first, given.num_tokens, given.num_slots);
  __syncthreads();
  const bool is_asked = tokens.has(slot);
  if (!is_asked) return false;

  float d[kGroups][4] = {};
  {
    bool asked[kGroups];
#pragma unroll
    for (int i = 0; i < kGroups; i++) asked[i] = tokens.has(i, slot);
    if (!guessed) load_a(begin);
    for (int from = begin; from < min(own_end, given.inner); from += kSteps<kGroups> * kStep) {
      if (from != begin) load_a(from);
      uint4 x[kSteps<kGroups>][kGroups];
#pragma unroll
      for (int step = 0; step < kSteps<kGroups>; step++) {
        const int column = from + step * kStep + quarter * kVector;
#pragma unroll
        for (int i = 0; i < kGroups; i++) {
          const int token = first + i * 8 + group;
          const bool is_there = asked[i] && token < given.num_tokens && column < own_end;
          x[step][i] = eight(given.x + int64_t(token) * given.inner, column, given.inner, is_there);
        }
      }
#pragma unroll
      for (int step = 0; step < kSteps<kGroups>; step++) {
#pragma unroll
        for (int i = 0; i < kGroups; i++)
          if (asked[i]) multiply(d[i], held[step][0], held[step][1], x[step][i]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kGroups; i++) {
#pragma unroll
    for (int j = 0; j < 4; j++) sums[warp][i * 8 + quarter * 2 + j % 2][group + j / 2 * 8] = d[i][j];
  }
  __syncthreads();
  return true;
}

// The sum of all warps, in one order.
template <int kGroups>
__device__ __forceinline__ float sum_of(const Sums<kGroups>& sums, int token, int row) {
  float sum = 0;
#pragma unroll
  for (int warp = 0; warp < kWarpsOf<kGroups>; warp++) sum += sums[warp][token][row];
  return sum;
}

}  // namespace
