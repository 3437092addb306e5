// Routers of mixtures of experts: scores in float32, the best groups, the best experts, their weights. One warp a token.
//
// Choices are made by the largest key (value in order, lower id first), so that equal scores give the lower id and NaN,
// the smallest of all, still gives ids that exist.
#include <cstdint>
#include "overlap.cuh"

namespace {

constexpr int kMostExperts = 1024;
constexpr int kMostGroups = 32;
constexpr int kLanes = 32;
constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr float kLowest = -3.402823466e38f;

enum Scoring { kSoftmax, kSigmoid, kSqrtSoftplus };
enum GroupScore { kMax, kTopTwoSum };

struct Routing {
  int num_experts, per_token, num_groups, num_kept, scoring, group_score, normalised;
  float scale;
};

__device__ float warp_max(float value) {
  for (int step = 16; step; step /= 2) value = fmaxf(value, __shfl_xor_sync(kAll, value, step));
  return value;
}

__device__ float warp_sum(float value) {
  for (int step = 16; step; step /= 2) value += __shfl_xor_sync(kAll, value, step);
  return value;
}

__device__ uint64_t warp_max(uint64_t value) {
  for (int step = 16; step; step /= 2) {
    const uint64_t other = __shfl_xor_sync(kAll, value, step);
    value = other > value ? other : value;
  }
  return value;
}

// Larger for larger values, and among equal ones for lower ids; never 0. NaN is below everything.
__device__ uint64_t key_of(float value, int id) {
  const uint32_t bits = __float_as_uint(value + 0.0f);  // -0 becomes 0
  const uint32_t ordered = isnan(value) ? 1 : bits >> 31 ? ~bits : bits | 0x80000000u;
  return uint64_t(ordered) << 32 | uint32_t(~id);
}

__device__ int id_of(uint64_t key) { return int(~uint32_t(key)); }

__device__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

__device__ void score(const float* logits, float* scores, const Routing& routing, int lane) {
  const int n = routing.num_experts;
  if (routing.scoring == kSoftmax) {
    float top = kLowest, sum = 0;
    for (int e = lane; e < n; e += kLanes) top = fmaxf(top, logits[e]);
    top = warp_max(top);
    for (int e = lane; e < n; e += kLanes) sum += scores[e] = expf(logits[e] - top);
    sum = warp_sum(sum);
    for (int e = lane; e < n; e += kLanes) scores[e] /= sum;
  } else {
    for (int e = lane; e < n; e += kLanes)
      scores[e] = routing.scoring == kSigmoid ? 1 / (1 + expf(-logits[e])) : sqrtf(softplus(logits[e]));
  }
}

// Takes the largest of `keys`, which it sets to 0.
__device__ int take_largest(uint64_t* keys, int count, int lane) {
  uint64_t best = 0;
  for (int i = lane; i < count; i += kLanes) best = keys[i] > best ? keys[i] : best;
  const int id = id_of(warp_max(best));
  if (lane == 0) keys[id] = 0;
  __syncwarp();
  return id;
}

// Sets the keys of experts in groups that are not kept to 0; `group_keys` is scratch.
__device__ void drop_groups(uint64_t* keys, uint64_t* group_keys, const float* wanted, const Routing& routing, int lane) {
  const int size = routing.num_experts / routing.num_groups;
  if (lane < routing.num_groups) {
    float first = kLowest, second = kLowest;
    for (int e = lane * size; e < (lane + 1) * size; e++) {
      const float value = wanted[e];
      second = fmaxf(second, fminf(first, value));
      first = fmaxf(first, value);
    }
    group_keys[lane] = key_of(routing.group_score == kMax ? first : first + second, lane);
  }
  __syncwarp();
  uint32_t kept = 0;
  for (int i = 0; i < routing.num_kept; i++) kept |= 1u << take_largest(group_keys, routing.num_groups, lane);
  for (int e = lane; e < routing.num_experts; e += kLanes) {
    if (!(kept >> (e / size) & 1)) keys[e] = 0;
  }
  __syncwarp();
}

}  // namespace

// Of `logits [T, E]` into `ids [T, k]` and `weights [T, k]`. With a `table [V, k]` the experts are those of the tokens'
// ids; otherwise `bias [E]` may be null. `slots` may be null; below 0 a token is padding.
extern "C" __global__ void __launch_bounds__(kLanes)
    route(const float* logits, const float* bias, const int* token_ids, const int* table, const int64_t* slots, int* ids,
          float* weights, Routing routing) {
  __shared__ float scores[kMostExperts], wanted[kMostExperts];
  __shared__ uint64_t keys[kMostExperts], group_keys[kMostGroups];
  const int token = blockIdx.x, lane = threadIdx.x, k = routing.per_token;
  wait_for_previous_kernel();
  allow_next_kernel();
  ids += int64_t(token) * k;
  weights += int64_t(token) * k;
  if (slots != nullptr && slots[token] < 0) {
    if (lane < k) ids[lane] = -1, weights[lane] = 0;
    return;
  }
  score(logits + int64_t(token) * routing.num_experts, scores, routing, lane);
  __syncwarp();
  int mine = 0;  // of lane j < k: the choice in place j
  if (table != nullptr) {
    if (lane < k) mine = table[int64_t(token_ids[token]) * k + lane];
  } else {
    for (int e = lane; e < routing.num_experts; e += kLanes) {
      wanted[e] = bias == nullptr ? scores[e] : scores[e] + bias[e];
      keys[e] = key_of(wanted[e], e);
    }
    __syncwarp();
    if (routing.num_groups > 1) drop_groups(keys, group_keys, wanted, routing, lane);
    for (int place = 0; place < k; place++) {
      const int id = take_largest(keys, routing.num_experts, lane);
      if (lane == place) mine = id;
    }
  }
  float weight = lane < k ? scores[mine] : 0;
  if (routing.normalised) weight /= warp_sum(weight) + 1e-20f;
  if (lane < k) ids[lane] = mine, weights[lane] = weight * routing.scale;
}
