// Products of several BF16 matrices with many tokens each: a tile is kTokens positions of the line x kColumns rows of
// one expert's weight. Rows of x lie in the line's order, so that the copy engine takes them; what a tile reads of the
// next expert's tokens is multiplied and not stored.
//
//   producer thread:      wait for a free stage ─► TMA of a chunk of W and a chunk of X
//   consumer warpgroups:  wait for a full stage ─► wgmma ─► free the stage before ─► at the end: epilogue
//
// Two blocks share a multiprocessor, so that one multiplies while the other begins or ends. gemm_epilogue.cuh says what
// becomes of the sums.
#include "gemm_epilogue.cuh"
#include "hopper.cuh"
#include "wgmma.cuh"

using namespace hopper;

namespace {

constexpr int kChunk = 64;  // of K: 128 bytes, one swizzle row
constexpr int kRowBytes = kChunk * 2;
constexpr int kAlignment = 1024;
constexpr int kConsumers = 256;
constexpr int kThreads = kConsumers + 32;

struct Sizes {
  static constexpr int kTokens = 128, kColumns = 128, kStages = 3;
  static constexpr int kSums = kColumns / 2;
  static constexpr int kXBytes = kTokens * kRowBytes, kWeightBytes = kColumns * kRowBytes;
};

struct Shared {
  alignas(kAlignment) uint8_t x[Sizes::kStages][Sizes::kXBytes];
  alignas(kAlignment) uint8_t w[Sizes::kStages][Sizes::kWeightBytes];
  uint64_t full[Sizes::kStages], empty[Sizes::kStages];
};

__device__ void produce(Shared& s, const CUtensorMap& w_map, const CUtensorMap& x_map, int first_group, int first_token,
                        int chunks) {
  const uint64_t policy = evict_normal_policy();
  for (int i = 0; i < chunks; i++) {
    const int stage = i % Sizes::kStages;
    if (i >= Sizes::kStages) barrier_wait(&s.empty[stage], (i / Sizes::kStages - 1) & 1);
    barrier_expect(&s.full[stage], Sizes::kXBytes + Sizes::kWeightBytes);
    load_box(s.w[stage], &w_map, &s.full[stage], i * kChunk, 0, 0, first_group, policy);
    load_box(s.x[stage], &x_map, &s.full[stage], i * kChunk, first_token, policy);
  }
}

__device__ __forceinline__ void multiply(float (&d)[Sizes::kSums], Shared& s, int chunks) {
  const int warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32;
  int before = 0;
  for (int i = 0; i < chunks; i++) {
    const int stage = i % Sizes::kStages;
    barrier_wait(&s.full[stage], (i / Sizes::kStages) & 1);
    wgmma_fence();
    const uint64_t x = tile_descriptor(s.x[stage] + warpgroup * 64 * kRowBytes), w = tile_descriptor(s.w[stage]);
#pragma unroll
    for (int step = 0; step < kChunk / 16; step++)
      wgmma_or_begin<Sizes::kColumns>(d, x + step * 2, w + step * 2, i + step);
    wgmma_commit();
    wgmma_wait<1>();
    if (i > 0 && lane == 0) barrier_arrive(&s.empty[before]);
    before = stage;
  }
  wgmma_wait<0>();
}

template <Epilogue kEpilogue>
__device__ void run(const CUtensorMap& w_map, const CUtensorMap& x_map, const int4* tiles, void* y, int n, int k) {
  constexpr bool kGates = kEpilogue == kSwiglu;
  constexpr int kTileFeatures = Sizes::kColumns / (kGates ? 2 : 1);
  constexpr int kGroupRows = kGates ? 8 : 16;  // of the map's last axis
  extern __shared__ __align__(kAlignment) uint8_t raw[];
  auto& s = *reinterpret_cast<Shared*>(raw);
  wait_for_previous_kernel();
  allow_next_kernel();
  const int4 tile = tiles[blockIdx.y];
  if (tile.z == 0) return;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Sizes::kStages; i++) {
      barrier_init(&s.full[i], 1);
      barrier_init(&s.empty[i], kConsumers / 32);
    }
    barrier_init_fence();
  }
  __syncthreads();
  const int first_feature = blockIdx.x * kTileFeatures, chunks = (k + kChunk - 1) / kChunk;
  if (threadIdx.x >= kConsumers) {
    const int rows = kGates ? 2 * n : n;  // of a matrix
    const int first_group = (tile.x * rows + first_feature) / kGroupRows;
    if (threadIdx.x == kConsumers) produce(s, w_map, x_map, first_group, tile.y, chunks);
    return;
  }
  float d[Sizes::kSums];
  multiply(d, s, chunks);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_token = tile.y + warp * 16 + lane / 4;
  store_tile<Sizes, kEpilogue>(
      d, Target<kEpilogue>{y, tile.y + tile.z, n, first_token, first_feature, min(n, first_feature + kTileFeatures)});
}

}  // namespace

#define GROUPED_GEMM_HOPPER(EPILOGUE, NAME)                                                                   \
  extern "C" __global__ void __launch_bounds__(kThreads, 2)                                                   \
      grouped_gemm_hopper_##NAME(const __grid_constant__ CUtensorMap w_map,                                   \
                                 const __grid_constant__ CUtensorMap x_map, const int4* tiles, void* y, int n, \
                                 int k) {                                                                     \
    run<EPILOGUE>(w_map, x_map, tiles, y, n, k);                                                              \
  }

GROUPED_GEMM_HOPPER(kStore, store)
GROUPED_GEMM_HOPPER(kSwiglu, swiglu)
