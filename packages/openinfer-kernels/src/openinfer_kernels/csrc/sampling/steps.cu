// What a step of an engine does around the model. Block tables, last ids and sampling state live on the device, one row
// per sequence slot, so that the host sends which slots run, where they stand, and ids that no slot has sampled. A slot
// is a sequence slot here; KV slots are named so.
#include <cstdint>

#include "common/pdl.cuh"
#include "sampling/sampling_record.cuh"
#include "sampling/slot_arrays.cuh"

namespace {

// What a slot is given when a sequence begins in it.
struct SlotRecord {
  SlotParams params;
  float presence, frequency, repetition;
  int num_biased, slot, unused;
};

// What the model reads of tokens and rows: `block_tables` [tables, R, table_columns], `cache_slots` [tables, T].
struct ModelInputs {
  int *token_ids, *positions, *context_lens, *block_tables;
  int64_t* cache_slots;
  int num_rows, num_tokens, table_columns;

  __device__ __forceinline__ int* block_table(int table, int row) const {
    return block_tables + (int64_t(table) * num_rows + row) * table_columns;
  }

  __device__ __forceinline__ int64_t* cache_slots_of(int table) const {
    return cache_slots + int64_t(table) * num_tokens;
  }
};

// `[tables, slots, max_blocks]`: where blocks are void, behind the window of a table, entries may be anything.
struct Tables {
  const int* blocks;
  int num_slots, max_blocks, block_tokens;

  __device__ __forceinline__ const int* of(int table, int slot) const {
    return blocks + (int64_t(table) * num_slots + slot) * max_blocks;
  }

  __device__ __forceinline__ int64_t place(const int* table, int position) const {
    return int64_t(table[position / block_tokens]) * block_tokens + position % block_tokens;
  }
};

__device__ __forceinline__ void copy_table(int* target, const int* table, int num_blocks) {
  for (int i = threadIdx.x; i < num_blocks; i += blockDim.x) target[i] = table[i];
}

}  // namespace

// Entries `(table, slot, column, block)` of the block tables [tables, slots, max_blocks].
extern "C" __global__ void steps_append_blocks(int* tables, const int* entries, int num_entries, int num_slots,
                                               int max_blocks) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= num_entries) return;
  const int* entry = entries + 4 * i;
  tables[(int64_t(entry[0]) * num_slots + entry[1]) * max_blocks + entry[2]] = entry[3];
}

extern "C" __global__ void steps_start_slots(const SlotArrays slots, const SlotRecord* records, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const SlotRecord record = records[i];
  slots.params[record.slot] = record.params;
  slots.presence[record.slot] = record.presence;
  slots.frequency[record.slot] = record.frequency;
  slots.repetition[record.slot] = record.repetition;
  slots.num_biased[record.slot] = record.num_biased;
}

// Tokens that a penalised sequence brings along: `seen` [V] of its prompt, `counts` [V] of its output; both are zero
// before.
extern "C" __global__ void steps_count_tokens(uint8_t* seen, int* counts, const int* prompt, int num_prompt,
                                              const int* output, int num_output) {
  const int first = blockIdx.x * blockDim.x + threadIdx.x, stride = gridDim.x * blockDim.x;
  for (int i = first; i < num_prompt; i += stride) seen[prompt[i]] = 1;
  for (int i = first; i < num_output; i += stride) atomicAdd(counts + output[i], 1);
}

// A step of one token per row, the last one that its slot sampled, from `rows` [4, R]: slots, positions, whether the
// row samples, unused here. A row with slot -1 is padding: it has no context, its KV goes nowhere, and its token is 0.
// `sampled_slots` has the slot of rows that sample, and -1.
//
// Grid: one block per row and block table.
extern "C" __global__ void steps_prepare_decode(const int* rows, const Tables tables, const SlotArrays slots,
                                                const ModelInputs out, const SampledRows sampled, int* sampled_slots) {
  const int row = blockIdx.x, num_rows = gridDim.x, number = blockIdx.y;
  const int slot = rows[row], position = slot < 0 ? 0 : rows[num_rows + row];
  const int* table = tables.of(number, slot < 0 ? 0 : slot);
  copy_table(out.block_table(number, row), table, slot < 0 ? 0 : position / tables.block_tokens + 1);
  if (threadIdx.x != 0) return;
  out.cache_slots_of(number)[row] = slot < 0 ? -1 : tables.place(table, position);
  if (number != 0) return;
  const bool samples = slot >= 0 && rows[2 * num_rows + row] != 0;
  out.token_ids[row] = slot < 0 ? 0 : slots.last_ids[slot];
  out.positions[row] = position;
  out.context_lens[row] = slot < 0 ? 0 : position + 1;
  sampled.set(row, samples ? slots.params[slot] : NOT_SAMPLED, position + 1);
  sampled_slots[row] = samples ? slot : -1;
}

// A step of prefill chunks of any length (a mixed batch), from `rows` [6, R]: slots, first positions, tokens, host
// token ids of them, first token of the row in the step, first of its ids in `given`. Where the host gives one id less
// than there are tokens, the first is the slot's last id. Rows after the last chunk are padding: slot -1, no tokens,
// the first token after the last one. So are tokens there.
//
// Grid: one block per row and block table, and one per block table for the tokens that are padding.
extern "C" __global__ void steps_prepare_chunks(const int* rows, const int* given, const Tables tables,
                                                const SlotArrays slots, const ModelInputs out, int* query_starts,
                                                int num_tokens) {
  const int row = blockIdx.x, num_rows = gridDim.x - 1, number = blockIdx.y;
  int64_t* cache_slots = out.cache_slots_of(number);
  if (row == num_rows) {
    const int end = rows[4 * num_rows + row - 1] + rows[2 * num_rows + row - 1];
    if (threadIdx.x == 0 && number == 0) query_starts[num_rows] = end;
    for (int i = end + threadIdx.x; i < num_tokens; i += blockDim.x) {
      if (number == 0) out.token_ids[i] = out.positions[i] = 0;
      cache_slots[i] = -1;
    }
    return;
  }
  const int slot = rows[row], start = rows[num_rows + row], count = rows[2 * num_rows + row];
  const int from_device = count - rows[3 * num_rows + row];
  const int first = rows[4 * num_rows + row], first_given = rows[5 * num_rows + row];
  if (threadIdx.x == 0 && number == 0) {
    query_starts[row] = first;
    out.context_lens[row] = slot < 0 ? 0 : start + count;
  }
  if (slot < 0) return;
  const int* table = tables.of(number, slot);
  copy_table(out.block_table(number, row), table, (start + count - 1) / tables.block_tokens + 1);
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    cache_slots[first + i] = tables.place(table, start + i);
    if (number != 0) continue;
    out.token_ids[first + i] = i < from_device ? slots.last_ids[slot] : given[first_given + i - from_device];
    out.positions[first + i] = start + i;
  }
}

// How rows of these slots are sampled, whose tokens will have these positions.
extern "C" __global__ void steps_prepare_sampling(const int* sampled_slots, const int* positions, const SlotArrays slots,
                                                  const SampledRows sampled, int count) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row < count) sampled.set(row, slots.params[sampled_slots[row]], positions[row]);
}

// For each slot the row that samples it, if it has penalties or a bias; else -1. One block.
extern "C" __global__ void steps_name_rows(const int* sampled_slots, int num_rows, const SlotArrays slots, int num_slots,
                                           int* penalised_rows, int* biased_rows) {
  for (int slot = threadIdx.x; slot < num_slots; slot += blockDim.x) penalised_rows[slot] = biased_rows[slot] = -1;
  __syncthreads();
  for (int row = threadIdx.x; row < num_rows; row += blockDim.x) {
    const int slot = sampled_slots[row];
    if (slot < 0) continue;
    if (slots.is_penalised(slot)) penalised_rows[slot] = row;
    if (slots.num_biased[slot] > 0) biased_rows[slot] = row;
  }
}

// Notes what rows sampled, where a row does (slot >= 0) and had an answer (id >= 0): the slot's last id, and its count
// where the slot has penalties. `counts` [slots, V] may be null if none has.
extern "C" __global__ void steps_keep_sampled(const SlotArrays slots, int* counts, int64_t num_columns,
                                              const int* sampled_slots, const int* token_ids, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  wait_for_previous_kernel();
  if (i >= count || sampled_slots[i] < 0 || token_ids[i] < 0) return;
  slots.last_ids[sampled_slots[i]] = token_ids[i];
  if (counts && slots.is_penalised(sampled_slots[i])) counts[sampled_slots[i] * num_columns + token_ids[i]] += 1;
}

// A few bytes between pinned memory of the host and the device: a copy engine would bring them after all copies that it
// was given before, and those of KV tiers take a while. One block; 16 bytes at a time where both sides are aligned to
// that.
extern "C" __global__ void __launch_bounds__(1024) small_copy(const uint8_t* from, uint8_t* to, int bytes) {
  const bool is_aligned = ((reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to)) & 15) == 0;
  const int vectors = is_aligned ? bytes / 16 : 0;
  for (int i = threadIdx.x; i < vectors; i += blockDim.x)
    reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
  for (int i = vectors * 16 + threadIdx.x; i < bytes; i += blockDim.x) to[i] = from[i];
}
