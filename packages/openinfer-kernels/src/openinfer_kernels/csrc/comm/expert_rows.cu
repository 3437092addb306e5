// Rows of data-parallel ranks on their way to experts and back, each way in one kernel (peers.cuh).
//
//     dispatch   rows, ids, weights [T, ..] of each rank ─► [ranks, places, ..]: what this rank's experts are chosen for
//     combine    sums [ranks, places, h] of this rank's experts ─► [T, h]: the sum over ranks, in their order
//
// Only rows that chose an expert of a rank go there, and only their sums come back. Where each goes is known without
// counts, which the host would have to wait for: row t of rank r has place t of r on every rank, and its ids, which go
// to all, say whether it comes. So a graph may have both kernels. `places` are those of the rank that has most rows;
// others' last ones have ids of -1.
//
// A block has one place of each rank. In either kernel it sends each rank something, as peers.cuh asks: ids, a vector.
// All blocks of a launch are on the device at once, so many rows take several launches, each a turn of the buffers.
#include "comm/peers.cuh"
#include "common/pdl.cuh"

namespace {

constexpr int kMostChosen = 32;
constexpr int kMostHeader = kMostChosen / 2;  // vectors of a row's ids and weights

struct Sizes {
  int tokens, places;
  int first;        // place of the first block
  int chosen;       // experts of a row
  int experts;      // of a rank
  int row_vectors;  // of 16 bytes
};

__device__ __forceinline__ uint4 sendable(const uint4& v) {
  return {not_empty(v.x), not_empty(v.y), not_empty(v.z), not_empty(v.w)};
}

// Bit r says that a row chose an expert of rank r.
__device__ __forceinline__ unsigned ranks_of(const int* ids, const Sizes& sizes) {
  unsigned ranks = 0;
  for (int i = 0; i < sizes.chosen; i++) {
    const int id = ids[i];
    if (id >= 0) ranks |= 1u << (unsigned(id) / unsigned(sizes.experts));
  }
  return ranks;
}

__device__ __forceinline__ bool has_rank(unsigned ranks, int rank) { return ranks >> rank & 1; }

}  // namespace

extern "C" __global__ void __launch_bounds__(256, 4)
    dispatch_expert_rows(const uint4* x, const int* ids, const float* weights, const uint4* shared, uint4* all_x,
                         int* all_ids, float* all_weights, uint4* all_shared, const __grid_constant__ Group group,
                         const __grid_constant__ Sizes sizes) {
  __shared__ unsigned sent[4 * kMostHeader];
  __shared__ unsigned words[kMaxRanks][4 * kMostHeader];
  const int row = sizes.first + blockIdx.x, at = threadIdx.x, chosen = sizes.chosen, vectors = sizes.row_vectors;
  const int header = (2 * chosen + 3) / 4, stride = header + vectors;
  const int64_t slot = int64_t(blockIdx.x) * stride;
  const bool is_row = row < sizes.tokens;
  wait_for_previous_kernel();
  launch_dependents();
  const unsigned turn = *reinterpret_cast<const volatile unsigned*>(&group.state->turn);
  // Begun before anything is waited for: all of a row of 2048.
  const uint4 mine = is_row && at < vectors ? x[int64_t(row) * vectors + at] : uint4{0, 0, 0, 0};
  if (at < 4 * header) {
    unsigned word = 0;
    if (at < chosen) {
      word = is_row ? unsigned(ids[row * chosen + at]) : ~0u;
    } else if (is_row && at < 2 * chosen) {
      word = __float_as_uint(weights[row * chosen + at - chosen]);
    }
    sent[at] = not_empty(word);
  }
  __syncthreads();
  const unsigned ranks = ranks_of(reinterpret_cast<const int*>(sent), sizes);
  for (int i = 1; i < group.size; i++) {  // each rank begins with its neighbour, so that not all write to one
    const int peer = (group.rank + i) % group.size;
    uint4* to = group.place(peer, turn, group.rank) + slot;
    if (at < header) put(to + at, {sent[4 * at], sent[4 * at + 1], sent[4 * at + 2], sent[4 * at + 3]});
    if (!has_rank(ranks, peer)) continue;
    for (int v = at; v < vectors; v += blockDim.x) {
      put(to + header + v, sendable(v == at ? mine : x[int64_t(row) * vectors + v]));
    }
  }
  empty_last_turn(group, turn);  // while the others' rows are on their way
  for (int sender = 0; sender < group.size; sender++) {
    const uint4* from = group.place(group.rank, turn, sender) + slot;
    if (at >= header) continue;
    const uint4 v = sender == group.rank
                        ? uint4{sent[4 * at], sent[4 * at + 1], sent[4 * at + 2], sent[4 * at + 3]}
                        : receive(from + at, group);
    words[sender][4 * at] = v.x, words[sender][4 * at + 1] = v.y;
    words[sender][4 * at + 2] = v.z, words[sender][4 * at + 3] = v.w;
  }
  __syncthreads();
  for (int sender = 0; sender < group.size; sender++) {
    const uint4* from = group.place(group.rank, turn, sender) + slot + header;
    const int64_t place = int64_t(sender) * sizes.places + row;
    const bool is_own = sender == group.rank;
    const bool comes = has_rank(ranks_of(reinterpret_cast<const int*>(words[sender]), sizes), group.rank);
    if (at < chosen) all_ids[place * chosen + at] = int(words[sender][at]);
    if (at < chosen) all_weights[place * chosen + at] = __uint_as_float(words[sender][chosen + at]);
    for (int v = at; v < vectors; v += blockDim.x) {
      const int64_t own = int64_t(row) * vectors + v;
      uint4 found = {0, 0, 0, 0}, added = {0, 0, 0, 0};
      if (is_own && is_row) {
        found = v == at ? mine : x[own], added = shared[own];
      } else if (!is_own && comes) {
        found = receive(from + v, group);
      }
      all_x[place * vectors + v] = found;
      all_shared[place * vectors + v] = added;
    }
  }
  end_turn(group, turn, int64_t(gridDim.x) * stride);
}

extern "C" __global__ void __launch_bounds__(256, 4)
    combine_expert_rows(const float4* parts, const int* all_ids, float4* out, const __grid_constant__ Group group,
                        const __grid_constant__ Sizes sizes) {
  const int row = sizes.first + blockIdx.x, at = threadIdx.x, vectors = sizes.row_vectors, stride = 1 + vectors;
  const int64_t slot = int64_t(blockIdx.x) * stride;
  wait_for_previous_kernel();
  launch_dependents();
  const unsigned turn = *reinterpret_cast<const volatile unsigned*>(&group.state->turn);
  for (int i = 1; i < group.size; i++) {
    const int peer = (group.rank + i) % group.size;
    const int64_t place = int64_t(peer) * sizes.places + row;
    uint4* to = group.place(peer, turn, group.rank) + slot;
    if (at == 0) put(to, {1, 1, 1, 1});
    if (!has_rank(ranks_of(all_ids + place * sizes.chosen, sizes), group.rank)) continue;
    for (int v = at; v < vectors; v += blockDim.x) {
      const float4 part = parts[place * vectors + v];
      put(to + 1 + v, sendable({__float_as_uint(part.x), __float_as_uint(part.y), __float_as_uint(part.z),
                                __float_as_uint(part.w)}));
    }
  }
  empty_last_turn(group, turn);
  const int64_t own = int64_t(group.rank) * sizes.places + row;
  const unsigned ranks = ranks_of(all_ids + own * sizes.chosen, sizes);
  for (int sender = 0; at == 0 && sender < group.size; sender++) {
    if (sender != group.rank) receive(group.place(group.rank, turn, sender) + slot, group);
  }
  for (int v = at; row < sizes.tokens && v < vectors; v += blockDim.x) {
    float4 total = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int sender = 0; sender < group.size; sender++) {
      if (sender == group.rank) {
        const float4 part = parts[own * vectors + v];
        total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
      } else if (has_rank(ranks, sender)) {
        const uint4 part = receive(group.place(group.rank, turn, sender) + slot + 1 + v, group);
        total.x += __uint_as_float(part.x), total.y += __uint_as_float(part.y);
        total.z += __uint_as_float(part.z), total.w += __uint_as_float(part.w);
      }
    }
    out[int64_t(row) * vectors + v] = total;
  }
  end_turn(group, turn, int64_t(gridDim.x) * stride);
}
