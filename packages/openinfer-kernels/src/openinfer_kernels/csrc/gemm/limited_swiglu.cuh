// silu(min(gate, limit)) * clip(up, -limit, limit), with the roundings of linear.cu; NaN stays NaN.
#pragma once
#include "common/vectors.cuh"

__device__ __forceinline__ float limited_swiglu(float gate, float up, float limit) {
  gate = rounded(gate);
  up = rounded(up);
  if (gate > limit) gate = limit;
  if (up > limit) up = limit;
  if (up < -limit) up = -limit;
  return silu(gate) * up;
}
