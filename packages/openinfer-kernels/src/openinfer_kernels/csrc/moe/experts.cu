// What surrounds the products of experts: which expert multiplies which tokens, the sum over a token's experts, the
// gate.
//
// An expert slot is one choice of one token, token * k + place. `plan_experts` sorts the slots of this rank's experts
// by expert, and cuts the sorted tokens into tiles, which the products take: the host never learns how many there are.
// Products are stored in that order. The order of slots within an expert is not fixed; no result depends on it.
#include "common/pdl.cuh"
#include "gemm/limited_swiglu.cuh"

namespace {

constexpr int kMostExperts = 1024;  // and threads of a plan, of which there are at least as many as experts

// Sums before each thread's value, over the block, and the sum of all in `total`.
__device__ int2 sums_before(int2 value, int2* warp_sums, int2& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int2 sum = value;
  for (int step = 1; step < 32; step *= 2) {
    const int x = __shfl_up_sync(0xFFFFFFFFu, sum.x, step), y = __shfl_up_sync(0xFFFFFFFFu, sum.y, step);
    if (lane >= step) sum.x += x, sum.y += y;
  }
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  int2 before = {sum.x - value.x, sum.y - value.y};
  total = {0, 0};
  for (int other = 0; other < blockDim.x / 32; other++) {
    if (other < warp) before.x += warp_sums[other].x, before.y += warp_sums[other].y;
    total.x += warp_sums[other].x, total.y += warp_sums[other].y;
  }
  return before;
}

template <int kWidth>
__device__ void gate(const bf16* both, bf16* y, int width, float limit) {
  const int at = (blockIdx.y * blockDim.x + threadIdx.x) * kWidth;
  wait_for_previous_kernel();
  launch_dependents();
  if (at >= width) return;
  const bf16* row = both + int64_t(blockIdx.x) * 2 * width;
  float gates[kWidth], ups[kWidth];
  unpack(load<kWidth>(row + at), gates);
  unpack(load<kWidth>(row + width + at), ups);
#pragma unroll
  for (int i = 0; i < kWidth; i++) gates[i] = limited_swiglu(gates[i], ups[i], limit);
  store(y + int64_t(blockIdx.x) * width + at, pack(gates));
}

}  // namespace

// One block. `tiles [most_tiles]` become (expert, first sorted position, slots, tiles with slots), `sorted_tokens [num_expert_slots]` the
// tokens by position, and `positions [num_expert_slots]` where an expert slot stands, -1 where its expert is elsewhere.
extern "C" __global__ void __launch_bounds__(kMostExperts)
    plan_experts(const int* ids, int num_expert_slots, int per_token, int first_expert, int num_experts,
                 int tile_tokens, int4* tiles, int most_tiles, int* sorted_tokens, int* positions) {
  __shared__ int counts[kMostExperts];
  __shared__ int2 warp_sums[kMostExperts / 32];
  const int thread = threadIdx.x, threads = blockDim.x;
  counts[thread] = 0;
  wait_for_previous_kernel();
  launch_dependents();
  __syncthreads();
#pragma unroll 4
  for (int expert_slot = thread; expert_slot < num_expert_slots; expert_slot += threads) {
    const int expert = ids[expert_slot] - first_expert;
    if (expert >= 0 && expert < num_experts) atomicAdd(&counts[expert], 1);
  }
  __syncthreads();
  const int count = counts[thread];
  int2 total;
  const int2 before = sums_before({count, (count + tile_tokens - 1) / tile_tokens}, warp_sums, total);
  for (int done = 0, tile = before.y; done < count; done += tile_tokens, tile++)
    tiles[tile] = {thread, before.x + done, min(tile_tokens, count - done), total.y};
  for (int tile = total.y + thread; tile < most_tiles; tile += threads) tiles[tile] = {0, 0, 0, total.y};
  counts[thread] = before.x;
  __syncthreads();
#pragma unroll 4
  for (int expert_slot = thread; expert_slot < num_expert_slots; expert_slot += threads) {
    const int expert = ids[expert_slot] - first_expert;
    int position = -1;
    if (expert >= 0 && expert < num_experts) {
      position = atomicAdd(&counts[expert], 1);
      sorted_tokens[position] = expert_slot / per_token;
    }
    positions[expert_slot] = position;
  }
}

// Rows of `x [T, h]` in the order of `sorted_tokens`, for kernels that do not gather themselves.
extern "C" __global__ void permute_tokens(const bf16* x, const int* sorted_tokens, const int4* tiles, bf16* to, int h) {
  constexpr int kWidth = 8;
  wait_for_previous_kernel();
  launch_dependents();
  const int4 tile = tiles[blockIdx.x];
  for (int i = blockIdx.y; i < tile.z; i += gridDim.y) {
    const int64_t position = tile.y + i, token = sorted_tokens[position];
    for (int at = threadIdx.x * kWidth; at < h; at += blockDim.x * kWidth)
      store(to + position * h + at, load<kWidth>(x + token * h + at));
  }
}

// `out [T, h]` float32 = the sum over places of weights [T, k] * y [positions [T, k], h], in their order, and
// `shared [T, h]` or null.
extern "C" __global__ void combine_experts(const bf16* y, const int* positions, const float* weights,
                                           const bf16* shared, float* out, int h, int k) {
  constexpr int kWidth = 8;
  const int at = (blockIdx.y * blockDim.x + threadIdx.x) * kWidth;
  wait_for_previous_kernel();
  launch_dependents();
  if (at >= h) return;
  const int64_t token = blockIdx.x;
  float sums[kWidth] = {};
  for (int place = 0; place < k; place++) {
    const int64_t position = positions[token * k + place];
    if (position < 0) continue;
    float values[kWidth];
    unpack(load<kWidth>(y + position * h + at), values);
    const float weight = weights[token * k + place];
#pragma unroll
    for (int i = 0; i < kWidth; i++) sums[i] += weight * values[i];
  }
  if (shared != nullptr) {
    float values[kWidth];
    unpack(load<kWidth>(shared + token * h + at), values);
#pragma unroll
    for (int i = 0; i < kWidth; i++) sums[i] += values[i];
  }
  float4* to = reinterpret_cast<float4*>(out + token * h + at);
  to[0] = {sums[0], sums[1], sums[2], sums[3]};
  to[1] = {sums[4], sums[5], sums[6], sums[7]};
}

extern "C" __global__ void limited_swiglu_vectors(const bf16* both, bf16* y, int width, float limit) {
  gate<8>(both, y, width, limit);
}

extern "C" __global__ void limited_swiglu_singles(const bf16* both, bf16* y, int width, float limit) {
  gate<1>(both, y, width, limit);
}
