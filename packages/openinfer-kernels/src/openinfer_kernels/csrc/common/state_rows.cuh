// The rows of a step as operators over recurrent states see them.
#pragma once
#include <cstdint>

struct StateRows {
  const int* query_starts;  // [R + 1]
  const int* context_lens;  // [R]; 0: padding
  const int* slots;         // [R] state slots
  int num_rows;
};

struct StateRow {
  int first, count;  // tokens of the step
  int slot;          // state slot
  bool begins;       // the sequence begins: what the state slot holds was left by another one
};

__device__ __forceinline__ StateRow state_row(const StateRows& rows, int row) {
  const int first = rows.query_starts[row], count = rows.query_starts[row + 1] - first, context = rows.context_lens[row];
  return {first, context > 0 ? count : 0, rows.slots[row], context == count};
}
