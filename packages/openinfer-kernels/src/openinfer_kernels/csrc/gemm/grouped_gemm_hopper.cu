// Products of several BF16 matrices with many tokens each: a tile is kTokens sorted positions x kColumns rows of
// one expert's weight. Rows of x are permuted into that order, so that TMA can load them; what a tile reads of the
// next expert's tokens is multiplied and not stored.
//
//   producer thread:      wait for a free stage ─► TMA of a chunk of W and a chunk of X
//   consumer warpgroups:  wait for a full stage ─► wgmma ─► free the stage before ─► after a tile: epilogue
//
// A block has a multiprocessor to itself and takes tile after tile, so that stages fill while it stores. Neighbouring
// blocks have the same tokens. gemm_epilogue.cuh says what becomes of the sums.
#include "common/hopper.cuh"
#include "gemm/gemm_epilogue.cuh"
#include "gemm/wgmma.cuh"

using namespace hopper;

namespace hopper {

WGMMA_OR_BEGIN(256,
               REGISTERS_TO_90 ", " REGISTERS_10(9) ", " REGISTERS_10(10) ", " REGISTERS_10(11) ", " REGISTERS_8(12),
               128, 129, 130, SUMS_64(0), SUMS_64(64))

}  // namespace hopper

namespace {

constexpr int kChunk = 64;  // of K: 128 bytes, one swizzle row
constexpr int kRowBytes = kChunk * 2;
constexpr int kAlignment = 1024;
constexpr int kConsumers = 256;
constexpr int kThreads = kConsumers + 128;
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;  // with two consumers, three times the 168 of a launch

// Tiles of 128 x 128, two blocks on a multiprocessor, read shared memory more often for each product: 1,995 us instead
// of 1,623 for 8,192 tokens of DeepSeek-V2-Lite.
struct Sizes {
  static constexpr int kTokens = 128, kColumns = 256, kStages = 4;
  static constexpr int kSums = kColumns / 2;
  static constexpr int kXBytes = kTokens * kRowBytes, kWeightBytes = kColumns * kRowBytes;
};

struct Shared {
  alignas(kAlignment) uint8_t x[Sizes::kStages][Sizes::kXBytes];
  alignas(kAlignment) uint8_t w[Sizes::kStages][Sizes::kWeightBytes];
  uint64_t full[Sizes::kStages], empty[Sizes::kStages];
};

// A block's tiles, one after the other: of `tiles`, each `wide` columns tiles wide, up to the first without tokens.
struct Walk {
  const int4* tiles;
  int most_tiles, wide, index;
  int4 tile;  // expert, first position, positions
  int column_tile;

  __device__ Walk(const int4* tiles_, int most_tiles_, int wide_)
      : tiles(tiles_), most_tiles(most_tiles_), wide(wide_), index(blockIdx.x) {}

  __device__ bool next() {
    if (index >= most_tiles * wide) return false;
    tile = tiles[index / wide];
    column_tile = index % wide;
    index += gridDim.x;
    return tile.z > 0;
  }
};

struct Ring {
  int stage = 0, phase = 0;

  __device__ void advance() {
    if (++stage == Sizes::kStages) stage = 0, phase ^= 1;
  }
};

template <int kTileFeatures, int kGroupRows>
__device__ void produce(Shared& s, Walk walk, const CUtensorMap& w_map, const CUtensorMap& x_map, int rows,
                        int chunks) {
  const uint64_t policy = evict_normal_policy();
  Ring ring;
  bool is_first = true;  // round of the ring, in which all stages are free and no barrier has a phase to wait for
  while (walk.next()) {
    const int first_group = (walk.tile.x * rows + walk.column_tile * kTileFeatures) / kGroupRows;
    for (int i = 0; i < chunks; i++) {
      if (!is_first) barrier_wait(&s.empty[ring.stage], ring.phase ^ 1);
      barrier_expect(&s.full[ring.stage], Sizes::kXBytes + Sizes::kWeightBytes);
      load_box(s.w[ring.stage], &w_map, &s.full[ring.stage], i * kChunk, 0, 0, first_group, policy);
      load_box(s.x[ring.stage], &x_map, &s.full[ring.stage], i * kChunk, walk.tile.y, policy);
      ring.advance();
      is_first = is_first && ring.stage > 0;
    }
  }
}

__device__ __forceinline__ void multiply(float (&d)[Sizes::kSums], Shared& s, Ring& ring, int chunks) {
  const int warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32;
  int before = 0;
  for (int i = 0; i < chunks; i++) {
    barrier_wait(&s.full[ring.stage], ring.phase);
    wgmma_fence();
    const uint64_t x = tile_descriptor(s.x[ring.stage] + warpgroup * 64 * kRowBytes);
    const uint64_t w = tile_descriptor(s.w[ring.stage]);
#pragma unroll
    for (int step = 0; step < kChunk / 16; step++)
      wgmma_or_begin<Sizes::kColumns>(d, x + step * 2, w + step * 2, i + step);
    wgmma_commit();
    wgmma_wait<1>();
    if (i > 0 && lane == 0) barrier_arrive(&s.empty[before]);
    before = ring.stage;
    ring.advance();
  }
  wgmma_wait<0>();  // the epilogue reads the sums, while the producer fills the last stage for the next tile
  if (lane == 0) barrier_arrive(&s.empty[before]);
}

template <Epilogue kEpilogue>
__device__ void run(const CUtensorMap& w_map, const CUtensorMap& x_map, const int4* tiles, int most_tiles, void* y,
                    int n, int k) {
  constexpr bool kGates = kEpilogue == kSwiglu;
  constexpr int kTileFeatures = Sizes::kColumns / (kGates ? 2 : 1);
  extern __shared__ __align__(kAlignment) uint8_t raw[];
  auto& s = *reinterpret_cast<Shared*>(raw);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Sizes::kStages; i++) {
      barrier_init(&s.full[i], 1);
      barrier_init(&s.empty[i], kConsumers / 32);
    }
    barrier_init_fence();
  }
  __syncthreads();
  wait_for_previous_kernel();
  launch_dependents();
  Walk walk(tiles, most_tiles, (n + kTileFeatures - 1) / kTileFeatures);
  const int chunks = (k + kChunk - 1) / kChunk;
  if (threadIdx.x >= kConsumers) {
    leave_registers<kProducerRegisters>();
    if (threadIdx.x == kConsumers)
      produce<kTileFeatures, kGates ? 8 : 16>(s, walk, w_map, x_map, kGates ? 2 * n : n, chunks);
    return;
  }
  take_registers<kConsumerRegisters>();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Ring ring;
  float d[Sizes::kSums];
  while (walk.next()) {
    multiply(d, s, ring, chunks);
    const int4 tile = walk.tile;
    const int first_token = tile.y + warp * 16 + lane / 4, first_feature = walk.column_tile * kTileFeatures;
    const int end_feature = min(n, first_feature + kTileFeatures);
    const Target<kEpilogue> target{y, tile.y + tile.z, n, first_token, first_feature, end_feature};
    store_tile<Sizes, kEpilogue>(d, target);
  }
}

}  // namespace

#define GROUPED_GEMM_HOPPER(EPILOGUE, NAME)                                                                       \
  extern "C" __global__ void __launch_bounds__(kThreads, 1)                                                       \
      grouped_gemm_hopper_##NAME(const __grid_constant__ CUtensorMap w_map,                                       \
                                 const __grid_constant__ CUtensorMap x_map, const int4* tiles, int most_tiles,    \
                                 void* y, int n, int k) {                                                         \
    run<EPILOGUE>(w_map, x_map, tiles, most_tiles, y, n, k);                                                      \
  }

GROUPED_GEMM_HOPPER(kStore, store)
GROUPED_GEMM_HOPPER(kSwiglu, swiglu)
