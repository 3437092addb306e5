// Weights that a checkpoint holds in float32 or float16, rounded to BF16 on the device (to nearest, ties to even).
#include <cuda_fp16.h>

#include "common/vectors.cuh"

extern "C" __global__ void weights_from_float32(const float* from, bf16* to, int64_t size) {
  const int64_t at = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at < size) to[at] = __float2bfloat16_rn(from[at]);
}

extern "C" __global__ void weights_from_float16(const __half* from, bf16* to, int64_t size) {
  const int64_t at = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at < size) to[at] = __float2bfloat16_rn(__half2float(from[at]));
}
