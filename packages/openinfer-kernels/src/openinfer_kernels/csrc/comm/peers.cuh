// What ranks of one machine write into each other's memory over NVLink, and wait for in their own.
//
// No flag says that data is there. A place that nothing has arrived in holds kEmpty in each 32-bit word, which no
// sender writes (a pair of zeros stands for it: the sign of a zero is lost), and is polled until it does not. A rank's
// buffer has three turns: in turn t it takes what arrives in buffer t and empties buffer t - 1, which it has read.
// Another rank writes to that one again in turn t + 2, hence after it has received what this rank sent in turn t + 1,
// hence after this rank's kernel of turn t has ended: buffers are empty when they are written to, and no rank waits for
// that. So in each turn each rank sends each other rank something. As the Lamport buffers of TensorRT-LLM have it
// (Lamport 1977, "Concurrent Reading and Writing").
#pragma once
#include <cstdint>

namespace {

constexpr int kMaxRanks = 8;
constexpr int kTurns = 3;
constexpr unsigned kEmpty = 0x80000000u;
constexpr unsigned kPollsBetweenLooks = 1u << 14;

struct Buffers {
  uint4* of_rank[kMaxRanks];  // [turns][ranks][slot], each in its rank's memory
};

struct State {
  unsigned turn;
  unsigned blocks_done;
  int64_t used[kTurns];  // 16-byte vectors that a turn's buffer was written to
};

struct Group {
  Buffers buffers;
  State* state;
  const volatile unsigned* is_aborted;  // in host memory: each look crosses the bus
  int64_t slot;                         // 16-byte vectors of one sender's place in a buffer
  int rank, size;

  __device__ uint4* place(int owner, int turn, int sender) const {
    return buffers.of_rank[owner] + (int64_t(turn) * size + sender) * slot;
  }
};

__device__ __forceinline__ unsigned not_empty(unsigned word) { return word == kEmpty ? 0 : word; }

__device__ __forceinline__ uint4 peek(const uint4* at) {
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at)
               : "memory");
  return v;
}

__device__ __forceinline__ void put(uint4* at, uint4 v) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ bool has_arrived(const uint4& v) {
  return v.x != kEmpty && v.y != kEmpty && v.z != kEmpty && v.w != kEmpty;
}

// Waits for a vector, or for the group's end.
__device__ __forceinline__ uint4 receive(const uint4* at, const Group& group) {
  uint4 v = peek(at);
  for (unsigned polls = 1; !has_arrived(v); polls++) {
    if (polls % kPollsBetweenLooks == 0 && *group.is_aborted) break;
    v = peek(at);
  }
  return v;
}

// Empties what the turn before has read.
__device__ __forceinline__ void empty_last_turn(const Group& group, unsigned turn) {
  const unsigned last = (turn + kTurns - 1) % kTurns;
  const int64_t used = group.state->used[last];
  const int64_t first = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, step = int64_t(gridDim.x) * blockDim.x;
  for (int sender = 0; sender < group.size; sender++) {
    if (sender == group.rank) continue;
    uint4* place = group.place(group.rank, last, sender);
    for (int64_t at = first; at < used; at += step) place[at] = {kEmpty, kEmpty, kEmpty, kEmpty};
  }
}

// The last block to come here ends the turn; by then all have read which it is.
__device__ __forceinline__ void end_turn(const Group& group, unsigned turn, int64_t used) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  State* state = group.state;
  __threadfence();
  if (atomicAdd(&state->blocks_done, 1u) == gridDim.x - 1) {
    state->used[turn] = used;
    state->blocks_done = 0;
    state->turn = (turn + 1) % kTurns;
  }
}

}  // namespace
