// What collectives do to arrays besides moving them: sums over ranks, and two axes exchanged.
//
//     sum_over_ranks_T   out[i] = T(((x[0][i] + x[1][i]) + x[2][i]) + ...)     in float32, rounded once, in order of ranks
//     sum_over_nodes_T   out[i] = T((x[0][i] + x[1][i] + ...) + (x[n][i] + ...) + ...)   each node's ranks, then the nodes
//     exchange_axes      out[b][a] = in[a][b], of chunks of so many 16-byte, 4-byte or single elements
#include "common/pdl.cuh"
#include "common/vectors.cuh"

namespace {

template <int kWidth>
__device__ void sum_bfloat16(const bf16* ranks, bf16* out, int64_t count, int size) {
  const int64_t at = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * kWidth;
  wait_for_previous_kernel();
  launch_dependents();
  if (at >= count) return;
  float total[kWidth];
  unpack(load<kWidth>(ranks + at), total);
  for (int rank = 1; rank < size; rank++) {
    float values[kWidth];
    unpack(load<kWidth>(ranks + rank * count + at), values);
#pragma unroll
    for (int i = 0; i < kWidth; i++) total[i] += values[i];
  }
  store(out + at, pack(total));
}

__device__ __forceinline__ float as_float(float value) { return value; }
__device__ __forceinline__ float as_float(bf16 value) { return __bfloat162float(value); }
__device__ __forceinline__ void put(float* out, float value) { *out = value; }
__device__ __forceinline__ void put(bf16* out, float value) { *out = __float2bfloat16_rn(value); }

// Bit r of `starts` says that rank r is the first of its node; bit 0 is set.
template <typename T>
__device__ void sum_nodes(const T* ranks, T* out, int64_t count, int size, unsigned long long starts) {
  const int64_t at = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  wait_for_previous_kernel();
  launch_dependents();
  if (at >= count) return;
  float total = 0.0f, node = as_float(ranks[at]);
  bool is_first = true;
  for (int rank = 1; rank < size; rank++) {
    const float value = as_float(ranks[rank * count + at]);
    if (starts >> rank & 1) {
      total = is_first ? node : total + node;  // not 0 + node, which would lose the sign of -0
      is_first = false;
      node = value;
    } else {
      node += value;
    }
  }
  put(out + at, is_first ? node : total + node);
}

template <typename Element>
__device__ void exchange(const Element* in, Element* out, int first, int second, int elements) {
  const int element = blockIdx.y * blockDim.x + threadIdx.x;
  const int64_t chunk = blockIdx.x;  // of the result
  wait_for_previous_kernel();
  launch_dependents();
  if (element >= elements) return;
  const int64_t b = chunk / first, a = chunk % first;
  out[chunk * elements + element] = in[(a * second + b) * elements + element];
}

}  // namespace

extern "C" __global__ void sum_over_ranks_bfloat16_vectors(const bf16* ranks, bf16* out, int64_t count, int size) {
  sum_bfloat16<8>(ranks, out, count, size);
}

extern "C" __global__ void sum_over_ranks_bfloat16_singles(const bf16* ranks, bf16* out, int64_t count, int size) {
  sum_bfloat16<1>(ranks, out, count, size);
}

extern "C" __global__ void sum_over_ranks_float32(const float* ranks, float* out, int64_t count, int size) {
  const int64_t at = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  wait_for_previous_kernel();
  launch_dependents();
  if (at >= count) return;
  float total = ranks[at];
  for (int rank = 1; rank < size; rank++) total += ranks[rank * count + at];
  out[at] = total;
}

extern "C" __global__ void sum_over_nodes_bfloat16(const bf16* ranks, bf16* out, int64_t count, int size,
                                                   unsigned long long starts) {
  sum_nodes(ranks, out, count, size, starts);
}

extern "C" __global__ void sum_over_nodes_float32(const float* ranks, float* out, int64_t count, int size,
                                                  unsigned long long starts) {
  sum_nodes(ranks, out, count, size, starts);
}

extern "C" __global__ void exchange_axes_16(const uint4* in, uint4* out, int first, int second, int elements) {
  exchange(in, out, first, second, elements);
}

extern "C" __global__ void exchange_axes_4(const unsigned* in, unsigned* out, int first, int second, int elements) {
  exchange(in, out, first, second, elements);
}

extern "C" __global__ void exchange_axes_1(const unsigned char* in, unsigned char* out, int first, int second,
                                           int elements) {
  exchange(in, out, first, second, elements);
}
