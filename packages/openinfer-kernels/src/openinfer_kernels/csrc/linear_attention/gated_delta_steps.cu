// The gated delta rule token by token, for decode rows and short prefill chunks: the state is read once and written
// once.
//
//     S <- e^g S + k d^T     d = beta (v - e^g S^T k)     o = S^T q = e^g S_before^T q + (k . q) d
//
// Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks", eq. 10. The second form of o needs one sum over the keys
// per token for all of it: of k and q as they are, whose lengths are further sums, and divide the results.
#include "common/pdl.cuh"
#include "linear_attention/gated_delta.cuh"

using namespace gated_delta;

namespace {

// Heads of 128 x 128: a block holds some columns of one head's state in registers, a thread 8 rows of 4 of them.
constexpr int kDim = 128, kRows = 8;

template <int kColumns_>
struct Shape {
  static constexpr int kColumns = kColumns_, kSlices = kDim / kColumns, kAcross = kColumns / 4;
  static constexpr int kThreads = kAcross * kDim / kRows, kWarps = kThreads / 32;
  static constexpr int kPair = kAcross / 8;  // warps that hold a quarter of the rows
};

constexpr int kGroups = 3;  // of four sums: S^T k and S^T q of four columns; |k|^2, |q|^2, k . q
using Sums = float[kGroups][4];

__device__ __forceinline__ void load4(const bf16* from, float* values) {
  const uint2 bits = *reinterpret_cast<const uint2*>(from);
  const float2 low = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&bits.x));
  const float2 high = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&bits.y));
  values[0] = low.x, values[1] = low.y, values[2] = high.x, values[3] = high.y;
}

__device__ __forceinline__ float4 added(const float4& a, const float4& b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// Over all rows of the state, for every thread, in one order for all shapes: 32 rows by pairs, then the quarters one
// after the other. `shared` [warps, across, groups] is not in use by the call before.
template <class S>
__device__ __forceinline__ void fold(Sums& sums, float4* shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, across = threadIdx.x % S::kAcross;
#pragma unroll
  for (int g = 0; g < kGroups; g++) {
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int mask = S::kAcross; mask < 32; mask *= 2) sums[g][i] += __shfl_xor_sync(~0u, sums[g][i], mask);
    if (lane < S::kAcross)
      shared[(warp * S::kAcross + across) * kGroups + g] = make_float4(sums[g][0], sums[g][1], sums[g][2], sums[g][3]);
  }
  __syncthreads();
  float4 all[kGroups];
#pragma unroll
  for (int g = 0; g < kGroups; g++) {
#pragma unroll
    for (int w = 0; w < S::kWarps; w += S::kPair) {
      float4 quarter = shared[(w * S::kAcross + across) * kGroups + g];
      if (S::kPair == 2) quarter = added(quarter, shared[((w + 1) * S::kAcross + across) * kGroups + g]);
      all[g] = w == 0 ? quarter : added(all[g], quarter);
    }
    sums[g][0] = all[g].x, sums[g][1] = all[g].y, sums[g][2] = all[g].z, sums[g][3] = all[g].w;
  }
}

// Rows and columns of one thread, and where its block is among those of a head.
template <class S>
struct Part {
  int head = blockIdx.x / S::kSlices, slice = blockIdx.x % S::kSlices;
  int first_row = threadIdx.x / S::kAcross * kRows;
  int first_column = slice * S::kColumns + threadIdx.x % S::kAcross * 4;

  __device__ __forceinline__ int64_t offset() const { return (int64_t(head) * kDim + first_row) * kDim + first_column; }
};

// S takes in a token: by the sum S^T k in `sums[0]`, and |k|^2 in `sums[2][0]`. Leaves d.
__device__ __forceinline__ void take_in(float4 (&state)[kRows], const float (&k)[kRows], const float (&v)[4], float decay,
                                        float beta, float of_key, const Sums& sums, float (&d)[4]) {
#pragma unroll
  for (int c = 0; c < 4; c++) d[c] = beta * (v[c] - decay * of_key * sums[0][c]);
#pragma unroll
  for (int i = 0; i < kRows; i++) {
    const float key = of_key * k[i];
    state[i].x = decay * state[i].x + key * d[0];
    state[i].y = decay * state[i].y + key * d[1];
    state[i].z = decay * state[i].z + key * d[2];
    state[i].w = decay * state[i].w + key * d[3];
  }
}

// A token's part of a block, for `replay`. A key is written by one head of those that read it.
template <class S>
__device__ __forceinline__ void keep(const Arguments& a, const Part<S>& part, int slot, int t, int64_t token,
                                     float log_decay, float beta) {
  const int key_head = a.reads(part.head), keys = a.key_heads * kDim;
  bf16* to = a.kept.keys_values + slot * a.kept.keys_values_stride + int64_t(t) * (keys + a.heads * kDim);
  if (part.first_row == 0)
    *reinterpret_cast<uint2*>(to + keys + part.head * kDim + part.first_column) =
        *reinterpret_cast<const uint2*>(a.value(token, part.head) + part.first_column);
  if (part.slice != 0) return;
  if (part.head % (a.heads / a.key_heads) == 0 && threadIdx.x % S::kAcross == 0)
    *reinterpret_cast<uint4*>(to + key_head * kDim + part.first_row) =
        *reinterpret_cast<const uint4*>(a.key(token, key_head) + part.first_row);
  if (threadIdx.x == 0) {
    float* gates = a.kept.gates + slot * a.kept.gates_stride + (int64_t(t) * a.heads + part.head) * 2;
    gates[0] = log_decay, gates[1] = beta;
  }
}

template <class S>
__device__ void run(const Arguments& a) {
  __shared__ float4 shared[2][S::kWarps * S::kAcross * kGroups];
  const Part<S> part;
  const int head = part.head, key_head = a.reads(head), first_row = part.first_row, first_column = part.first_column;
  const StateRow row = state_row(a.rows, blockIdx.y);
  if (row.count == 0 || row.count > a.most_tokens) return;
  const bool is_kept = a.kept.rows != nullptr && a.kept.rows[blockIdx.y] != 0;
  float* at = a.state + row.slot * a.slot_stride + part.offset();
  float4 state[kRows];
#pragma unroll
  for (int i = 0; i < kRows; i++)
    state[i] = row.begins ? make_float4(0, 0, 0, 0) : __ldcg(reinterpret_cast<const float4*>(at + i * kDim));
  for (int t = 0; t < row.count; t++) {
    const int64_t token = row.first + t;
    float k[kRows], q[kRows], v[4];
#pragma unroll
    for (int i = 0; i < kRows; i += 4) {
      load4(a.key(token, key_head) + first_row + i, k + i);
      load4(a.query(token, key_head) + first_row + i, q + i);
    }
    load4(a.value(token, head) + first_column, v);
    const float log_decay = a.log_decay(token, head), decay = __expf(log_decay), beta = a.beta(token, head);
    if (is_kept) keep(a, part, row.slot, t, token, log_decay, beta);
    Sums sums = {};
#pragma unroll
    for (int i = 0; i < kRows; i++) {
      const float s[4] = {state[i].x, state[i].y, state[i].z, state[i].w};
#pragma unroll
      for (int c = 0; c < 4; c++) {
        sums[0][c] += s[c] * k[i];
        sums[1][c] += s[c] * q[i];
      }
      sums[2][0] += k[i] * k[i];
      sums[2][1] += q[i] * q[i];
      sums[2][2] += k[i] * q[i];
    }
    fold<S>(sums, shared[t & 1]);
    const float of_key = rsqrtf(sums[2][0] + kLengthEps);
    const float of_query = rsqrtf(sums[2][1] + kLengthEps) * rsqrtf(float(kDim)), both = of_key * sums[2][2];
    float d[4], o[4];
    take_in(state, k, v, decay, beta, of_key, sums, d);
#pragma unroll
    for (int c = 0; c < 4; c++) o[c] = of_query * (decay * sums[1][c] + both * d[c]);
    if (threadIdx.x < S::kAcross) {
      __nv_bfloat162* out = reinterpret_cast<__nv_bfloat162*>(a.out + (token * a.heads + head) * kDim + first_column);
      out[0] = __floats2bfloat162_rn(o[0], o[1]);
      out[1] = __floats2bfloat162_rn(o[2], o[3]);
    }
  }
  if (is_kept) return;
#pragma unroll
  for (int i = 0; i < kRows; i++) __stcg(reinterpret_cast<float4*>(at + i * kDim), state[i]);
}

struct Replay {
  float* state;             // of slot 0 and layer 0: [N, dk, dv]
  const bf16* keys_values;  // likewise: [M, Hk dk + N dv]
  const float* gates;       // likewise: [M, N, 2]
  const int *slots, *counts;
  int64_t state_strides[2], keys_values_strides[2], gates_strides[2];  // from slot to slot, from layer to layer
  int key_heads, heads;
};

// What `run` leaves as the state after the first `counts` tokens of a row, from what was kept of it.
template <class S>
__device__ void replay(const Replay& a) {
  __shared__ float4 shared[2][S::kWarps * S::kAcross * kGroups];
  const int count = a.counts[blockIdx.y];
  if (count <= 0) return;
  const int64_t slot = a.slots[blockIdx.y], layer = blockIdx.z;
  const Part<S> part;
  const int keys = a.key_heads * kDim, key = part.head / (a.heads / a.key_heads) * kDim + part.first_row;
  const int value = keys + part.head * kDim + part.first_column;
  const bf16* from = a.keys_values + slot * a.keys_values_strides[0] + layer * a.keys_values_strides[1];
  const float* gates = a.gates + slot * a.gates_strides[0] + layer * a.gates_strides[1] + part.head * 2;
  float* at = a.state + slot * a.state_strides[0] + layer * a.state_strides[1] + part.offset();
  float4 state[kRows];
#pragma unroll
  for (int i = 0; i < kRows; i++) state[i] = __ldcg(reinterpret_cast<const float4*>(at + i * kDim));
  for (int t = 0; t < count; t++, from += keys + a.heads * kDim, gates += 2 * a.heads) {
    float k[kRows], v[4], d[4];
#pragma unroll
    for (int i = 0; i < kRows; i += 4) load4(from + key + i, k + i);
    load4(from + value, v);
    Sums sums = {};
#pragma unroll
    for (int i = 0; i < kRows; i++) {
      const float s[4] = {state[i].x, state[i].y, state[i].z, state[i].w};
#pragma unroll
      for (int c = 0; c < 4; c++) sums[0][c] += s[c] * k[i];
      sums[2][0] += k[i] * k[i];
    }
    fold<S>(sums, shared[t & 1]);
    take_in(state, k, v, __expf(gates[0]), gates[1], rsqrtf(sums[2][0] + kLengthEps), sums, d);
  }
#pragma unroll
  for (int i = 0; i < kRows; i++) __stcg(reinterpret_cast<float4*>(at + i * kDim), state[i]);
}

// Any sizes, slowly: a block for a head, a thread for some columns of its state, which stay in memory.
__device__ void run_any(const Arguments& a) {
  const int head = blockIdx.x, key_head = a.reads(head);
  const StateRow row = state_row(a.rows, blockIdx.y);
  if (row.count == 0 || row.count > a.most_tokens) return;
  float* state = a.state + row.slot * a.slot_stride + int64_t(head) * a.key_dim * a.value_dim;
  for (int column = threadIdx.x; column < a.value_dim; column += blockDim.x) {
    for (int t = 0; t < row.count; t++) {
      const int64_t token = row.first + t;
      const bf16 *k = a.key(token, key_head), *q = a.query(token, key_head);
      const bool begins = row.begins && t == 0;
      float held = 0, read = 0, keys = 0, queries = 0, both = 0;
      for (int i = 0; i < a.key_dim; i++) {
        const float key = __bfloat162float(k[i]), query = __bfloat162float(q[i]);
        const float s = begins ? 0.0f : state[i * a.value_dim + column];
        held += s * key;
        read += s * query;
        keys += key * key;
        queries += query * query;
        both += key * query;
      }
      const float decay = __expf(a.log_decay(token, head)), beta = a.beta(token, head);
      const float of_key = rsqrtf(keys + kLengthEps);
      const float of_query = rsqrtf(queries + kLengthEps) * rsqrtf(float(a.key_dim));
      const float d = beta * (__bfloat162float(a.value(token, head)[column]) - decay * of_key * held);
      for (int i = 0; i < a.key_dim; i++) {
        const float s = begins ? 0.0f : state[i * a.value_dim + column];
        state[i * a.value_dim + column] = decay * s + of_key * __bfloat162float(k[i]) * d;
      }
      const float o = of_query * (decay * read + of_key * both * d);
      a.out[(token * a.heads + head) * a.value_dim + column] = __float2bfloat16_rn(o);
    }
  }
}

}  // namespace

// Grid: heads in slices of COLUMNS columns, rows. At 64 rows a layer takes 82 us with slices of 32 columns, 76 with 64,
// and 113 with whole heads.
#define GATED_DELTA_STEPS(COLUMNS, BLOCKS)                                       \
  extern "C" __global__ void __launch_bounds__(Shape<COLUMNS>::kThreads, BLOCKS) \
      gated_delta_steps_##COLUMNS(const __grid_constant__ Arguments a) {         \
    launch_dependents();                                                         \
    wait_for_previous_kernel();                                                  \
    run<Shape<COLUMNS>>(a);                                                      \
  }

GATED_DELTA_STEPS(32, 6)
GATED_DELTA_STEPS(64, 3)

// Grid: heads in slices, rows, layers.
#define GATED_DELTA_REPLAY(COLUMNS, BLOCKS)                                       \
  extern "C" __global__ void __launch_bounds__(Shape<COLUMNS>::kThreads, BLOCKS) \
      gated_delta_replay_##COLUMNS(const __grid_constant__ Replay a) {            \
    launch_dependents();                                                          \
    wait_for_previous_kernel();                                                   \
    replay<Shape<COLUMNS>>(a);                                                    \
  }

GATED_DELTA_REPLAY(32, 6)
GATED_DELTA_REPLAY(64, 3)

// Grid: heads, rows.
extern "C" __global__ void gated_delta_steps_any(const __grid_constant__ Arguments a) {
  launch_dependents();
  wait_for_previous_kernel();
  run_any(a);
}
