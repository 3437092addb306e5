// What the kernels of latent attention share: the sizes of every published model, copies to shared memory, tensor core
// operands from there.
#pragma once
#include "attention/attention.cuh"

namespace latent {

using attention::bf16;

constexpr int kLatent = 512;             // values of a latent
constexpr int kRope = 64;                // rotated values
constexpr int kEntry = kLatent + kRope;  // of one token in the cache
constexpr int kNope = 128;               // unrotated values of a head's query and key
constexpr int kHead = kNope + kRope;     // values of a head's query
constexpr int kValue = 128;              // values of a head's value
constexpr int kHeads = 16;               // query heads of an item: the rows of a tensor core tile
constexpr int kPad = 8;                  // values between vectors in shared memory, against bank conflicts
constexpr int kPartial =
    kHeads * (kLatent + 2);  // floats of a partial: sums [heads, 512], maxima, sums of exponentials

// Where the sums of an item, a (token, tile of 16 query heads), are.
struct Item {
  int first_worker;  // of its partials, if there are several
  int count;         // of partials; 1: all is in `whole`; 0: nothing was computed
};

__device__ __forceinline__ uint32_t shared_of(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Starts a copy of 16 bytes to shared memory; zeros where `is_there` is false.
__device__ __forceinline__ void copy_16(void* to, const void* from, bool is_there = true) {
  const int size = is_there ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_of(to)), "l"(from), "r"(size) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four 8 x 8 matrices; lane i names row i % 8 of matrix i / 8.
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], const bf16* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_of(row))
               : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void load_transposed(uint32_t (&to)[4], const bf16* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_of(row))
               : "memory");
}

}  // namespace latent
