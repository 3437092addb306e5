// Hidden states that drafters go on from, and where their drafts stand. What the operators mean is in `ops/drafting.py`
// (`HiddenMemory`), with NumPy in `cpu/sampling/drafting.py`; rows are copied as bytes, whatever their numbers are.
//
//     restore ─► before ─► the drafter's K and V of the step ─► keep          of each step, prompts too
//     settle ─► spans ─► { place ─► the drafter ─► ids } per draft            of the rows that sampled
//     put_late, step after step ─► take_late ─► what each step has, at once    of steps that the drafter is shown later
//
// A row with slot -1 is padding, and so are tokens after the last row's.
#include <cstdint>

namespace {

struct Hidden {
  char* last;      // [slots] rows, `last_stride` bytes apart
  char* tail;      // [slots, depth] rows, the newest first
  int* ends;       // [slots] position of the last token of the row that was shown last
  int* begun;      // [slots] 1: a sequence began, and was not seen yet
  char* boundary;  // of block 0, `boundary_stride` bytes before that of block 1; null: none
  int64_t last_stride, boundary_stride;
  int row_bytes, depth, block_tokens;

  __device__ __forceinline__ char* last_of(int slot) const { return last + slot * last_stride; }
  __device__ __forceinline__ char* tail_of(int slot, int back) const {
    return tail + (int64_t(slot) * depth + back) * row_bytes;
  }
};

struct Step {
  const int *slots, *query_starts, *positions, *block_tables;
  int num_rows, table_columns;

  // The row of a token; the number of rows for padding.
  __device__ __forceinline__ int row_of(int token) const {
    if (token >= query_starts[num_rows]) return num_rows;
    int low = 0, high = num_rows;  // query_starts[low] <= token < query_starts[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (query_starts[middle] <= token)
        low = middle;
      else high = middle;
    }
    return slots[low] < 0 ? num_rows : low;
  }
};

// All threads of a block; rows are multiples of 16 bytes and begin at such. A null `from` is zeros.
__device__ __forceinline__ void copy_row(char* to, const char* from, int bytes) {
  uint4* targets = reinterpret_cast<uint4*>(to);
  const uint4* sources = reinterpret_cast<const uint4*>(from);
  for (int i = threadIdx.x; i < bytes / 16; i += blockDim.x) targets[i] = from == nullptr ? uint4{} : sources[i];
}

}  // namespace

// `last` of sequences that begin: what the block before their first token has, or zeros. Grid: rows.
extern "C" __global__ void drafters_restore(const Hidden memory, const Step step) {
  const int row = blockIdx.x, slot = step.slots[row], first = step.query_starts[row];
  if (slot < 0 || step.query_starts[row + 1] <= first || memory.begun[slot] == 0) return;
  const int position = step.positions[first];
  const char* from = nullptr;
  if (memory.boundary != nullptr && position > 0 && position % memory.block_tokens == 0) {
    const int block = step.block_tables[int64_t(row) * step.table_columns + position / memory.block_tokens - 1];
    from = memory.boundary + block * memory.boundary_stride;
  }
  copy_row(memory.last_of(slot), from, memory.row_bytes);
  __syncthreads();
  if (threadIdx.x == 0) memory.begun[slot] = 0;
}

// The state before each token. Grid: tokens.
extern "C" __global__ void drafters_before(const char* hidden, const Hidden memory, const Step step, char* before) {
  const int token = blockIdx.x, row = step.row_of(token);
  const char* from = nullptr;
  if (row < step.num_rows && step.positions[token] > 0)
    from = token == step.query_starts[row] ? memory.last_of(step.slots[row])
                                           : hidden + int64_t(token - 1) * memory.row_bytes;
  copy_row(before + int64_t(token) * memory.row_bytes, from, memory.row_bytes);
}

// Zeros in the rows of tokens at one position. Grid: tokens.
extern "C" __global__ void drafters_clear(char* rows, const int* positions, int position, int row_bytes) {
  const int token = blockIdx.x;
  if (positions[token] == position) copy_row(rows + int64_t(token) * row_bytes, nullptr, row_bytes);
}

// What later steps go on from. Grid: tokens.
extern "C" __global__ void drafters_keep(const char* hidden, const Hidden memory, const Step step) {
  const int token = blockIdx.x, row = step.row_of(token);
  if (row == step.num_rows) return;
  const char* from = hidden + int64_t(token) * memory.row_bytes;
  const int slot = step.slots[row], position = step.positions[token], back = step.query_starts[row + 1] - 1 - token;
  if (back < memory.depth) copy_row(memory.tail_of(slot, back), from, memory.row_bytes);
  if (back == 0) {
    copy_row(memory.last_of(slot), from, memory.row_bytes);
    if (threadIdx.x == 0) memory.ends[slot] = position;
  }
  if (memory.boundary != nullptr && (position + 1) % memory.block_tokens == 0) {
    const int block = step.block_tables[int64_t(row) * step.table_columns + position / memory.block_tokens];
    copy_row(memory.boundary + block * memory.boundary_stride, from, memory.row_bytes);
  }
}

// The states before the last known tokens, which are `last` then: `hidden` [n] if given. Grid: sequences.
extern "C" __global__ void drafters_settle(const Hidden memory, const int* slots, const int* lengths,
                                           const char* hidden, char* settled) {
  const int i = blockIdx.x, slot = slots[i];
  const int back = min(max(memory.ends[slot] - (lengths[i] - 2), 0), memory.depth - 1);
  const char* from = hidden == nullptr ? memory.tail_of(slot, back) : hidden + int64_t(i) * memory.row_bytes;
  copy_row(memory.last_of(slot), from, memory.row_bytes);
  copy_row(settled + int64_t(i) * memory.row_bytes, from, memory.row_bytes);
}

namespace {

constexpr int LATE_PARTS = 8;

// What a drafter reads of steps, [rows] each.
struct Parts {
  const char* rows[LATE_PARTS];
};

// The same of the last `depth` tokens of each slot, by position; `num_parts` of `row_bytes` each, or ids alone.
struct LateRows {
  char* parts;     // [num_parts, slots, depth]
  int* token_ids;  // [slots, depth]
  int slots, depth, row_bytes;

  __device__ __forceinline__ int64_t place(int slot, int position) const {
    return int64_t(slot) * depth + position % depth;
  }
  __device__ __forceinline__ char* part(int number, int64_t place) const {
    return parts + (int64_t(number) * slots * depth + place) * row_bytes;
  }
};

}  // namespace

// A step of one token a row: `parts` are those from number `first` on. Grid: rows, and parts (one of them for ids alone).
extern "C" __global__ void drafters_put_late(const Parts parts, const LateRows late, const int* token_ids,
                                             const int* slots, const int* positions, int first) {
  const int row = blockIdx.x, slot = slots[row];
  if (slot < 0) return;
  const int64_t place = late.place(slot, positions[row]);
  const char* from = parts.rows[blockIdx.y];
  if (late.row_bytes > 0) copy_row(late.part(first + blockIdx.y, place), from + int64_t(row) * late.row_bytes, late.row_bytes);
  if (first + blockIdx.y == 0 && threadIdx.x == 0) late.token_ids[place] = token_ids[row];
}

// What was put of the tokens of a batch, `parts` [num_parts, tokens]; zeros for padding. Grid: tokens, and parts.
extern "C" __global__ void drafters_take_late(const LateRows late, const Step step, char* parts, int* token_ids) {
  const int token = blockIdx.x, row = step.row_of(token);
  const bool is_padding = row == step.num_rows;
  const int64_t place = is_padding ? 0 : late.place(step.slots[row], step.positions[token]);
  if (late.row_bytes > 0)
    copy_row(parts + (int64_t(blockIdx.y) * gridDim.x + token) * late.row_bytes,
             is_padding ? nullptr : late.part(blockIdx.y, place), late.row_bytes);
  if (blockIdx.y == 0 && threadIdx.x == 0) token_ids[token] = is_padding ? 0 : late.token_ids[place];
}

// Each token of a batch as a row of its own: `starts` [tokens + 1], `context_lens` [tokens], 0 for padding, and its row's
// block table in `tables` [tokens, columns]. Grid: tokens.
extern "C" __global__ void drafters_rows(const Step step, int* starts, int* context_lens, int* tables) {
  const int token = blockIdx.x, row = step.row_of(token);
  const bool is_padding = row == step.num_rows;
  if (threadIdx.x == 0) {
    starts[token] = token;
    if (token + 1 == gridDim.x) starts[gridDim.x] = gridDim.x;
    context_lens[token] = is_padding ? 0 : step.positions[token] + 1;
  }
  const int* table = step.block_tables + int64_t(is_padding ? 0 : row) * step.table_columns;
  for (int column = threadIdx.x; column < step.table_columns; column += blockDim.x)
    tables[int64_t(token) * step.table_columns + column] = is_padding ? 0 : table[column];
}

// A matrix into columns of a wider one: rows of `row_bytes`, `stride` bytes apart in `to`. Grid: rows.
extern "C" __global__ void drafters_join(const char* from, char* to, int64_t stride, int row_bytes) {
  copy_row(to + blockIdx.x * stride, from + int64_t(blockIdx.x) * row_bytes, row_bytes);
}

// Sampled ids, below 0 where logits were not finite, in the model's vocabulary; `drafts` has them in a column, whose
// rows are `stride` apart.
extern "C" __global__ void drafters_ids(int* ids, const int* token_ids, int* drafts, int stride, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const int id = max(ids[i], 0);
  ids[i] = drafts[int64_t(i) * stride] = token_ids == nullptr ? id : token_ids[id];
}

// Logits onto others, row by row: those of row i begin `stride` numbers after those of row i - 1, the target's `width`.
// Grid: rows, each in `blocks` runs of columns, which give each thread its numbers one after the other.
extern "C" __global__ void drafters_add(float* target, const float* logits, int64_t stride, int width, int blocks) {
  const int row = blockIdx.x / blocks, part = blockIdx.x % blocks, columns = (width + blocks - 1) / blocks;
  const int end = min((part + 1) * columns, width);
  float* to = target + int64_t(row) * width;
  const float* from = logits + row * stride;
  for (int column = part * columns + threadIdx.x; column < end; column += blockDim.x) to[column] += from[column];
}

namespace {

// The pool's last blocks, which no sequence has, and what of a block is the drafter's.
struct SpanBlocks {
  char* pool;
  int64_t block_bytes, begin, bytes;  // the drafter's bytes of a block, from `begin` on; multiples of 16
  int first, per_row, block_tokens;
};

}  // namespace

// Block tables of sequences whose further positions lie in blocks of their own, the first of which begins with what the
// sequence's last block has: the drafter's KV of positions up to `lengths - 2`. `starts` [n] is the first new position.
// Grid: sequences, and slices of a block's bytes.
extern "C" __global__ void drafters_spans(const SpanBlocks blocks, const int* slot_tables, int max_blocks,
                                          const int* slots, const int* lengths, int* tables, int table_columns,
                                          int* starts) {
  const int i = blockIdx.x, start = max(lengths[i] - 1, 0), known = start / blocks.block_tokens;
  const int* table = slot_tables + int64_t(slots[i]) * max_blocks;
  const int own = blocks.first + i * blocks.per_row;
  const int first = blockIdx.y * blockDim.x + threadIdx.x, stride = gridDim.y * blockDim.x;
  int* target = tables + int64_t(i) * table_columns;
  for (int column = first; column < table_columns; column += stride) {
    const int later = column - known;
    target[column] = later >= 0 && later < blocks.per_row ? own + later : column < known ? table[column] : 0;
  }
  if (first == 0) starts[i] = start;
  if (start % blocks.block_tokens == 0) return;
  const uint4* from = reinterpret_cast<const uint4*>(blocks.pool + table[known] * blocks.block_bytes + blocks.begin);
  uint4* to = reinterpret_cast<uint4*>(blocks.pool + own * blocks.block_bytes + blocks.begin);
  for (int64_t at = first; at < blocks.bytes / 16; at += stride) to[at] = from[at];
}

// `count` tokens of each span from its `first` new position on. With `whole` each is a row of its own, which sees all of
// them; else they are a row, and `context_lens` has one number for it. Rows' tables are copied where a row is a token.
// Grid: tokens.
extern "C" __global__ void drafters_place(const int* starts, const int* tables, int table_columns, int block_tokens,
                                          int first, int count, int whole, int* positions, int* context_lens,
                                          int64_t* cache_slots, int* row_tables) {
  const int token = blockIdx.x, span = token / count, index = token % count;
  const int position = starts[span] + first + index;
  const int* table = tables + int64_t(span) * table_columns;
  if (threadIdx.x == 0) {
    positions[token] = position;
    cache_slots[token] = int64_t(table[position / block_tokens]) * block_tokens + position % block_tokens;
    if (whole != 0) context_lens[token] = starts[span] + first + count;
    else if (index == 0) context_lens[span] = position + count;
  }
  if (whole == 0) return;
  for (int column = threadIdx.x; column < table_columns; column += blockDim.x)
    row_tables[int64_t(token) * table_columns + column] = table[column];
}
