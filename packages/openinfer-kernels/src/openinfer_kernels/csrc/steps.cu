// What a step of an engine does around the model: block tables, input ids and sampling parameters that live on the device, one row
// per slot, so that a captured decode step needs nothing from the host but which slots run and where they stand.
#include <cstdint>

#include "overlap.cuh"

namespace {

// One slot's sampling parameters.
struct SlotParams {
  float temperature, top_p, min_p;
  int top_k;
  uint64_t seed;
};

}  // namespace

// Entries `(slot, column, block)` of the block tables.
extern "C" __global__ void steps_append_blocks(int* tables, const int* entries, int num_entries, int max_blocks) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= num_entries) return;
  tables[int64_t(entries[3 * i]) * max_blocks + entries[3 * i + 1]] = entries[3 * i + 2];
}

// last_ids[slots[i]] = token_ids[i] where the row is one (slot >= 0) and has sampled (id >= 0).
extern "C" __global__ void steps_keep_last_ids(int* last_ids, const int* slots, const int* token_ids, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  wait_for_previous_kernel();
  if (i < count && slots[i] >= 0 && token_ids[i] >= 0) last_ids[slots[i]] = token_ids[i];
}

// Everything that a decode step of one token per row reads, from slots and positions. A row with slot -1 is padding:
// it has no context, its KV goes nowhere, and its token is 0.
//
// Grid: one block per row.
extern "C" __global__ void steps_prepare_decode(const int* slots, const int* positions, const int* tables,
                                                const int* last_ids, const SlotParams* params, int* token_ids,
                                                int* row_positions, int* context_lens, int64_t* cache_slots,
                                                int* block_tables, float* temperature, float* top_p, float* min_p,
                                                int* top_k, uint64_t* seeds, int64_t* sampled_positions, int max_blocks,
                                                int block_tokens) {
  const int row = blockIdx.x, slot = slots[row], position = slot < 0 ? 0 : positions[row];
  const int* table = tables + int64_t(slot < 0 ? 0 : slot) * max_blocks;
  const int used = slot < 0 ? 0 : position / block_tokens + 1;
  for (int i = threadIdx.x; i < used; i += blockDim.x) block_tables[int64_t(row) * max_blocks + i] = table[i];
  if (threadIdx.x != 0) return;
  const SlotParams p = slot < 0 ? SlotParams{0.0f, 1.0f, 0.0f, 0, 0} : params[slot];
  token_ids[row] = slot < 0 ? 0 : last_ids[slot];
  row_positions[row] = position;
  context_lens[row] = slot < 0 ? 0 : position + 1;
  cache_slots[row] =
      slot < 0 ? -1 : int64_t(table[position / block_tokens]) * block_tokens + position % block_tokens;
  temperature[row] = p.temperature;
  top_p[row] = p.top_p;
  min_p[row] = p.min_p;
  top_k[row] = p.top_k;
  seeds[row] = p.seed;
  sampled_positions[row] = position + 1;
}
