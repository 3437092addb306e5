// Routers of mixtures of experts: scores in float32, the best groups, the best experts, their weights. A warp has one
// token; lane l has experts l, l + 32 and so on in registers, kPerLane of them.
//
// Choices are made by the largest key (value in order, then the lower id), so that equal scores give the lower id and
// NaN, the smallest of all, still gives ids that exist.
#include <cstdint>
#include "common/pdl.cuh"

namespace {

constexpr int kLanes = 32;
constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr float kLowest = -3.402823466e38f;

enum Scoring { kSoftmax, kSigmoid, kSqrtSoftplus };
enum GroupScore { kMax, kTopTwoSum };

struct Routing {
  int num_experts, per_token, num_groups, num_kept, scoring, group_score, normalised;
  float scale;
  int has_shared, num_columns;  // whether expert num_experts is every token's; of the logits
};

__device__ float warp_max(float value) {
  for (int step = 16; step; step /= 2) value = fmaxf(value, __shfl_xor_sync(kAll, value, step));
  return value;
}

__device__ float warp_sum(float value) {
  for (int step = 16; step; step /= 2) value += __shfl_xor_sync(kAll, value, step);
  return value;
}

// Larger for larger values, and never 0, which stands for what cannot be chosen. NaN is below everything.
__device__ uint32_t key_of(float value) {
  const uint32_t bits = __float_as_uint(value + 0.0f);  // -0 becomes 0
  return isnan(value) ? 1 : bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// The experts of a lane, in the order of their ids.
template <int kPerLane>
struct Held {
  float scores[kPerLane];
  uint32_t keys[kPerLane];
  uint32_t best_key;  // the largest of the keys
  int best;           // and the first that has it

  __device__ void find_best() {
    best_key = 0, best = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; i++) {
      if (keys[i] > best_key) best_key = keys[i], best = i;
    }
  }

  // Takes the largest key of the warp: the id, which is not chosen again.
  __device__ int take(int lane) {
    const uint32_t top = __reduce_max_sync(kAll, best_key);
    const int id = __reduce_min_sync(kAll, best_key == top ? best * kLanes + lane : kAll);
    if (id % kLanes == lane) {
#pragma unroll
      for (int i = 0; i < kPerLane; i++) keys[i] = i == id / kLanes ? 0 : keys[i];
      find_best();
    }
    return id;
  }
};

template <int kPerLane>
__device__ void score(Held<kPerLane>& held, const float* logits, const Routing& routing, int lane) {
  float values[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; i++) {
    const int e = i * kLanes + lane;
    values[i] = e < routing.num_experts ? logits[e] : kLowest;
  }
  if (routing.scoring == kSoftmax) {
    float top = kLowest, sum = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; i++) top = fmaxf(top, values[i]);
    top = warp_max(top);
#pragma unroll
    for (int i = 0; i < kPerLane; i++) {
      held.scores[i] = i * kLanes + lane < routing.num_experts ? expf(values[i] - top) : 0;
      sum += held.scores[i];
    }
    sum = warp_sum(sum);
#pragma unroll
    for (int i = 0; i < kPerLane; i++) held.scores[i] /= sum;
  } else {
#pragma unroll
    for (int i = 0; i < kPerLane; i++)
      held.scores[i] = routing.scoring == kSigmoid ? 1 / (1 + expf(-values[i])) : sqrtf(softplus(values[i]));
  }
}

// Bit g: whether group g is kept, for `wanted [E]` in shared memory.
__device__ uint32_t kept_groups(const float* wanted, const Routing& routing, int lane) {
  const int size = routing.num_experts / routing.num_groups;
  Held<1> held;
  held.keys[0] = 0;
  if (lane < routing.num_groups) {
    float first = kLowest, second = kLowest;
    for (int e = lane * size; e < (lane + 1) * size; e++) {
      second = fmaxf(second, fminf(first, wanted[e]));
      first = fmaxf(first, wanted[e]);
    }
    held.keys[0] = key_of(routing.group_score == kMax ? first : first + second);
  }
  held.find_best();
  uint32_t kept = 0;
  for (int i = 0; i < routing.num_kept; i++) kept |= 1u << held.take(lane);
  return kept;
}

template <int kPerLane>
__device__ void route(const float* logits, const float* bias, const int* token_ids, const int* table,
                      const int64_t* slots, int* ids, float* weights, const Routing& routing) {
  __shared__ float scores[kPerLane * kLanes];
  const int token = blockIdx.x, lane = threadIdx.x, k = routing.per_token, chosen = k + routing.has_shared;
  wait_for_previous_kernel();
  launch_dependents();
  ids += int64_t(token) * chosen;
  weights += int64_t(token) * chosen;
  logits += int64_t(token) * routing.num_columns;
  if (slots != nullptr && slots[token] < 0) {
    if (lane < chosen) ids[lane] = -1, weights[lane] = 0;
    return;
  }
  Held<kPerLane> held;
  score(held, logits, routing, lane);
  int mine = 0;  // of lane j < k: the choice in place j
  if (table != nullptr) {
    if (lane < k) mine = table[int64_t(token_ids[token]) * k + lane];
  } else {
    float wanted[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; i++) {
      const int e = i * kLanes + lane;
      const bool is_one = e < routing.num_experts;
      wanted[i] = held.scores[i] + (bias != nullptr && is_one ? bias[e] : 0);
      held.keys[i] = is_one ? key_of(wanted[i]) : 0;
    }
    if (routing.num_groups > 1) {
      const int size = routing.num_experts / routing.num_groups;
#pragma unroll
      for (int i = 0; i < kPerLane; i++) scores[i * kLanes + lane] = wanted[i];
      __syncwarp();
      const uint32_t kept = kept_groups(scores, routing, lane);
#pragma unroll
      for (int i = 0; i < kPerLane; i++) {
        if (!(kept >> (i * kLanes + lane) / size & 1)) held.keys[i] = 0;
      }
      __syncwarp();
    }
    held.find_best();
    for (int place = 0; place < k; place++) {
      const int id = held.take(lane);
      if (lane == place) mine = id;
    }
  }
#pragma unroll
  for (int i = 0; i < kPerLane; i++) scores[i * kLanes + lane] = held.scores[i];
  __syncwarp();
  float weight = lane < k ? scores[mine] : 0;
  if (routing.normalised) weight /= warp_sum(weight) + 1e-20f;
  if (lane < k) ids[lane] = mine, weights[lane] = weight * routing.scale;
  if (lane == k && routing.has_shared)
    ids[k] = routing.num_experts, weights[k] = 1 / (1 + expf(-logits[routing.num_experts]));
}

}  // namespace

// Routes by `logits [T, num_columns]` into `ids [T, k]` and `weights [T, k]`, [T, k + 1] with a shared expert; at most
// MOST experts. With a `table [V, k]` the
// experts are those of the tokens' ids; otherwise `bias [E]` may be null. `slots` (KV slots) may be null; below 0 a
// token is padding.
#define ROUTE(MOST)                                                                                                 \
  extern "C" __global__ void __launch_bounds__(kLanes)                                                              \
      route_##MOST(const float* logits, const float* bias, const int* token_ids, const int* table,                  \
                   const int64_t* slots, int* ids, float* weights, Routing routing) {                               \
    route<MOST / kLanes>(logits, bias, token_ids, table, slots, ids, weights, routing);                             \
  }

ROUTE(64)
ROUTE(256)
ROUTE(384)
ROUTE(1024)
