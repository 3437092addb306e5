// The blocks that share one row: a thread block cluster from Hopper on, a single block before it.
//
// Blocks of a cluster read each other's shared memory after `cluster_sync`; none may end before a last `cluster_sync`.
#pragma once
#include <cstdint>

#if __CUDA_ARCH__ >= 900
#define CLUSTER_KERNEL __cluster_dims__(8, 1, 1)
constexpr int kClusterSize = 8;
#else
#define CLUSTER_KERNEL
constexpr int kClusterSize = 1;
#endif

__device__ __forceinline__ int cluster_row() { return blockIdx.x / kClusterSize; }

__device__ __forceinline__ int cluster_rank() { return blockIdx.x % kClusterSize; }

// A barrier of all threads of the cluster, which orders their accesses to shared and global memory (release, acquire).
__device__ __forceinline__ void cluster_sync() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

// What block `rank` has where this block has `mine`, which is in shared memory.
__device__ __forceinline__ uint64_t cluster_read(const uint64_t* mine, int rank) {
#if __CUDA_ARCH__ >= 900
  uint32_t address;
  unsigned long long value;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(address)
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(mine))), "r"(rank));
  asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(value) : "r"(address) : "memory");
  return value;
#else
  return *mine;
#endif
}

__device__ __forceinline__ uint32_t cluster_read(const uint32_t* mine, int rank) {
#if __CUDA_ARCH__ >= 900
  uint32_t address, value;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(address)
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(mine))), "r"(rank));
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
#else
  return *mine;
#endif
}

// `combine` over what each block of the cluster has in `mine`, for every thread of full warps.
template <class Combine>
__device__ __forceinline__ uint64_t cluster_fold(const uint64_t* mine, Combine combine) {
  uint64_t value = cluster_read(mine, threadIdx.x % kClusterSize);
#pragma unroll
  for (int mask = kClusterSize / 2; mask > 0; mask /= 2) value = combine(value, __shfl_xor_sync(~0u, value, mask));
  return value;
}
