// Ampere's instructions for shared memory, one function each: copies that no thread waits for, and matrices as the
// tensor cores take them.
#pragma once
#include <cstdint>

namespace ampere {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Starts a copy of 16 bytes to shared memory, past the first-level cache; where `is_there` is false, nothing is read
// and zeros are written.
__device__ __forceinline__ void copy_16(void* to, const void* from, bool is_there = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(is_there ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all groups but the last `kPending` have come. They are this thread's: others need a barrier, too.
template <int kPending = 0>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four 8 x 8 matrices; lane i names row i % 8 of matrix i / 8.
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void load_transposed(uint32_t (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
}

}  // namespace ampere
