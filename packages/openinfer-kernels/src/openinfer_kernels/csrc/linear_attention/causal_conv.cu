// The depthwise causal convolution before linear attention, with silu, and the inputs that later steps need.
//
//     y_t[c] = silu(sum_j w[c, j] x_{t - W + 1 + j}[c])       state [slots, layers, C, W - 1]: the last inputs, oldest first
//
// A thread walks over a tile of a row's tokens with the last inputs in registers. Tiles begin at the row's first token
// and are longer than the taps, so only a row's first tile reads the state slot and writes it: no two blocks race for
// one.
#include "attention/attention_query_tile.cuh"
#include "common/pdl.cuh"
#include "common/state_rows.cuh"
#include "common/vectors.cuh"

namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kTileTokens = 32;
constexpr int kAhead = 4;  // tokens whose loads are in flight while one is computed

struct Arguments {
  const bf16* x;        // [T, C], rows `x_stride` apart
  const bf16* weight;   // [C, W]
  bf16* state;          // this layer of state slot 0: [C, W - 1]
  bf16* out;            // [T, C]
  StateRows rows;
  int64_t x_stride, slot_stride;
  int channels;
  const int* kept_rows;  // [R], 1 for a row whose state stays as it is; null: there is none
  bf16* kept;            // this layer of state slot 0: [M, C], where the inputs of such a row go
  int64_t kept_stride;   // from slot to slot
};

// kWidth channels of kTaps taps.
template <int kWidth, int kTaps>
struct Window {
  static constexpr int kHeld = kTaps - 1;
  float taps[kWidth][kTaps], held[kHeld][kWidth];

  __device__ __forceinline__ void load_taps(const bf16* from) {
#pragma unroll
    for (int v = 0; v < kTaps; v++) {
      float values[kWidth];
      unpack(load<kWidth>(from + v * kWidth), values);
#pragma unroll
      for (int i = 0; i < kWidth; i++) taps[(v * kWidth + i) / kTaps][(v * kWidth + i) % kTaps] = values[i];
    }
  }

  __device__ __forceinline__ void load_state(const bf16* from) {
#pragma unroll
    for (int v = 0; v < kHeld; v++) {
      float values[kWidth];
      unpack(load<kWidth>(from + v * kWidth), values);
#pragma unroll
      for (int i = 0; i < kWidth; i++) held[(v * kWidth + i) % kHeld][(v * kWidth + i) / kHeld] = values[i];
    }
  }

  __device__ __forceinline__ void store_state(bf16* to) const {
#pragma unroll
    for (int v = 0; v < kHeld; v++) {
      float values[kWidth];
#pragma unroll
      for (int i = 0; i < kWidth; i++) values[i] = held[(v * kWidth + i) % kHeld][(v * kWidth + i) / kHeld];
      store(to + v * kWidth, pack(values));
    }
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int v = 0; v < kHeld; v++)
#pragma unroll
      for (int i = 0; i < kWidth; i++) held[v][i] = 0;
  }

  __device__ __forceinline__ void push(const float (&x)[kWidth]) {
#pragma unroll
    for (int i = 0; i < kWidth; i++) {
#pragma unroll
      for (int v = 0; v + 1 < kHeld; v++) held[v][i] = held[v + 1][i];
      held[kHeld - 1][i] = x[i];
    }
  }

  __device__ __forceinline__ void sums(const float (&x)[kWidth], float (&y)[kWidth]) const {
#pragma unroll
    for (int i = 0; i < kWidth; i++) {
      float sum = 0;
#pragma unroll
      for (int v = 0; v < kHeld; v++) sum += taps[i][v] * held[v][i];
      y[i] = silu(sum + taps[i][kHeld] * x[i]);
    }
  }
};

template <int kWidth, int kTaps>
__device__ void walk(const Arguments& a, Window<kWidth, kTaps>& window, const StateRow& row, bool is_kept, int tile_first,
                     int channel) {
  constexpr int kHeld = kTaps - 1;
  const bf16* x = a.x + int64_t(row.first) * a.x_stride + channel;
  bf16* out = a.out + int64_t(row.first) * a.channels + channel;
  bf16* state = a.state + row.slot * a.slot_stride + int64_t(channel) * kHeld;
  float values[kWidth], y[kWidth];
  if (tile_first > 0) {
#pragma unroll
    for (int v = 0; v < kHeld; v++) {
      unpack(load<kWidth>(x + (tile_first - kHeld + v) * a.x_stride), values);
      window.push(values);
    }
  } else if (row.begins) {
    window.clear();
  } else {
    window.load_state(state);
  }
  bf16* kept = is_kept ? a.kept + row.slot * a.kept_stride + channel : nullptr;
  const int end = min(tile_first + kTileTokens, row.count);
  Vector<kWidth> ahead[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; i++)
    if (tile_first + i < end) ahead[i] = load<kWidth>(x + (tile_first + i) * a.x_stride);
  for (int begin = tile_first; begin < end; begin += kAhead) {
#pragma unroll
    for (int i = 0; i < kAhead; i++) {
      const int t = begin + i;
      if (t >= end) break;
      unpack(ahead[i], values);
      if (is_kept) store(kept + int64_t(t) * a.channels, ahead[i]);
      if (t + kAhead < end) ahead[i] = load<kWidth>(x + (t + kAhead) * a.x_stride);
      window.sums(values, y);
      window.push(values);
      store(out + int64_t(t) * a.channels, pack(y));
    }
  }
  if (tile_first > 0 || is_kept) return;
  if (row.count > kTileTokens) {
#pragma unroll
    for (int v = 0; v < kHeld; v++) {
      unpack(load<kWidth>(x + (row.count - kHeld + v) * a.x_stride), values);
      window.push(values);
    }
  }
  window.store_state(state);
}

// Grid: chunks of the channels, rows of one tile each.
template <int kWidth, int kTaps>
__device__ void run_steps(const Arguments& a) {
  const int channel = (blockIdx.x * blockDim.x + threadIdx.x) * kWidth;
  Window<kWidth, kTaps> window;
  if (channel < a.channels) window.load_taps(a.weight + int64_t(channel) * kTaps);
  launch_dependents();
  wait_for_previous_kernel();
  const StateRow row = state_row(a.rows, blockIdx.y);
  const bool is_kept = a.kept_rows != nullptr && a.kept_rows[blockIdx.y] != 0;
  if (channel < a.channels && row.count > 0) walk(a, window, row, is_kept, 0, channel);
}

// Grid: chunks of the channels, as many tiles as there can be.
template <int kWidth, int kTaps>
__device__ void run_tiles(const Arguments& a) {
  __shared__ int scratch[attention::kTileScratch(kWarps)];
  const int channel = (blockIdx.x * blockDim.x + threadIdx.x) * kWidth;
  Window<kWidth, kTaps> window;
  if (channel < a.channels) window.load_taps(a.weight + int64_t(channel) * kTaps);
  launch_dependents();
  wait_for_previous_kernel();
  const attention::QueryTile tile = attention::find_tile<kWarps>(
      blockIdx.y, a.rows.query_starts, a.rows.context_lens, a.rows.num_rows, 1, 1, kTileTokens, scratch);
  if (tile.row < 0 || channel >= a.channels) return;
  const bool is_kept = a.kept_rows != nullptr && a.kept_rows[tile.row] != 0;
  walk(a, window, state_row(a.rows, tile.row), is_kept, tile.first_query_row, channel);
}

struct Replay {
  bf16* state;       // of slot 0 and layer 0: [C, W - 1]
  const bf16* kept;  // likewise: [M, C]
  const int *slots, *counts;
  int64_t state_strides[2], kept_strides[2];  // from slot to slot, from layer to layer
  int channels, held;                         // held: W - 1
};

}  // namespace

#define CAUSAL_CONV(NAME, WIDTH, TAPS)                                                                              \
  extern "C" __global__ void __launch_bounds__(kThreads) causal_conv_steps_##NAME(const __grid_constant__ Arguments a) { \
    run_steps<WIDTH, TAPS>(a);                                                                                      \
  }                                                                                                                 \
  extern "C" __global__ void __launch_bounds__(kThreads) causal_conv_tiles_##NAME(const __grid_constant__ Arguments a) { \
    run_tiles<WIDTH, TAPS>(a);                                                                                      \
  }

// The state after the first `counts` tokens of rows whose inputs were kept. Grid: chunks of the channels, rows, layers.
extern "C" __global__ void __launch_bounds__(kThreads) causal_conv_replay(const __grid_constant__ Replay a) {
  launch_dependents();
  wait_for_previous_kernel();
  const int channel = blockIdx.x * blockDim.x + threadIdx.x, count = a.counts[blockIdx.y];
  if (channel >= a.channels || count <= 0) return;
  const int64_t slot = a.slots[blockIdx.y], layer = blockIdx.z;
  bf16* state = a.state + slot * a.state_strides[0] + layer * a.state_strides[1] + int64_t(channel) * a.held;
  const bf16* kept = a.kept + slot * a.kept_strides[0] + layer * a.kept_strides[1] + channel;
  // From the front: what is written was read before, as it moves towards the front.
  for (int i = 0; i < a.held; i++) {
    const int at = count + i;
    state[i] = at < a.held ? state[at] : kept[int64_t(at - a.held) * a.channels];
  }
}

CAUSAL_CONV(vectors_4, 8, 4)
CAUSAL_CONV(singles_2, 1, 2)
CAUSAL_CONV(singles_3, 1, 3)
CAUSAL_CONV(singles_4, 1, 4)
