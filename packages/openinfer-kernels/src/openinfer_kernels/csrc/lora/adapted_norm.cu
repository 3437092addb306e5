// add_rms_norm of a product of which the adapters are deferred: lora/deferred_delta.cuh.
//
//     r += y + B (A x);  out = bf16(w * r / sqrt(mean(r^2) + eps))
#include "lora/deferred_delta.cuh"
#include "norm/norm_row.cuh"

namespace {

struct NormDelta {
  lora::DeferredRows rows;
  lora::DeferredShrunk& shrunk;

  __device__ __forceinline__ void add(float (&values)[8]) { rows.add(values, 0, shrunk); }
};

}  // namespace

// Rows of whole warps of vectors, 8 values a thread.
extern "C" __global__ void __launch_bounds__(512) adapted_norm_add_rms_norm(
    const bf16* x, float* residual, const bf16* weight, bf16* y, int size, float eps,
    const __grid_constant__ lora::DeferredDelta delta) {
  __shared__ lora::DeferredShrunk shrunk;
  const NormDelta deferred{lora::DeferredRows(delta, blockIdx.x, threadIdx.x * 8), shrunk};
  norm_row<8, 1, true, false>(x, residual, weight, y, size, eps, deferred);
}
