// Compressed entries: means of windows of tokens with weights per channel, then RMSNorm and RoPE at the window's first
// token; float32 throughout. `cpu/compressor.py` has both rules.
//
// A block has one token, a thread one channel of the entry. Blocks of tokens that complete no window have nothing to
// do: they leave at once. States are brought up to date by a launch of their own after the entries, which read them;
// where rows have one token each, by the same block.
#include "attention/sparse.cuh"

namespace {

constexpr int kMaxThreads = 512;

struct Arguments {
  const float* projected;  // [T, 2 w]: values, then weights
  const float* ape;        // [ratio, w]
  const bf16* norm;        // [d]
  float* state;            // this layer of state slot 0
  bf16* cache;             // this layer
  StateRows rows;
  sparse::Entries entries;
  sparse::Rope rope;
  int64_t slot_stride;
  float eps;
};

// Norms, rotates and stores the entry whose channels the threads hold.
__device__ void write_entry(const Arguments& a, int row, int window, float value) {
  __shared__ float sums[kMaxThreads / 32];
  const int channel = threadIdx.x, size = a.entries.size, warps = blockDim.x / 32;
  const float part = sparse::warp_sum(value * value);
  if (channel % 32 == 0) sums[channel / 32] = part;
  __syncthreads();
  float squares = 0;
  for (int i = 0; i < warps; i++) squares += sums[i];
  value *= rsqrtf(squares / size + a.eps) * __bfloat162float(a.norm[channel]);
  const float other = __shfl_xor_sync(~0u, value, 1);
  const int tail = size - 2 * a.rope.pairs;
  if (channel >= tail) {
    const float2 rotation = a.rope.at(window * a.entries.ratio, (channel - tail) / 2);
    value = channel % 2 == 0 ? value * rotation.x - other * rotation.y : other * rotation.y + value * rotation.x;
  }
  a.cache[a.entries.offset(row, window) + channel] = __float2bfloat16_rn(value);
}

struct Running {
  float top, total, weighted;

  __device__ __forceinline__ void add(float logit, float value) {
    const float highest = fmaxf(top, logit), kept = expf(top - highest), share = expf(logit - highest);
    total = total * kept + share;
    weighted = weighted * kept + share * value;
    top = highest;
  }
};

// The open window that ends at `token`, which begins in the state or in this step.
__device__ Running gather(const Arguments& a, const sparse::Token& at, int position, int channel) {
  const int ratio = a.entries.ratio, size = a.entries.size, begin = position / ratio * ratio;
  Running open = {-CUDART_INF_F, 0, 0};
  if (begin < at.start) {
    const float* state = a.state + at.slot * a.slot_stride + channel;
    open = {state[0], state[size], state[2 * size]};
  }
  for (int p = max(begin, at.start); p <= position; p++) {
    const float* token = a.projected + int64_t(at.first + p - at.start) * 2 * size + channel;
    open.add(token[size] + a.ape[(p - begin) * size + channel], token[0]);
  }
  return open;
}

__device__ __forceinline__ void keep(const Arguments& a, int slot, int channel, const Running& open) {
  float* state = a.state + slot * a.slot_stride + channel;
  state[0] = open.top;
  state[a.entries.size] = open.total;
  state[2 * a.entries.size] = open.weighted;
}

// kSteps: rows of one token, whose states are written here, too.
template <bool kSteps>
__device__ void windows(const Arguments& a) {
  const sparse::Token at = sparse::find_token(a.rows, blockIdx.x);
  const bool completes = (at.position + 1) % a.entries.ratio == 0;
  if (at.position < 0 || (!completes && !kSteps)) return;
  const Running open = gather(a, at, at.position, threadIdx.x);
  if (kSteps) keep(a, at.slot, threadIdx.x, open);
  if (completes) write_entry(a, at.row, at.position / a.entries.ratio, open.weighted / open.total);
}

// Position `p`'s values (2 d) and weights (2 d), of this step or of the state.
__device__ __forceinline__ float known(const Arguments& a, const sparse::Token& at, int p, int channel) {
  const int ratio = a.entries.ratio, width = 2 * a.entries.size;
  if (p < at.start) return a.state[at.slot * a.slot_stride + int64_t(p % (2 * ratio)) * 2 * width + channel];
  const float value = a.projected[int64_t(at.first + p - at.start) * 2 * width + channel];
  return channel < width ? value : value + a.ape[p % ratio * width + channel - width];
}

__device__ void keep_token(const Arguments& a, const sparse::Token& at, int p) {
  const int width = 2 * a.entries.size;
  float* state = a.state + at.slot * a.slot_stride + int64_t(p % (2 * a.entries.ratio)) * 2 * width;
  for (int channel = threadIdx.x; channel < 2 * width; channel += blockDim.x) state[channel] = known(a, at, p, channel);
}

template <bool kSteps>
__device__ void overlapping(const Arguments& a) {
  const sparse::Token at = sparse::find_token(a.rows, blockIdx.x);
  const int ratio = a.entries.ratio, size = a.entries.size, channel = threadIdx.x;
  const bool completes = (at.position + 1) % ratio == 0;
  if (at.position < 0 || (!completes && !kSteps)) return;
  if (completes) {
    const int begin = at.position + 1 - ratio;
    Running open = {-CUDART_INF_F, 0, 0};
    for (int p = max(0, begin - ratio); p <= at.position; p++) {
      const int half = p < begin ? 0 : size;
      open.add(known(a, at, p, 2 * size + half + channel), known(a, at, p, half + channel));
    }
    write_entry(a, at.row, at.position / ratio, open.weighted / open.total);
  }
  if (kSteps) keep_token(a, at, at.position);
}

}  // namespace

#define KERNEL(NAME, BODY) \
  extern "C" __global__ void __launch_bounds__(kMaxThreads) NAME(const __grid_constant__ Arguments a) { BODY; }

KERNEL(compress_windows, windows<false>(a))
KERNEL(compress_windows_steps, windows<true>(a))
KERNEL(compress_overlapping_windows, overlapping<false>(a))
KERNEL(compress_overlapping_windows_steps, overlapping<true>(a))

// The open windows of all rows. Grid: rows.
extern "C" __global__ void __launch_bounds__(kMaxThreads) keep_windows(const __grid_constant__ Arguments a) {
  const StateRow row = state_row(a.rows, blockIdx.x);
  if (row.count == 0) return;
  const sparse::Token at = sparse::find_token(a.rows, row.first + row.count - 1);
  keep(a, at.slot, threadIdx.x, gather(a, at, at.position, threadIdx.x));
}

// The last tokens of all rows. Grid: (rows, 2 ratio).
extern "C" __global__ void __launch_bounds__(kMaxThreads) keep_overlapping_windows(const __grid_constant__ Arguments a) {
  const StateRow row = state_row(a.rows, blockIdx.x);
  if (int(blockIdx.y) >= row.count) return;
  const sparse::Token at = sparse::find_token(a.rows, row.first + row.count - 1);
  keep_token(a, at, at.position - blockIdx.y);
}
