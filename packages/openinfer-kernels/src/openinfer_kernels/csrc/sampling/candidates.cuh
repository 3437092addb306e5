// The few likeliest entries of a row: found by the maxima of threads, collected and sorted by one block.
//
// Each thread of a cluster knows the largest of the values it holds. At least k values of a row reach the k-th largest
// of these maxima, and hardly more than k do if there are many threads: a histogram of the maxima, one entry per
// thread, gives a bound that keeps the k likeliest and little else. In the same way the maxima that hold a share of the
// sum of all weights bound the fewest tokens that do.
#pragma once
#include "common/block.cuh"
#include "sampling/cluster.cuh"
#include "sampling/ordered.cuh"

constexpr int kCandidates = 2048;
constexpr int kCoarseBins = kThreads, kCoarseBits = 8;
static_assert(kCoarseBins == 1 << kCoarseBits, "one bin per thread");
constexpr uint32_t kNoDistance = 0xFFFFFFFF;

// An entry of a row: the likelier, then the lower id, is the smaller one.
__device__ __forceinline__ uint64_t entry(uint32_t distance, uint32_t id) { return uint64_t(distance) << 32 | id; }

// A distance within which the maxima of threads amount to what `wanted()` says, once the cluster has synchronised; if
// all amount to less, kNoDistance. `mine` is the distance of this thread's largest value (kNoDistance if it has none),
// `range` the largest of the cluster's.
template <class Wanted>
__device__ __forceinline__ uint32_t candidate_bound(uint32_t mine, uint32_t range, uint64_t amount, Wanted wanted) {
  __shared__ uint64_t bins[kCoarseBins];
  __shared__ uint32_t bound;
  const int shift = max(0, 32 - __clz(range) - kCoarseBits);
  bins[threadIdx.x] = 0;
  if (threadIdx.x == 0) bound = kNoDistance;
  __syncthreads();
  if (mine != kNoDistance) add_to(&bins[mine >> shift], amount);
  cluster_sync();
  uint64_t sum = 0;
#pragma unroll
  for (int rank = 0; rank < kClusterSize; rank++) sum += cluster_read(&bins[threadIdx.x], rank);
  const uint64_t before = block_sum_before(sum), target = wanted();
  if (before < target && target <= before + sum) bound = uint32_t((uint64_t(threadIdx.x + 1) << shift) - 1);
  __syncthreads();
  return bound;
}

// Appends to the `entries` of this block, which hold kCandidates; more are counted only.
__device__ __forceinline__ void append(uint64_t* entries, uint32_t* count, uint64_t value) {
  const uint32_t at = atomicAdd(count, 1);
  if (at < kCandidates) entries[at] = value;
}

// Moves the entries of all blocks to this one, at most kCandidates in all, each block's number in `count`.
__device__ __forceinline__ int collect(uint64_t* entries, const uint64_t* count) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int theirs = lane < kClusterSize ? int(cluster_read(count, lane)) : 0;
  const int before = int(warp_sum_before(theirs));
  for (int rank = 1 + warp; rank < kClusterSize; rank += kWarps) {
    const int first = __shfl_sync(~0u, before, rank), size = __shfl_sync(~0u, theirs, rank);
    for (int i = lane; i < size; i += 32) entries[first + i] = cluster_read(&entries[i], rank);
  }
  __syncthreads();
  return __shfl_sync(~0u, before, 31);  // lanes after the cluster's have none
}

// Bitonic sort in ascending order by one block; room for a power of two of entries is needed. Batcher 1968.
__device__ __forceinline__ void sort(uint64_t* entries, int count) {
  const int size = count > 1 ? 1 << (32 - __clz(count - 1)) : 1;
  for (int i = count + threadIdx.x; i < size; i += kThreads) entries[i] = ~uint64_t(0);
  __syncthreads();
  for (int width = 2; width <= size; width *= 2) {
    for (int step = width / 2; step > 0; step /= 2) {
      for (int pair = threadIdx.x; pair < size / 2; pair += kThreads) {
        const int low = 2 * (pair & ~(step - 1)) | (pair & (step - 1));
        const uint64_t a = entries[low], b = entries[low + step];
        if ((a > b) == ((low & width) == 0)) {
          entries[low] = b;
          entries[low + step] = a;
        }
      }
      __syncthreads();
    }
  }
}

constexpr int kHeld = kCandidates / kThreads;

// The running sums of the weights of `count` entries, kHeld of them per thread; returns the sum before the first of
// them.
template <class WeightOf>
__device__ __forceinline__ uint64_t running_weights(int count, WeightOf weight_of, uint64_t (&running)[kHeld]) {
  uint64_t sum = 0;
#pragma unroll
  for (int i = 0; i < kHeld; i++) {
    const int at = threadIdx.x * kHeld + i;
    sum += at < count ? weight_of(at) : 0;
    running[i] = sum;
  }
  const uint64_t before = block_sum_before(sum);
#pragma unroll
  for (int i = 0; i < kHeld; i++) running[i] += before;
  return before;
}
