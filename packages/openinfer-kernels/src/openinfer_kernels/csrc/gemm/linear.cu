// What follows a matrix product: the gate of SwiGLU.
//
//     y[t, i] = bf16(silu(g) * u)      g = both[t, i] and u = both[t, F + i] in BF16, silu(g) = g / (1 + exp(-g))
//
// Shazeer 2020, "GLU Variants Improve Transformer", eq. 6. Kernels that gate their own sums round both to BF16 first,
// so that they agree with this one bit for bit. Each block makes a chunk of one token's row.
#include "common/pdl.cuh"
#include "common/vectors.cuh"

namespace {

template <int kWidth>
__device__ void gate(const bf16* both, bf16* y, int width) {
  const int at = (blockIdx.y * blockDim.x + threadIdx.x) * kWidth;
  wait_for_previous_kernel();
  launch_dependents();
  if (at >= width) return;
  const bf16* row = both + int64_t(blockIdx.x) * 2 * width;
  float gates[kWidth], ups[kWidth];
  unpack(load<kWidth>(row + at), gates);
  unpack(load<kWidth>(row + width + at), ups);
#pragma unroll
  for (int i = 0; i < kWidth; i++) gates[i] = silu(gates[i]) * ups[i];
  store(y + int64_t(blockIdx.x) * width + at, pack(gates));
}

}  // namespace

extern "C" __global__ void swiglu_vectors(const bf16* both, bf16* y, int width) { gate<8>(both, y, width); }

extern "C" __global__ void swiglu_singles(const bf16* both, bf16* y, int width) { gate<1>(both, y, width); }
