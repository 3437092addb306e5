// Rows of an embedding table: each block copies a chunk of one row. Float32 is copied as twice as many BF16; where a
// residual stream begins, BF16 becomes float32 and is multiplied by a scale, 1 for most models.
//
// The PDL trigger comes after the wait: decode attention reads keys early, and where it follows a choice of
// queries (a model's last layer), these keys are of the same step. All kernels before this one have ended by then.
#include "common/pdl.cuh"
#include "common/vectors.cuh"

namespace {

template <int kWidth>
__device__ __forceinline__ void put(bf16* to, const Vector<kWidth>& row, float) {
  store(to, row);
}

template <int kWidth>
__device__ __forceinline__ void put(float* to, const Vector<kWidth>& row, float scale) {
  float values[kWidth];
  unpack(row, values);
#pragma unroll
  for (int i = 0; i < kWidth; i++) values[i] *= scale;
  store_values(to, values);
}

template <int kWidth, typename Output>
__device__ void copy_row(const int* token_ids, const bf16* table, Output* out, int size, float scale = 1.0f) {
  const int at = (blockIdx.y * blockDim.x + threadIdx.x) * kWidth;
  wait_for_previous_kernel();
  launch_dependents();
  if (at >= size) return;
  const int64_t row = token_ids[blockIdx.x];
  put(out + int64_t(blockIdx.x) * size + at, load<kWidth>(table + row * size + at), scale);
}

}  // namespace

extern "C" __global__ void embedding_vectors(const int* token_ids, const bf16* table, bf16* out, int size) {
  copy_row<8>(token_ids, table, out, size);
}

extern "C" __global__ void embedding_singles(const int* token_ids, const bf16* table, bf16* out, int size) {
  copy_row<1>(token_ids, table, out, size);
}

extern "C" __global__ void residual_embedding_vectors(const int* token_ids, const bf16* table, float* out, int size,
                                                       float scale) {
  copy_row<8>(token_ids, table, out, size, scale);
}

extern "C" __global__ void residual_embedding_singles(const int* token_ids, const bf16* table, float* out, int size,
                                                       float scale) {
  copy_row<1>(token_ids, table, out, size, scale);
}
