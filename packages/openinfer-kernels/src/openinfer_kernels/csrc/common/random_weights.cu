// Random weights, made where they are used. `openinfer_kernels.weights.plain.RandomWeight` says which number stands
// where.
#include "common/philox.cuh"
#include "common/vectors.cuh"

namespace {

constexpr int kPerThread = 8;

// Two normal numbers from two words: Box and Muller 1958.
__device__ float2 normal_pair(uint32_t first, uint32_t second) {
  // Half a step off zero, whose logarithm is infinite.
  const float radius = sqrtf(-2.0f * logf((float(first) + 0.5f) * 0x1p-32f));
  float sine, cosine;
  sincospif(float(second) * 0x1p-31f, &sine, &cosine);
  return {radius * cosine, radius * sine};
}

// Number `place` of the whole tensor; `group` and `normals` keep the last four that were made.
struct Normals {
  uint64_t seed, group = ~uint64_t(0);
  float2 low, high;

  __device__ float at(uint64_t place) {
    if (place / 4 != group) {
      group = place / 4;
      const uint4 words = philox_words(seed, group);
      low = normal_pair(words.x, words.y);
      high = normal_pair(words.z, words.w);
    }
    const float2 pair = place & 2 ? high : low;
    return place & 1 ? pair.y : pair.x;
  }
};

}  // namespace

// `to [size / columns, columns]` is the shard of a tensor with rows of `row_length` that begins at `origin`.
extern "C" __global__ void random_weights(bf16* to, int64_t size, int64_t columns, int64_t row_length, int64_t origin,
                                          uint64_t seed, float mean, float spread) {
  const int64_t first = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * kPerThread;
  if (first >= size) return;
  int64_t row = first / columns, column = first - row * columns;
  Normals normals{seed};
  float values[kPerThread];
#pragma unroll
  for (int i = 0; i < kPerThread; i++) {
    values[i] = fmaf(spread, normals.at(origin + row * row_length + column), mean);
    if (++column == columns) column = 0, row++;
  }
  if (first + kPerThread <= size && reinterpret_cast<uintptr_t>(to + first) % sizeof(Vector<8>) == 0) {
    store(to + first, pack(values));
  } else {
#pragma unroll
    for (int i = 0; i < kPerThread; i++) {
      if (first + i < size) to[first + i] = __float2bfloat16_rn(values[i]);
    }
  }
}
