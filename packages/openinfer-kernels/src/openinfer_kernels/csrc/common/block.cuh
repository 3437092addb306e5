// Reductions and scans over the threads of one block.
#pragma once
#include <cstdint>

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

struct Sum {
  template <class T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a + b;
  }
};

struct Least {
  template <class T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a < b ? a : b;
  }
};

struct Most {
  template <class T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a > b ? a : b;
  }
};

// The larger of the upper and the larger of the lower halves.
struct MostOfHalves {
  __device__ __forceinline__ uint64_t operator()(uint64_t a, uint64_t b) const {
    const uint32_t high = Most()(uint32_t(a >> 32), uint32_t(b >> 32)), low = Most()(uint32_t(a), uint32_t(b));
    return uint64_t(high) << 32 | low;
  }
};

// `combine` over the values of all threads, for all of them.
template <class Combine>
__device__ uint64_t block_fold(uint64_t value, Combine combine) {
  __shared__ uint64_t partial[kWarps];
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value = combine(value, __shfl_xor_sync(~0u, value, mask));
  __syncthreads();  // `partial` may still be read for the call before
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  value = partial[threadIdx.x % kWarps];
#pragma unroll
  for (int mask = kWarps / 2; mask > 0; mask /= 2) value = combine(value, __shfl_xor_sync(~0u, value, mask));
  return value;
}

// The sum of the values of the lower lanes.
__device__ __forceinline__ uint64_t warp_sum_before(uint64_t value) {
  const int lane = threadIdx.x % 32;
  uint64_t running = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint64_t other = __shfl_up_sync(~0u, running, step);
    if (lane >= step) running += other;
  }
  return running - value;
}

// The sum of the values of the lower threads.
__device__ __forceinline__ uint64_t block_sum_before(uint64_t value) {
  __shared__ uint64_t totals[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint64_t before = warp_sum_before(value);
  __syncthreads();  // `totals` may still be read for the call before
  if (lane == 31) totals[warp] = before + value;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kWarps; i++) before += i < warp ? totals[i] : 0;
  return before;
}

// Adds to an integer in shared memory, which has no 64-bit atomics of its own: the halves one by one, with carry. The
// sum is right once all threads have added; between the two halves it may lack a carry.
__device__ __forceinline__ void add_to(uint64_t* sum, uint64_t amount) {
  uint32_t* halves = reinterpret_cast<uint32_t*>(sum);
  const uint32_t low = amount;
  const uint32_t carry = low > 0 && atomicAdd(halves, low) > ~low;
  const uint32_t high = uint32_t(amount >> 32) + carry;
  if (high > 0) atomicAdd(halves + 1, high);
}
