// Drafts that are looked up in the ids of a sequence: one block per row. Threads take places in turn; a place and how
// many of the last tokens stand there are one number, whose maximum is the match.
//
//     known | drafts that were accepted | last id      then      longest match ─► what follows it
#include <cstdint>

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kPlaceBits = 25;  // `LONGEST_HISTORY`; what is left is for a length up to `LONGEST_NGRAM`, and 0

struct History {
  int* ids;               // [slots, width]
  int* known;             // [slots] tokens of the sequence
  const int* references;  // [slots] ids before them
  int* drafts;            // [slots, max_drafts]
  int width, max_drafts;
};

struct Rule {
  int n_min, n_max, reference_n_max;
  int is_latest;
  int max_tokens;
};

__device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

// The largest of the values of all threads, for all of them.
__device__ uint32_t block_most(uint32_t value) {
  __shared__ uint32_t partial[kWarps];
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) value = larger(value, __shfl_xor_sync(~0u, value, mask));
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  uint32_t most = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; warp++) most = larger(most, partial[warp]);
  return most;
}

// How many of the tokens before `length` stand before and at `place`, `most` at most.
__device__ __forceinline__ int match_at(const int* ids, int place, int length, int most) {
  most = min(most, place + 1);
  int matched = 0;
  while (matched < most && ids[place - matched] == ids[length - 1 - matched]) matched++;
  return matched;
}

}  // namespace

// `drafts` is [rows, max_drafts]; a row is a block.
extern "C" __global__ void ngram_drafts(const History history, const Rule rule, const int* slots, const int* last_ids,
                                        const int* lengths, int* drafts) {
  const int row = blockIdx.x, slot = slots[row], length = lengths[row];
  const int known = history.known[slot], reference = history.references[slot];
  int* ids = history.ids + int64_t(slot) * history.width;
  int* before = history.drafts + int64_t(slot) * history.max_drafts;
  int* given = drafts + int64_t(row) * history.max_drafts;
  const bool has_grown = length > known && length <= history.width - reference;
  int first = 0, period = 0, count = 0;
  if (has_grown) {  // alike in all threads
    for (int i = known + threadIdx.x; i < length; i += kThreads) {
      const int draft = i - known < history.max_drafts ? before[i - known] : -1;
      ids[reference + i] = i == length - 1 ? last_ids[row] : draft;
    }
    __syncthreads();
    if (threadIdx.x == 0) history.known[slot] = length;
    const int total = reference + length, end = reference > 0 ? reference : total;
    const int most = reference > 0 ? rule.reference_n_max : rule.n_max;
    uint32_t best = 0;
    for (int place = threadIdx.x; place < end - 1; place += kThreads) {
      const uint32_t matched = match_at(ids, place, total, most);
      const uint32_t order = rule.is_latest ? place : (1 << kPlaceBits) - 1 - place;
      if (matched > 0) best = larger(best, matched << kPlaceBits | order);
    }
    best = block_most(best);
    if (int(best >> kPlaceBits) >= rule.n_min) {
      const int order = best & ((1 << kPlaceBits) - 1);
      first = (rule.is_latest ? order : (1 << kPlaceBits) - 1 - order) + 1;
      period = end - first;
      count = max(0, min(history.max_drafts, rule.max_tokens - length));
      if (!rule.is_latest || reference > 0) count = min(count, period);
    }
  }
  __syncthreads();  // all drafts from before were read
  for (int i = threadIdx.x; i < history.max_drafts; i += kThreads)
    given[i] = before[i] = i < count ? ids[first + i % period] : -1;
}
