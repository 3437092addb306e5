// The scores of a row, which is what tokens are drawn by, as the blocks of a cluster share them.
#pragma once
#include "common/block.cuh"
#include "sampling/logits.cuh"

namespace {

constexpr int kAhead = 4;  // reads in flight per thread

// The ids of a row that one block looks at: `size` of them from `first`.
struct Slice {
  int first, size;
};

__device__ __forceinline__ Slice slice_of(int rank, int slice, int num_token_ids) {
  const int first = rank * slice;
  return {first, max(0, min(slice, num_token_ids - first))};
}

// The scores of one slice, at a 16-byte address and readable up to a multiple of 16 bytes.
template <class Logit>
struct Scores {
  static constexpr int kWidth = kWide<Logit>;
  const Logit* stored;
  Slice slice;

  __device__ __forceinline__ void unpack(int at, const Stored<Logit, kWidth>& from, float (&values)[kWidth]) const {
    to_float32(from, values);
    if (at + kWidth > slice.size) {  // what lies after it is never sampled
#pragma unroll
      for (int i = 0; i < kWidth; i++)
        if (at + i >= slice.size) values[i] = -CUDART_INF_F;
    }
  }

  __device__ __forceinline__ void at(int at, float (&values)[kWidth]) const {
    unpack(at, read<kWidth>(stored + at), values);
  }

  // Calls `use(offset in the slice, scores)` for the accesses of this thread.
  template <int kReads, class Use>
  __device__ __forceinline__ void each_access(Use use) const {
    constexpr int kStride = kThreads * kWidth;
    for (int first = threadIdx.x * kWidth; first < slice.size; first += kReads * kStride) {
      Stored<Logit, kWidth> held[kReads];
#pragma unroll
      for (int i = 0; i < kReads; i++)
        if (first + i * kStride < slice.size) held[i] = read<kWidth>(stored + first + i * kStride);
#pragma unroll
      for (int i = 0; i < kReads; i++) {
        if (first + i * kStride >= slice.size) break;
        float values[kWidth];
        unpack(first + i * kStride, held[i], values);
        use(first + i * kStride, values);
      }
    }
  }

  // Calls `use(offset in the slice, score)` for the scores of this thread.
  template <int kReads, class Use>
  __device__ __forceinline__ void each(Use use) const {
    each_access<kReads>([&](int at, const float (&values)[kWidth]) {
#pragma unroll
      for (int i = 0; i < kWidth; i++) use(at + i, values[i]);
    });
  }
};

}  // namespace
