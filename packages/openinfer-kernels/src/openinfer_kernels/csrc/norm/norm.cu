// RMSNorm over rows, alone or after adding into the residual: norm/norm_row.cuh.
#include "norm/norm_row.cuh"

#define NORM(PREFIX, ZERO_CENTRED, DTYPE, INPUT, NAME, WIDTH, HELD)                                         \
  extern "C" __global__ void __launch_bounds__(1024) PREFIX##rms_norm_##DTYPE##_##NAME(                     \
      const INPUT* x, const bf16* weight, bf16* y, int size, float eps) {                                   \
    norm_row<WIDTH, HELD, false, ZERO_CENTRED>(x, nullptr, weight, y, size, eps);                           \
  }                                                                                                         \
  extern "C" __global__ void __launch_bounds__(1024) add_##PREFIX##rms_norm_##DTYPE##_##NAME(               \
      const INPUT* x, float* residual, const bf16* weight, bf16* y, int size, float eps) {                  \
    norm_row<WIDTH, HELD, true, ZERO_CENTRED>(x, residual, weight, y, size, eps);                           \
  }
#define NORMS(PREFIX, ZERO_CENTRED, DTYPE, INPUT)             \
  NORM(PREFIX, ZERO_CENTRED, DTYPE, INPUT, vectors, 8, 1)      \
  NORM(PREFIX, ZERO_CENTRED, DTYPE, INPUT, long_vectors, 8, 3) \
  NORM(PREFIX, ZERO_CENTRED, DTYPE, INPUT, singles, 1, 8)

NORMS(, false, bfloat16, bf16)
NORMS(, false, float32, float)
NORMS(zero_centred_, true, bfloat16, bf16)
NORMS(zero_centred_, true, float32, float)

// A residual stream in BF16, 8 values a thread: what a drafter sees of it. The product after it reads its weights meanwhile.
extern "C" __global__ void __launch_bounds__(256) residual_bfloat16(const float* residual, bf16* y, int vectors) {
  launch_dependents();
  wait_for_previous_kernel();
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= vectors) return;
  float values[8];
  load_values(residual + int64_t(at) * 8, values);
  store(y + int64_t(at) * 8, pack(values));
}
