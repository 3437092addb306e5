// What a step of an engine with a drafter does around the model, in addition to steps.cu. Rows yield several tokens, so
// where a sequence stands is known here before the host knows it: `starts` of a plan are upper bounds, and which drafts
// were accepted is found position by position, each sampled as a step of its own would have sampled it.
//
//     place_rows ─► model ─► { open_position ─► sample ─► accept } per sampled position ─► finish ─► drafter ─► keep
//
// A span is a row that samples: its last `max_new` positions, the first of which has a known id, and drafts after it.
#include <cstdint>

#include "sampling/sampling_record.cuh"
#include "sampling/slot_arrays.cuh"

namespace {

// `[slots]` each.
struct DraftArrays {
  int* lengths;            // known tokens; the last one, which a row begins with, was not computed yet
  int* stop_allowed_from;  // position from which on a stop token may be sampled
  int* num_drafts;         // of the slot's `drafts`, those from the front that are ids
  int* drafts;             // [slots, max_drafts]
  int max_drafts;
};

// `[spans]` each; the first four come from the host.
struct Spans {
  const int* slots;
  const int* firsts;       // token of the step at the first position that is sampled
  const int* max_new;      // positions that are sampled
  const int* num_planned;  // drafts that the plan takes from the slot: the last of the positions
  int* alive;              // whether the position that is sampled next is reached
  int* new_counts;         // tokens
  int* token_ids;          // [positions, spans]
  int count;

  // Drafts that there are: those of the host, and as many of the planned ones as the slot has.
  __device__ __forceinline__ int num_compared(int span, const DraftArrays& drafts) const {
    const int planned = num_planned[span];
    return max_new[span] - 1 - planned + min(planned, drafts.num_drafts[slots[span]]);
  }
};

}  // namespace

// A sequence begins in a slot: records `(slot, position from which on a stop token may be sampled, changes of single
// logits until then)`. `num_biased` is that of the second list of changes.
extern "C" __global__ void drafts_start_slots(const DraftArrays drafts, int* num_biased, const int* records, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const int slot = records[3 * i];
  drafts.lengths[slot] = drafts.num_drafts[slot] = 0;
  drafts.stop_allowed_from[slot] = records[3 * i + 1];
  num_biased[slot] = records[3 * i + 2];
}

// Brings the record of a mixed batch (`steps_prepare_chunks`: `rows` [6, padded_rows], then the host's ids) to what the
// device knows: rows that begin with the last id of their slot begin where the slot stands, and the last `num_planned`
// [num_rows] of a row's ids are the slot's drafts, 0 where it has fewer. The host's start is a bound that its blocks
// cover, and it stays one whatever the slot says. `kept_rows`, if not null, are those that sample several positions.
extern "C" __global__ void drafts_place_rows(int* record, int padded_rows, const int* num_planned,
                                             const DraftArrays drafts, int num_rows, const int* max_new,
                                             int* kept_rows) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= num_rows) return;
  if (kept_rows != nullptr) kept_rows[row] = max_new[row] > 1;
  const int slot = record[row], count = record[2 * padded_rows + row], num_host = record[3 * padded_rows + row];
  int* start = record + padded_rows + row;
  if (count > num_host) *start = max(0, min(*start, drafts.lengths[slot] - 1));
  const int planned = num_planned[row];
  int* ids = record + 6 * padded_rows + record[5 * padded_rows + row] + num_host - planned;
  const int* found = drafts.drafts + int64_t(slot) * drafts.max_drafts;
  for (int i = 0; i < planned; ++i) ids[i] = i < drafts.num_drafts[slot] ? found[i] : 0;
}

// The same for a step of one token per row, without drafts: `rows` as `steps_prepare_decode` takes it, -1 for padding.
extern "C" __global__ void drafts_place_decode(int* rows, int padded_rows, const DraftArrays drafts, int num_rows) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= num_rows || rows[row] < 0) return;
  int* start = rows + padded_rows + row;
  *start = max(0, min(*start, drafts.lengths[rows[row]] - 1));
}

// The record of a mixed batch, as `place_rows` takes it, of the `count` tokens of each of these slots that were computed
// last. Their ids are not in it.
extern "C" __global__ void drafts_place_late(const int* slots, const DraftArrays drafts, int count, int* record,
                                             int num_rows) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= num_rows) return;
  const int slot = slots[row], start = max(0, drafts.lengths[slot] - 1 - count);
  const int lines[6] = {slot, start, count, count, row * count, row * count};
  for (int line = 0; line < 6; ++line) record[line * num_rows + row] = lines[line];
}

// After such a step, what `finish` and `keep` do after others: where each slot stands, and that it has no drafts.
extern "C" __global__ void drafts_advance(const int* rows, int padded_rows, const int* sampled_ids,
                                          const SlotArrays slots, const DraftArrays drafts, int* span_slots,
                                          int* new_counts, int* last_ids, int* lengths, int num_rows) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= num_rows || rows[row] < 0) return;
  const int slot = rows[row], num_new = sampled_ids[row] < 0 ? 0 : 1;
  drafts.lengths[slot] = lengths[row] = rows[padded_rows + row] + 1 + num_new;
  drafts.num_drafts[slot] = 0;
  span_slots[row] = slot;
  new_counts[row] = num_new;
  last_ids[row] = slots.last_ids[slot];
}

// How the sampled position number `position` of some spans is sampled, where it is reached; `chosen` [count] says which
// spans have it. `sampled_slots` has the slot of those, and -1. `positions` are those of the step's tokens.
extern "C" __global__ void drafts_open_position(const Spans spans, const int* chosen, int position,
                                                const SlotArrays slots, const int* positions, const SampledRows sampled,
                                                int* sampled_slots, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const int span = chosen[i], slot = spans.slots[span];
  const bool is_reached = position == 0 || spans.alive[span] != 0;
  const int at = spans.firsts[span] + min(position, spans.max_new[span] - 1);  // a captured step opens all it has room for
  sampled.set(i, is_reached ? slots.params[slot] : NOT_SAMPLED, positions[at] + 1);
  sampled_slots[i] = is_reached ? slot : -1;
}

// For each slot the row that samples it, if it has penalties; in the two lists of changes of single logits, the row that
// it has changes for: the first list in general, the second where a stop token is not allowed yet at the `positions` of
// the sampled tokens. Else -1. One block.
extern "C" __global__ void drafts_name_rows(const int* sampled_slots, const int64_t* positions, int num_rows,
                                            const SlotArrays slots, const int* stop_allowed_from, int num_slots,
                                            int* penalised_rows, int* biased_rows) {
  for (int slot = threadIdx.x; slot < num_slots; slot += blockDim.x)
    penalised_rows[slot] = biased_rows[slot] = biased_rows[num_slots + slot] = -1;
  __syncthreads();
  for (int row = threadIdx.x; row < num_rows; row += blockDim.x) {
    const int slot = sampled_slots[row];
    if (slot < 0) continue;
    if (slots.is_penalised(slot)) penalised_rows[slot] = row;
    const int list = positions[row] < stop_allowed_from[slot] ? num_slots + slot : slot;
    if (slots.num_biased[list] > 0) biased_rows[list] = row;
  }
}

// Takes what the spans of `chosen` [count] sampled at a position: its token, and whether the next one is reached, where a
// draft stands, one of `input_ids` of the step, that must be the same token. An id below 0 is no token: the request fails,
// and gets none of the step's.
extern "C" __global__ void drafts_accept(const Spans spans, const int* chosen, int position, const int* sampled_ids,
                                         const int* input_ids, const DraftArrays drafts, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const int span = chosen[i], id = sampled_ids[i], next = position + 1;
  if (position > 0 && spans.alive[span] == 0) return;
  spans.token_ids[int64_t(position) * spans.count + span] = id;
  spans.new_counts[span] = id < 0 ? 0 : next;
  const bool has_next = id >= 0 && next <= spans.num_compared(span, drafts);
  spans.alive[span] = has_next && input_ids[spans.firsts[span] + next] == id;
}

// Where each slot stands after the step, and what a drafter is told, `[spans]` each: `last_tokens` of the step that
// predicted its last one, `last_ids`, `lengths`. `compared` are drafts that there were. `consumed` are the tokens of a row
// with drafts that count: all but the last of what it yielded, after the one that it begins with.
extern "C" __global__ void drafts_finish(const Spans spans, const SlotArrays slots, const DraftArrays drafts,
                                         const int* positions, int* last_tokens, int* last_ids, int* lengths,
                                         int* compared, int* consumed) {
  const int span = blockIdx.x * blockDim.x + threadIdx.x;
  if (span >= spans.count) return;
  const int slot = spans.slots[span], first = spans.firsts[span], num_new = spans.new_counts[span];
  drafts.lengths[slot] = lengths[span] = positions[first] + 1 + num_new;
  last_tokens[span] = first + max(num_new, 1) - 1;
  last_ids[span] = slots.last_ids[slot];
  compared[span] = spans.num_compared(span, drafts);
  consumed[span] = spans.max_new[span] > 1 ? max(num_new, 1) : 0;
}

// Leaves drafts `given` [spans, max_drafts] for the slots, up to each row's first that is no id; null: none. A span that
// yielded no token has none. `num_kept` [spans] says how many.
extern "C" __global__ void drafts_keep(const Spans spans, const int* given, int num_token_ids, const DraftArrays drafts,
                                       int* num_kept) {
  const int span = blockIdx.x * blockDim.x + threadIdx.x;
  if (span >= spans.count) return;
  const int slot = spans.slots[span];
  const int most = given && spans.new_counts[span] > 0 ? drafts.max_drafts : 0;
  int kept = 0;
  for (; kept < most; ++kept) {
    const int id = given[int64_t(span) * drafts.max_drafts + kept];
    if (id < 0 || id >= num_token_ids) break;
    drafts.drafts[int64_t(slot) * drafts.max_drafts + kept] = id;
  }
  drafts.num_drafts[slot] = num_kept[span] = kept;
}
