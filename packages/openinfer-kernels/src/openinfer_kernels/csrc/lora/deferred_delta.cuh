// What adapters add to a product, by the kernel after it: y + B (A x), of which A x was made beside the product.
//
// Of the norm's kernel a block has one token, and a thread eight of its values; heads and gates are in
// deferred_tiles.cuh. It reads the eight rows of B before it waits for the product, in which time they cost nothing;
// which slot the token has is only guessed then, and read again after the wait. A x is float32, and so are the sums: y is
// rounded once as a product without adapters, and its sum with the delta when the kernel rounds its own result. A token
// without an adapter computes what it does without adapters.
#pragma once
#include <cstdint>

#include "common/hopper.cuh"  // so that it is compiled for Hopper alone, as the products that leave A x are
#include "lora/halves.cuh"

namespace lora {

constexpr int kMostDeferredPieces = 3, kMostDeferredRank = 64;  // cuda/lora/deferred_delta.py repeats them
constexpr int kDeferredStep = 16;                               // columns of B that a thread holds of each row

struct DeferredDelta {
  const float* shrunk;  // [splits, T, P r], of tokens with an adapter
  const uint16_t* b;    // [n, E], the B's of all slots next to each other
  const int* slots;     // [T]
  int num_tokens, num_slots, pieces, rank, num_columns, splits;
};

// A x of a block's token.
using DeferredShrunk = float[kMostDeferredPieces * kMostDeferredRank];

// What a thread adds to values `row` to `row` + 7 of a product's token.
class DeferredRows {
 public:
  // Before the kernel ahead has ended.
  __device__ __forceinline__ DeferredRows(const DeferredDelta& given, int token, int row)
      : given_(given), token_(token), row_(row), slot_(read_slot()) {
    if (slot_ >= 0) hold(0);
  }

  // After it, by all threads of the block.
  __device__ __forceinline__ void add(float (&values)[8], int piece, DeferredShrunk& shrunk) {
    const int guessed = slot_;
    if (guessed >= 0) leave_shrunk(shrunk);  // does not wait for the slot, which is hardly ever another one
    slot_ = read_slot();
    if (slot_ < 0) return;  // all threads of the block
    if (guessed < 0) leave_shrunk(shrunk);
    if (slot_ != guessed) hold(0);
    __syncthreads();
    const float* own = shrunk + piece * given_.rank;
    for (int first = 0; first < given_.rank; first += kDeferredStep) {
      if (first > 0) hold(first);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        if (first + half * 8 >= given_.rank) break;
        const float4 low = *reinterpret_cast<const float4*>(own + first + half * 8);
        const float4 high = *reinterpret_cast<const float4*>(own + first + half * 8 + 4);
        const float factors[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < 8; i++) {
          const uint32_t pairs[4] = {held_[i][half].x, held_[i][half].y, held_[i][half].z, held_[i][half].w};
#pragma unroll
          for (int j = 0; j < 4; j++) {
            values[i] += factors[j * 2] * value_of(pairs[j] & 0xffff);
            values[i] += factors[j * 2 + 1] * value_of(pairs[j] >> 16);
          }
        }
      }
    }
  }

 private:
  __device__ __forceinline__ int read_slot() const {
    const int slot = __ldcg(given_.slots + token_);
    return slot < given_.num_slots ? slot : -1;
  }

  __device__ __forceinline__ void hold(int first) {
    const uint16_t* b = given_.b + int64_t(row_) * given_.num_columns + slot_ * given_.rank + first;
#pragma unroll
    for (int i = 0; i < 8; i++, b += given_.num_columns) {
      held_[i][0] = *reinterpret_cast<const uint4*>(b);
      held_[i][1] = first + 8 < given_.rank ? *reinterpret_cast<const uint4*>(b + 8) : make_uint4(0, 0, 0, 0);
    }
  }

  // The sum over splits, in one order.
  __device__ __forceinline__ void leave_shrunk(DeferredShrunk& shrunk) const {
    const int values = given_.pieces * given_.rank;
    for (int i = threadIdx.x; i < values; i += blockDim.x) {
      const float* from = given_.shrunk + int64_t(token_) * values + i;
      float sum = 0;
#pragma unroll 4
      for (int split = 0; split < given_.splits; split++) sum += __ldcg(from + int64_t(split) * given_.num_tokens * values);
      shrunk[i] = sum;
    }
  }

  const DeferredDelta& given_;
  int token_, row_;
  int slot_;
  uint4 held_[8][2] = {};
};

}  // namespace lora
