// Logits of a head in E4M3, in float32: see lowbit_gemm.cuh.
#include "lowbit/lowbit_gemm.cuh"

LOWBIT_GEMM_SUMS(Fp8, fp8, kFloat32, float32)
LOWBIT_GEMM_WEIGHTS(Fp8, fp8, kFloat32, float32)
LOWBIT_GEMM_E4M3(Fp8, fp8, kFloat32, float32)
