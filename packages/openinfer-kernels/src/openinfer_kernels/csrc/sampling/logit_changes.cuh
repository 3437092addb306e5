// What changes logits before a token is drawn: penalties and token masks as the logits are read, bias after it.
// Each operation is rounded as the CPU module rounds it, so no products are fused into sums.
#pragma once
#include <cstdint>

// Where in `rows` this row is named; -1 if it is not. For all threads of the block.
__device__ __forceinline__ int index_of(int row, const int* rows, int count) {
  __shared__ int found;
  __syncthreads();
  if (threadIdx.x == 0) found = -1;
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += blockDim.x)
    if (rows[i] == row) found = i;
  __syncthreads();
  return found;
}

// The penalties of one row; `output_counts` is null where it has none.
struct RowPenalties {
  const int* output_counts;
  const uint8_t* prompt_seen;
  float presence, frequency, repetition;

  __device__ __forceinline__ float penalised(float logit, int count, bool seen) const {
    if (count <= 0 && !seen) return logit;
    const float repeated = logit > 0 ? __fdiv_rn(logit, repetition) : __fmul_rn(logit, repetition);
    return __fsub_rn(repeated, __fadd_rn(__fmul_rn(frequency, float(count)), count > 0 ? presence : 0.0f));
  }

  __device__ __forceinline__ void apply(int id, float (&logits)[1]) const {
    logits[0] = penalised(logits[0], output_counts[id], prompt_seen[id]);
  }

  __device__ __forceinline__ void apply(int id, float (&logits)[4]) const {
    const int4 counts = *reinterpret_cast<const int4*>(output_counts + id);
    const uint32_t seen = *reinterpret_cast<const uint32_t*>(prompt_seen + id);
    logits[0] = penalised(logits[0], counts.x, seen & 0xFF);
    logits[1] = penalised(logits[1], counts.y, seen & 0xFF00);
    logits[2] = penalised(logits[2], counts.z, seen & 0xFF0000);
    logits[3] = penalised(logits[3], counts.w, seen & 0xFF000000);
  }

  __device__ __forceinline__ void apply(int id, float (&logits)[8]) const {
    apply(id, reinterpret_cast<float (&)[4]>(logits[0]));
    apply(id + 4, reinterpret_cast<float (&)[4]>(logits[4]));
  }
};

struct Penalties {
  const int* rows;
  const float *presence, *frequency, *repetition;
  const int* output_counts;
  const uint8_t* prompt_seen;
  int count;

  __device__ __forceinline__ RowPenalties of(int row, int num_columns) const {
    const int index = count > 0 ? index_of(row, rows, count) : -1;
    if (index < 0) return {nullptr, nullptr, 0.0f, 0.0f, 1.0f};
    const int64_t first = int64_t(index) * num_columns;
    return {output_counts + first, prompt_seen + first, presence[index], frequency[index], repetition[index]};
  }
};

struct TokenMask {
  const int* rows;
  const uint32_t* bits;
  int count;

  // The words of a row; null where it has no mask.
  __device__ __forceinline__ const uint32_t* of(int row, int num_columns) const {
    const int index = count > 0 ? index_of(row, rows, count) : -1;
    return index < 0 ? nullptr : bits + int64_t(index) * ((num_columns + 31) / 32);
  }
};

// The changes of one row; `count` is 0 where it has none.
struct RowBias {
  const int* token_ids;
  const float* values;
  int count;

  // Adds what names ids `first .. first + size` to `scores`, which begin with id `first`.
  __device__ __forceinline__ void add(float* scores, int first, int size) const {
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
      const int at = token_ids[i] - first;
      if (at >= 0 && at < size) scores[at] += values[i];
    }
  }
};

struct Bias {
  const int *rows, *counts, *token_ids;
  const float* values;
  int count, width;

  __device__ __forceinline__ RowBias of(int row) const {
    const int index = count > 0 ? index_of(row, rows, count) : -1;
    if (index < 0) return {nullptr, nullptr, 0};
    const int64_t first = int64_t(index) * width;
    return {token_ids + first, values + first, counts[index]};
  }
};
