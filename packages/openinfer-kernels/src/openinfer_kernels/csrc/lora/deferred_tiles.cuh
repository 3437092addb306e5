// What deferred_delta.cuh says, by tensor cores: a warp adds B (A x) to 16 tokens' values of 64 rows of a product, so that
// B is read once for 16 tokens.
//
// The 64 rows are two halves of 32 neighbours, wherever these begin. The four threads of a token have 8 neighbouring
// values of each half: rows of B are numbered as an `mma`'s columns so that these are a vector. All of B's first chunk is
// in registers before the kernel ahead has ended; after it a thread reads the product and A x alone. A x is two BF16
// halves, which are both multiplied, and zero outside its token's slot. Steps of 16 columns of B in which no token of the
// warp has its slot are left out.
#pragma once
#include "common/vectors.cuh"
#include "lora/deferred_delta.cuh"
#include "lora/lora_mma.cuh"

namespace lora {

constexpr int kDeferredTokens = 16, kDeferredHalf = 32;  // of a warp: tokens, and rows of a half
constexpr int kDeferredChunk = 64;                       // columns of B that are held at a time
constexpr int kDeferredSteps = kDeferredChunk / 16;      // of a chunk
constexpr int kDeferredThreads = 128;                    // of a block, at most

// Blocks for which a multiprocessor has registers: three where two are to find room next to a block of gemm/gemm.cuh.
template <int kMostRank>
constexpr int kDeferredBlocks = kMostRank <= 16 ? 3 : 2;

// Four columns of A x, for the tensor cores.
struct ShrunkFour {
  uint32_t high[2], low[2];
};

// Brings B's rows of two halves into the second-level cache, for a block that finds no room yet; by all threads of a block.
__device__ __forceinline__ void prefetch_halves(const DeferredDelta& given, int low_row, int high_row) {
  for (int i = threadIdx.x; i < 2 * kDeferredHalf; i += blockDim.x) {
    const int row = i % kDeferredHalf + (i < kDeferredHalf ? low_row : high_row);
    for (int first = 0; first < given.num_columns; first += kDeferredChunk)
      prefetch(given.b + int64_t(row) * given.num_columns + first);
  }
}

// kMostRank: 16, for which a token's slot lies in one step (the rank is 8 or 16), or 64. kPieces: 1 where both halves are
// of one piece, or 2.
template <int kMostRank, int kPieces>
class DeferredTiles {
 public:
  // Before the kernel ahead has ended.
  __device__ __forceinline__ DeferredTiles(const DeferredDelta& given, int first_token, int low_row, int high_row)
      : given_(given), lane_(threadIdx.x % 32), rows_{low_row, high_row} {
#pragma unroll
    for (int i = 0; i < 2; i++) tokens_[i] = first_token + lane_ / 4 + i * 8, slots_[i] = read_slot(tokens_[i]);
    hold(0);
    for (int first = kDeferredChunk; first < given_.num_columns; first += kDeferredChunk)
#pragma unroll
      for (int half = 0; half < 2; half++) prefetch(row_of(half, lane_ % 4) + first);
  }

  // Tokens of the thread: a lane's, and the eighth after it.
  __device__ __forceinline__ int token(int i) const { return tokens_[i]; }
  __device__ __forceinline__ bool is_there(int i) const { return tokens_[i] < given_.num_tokens; }

  // First of its values, within a half.
  __device__ __forceinline__ int column() const { return lane_ % 4 * 8; }

  // After the kernel ahead: values of both tokens and halves, with what adapters add; `piece` is the first half's.
  __device__ __forceinline__ void sum(const bf16* y, int64_t row_values, int piece, float (&values)[2][2][8]) {
    const int slots[2] = {read_slot(tokens_[0]), read_slot(tokens_[1])};
    Vector<8> products[2][2];
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        products[i][half] = load<8>(y + min(tokens_[i], given_.num_tokens - 1) * row_values + rows_[half] + column());
    Shrunk shrunk;
    read_shrunk(shrunk, piece, 0);  // does not wait for slots, which are hardly ever others
    if (__any_sync(~0u, slots[0] != slots_[0] || slots[1] != slots_[1])) {
      slots_[0] = slots[0], slots_[1] = slots[1];
      read_shrunk(shrunk, piece, 0);
    }
    float d[2][4][4] = {};
    multiply(d, shrunk, 0);  // before the loop, where sums need no registers before they begin
    for (int first = kDeferredChunk; first < given_.num_columns; first += kDeferredChunk) {
      hold(first);
      if constexpr (kHeld > 1) read_shrunk(shrunk, piece, first);
      multiply(d, shrunk, first);
    }
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        unpack(products[i][half], values[i][half]);
        if (slots_[i] < 0) continue;  // a sum with zero would change the sign of -0
#pragma unroll
        for (int j = 0; j < 8; j++) values[i][half][j] += d[half][j / 2][i * 2 + j % 2];
      }
  }

 private:
  static constexpr int kHeld = kMostRank <= 16 ? 1 : kDeferredSteps;  // steps of a token in which a chunk has its slot
  using Shrunk = ShrunkFour[kPieces][2][kHeld];

  __device__ __forceinline__ int read_slot(int token) const {
    const int slot = token < given_.num_tokens ? __ldcg(given_.slots + token) : -1;
    return slot < given_.num_slots ? slot : -1;
  }

  // The row of B that is column lane / 4 of tile `tile` of a half: columns 2 t and 2 t + 1 of all tiles are thread t's.
  __device__ __forceinline__ const uint16_t* row_of(int half, int tile) const {
    const int row = rows_[half] + lane_ / 8 * 8 + tile * 2 + lane_ / 4 % 2;
    return given_.b + int64_t(row) * given_.num_columns;
  }

  // Of a step's 16 columns thread t has 4 from 4 t on, of B as of A x.
  __device__ __forceinline__ void hold(int first) {
    // One loop: of loops in each other the compiler leaves one as it is here, for which B would lie in local memory.
#pragma unroll
    for (int i = 0; i < 2 * 4 * kDeferredSteps; i++) {
      const int step = i % kDeferredSteps, tile = i / kDeferredSteps % 4, half = i / kDeferredSteps / 4;
      held_[half][tile][step] = *reinterpret_cast<const uint2*>(row_of(half, tile) + first + step * 16 + lane_ % 4 * 4);
    }
  }

  // The step, of all chunks, that a token's first held columns are of.
  __device__ __forceinline__ int first_step(int i, int first) const {
    return kHeld == 1 ? slots_[i] * given_.rank / 16 : first / 16;
  }

  // Within its slot, a token's columns of a step; not its own if below 0 or beyond the rank.
  __device__ __forceinline__ int own_column(int i, int step) const {
    return slots_[i] < 0 ? -1 : step * 16 + lane_ % 4 * 4 - slots_[i] * given_.rank;
  }
  __device__ __forceinline__ bool is_own(int column) const { return column >= 0 && column < given_.rank; }

  // A x in this thread's columns of a chunk, the sum over splits in one order.
  __device__ __forceinline__ void read_shrunk(Shrunk& shrunk, int piece, int first) const {
    constexpr int kFours = kPieces * 2 * kHeld;
    const int token_values = given_.pieces * given_.rank;
    int from[kFours];  // at most 8 splits of 64 tokens of 192 values
    bool is_there[kFours];
    float4 sums[kFours];
#pragma unroll
    for (int i = 0; i < kFours; i++) {
      const int own = i / (2 * kHeld), token = i / kHeld % 2;
      const int column = own_column(token, first_step(token, first) + i % kHeld);
      is_there[i] = is_own(column);
      from[i] = tokens_[token] * token_values + (piece + own) * given_.rank + column;
      sums[i] = four_if(is_there[i], given_.shrunk + from[i]);
    }
    for (int split = 1; split < given_.splits; split++) {
      const float* shrunk_split = given_.shrunk + split * given_.num_tokens * token_values;
      float4 more[kFours];
#pragma unroll
      for (int i = 0; i < kFours; i++) more[i] = four_if(is_there[i], shrunk_split + from[i]);
#pragma unroll
      for (int i = 0; i < kFours; i++)
        sums[i] = make_float4(sums[i].x + more[i].x, sums[i].y + more[i].y, sums[i].z + more[i].z, sums[i].w + more[i].w);
    }
#pragma unroll
    for (int i = 0; i < kFours; i++) {
      const Halves begin(sums[i].x, sums[i].y), end(sums[i].z, sums[i].w);
      shrunk[i / (2 * kHeld)][i / kHeld % 2][i % kHeld] = {{begin.high, end.high}, {begin.low, end.low}};
    }
  }

  // One half after the other: registers of the first one's rows of B are free when the second one's sums begin.
  __device__ __forceinline__ void multiply(float (&d)[2][4][4], const Shrunk& shrunk, int first) const {
    bool is_needed[kDeferredSteps];
#pragma unroll
    for (int step = 0; step < kDeferredSteps; step++)
      is_needed[step] = __any_sync(~0u, has(0, first, step) || has(1, first, step));
#pragma unroll
    for (int i = 0; i < 2 * kDeferredSteps; i++) {
      const int half = i / kDeferredSteps, step = i % kDeferredSteps;
      if (is_needed[step]) multiply_step(d[half], held_[half], shrunk[half % kPieces], first, step);
    }
  }

  __device__ __forceinline__ bool has(int i, int first, int step) const {
    return is_own(own_column(i, first / 16 + step));
  }

  __device__ __forceinline__ void multiply_step(float (&d)[4][4], const uint2 (&held)[4][kDeferredSteps],
                                                const ShrunkFour (&shrunk)[2][kHeld], int first, int step) const {
    ShrunkFour a[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      a[i] = shrunk[i][kHeld == 1 ? 0 : step];
      if (!has(i, first, step)) a[i] = {};
    }
#pragma unroll
    for (int tile = 0; tile < 4; tile++) {
      const uint2 b = held[tile][step];
      mma(d[tile], a[0].high[0], a[1].high[0], a[0].high[1], a[1].high[1], b.x, b.y);
      mma(d[tile], a[0].low[0], a[1].low[0], a[0].low[1], a[1].low[1], b.x, b.y);
    }
  }

  const DeferredDelta& given_;
  const int lane_;
  const int rows_[2];
  int tokens_[2], slots_[2];
  uint2 held_[2][4][kDeferredSteps];
};

}  // namespace lora
