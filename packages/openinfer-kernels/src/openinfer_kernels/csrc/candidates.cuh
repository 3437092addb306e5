// The few likeliest entries of a row: found by the maxima of threads, collected and sorted by one block.
//
// Each thread of a team knows the largest of the values it holds. At least k values of a row reach the k-th largest of
// these maxima, and hardly more than k do if there are many threads: a histogram of the maxima, one entry per thread,
// gives a bound that keeps the k likeliest and little else, without touching the row again.
#pragma once
#include "block.cuh"
#include "ordered.cuh"
#include "team.cuh"

constexpr int kCandidates = 2048;
constexpr int kCoarseBins = kThreads;
constexpr uint32_t kNoDistance = 0xFFFFFFFF;

// An entry of a row: the likelier, then the lower id, is the smaller one.
__device__ __forceinline__ uint64_t entry(uint32_t distance, uint32_t id) { return uint64_t(distance) << 32 | id; }

// A distance that at least `wanted` entries of the row are within, or that of the lowest finite value.
// `mine` is the distance of this thread's largest value (kNoDistance if it has none), `range` the largest of the team's.
__device__ __forceinline__ uint32_t candidate_bound(const Distances& distances, uint32_t mine, uint32_t range,
                                                    uint32_t wanted) {
  __shared__ uint32_t bins[kCoarseBins];
  __shared__ uint32_t bound;
  const int shift = max(0, 32 - __clz(range) - 9);
  bins[threadIdx.x] = 0;
  if (threadIdx.x == 0) bound = distances.of_lowest_finite();
  __syncthreads();
  if (mine != kNoDistance) atomicAdd(&bins[mine >> shift], 1);
  team_sync();
  uint32_t count = 0;
#pragma unroll
  for (int rank = 0; rank < kTeam; rank++) count += team_read(&bins[threadIdx.x], rank);
  const uint32_t before = block_sum_before(count);
  if (before < wanted && wanted <= before + count)
    bound = min(bound, uint32_t((uint64_t(threadIdx.x + 1) << shift) - 1));
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
  int total = 0;
#pragma unroll
  for (int rank = 0; rank < kTeam; rank++) {
    const int theirs = team_read(count, rank);
    if (rank > 0)
      for (int i = threadIdx.x; i < theirs; i += kThreads) entries[total + i] = team_read(&entries[i], rank);
    total += theirs;
  }
  __syncthreads();
  return total;
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
