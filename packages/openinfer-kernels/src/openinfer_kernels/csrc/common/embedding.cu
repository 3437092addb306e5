// Rows of an embedding table: each block copies a chunk of one row. Float32 is copied as twice as many BF16; where a
// residual stream begins, BF16 becomes float32.
//
// The PDL trigger comes after the wait: decode attention reads keys early, and where it follows a choice of
// queries (a model's last layer), these keys are of the same step. All kernels before this one have ended by then.
#include "common/pdl.cuh"
#include "common/vectors.cuh"

namespace {

template <int kWidth, typename Output>
__device__ void copy_row(const int* token_ids, const bf16* table, Output* out, int size) {
  const int at = (blockIdx.y * blockDim.x + threadIdx.x) * kWidth;
  wait_for_previous_kernel();
  launch_dependents();
  if (at >= size) return;
  const int64_t row = token_ids[blockIdx.x];
  store(out + int64_t(blockIdx.x) * size + at, load<kWidth>(table + row * size + at));
}

}  // namespace

extern "C" __global__ void embedding_vectors(const int* token_ids, const bf16* table, bf16* out, int size) {
  copy_row<8>(token_ids, table, out, size);
}

extern "C" __global__ void embedding_singles(const int* token_ids, const bf16* table, bf16* out, int size) {
  copy_row<1>(token_ids, table, out, size);
}

extern "C" __global__ void residual_embedding_vectors(const int* token_ids, const bf16* table, float* out, int size) {
  copy_row<8>(token_ids, table, out, size);
}

extern "C" __global__ void residual_embedding_singles(const int* token_ids, const bf16* table, float* out, int size) {
  copy_row<1>(token_ids, table, out, size);
}
