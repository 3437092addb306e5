// Sums over ranks in one kernel, for the rows of a decode step or of a short prefill chunk: each rank writes its
// array into every other rank's memory over NVLink (peers.cuh), and adds up what arrives in its own, in float32 in order
// of ranks, rounded once. A norm in the same kernel saved 0.05 us of 4.05 at one row, which no other contract is worth.
#include "comm/peers.cuh"
#include "common/pdl.cuh"
#include "common/vectors.cuh"

namespace {

// The values of a vector as float32: eight BF16, or four float32.
struct Bfloat16 {
  static constexpr int kValues = 8;
  static __device__ __forceinline__ void add(const uint4& bits, float (&total)[kValues]) {
    Vector<8> vector;
    vector.bits = bits;
    float values[8];
    unpack(vector, values);
#pragma unroll
    for (int j = 0; j < kValues; j++) total[j] += values[j];
  }
  static __device__ __forceinline__ uint4 packed(const float (&total)[kValues]) { return pack(total).bits; }
};

struct Float32 {
  static constexpr int kValues = 4;
  static __device__ __forceinline__ void add(const uint4& bits, float (&total)[kValues]) {
    total[0] += __uint_as_float(bits.x);
    total[1] += __uint_as_float(bits.y);
    total[2] += __uint_as_float(bits.z);
    total[3] += __uint_as_float(bits.w);
  }
  static __device__ __forceinline__ uint4 packed(const float (&total)[kValues]) {
    return {__float_as_uint(total[0]), __float_as_uint(total[1]), __float_as_uint(total[2]), __float_as_uint(total[3])};
  }
};

// The sum of vector `at` over ranks, rounded.
template <typename Values>
__device__ __forceinline__ uint4 reduce(const Group& group, unsigned turn, int64_t at, uint4 mine) {
  mine = {not_empty(mine.x), not_empty(mine.y), not_empty(mine.z), not_empty(mine.w)};
  for (int i = 1; i < group.size; i++) {  // each rank begins with its neighbour, so that not all write to one
    const int peer = (group.rank + i) % group.size;
    put(group.place(peer, turn, group.rank) + at, mine);
  }
  float total[Values::kValues] = {};
  for (int sender = 0; sender < group.size; sender++) {
    Values::add(sender == group.rank ? mine : receive(group.place(group.rank, turn, sender) + at, group), total);
  }
  return Values::packed(total);
}

template <typename Values>
__device__ __forceinline__ void sum_over_ranks(const uint4* x, uint4* out, const Group& group, int64_t vectors) {
  const int64_t at = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  wait_for_previous_kernel();
  launch_dependents();
  const unsigned turn = *reinterpret_cast<const volatile unsigned*>(&group.state->turn);
  if (at < vectors) out[at] = reduce<Values>(group, turn, at, x[at]);
  empty_last_turn(group, turn);
  end_turn(group, turn, vectors);
}

}  // namespace

extern "C" __global__ void one_shot_all_reduce_bfloat16(const uint4* x, uint4* out, const __grid_constant__ Group group,
                                                        int64_t vectors) {
  sum_over_ranks<Bfloat16>(x, out, group, vectors);
}

extern "C" __global__ void one_shot_all_reduce_float32(const uint4* x, uint4* out, const __grid_constant__ Group group,
                                                       int64_t vectors) {
  sum_over_ranks<Float32>(x, out, group, vectors);
}
