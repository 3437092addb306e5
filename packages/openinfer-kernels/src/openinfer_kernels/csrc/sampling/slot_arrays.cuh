// How the sequence in each sequence slot is sampled, on the device.
#pragma once
#include "sampling/sampling_record.cuh"

namespace {

// The state of all slots, `[slots]` each.
struct SlotArrays {
  int* last_ids;
  SlotParams* params;
  float *presence, *frequency, *repetition;
  int* num_biased;

  __device__ __forceinline__ bool is_penalised(int slot) const {
    return presence[slot] != 0.0f || frequency[slot] != 0.0f || repetition[slot] != 1.0f;
  }
};

}  // namespace
