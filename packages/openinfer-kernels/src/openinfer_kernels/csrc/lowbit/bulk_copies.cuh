// How tiles of quantised weights, and what is made of them, reach shared memory and the tensor cores.
#pragma once
#include "common/hopper.cuh"

namespace lowbit {

__device__ __forceinline__ void load_bulk(void* target, const void* from, uint32_t bytes, uint64_t* barrier,
                                          uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
          hopper::shared_address(target)),
      "l"(from), "r"(bytes), "r"(hopper::shared_address(barrier)), "l"(policy)
      : "memory");
}

// What threads have written to shared memory may be read by tensor cores after the next barrier.
__device__ __forceinline__ void fence_for_async_reads() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace lowbit
