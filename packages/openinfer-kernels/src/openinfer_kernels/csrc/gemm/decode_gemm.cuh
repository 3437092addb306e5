// Y = X W^T for few tokens: weights are streamed once, by TMA, at the speed of memory.
//
// Operands are swapped (swap-AB): a tile is 64 rows of W (output features) x all tokens, so the tensor cores' 64-row
// side is the weights and the tokens are the narrow side. What a step of a model loses is not bandwidth but the time
// between two products, so everything here keeps the tail of a kernel short and lets the next one begin early:
//
//   - a block has whole tiles, several one after the other, and no sums to share; where there are too few tiles for
//     the chip, a cluster of blocks splits K and the partial sums go to its first block through distributed shared memory;
//   - programmatic dependent launch: the next kernel's blocks move in while this one's drain, and fill their stages
//     with weights, which depend on nothing; only X waits. Blocks take at most half of a multiprocessor's shared
//     memory, so that those of the next kernel find room next to them.
//
//   producer warp:         wait for a free stage ─► TMA of a chunk of W and a chunk of X
//   consumer warpgroup:    wait for a full stage ─► wgmma ─► free the stage ─► at the end of a tile: epilogue
//
// Epilogues:  store     y = x W^T
//             swiglu    y = silu(g) * u, with the roundings of linear.cu; TMA interleaves gate and up rows by 8
//             float32   y = x W^T, the sums as they are
// The tensor map of W has four axes, (k, 8 rows, 2, the rest), and a tile is 8 x 2 x 4 rows: but for swiglu the
// second axis goes on to the next 8 rows, for swiglu from gate rows to the up rows of the same features. So a thread,
// whose accumulators are of rows r and r + 8, has the gate and the up value of one feature.
//
// With adapters (kAdapted) the grid's first blocks make A x, and a tile's last chunks are those of B, which are added to
// its sums: lora/decode_adapters.cuh.
#pragma once
#include "common/hopper.cuh"
#include "common/vectors.cuh"
#include "lora/decode_adapters.cuh"

using namespace hopper;

namespace {

constexpr int kBox = 64;                     // K of one box: 128 bytes, one swizzle row
constexpr int kBoxes = 2;
constexpr int kColumns = kBox * kBoxes;      // K of a chunk: with one box there are twice the waits
constexpr int kRows = 64;                    // features of a tile
constexpr int kConsumers = 128;              // one warpgroup
constexpr int kThreads = kConsumers + 32;    // and the producer
constexpr int kAdaptedThreads = kThreads + 32;  // and the warp that delivers A x
constexpr int kMostBlocksPerTile = 3;        // a cluster: 40 tiles (`down`) for 132 multiprocessors
constexpr int kBlocksPerMultiprocessor = 2;
constexpr int kAlignment = 1024;             // of swizzled boxes

enum Epilogue { kStore, kSwiglu, kFloat32 };

// Sizes for up to kTokens tokens; decode_gemm.py repeats those of launches. At most half of a multiprocessor's shared
// memory, and the division of L1 cache and shared memory that all kernels ask for: another one would have to wait until
// the multiprocessor is empty.
template <int kTokens>
struct Sizes {
  static constexpr int kSharedBytes = (kTokens == 8 ? 113 : 89) * 1024;
  static constexpr int kSums = kTokens / 2;  // of a consumer
  static constexpr int kWeightBox = kRows * kBox * 2, kXBox = kTokens * kBox * 2;
  static constexpr int kStageBytes = (kWeightBox + kXBox) * kBoxes;
  static constexpr int kPartialBytes = (kMostBlocksPerTile - 1) * kSums * kConsumers * 4;
  static constexpr int kStages = (kSharedBytes - kPartialBytes - 8) / (kStageBytes + 16);
};

template <int kTokens>
struct Shared {
  using S = Sizes<kTokens>;
  alignas(kAlignment) uint8_t w[S::kStages][kBoxes][S::kWeightBox];
  alignas(kAlignment) uint8_t x[S::kStages][kBoxes][S::kXBox];
  float partials[kMostBlocksPerTile - 1][S::kSums][kConsumers];
  uint64_t full[S::kStages], empty[S::kStages], partials_full;
  uint64_t freed[S::kStages];  // a stage is free for A x, of which the producer tells the warp that delivers it
  uint32_t asked;              // columns of B, as lora::Delivery has them
};

// Which tiles and which split of K a block multiplies.
struct Work {
  int rank, size;               // in the cluster, which shares a tile
  int first_tile, tile_stride;
  int first_chunk, num_chunks;  // of W, of each tile
  int tile_steps, steps;        // chunks of a tile, with those of B, and of all tiles

  __device__ __forceinline__ Work(int tiles, int chunks_per_tile, int blocks_before, int delta_chunks)
      : rank(cluster_rank()), size(cluster_size()) {
    first_tile = (blockIdx.x - blocks_before) / size;
    tile_stride = (gridDim.x - blocks_before) / size;
    first_chunk = chunks_per_tile * rank / size;
    num_chunks = chunks_per_tile * (rank + 1) / size - first_chunk;
    tile_steps = num_chunks + (rank == 0 ? delta_chunks : 0);  // the first block has all sums in the end
    steps = (tiles - first_tile + tile_stride - 1) / tile_stride * tile_steps;
  }
};

template <int kTokens>
__device__ __forceinline__ void load_w(Shared<kTokens>& s, int stage, const CUtensorMap& map, int tile, int chunk,
                                       uint64_t policy) {
#pragma unroll
  for (int box = 0; box < kBoxes; box++)
    load_box(s.w[stage][box], &map, &s.full[stage], chunk * kColumns + box * kBox, 0, 0, tile * (kRows / 16), policy);
}

template <int kTokens>
__device__ __forceinline__ void load_x(Shared<kTokens>& s, int stage, const CUtensorMap& map, int chunk,
                                       uint64_t policy) {
#pragma unroll
  for (int box = 0; box < kBoxes; box++)
    load_box(s.x[stage][box], &map, &s.full[stage], chunk * kColumns + box * kBox, 0, policy);
}

template <int kTokens, bool kAdapted>
__device__ void produce(Shared<kTokens>& s, const Work& work, const CUtensorMap& w_map, const CUtensorMap& x_map,
                        const lora::DecodeAdapters* adapters) {
  using S = Sizes<kTokens>;
  const uint64_t once = evict_first_policy(), again = evict_last_policy();
  const int ahead = min(S::kStages, work.steps);
  int tile = work.first_tile, chunk = 0;
  auto advance = [&] {
    if (++chunk == work.tile_steps) {
      chunk = 0;
      tile += work.tile_stride;
    }
  };
  // With adapters a stage is full after two arrivals: those of a chunk of W and of X, or of B and, by the warp that
  // delivers it, of A x.
  auto load_rows = [&](int stage) {
    if constexpr (kAdapted) {
      if (chunk >= work.num_chunks) {
        barrier_arrive(&s.freed[stage]);
        barrier_expect(&s.full[stage], S::kWeightBox);
        load_box(s.w[stage][0], &adapters->b, &s.full[stage], (chunk - work.num_chunks) * kBox, 0, 0,
                 tile * (kRows / 16), once);
        return;
      }
    }
    barrier_expect(&s.full[stage], kAdapted ? S::kWeightBox * kBoxes : S::kStageBytes);
    load_w<kTokens>(s, stage, w_map, tile, work.first_chunk + chunk, once);
  };
  auto load_tokens = [&](int stage, int own) {
    if constexpr (kAdapted) {
      if (own >= work.num_chunks) return;
      barrier_expect(&s.full[stage], S::kXBox * kBoxes);
    }
    load_x<kTokens>(s, stage, x_map, work.first_chunk + own, again);
  };
  // At first all stages are free. They are full only with their chunks of X, which the kernel ahead may write.
  for (int i = 0; i < ahead; i++, advance()) load_rows(i);
  wait_for_previous_kernel();
  for (int i = 0; i < ahead; i++) load_tokens(i, i % work.tile_steps);
  for (int i = ahead; i < work.steps; i++, advance()) {
    const int stage = i % S::kStages;
    barrier_wait(&s.empty[stage], (i / S::kStages - 1) & 1);
    load_rows(stage);
    load_tokens(stage, chunk);
  }
}

// A x, where a chunk of W has its second half. Of B a chunk is one box.
template <int kTokens>
__device__ __forceinline__ lora::Halved<kTokens>& shrunk_in(Shared<kTokens>& s, int stage) {
  static_assert(sizeof(lora::Halved<kTokens>) <= Sizes<kTokens>::kWeightBox && kBox == lora::kDeltaColumns);
  return *reinterpret_cast<lora::Halved<kTokens>*>(s.w[stage][1]);
}

// Brings A x for each chunk of B, by one warp of a block that has the sums of tiles.
template <int kTokens, bool kGated>
__device__ void deliver(Shared<kTokens>& s, const Work& work, const lora::DecodeAdapters& adapters, int m) {
  using S = Sizes<kTokens>;
  const lora::Delivery<kTokens> delivery(adapters, m);
  const uint32_t asked = delivery.asked();
  if (threadIdx.x % 32 == 0) s.asked = asked;
  delivery.wait();
  int tile = work.first_tile;
  uint32_t parities = 0;  // of each stage's next phase of `freed`: a stage is freed again when this warp has used it
  for (int tile_end = work.tile_steps; tile_end <= work.steps; tile_end += work.tile_steps, tile += work.tile_stride) {
    const lora::Planes planes = lora::Planes::of<kGated>(adapters, tile);
    for (int i = tile_end - work.tile_steps + work.num_chunks; i < tile_end; i++) {
      const int stage = i % S::kStages, chunk = i - (tile_end - work.tile_steps + work.num_chunks);
      for (int plane = 0; plane < planes.count; plane++) {
        uint4 halves[lora::Delivery<kTokens>::kRounds];
        delivery.read(planes.first + plane, chunk, halves);
        if (plane == 0) barrier_wait(&s.freed[stage], parities >> stage & 1);
        delivery.write(halves, shrunk_in<kTokens>(s, stage), plane);
      }
      parities ^= 1u << stage;
      lora::fence_shared_copies();  // the copy engine writes there next
      __syncwarp();
      if (threadIdx.x % 32 == 0) barrier_arrive(&s.full[stage]);
    }
  }
  delivery.leave_shrunk(work.tile_stride);
}

template <int kTokens>
__device__ __forceinline__ void multiply(float (&d)[kTokens / 2], const Shared<kTokens>& s, int stage) {
  wgmma_fence();
#pragma unroll
  for (int box = 0; box < kBoxes; box++) {
    const uint64_t w = tile_descriptor(s.w[stage][box]);
    const uint64_t x = tile_descriptor(s.x[stage][box]);
#pragma unroll
    for (int step = 0; step < kBox / 16; step++) wgmma<kTokens>(d, w + step * 2, x + step * 2);
  }
  wgmma_commit();
  wgmma_wait<0>();
}

// Sends this block's sums to the cluster's first block, or, there, adds the others' in the order of ranks.
template <int kTokens>
__device__ bool reduce_partials(float (&d)[kTokens / 2], const Work& work, Shared<kTokens>& s) {
  using S = Sizes<kTokens>;
  const int thread = threadIdx.x;
  if (work.rank != 0) {
    const uint32_t partials = address_in(&s.partials[work.rank - 1][0][thread], 0);
#pragma unroll
    for (int i = 0; i < S::kSums; i++) store_in(partials + i * kConsumers * 4, d[i]);
    barrier_arrive_in(address_in(&s.partials_full, 0));
    return false;
  }
  barrier_wait_cluster(&s.partials_full, 0);  // the only phase: a cluster has one tile
  for (int other = 0; other < work.size - 1; other++) {
#pragma unroll
    for (int i = 0; i < S::kSums; i++) d[i] += s.partials[other][i][thread];
  }
  return true;
}

template <Epilogue>
struct OutputOf {
  using Type = bf16;
};

template <>
struct OutputOf<kFloat32> {
  using Type = float;
};

template <Epilogue kEpilogue>
using Output = typename OutputOf<kEpilogue>::Type;

template <int kTokens, Epilogue kEpilogue>
__device__ void finish_tile(const float (&d)[kTokens / 2], int tile, Output<kEpilogue>* y, int m, int n) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kTokens / 4; i++) {
    const int token = i / 2 * 8 + 2 * (lane % 4) + i % 2;
    if (token >= m) continue;
    const float first = d[i / 2 * 4 + i % 2], second = d[i / 2 * 4 + 2 + i % 2];
    if constexpr (kEpilogue == kStore) {
      bf16* to = y + int64_t(token) * n + tile * kRows + warp * 16 + lane / 4;
      to[0] = __float2bfloat16_rn(first);
      to[8] = __float2bfloat16_rn(second);
    } else if constexpr (kEpilogue == kFloat32) {
      float* to = y + int64_t(token) * n + tile * kRows + warp * 16 + lane / 4;
      to[0] = first;
      to[8] = second;
    } else {
      bf16* to = y + int64_t(token) * (n / 2) + tile * (kRows / 2) + warp * 8 + lane / 4;
      *to = __float2bfloat16_rn(silu(rounded(first)) * rounded(second));
    }
  }
}

template <int kTokens, Epilogue kEpilogue, bool kAdapted>
__device__ void consume(Shared<kTokens>& s, const Work& work, Output<kEpilogue>* y, int m, int n,
                        const lora::DecodeAdapters* adapters) {
  using S = Sizes<kTokens>;
  float d[S::kSums] = {};
  int tile = work.first_tile, chunk = 0;
  for (int i = 0; i < work.steps; i++) {
    const int stage = i % S::kStages;
    barrier_wait(&s.full[stage], (i / S::kStages) & 1);
    if (!kAdapted || chunk < work.num_chunks) {
      multiply<kTokens>(d, s, stage);
    } else if constexpr (kAdapted) {
      constexpr bool kGated = kEpilogue == kSwiglu;
      const int row = tile * kRows + threadIdx.x / 32 * 16;
      const int plane = kGated ? 0 : adapters->piece_of(row) - adapters->piece_of(tile * kRows);
      const uint32_t asked = s.asked >> ((chunk - work.num_chunks) * lora::kDeltaSteps);
      lora::add_delta<kTokens, kGated>(d, s.w[stage][0], shrunk_in<kTokens>(s, stage), plane, asked);
      __syncwarp();
    }
    if (threadIdx.x % 32 == 0) barrier_arrive(&s.empty[stage]);
    if (++chunk < work.tile_steps) continue;
    if (work.size == 1 || reduce_partials<kTokens>(d, work, s)) finish_tile<kTokens, kEpilogue>(d, tile, y, m, n);
#pragma unroll
    for (int j = 0; j < S::kSums; j++) d[j] = 0;
    chunk = 0;
    tile += work.tile_stride;
  }
}

template <int kTokens, Epilogue kEpilogue, bool kAdapted = false>
__device__ void run(const CUtensorMap& w_map, const CUtensorMap& x_map, Output<kEpilogue>* y, int m, int n, int k,
                    const lora::DecodeAdapters* adapters = nullptr) {
  using S = Sizes<kTokens>;
  static_assert(sizeof(Shared<kTokens>) <= S::kSharedBytes && S::kStages >= 2);
  extern __shared__ __align__(kAlignment) uint8_t raw[];
  auto& s = *reinterpret_cast<Shared<kTokens>*>(raw);
  int blocks_before = 0;
  if constexpr (kAdapted) {
    static_assert(sizeof(lora::ShrinkShared<kTokens>) <= S::kSharedBytes);
    blocks_before = adapters->shrink_blocks;
    if (int(blockIdx.x) < blocks_before) {
      launch_dependents();
      auto& shrink = *reinterpret_cast<lora::ShrinkShared<kTokens>*>(raw);
      if (int(blockIdx.x) < adapters->parts()) lora::shrink_part<kTokens>(*adapters, m, k, blockIdx.x, shrink);
      return;
    }
  }
  const Work work(n / kRows, k / kColumns, blocks_before, kAdapted ? adapters->delta_chunks() : 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kStages; i++) {
      barrier_init(&s.full[i], kAdapted ? 2 : 1);
      barrier_init(&s.empty[i], kConsumers / 32);
      if constexpr (kAdapted) barrier_init(&s.freed[i], 1);
    }
    if (work.size > 1) barrier_init(&s.partials_full, (work.size - 1) * kConsumers);
    barrier_init_fence();
  }
  if (work.size > 1)
    cluster_sync();  // the others arrive at the first block's barrier
  else
    __syncthreads();
  // Before the wait, so that the next kernel's weights are on their way during all of this one; after it, the
  // products of a step of 8 tokens take 2.46 ms instead of 2.3.
  launch_dependents();
  if (threadIdx.x < kConsumers) {
    wait_for_previous_kernel();
    consume<kTokens, kEpilogue, kAdapted>(s, work, y, m, n, adapters);
  } else if (threadIdx.x < kThreads) {
    if (threadIdx.x == kConsumers) produce<kTokens, kAdapted>(s, work, w_map, x_map, adapters);
  } else if constexpr (kAdapted) {
    wait_for_previous_kernel();
    if (work.rank == 0) deliver<kTokens, kEpilogue == kSwiglu>(s, work, *adapters, m);
  }
  // The first block stays until the others, which write to its memory, have left: a thread that has ended counts as
  // arrived.
  if (work.size > 1 && work.rank == 0) {
    __syncwarp();
    cluster_meet();
  }
}

}  // namespace
