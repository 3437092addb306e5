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
// A tile of five slices of 16 rows is for gate and up where blocks then have one each: by a second product of 64 rows, of
// which those after the tile's are whatever follows it in shared memory, and stored nowhere.
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
// With adapters the grid's first blocks make A x. In the product (kWithin) a tile's last chunks are those of B, which are
// added to its sums: lora/decode_adapters.cuh. Beside it (kBeside) tiles are those without adapters, bit for bit, and the
// kernel after this one adds B (A x): lora/deferred_delta.cuh.
#pragma once
#include "common/hopper.cuh"
#include "common/vectors.cuh"
#include "lora/decode_adapters.cuh"

using namespace hopper;

namespace {

constexpr int kBox = 64;                     // K of one box: 128 bytes, one swizzle row
constexpr int kBoxes = 2;
constexpr int kColumns = kBox * kBoxes;      // K of a chunk: with one box there are twice the waits
constexpr int kSliceRows = 16, kProductSlices = 4;  // features of a slice; slices of a product of the tensor cores
constexpr int kConsumers = 128;              // one warpgroup
constexpr int kThreads = kConsumers + 32;    // and the producer
constexpr int kAdaptedThreads = kThreads + 32;  // and the warp that delivers A x
constexpr int kMostBlocksPerTile = 3;        // a cluster: 40 tiles (`down`) for 132 multiprocessors
constexpr int kBlocksPerMultiprocessor = 2;
constexpr int kAlignment = 1024;             // of swizzled boxes
constexpr int kProductBytes = kProductSlices * kSliceRows * kBox * 2;  // of a box, for a product

enum Epilogue { kStore, kSwiglu, kFloat32 };

// How a product has adapters.
enum Adapted { kWithout, kBeside, kWithin };

// Sizes for up to kTokens tokens; decode_gemm.py repeats those of launches. At most half of a multiprocessor's shared
// memory, and the division of L1 cache and shared memory that all kernels ask for: another one would have to wait until
// the multiprocessor is empty.
template <int kTokens, int kSlices>
struct Sizes {
  static constexpr int kSharedBytes = (kTokens == 8 || kSlices != kProductSlices ? 113 : 89) * 1024;
  static constexpr int kRows = kSlices * kSliceRows;  // features of a tile
  static constexpr int kProducts = (kSlices + kProductSlices - 1) / kProductSlices;
  static constexpr int kSums = kTokens / 2;  // of a consumer and a product
  static constexpr int kWeightBox = kRows * kBox * 2, kXBox = kTokens * kBox * 2;
  static constexpr int kStageBytes = (kWeightBox + kXBox) * kBoxes;
  static constexpr int kPartials = kSlices == kProductSlices ? kMostBlocksPerTile - 1 : 0;  // that others send
  static constexpr int kPartialBytes = kPartials * kSums * kConsumers * 4;
  static constexpr int kStages = (kSharedBytes - kPartialBytes - 16) / (kStageBytes + 16);
};

template <int kTokens, int kSlices>
struct Shared {
  using S = Sizes<kTokens, kSlices>;
  alignas(kAlignment) uint8_t w[S::kStages][kBoxes][S::kWeightBox];
  alignas(kAlignment) uint8_t x[S::kStages][kBoxes][S::kXBox];
  float partials[S::kPartials * S::kSums * kConsumers + 1];  // and one, as there is no array of none
  uint64_t full[S::kStages], empty[S::kStages], partials_full;
  uint64_t freed[S::kStages];  // a stage is free for A x, of which the producer tells the warp that delivers it
  uint32_t asked;              // columns of B, as lora::Delivery has them

  __device__ __forceinline__ float* partial(int other, int sum) { return partials + (other * S::kSums + sum) * kConsumers; }
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

template <int kTokens, int kSlices>
__device__ __forceinline__ void load_w(Shared<kTokens, kSlices>& s, int stage, const CUtensorMap& map, int tile, int chunk,
                                       uint64_t policy) {
#pragma unroll
  for (int box = 0; box < kBoxes; box++)
    load_box(s.w[stage][box], &map, &s.full[stage], chunk * kColumns + box * kBox, 0, 0, tile * kSlices, policy);
}

template <int kTokens, int kSlices>
__device__ __forceinline__ void load_x(Shared<kTokens, kSlices>& s, int stage, const CUtensorMap& map, int chunk,
                                       uint64_t policy) {
#pragma unroll
  for (int box = 0; box < kBoxes; box++)
    load_box(s.x[stage][box], &map, &s.full[stage], chunk * kColumns + box * kBox, 0, policy);
}

template <int kTokens, int kSlices, bool kAdapted>
__device__ void produce(Shared<kTokens, kSlices>& s, const Work& work, const CUtensorMap& w_map, const CUtensorMap& x_map,
                        const lora::DecodeAdapters* adapters) {
  using S = Sizes<kTokens, kSlices>;
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
                 tile * kSlices, once);
        return;
      }
    }
    barrier_expect(&s.full[stage], kAdapted ? S::kWeightBox * kBoxes : S::kStageBytes);
    load_w<kTokens, kSlices>(s, stage, w_map, tile, work.first_chunk + chunk, once);
  };
  auto load_tokens = [&](int stage, int own) {
    if constexpr (kAdapted) {
      if (own >= work.num_chunks) return;
      barrier_expect(&s.full[stage], S::kXBox * kBoxes);
    }
    load_x<kTokens, kSlices>(s, stage, x_map, work.first_chunk + own, again);
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
template <int kTokens, int kSlices>
__device__ __forceinline__ lora::Halved<kTokens>& shrunk_in(Shared<kTokens, kSlices>& s, int stage) {
  static_assert(sizeof(lora::Halved<kTokens>) <= Sizes<kTokens, kSlices>::kWeightBox && kBox == lora::kDeltaColumns);
  return *reinterpret_cast<lora::Halved<kTokens>*>(s.w[stage][1]);
}

// Brings A x for each chunk of B, by one warp of a block that has the sums of tiles.
template <int kTokens, bool kGated, int kSlices>
__device__ void deliver(Shared<kTokens, kSlices>& s, const Work& work, const lora::DecodeAdapters& adapters, int m) {
  static_assert(kGated || kSlices == kProductSlices);  // tiles of 64 rows say which pieces they have
  using S = Sizes<kTokens, kSlices>;
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
        constexpr int kTogether = lora::Delivery<kTokens>::kTogether;
        for (int round = 0; round < delivery.rounds(); round += kTogether) {
          typename lora::Delivery<kTokens>::Four fours[kTogether];
#pragma unroll
          for (int j = 0; j < kTogether; j++) fours[j] = delivery.read(planes.first + plane, chunk, round + j);
          if (round == 0) {
            if (plane == 0) barrier_wait(&s.freed[stage], parities >> stage & 1);
            delivery.clear(shrunk_in<kTokens, kSlices>(s, stage), plane);
          }
#pragma unroll
          for (int j = 0; j < kTogether; j++) delivery.write(fours[j], shrunk_in<kTokens, kSlices>(s, stage), plane);
        }
      }
      parities ^= 1u << stage;
      lora::fence_shared_copies();  // the copy engine writes there next
      __syncwarp();
      if (threadIdx.x % 32 == 0) barrier_arrive(&s.full[stage]);
    }
  }
  delivery.leave_shrunk(work.tile_stride);
}

template <int kTokens, int kSlices>
__device__ __forceinline__ void multiply(float (&d)[Sizes<kTokens, kSlices>::kProducts][kTokens / 2],
                                         const Shared<kTokens, kSlices>& s, int stage) {
  wgmma_fence();
#pragma unroll
  for (int box = 0; box < kBoxes; box++) {
    const uint64_t w = tile_descriptor(s.w[stage][box]);
    const uint64_t x = tile_descriptor(s.x[stage][box]);
#pragma unroll
    for (int step = 0; step < kBox / 16; step++)
#pragma unroll
      for (int product = 0; product < Sizes<kTokens, kSlices>::kProducts; product++)
        wgmma<kTokens>(d[product], w + step * 2 + product * kProductBytes / 16, x + step * 2);
  }
  wgmma_commit();
  wgmma_wait<0>();
}

// Sends this block's sums to the cluster's first block, or, there, adds the others' in the order of ranks.
template <int kTokens, int kSlices>
__device__ bool reduce_partials(float (&d)[kTokens / 2], const Work& work, Shared<kTokens, kSlices>& s) {
  using S = Sizes<kTokens, kSlices>;
  const int thread = threadIdx.x;
  if (work.rank != 0) {
    const uint32_t partials = address_in(s.partial(work.rank - 1, 0) + thread, 0);
#pragma unroll
    for (int i = 0; i < S::kSums; i++) store_in(partials + i * kConsumers * 4, d[i]);
    barrier_arrive_in(address_in(&s.partials_full, 0));
    return false;
  }
  barrier_wait_cluster(&s.partials_full, 0);  // the only phase: a cluster has one tile
  for (int other = 0; other < work.size - 1; other++) {
#pragma unroll
    for (int i = 0; i < S::kSums; i++) d[i] += s.partial(other, i)[thread];
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

// The sums of up to four slices, of which a warp has one.
template <int kTokens, Epilogue kEpilogue>
__device__ void finish_slices(const float (&d)[kTokens / 2], int first_slice, int end_slice, Output<kEpilogue>* y, int m,
                             int n) {
  const int lane = threadIdx.x % 32, slice = first_slice + threadIdx.x / 32;
  if (slice >= end_slice) return;
#pragma unroll
  for (int i = 0; i < kTokens / 4; i++) {
    const int token = i / 2 * 8 + 2 * (lane % 4) + i % 2;
    if (token >= m) continue;
    const float first = d[i / 2 * 4 + i % 2], second = d[i / 2 * 4 + 2 + i % 2];
    if constexpr (kEpilogue == kStore) {
      bf16* to = y + int64_t(token) * n + slice * kSliceRows + lane / 4;
      to[0] = __float2bfloat16_rn(first);
      to[8] = __float2bfloat16_rn(second);
    } else if constexpr (kEpilogue == kFloat32) {
      float* to = y + int64_t(token) * n + slice * kSliceRows + lane / 4;
      to[0] = first;
      to[8] = second;
    } else {
      bf16* to = y + int64_t(token) * (n / 2) + slice * (kSliceRows / 2) + lane / 4;
      *to = __float2bfloat16_rn(silu(rounded(first)) * rounded(second));
    }
  }
}

template <int kTokens, Epilogue kEpilogue, int kSlices, bool kAdapted>
__device__ void consume(Shared<kTokens, kSlices>& s, const Work& work, Output<kEpilogue>* y, int m, int n,
                        const lora::DecodeAdapters* adapters) {
  using S = Sizes<kTokens, kSlices>;
  float d[S::kProducts][S::kSums] = {};
  int tile = work.first_tile, chunk = 0;
  for (int i = 0; i < work.steps; i++) {
    const int stage = i % S::kStages;
    barrier_wait(&s.full[stage], (i / S::kStages) & 1);
    if (!kAdapted || chunk < work.num_chunks) {
      multiply<kTokens, kSlices>(d, s, stage);
    } else if constexpr (kAdapted) {
      constexpr bool kGated = kEpilogue == kSwiglu;
      const int row = tile * S::kRows + threadIdx.x / 32 * kSliceRows;
      const int plane = kGated ? 0 : adapters->piece_of(row) - adapters->piece_of(tile * S::kRows);
      const uint32_t asked = s.asked >> ((chunk - work.num_chunks) * lora::kDeltaSteps);
#pragma unroll
      for (int product = 0; product < S::kProducts; product++)
        if (product * kProductSlices + int(threadIdx.x) / 32 < kSlices)
          lora::add_delta<kTokens, kGated>(d[product], s.w[stage][0] + product * kProductBytes,
                                           shrunk_in<kTokens, kSlices>(s, stage), plane, asked);
      __syncwarp();
    }
    if (threadIdx.x % 32 == 0) barrier_arrive(&s.empty[stage]);
    if (++chunk < work.tile_steps) continue;
    bool has_sums = true;
    if constexpr (S::kPartials > 0) has_sums = work.size == 1 || reduce_partials<kTokens, kSlices>(d[0], work, s);
    if (has_sums) {
      const int end_slice = min((tile + 1) * kSlices, n / kSliceRows);
#pragma unroll
      for (int product = 0; product < S::kProducts; product++)
        finish_slices<kTokens, kEpilogue>(d[product], tile * kSlices + product * kProductSlices, end_slice, y, m, n);
    }
#pragma unroll
    for (int product = 0; product < S::kProducts; product++)
#pragma unroll
      for (int j = 0; j < S::kSums; j++) d[product][j] = 0;
    chunk = 0;
    tile += work.tile_stride;
  }
}

template <int kTokens, Epilogue kEpilogue, Adapted kHow = kWithout, int kSlices = kProductSlices>
__device__ void run(const CUtensorMap& w_map, const CUtensorMap& x_map, Output<kEpilogue>* y, int m, int n, int k,
                    const lora::DecodeAdapters* adapters = nullptr) {
  using S = Sizes<kTokens, kSlices>;
  constexpr bool kAdapted = kHow == kWithin;
  static_assert(sizeof(Shared<kTokens, kSlices>) <= S::kSharedBytes && S::kStages >= 2);
  extern __shared__ __align__(kAlignment) uint8_t raw[];
  auto& s = *reinterpret_cast<Shared<kTokens, kSlices>*>(raw);
  int blocks_before = 0;
  if constexpr (kHow != kWithout) {
    // Of 32 tokens a block takes half: all of them would take so many registers that the next kernel finds no room.
    constexpr int kShrunk = kTokens < 16 ? kTokens : 16;
    static_assert(sizeof(lora::ShrinkShared<kShrunk>) <= S::kSharedBytes && (kTokens == kShrunk || !kAdapted));
    blocks_before = adapters->shrink_blocks;
    if (int(blockIdx.x) < blocks_before) {
      launch_dependents();
      auto& shrink = *reinterpret_cast<lora::ShrinkShared<kShrunk>*>(raw);
      int part = blockIdx.x, first_token = 0;
      if constexpr (kTokens > kShrunk) {
        first_token = part / adapters->parts() * kShrunk;
        part %= adapters->parts();
        if (first_token >= m) return;
      }
      if (part >= adapters->parts()) return;
      lora::shrink_part<kShrunk>(*adapters, m, k, part, shrink, first_token);
      if constexpr (kAdapted) {
        __syncthreads();
        if (threadIdx.x == 0) lora::count_part(&lora::parts_ready);
      }
      return;
    }
  }
  const int tiles = (n + S::kRows - 1) / S::kRows;
  const Work work(tiles, k / kColumns, blocks_before, kAdapted ? adapters->delta_chunks() : 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kStages; i++) {
      barrier_init(&s.full[i], kAdapted ? 2 : 1);
      barrier_init(&s.empty[i], kConsumers / 32);
      if constexpr (kAdapted) barrier_init(&s.freed[i], 1);
    }
    if (S::kPartials > 0 && work.size > 1) barrier_init(&s.partials_full, (work.size - 1) * kConsumers);
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
    consume<kTokens, kEpilogue, kSlices, kAdapted>(s, work, y, m, n, adapters);
  } else if (threadIdx.x < kThreads) {
    if (threadIdx.x == kConsumers) produce<kTokens, kSlices, kAdapted>(s, work, w_map, x_map, adapters);
  } else if constexpr (kAdapted) {
    wait_for_previous_kernel();
    if (work.rank == 0) deliver<kTokens, kEpilogue == kSwiglu, kSlices>(s, work, *adapters, m);
  }
  // The first block stays until the others, which write to its memory, have left: a thread that has ended counts as
  // arrived.
  if (work.size > 1 && work.rank == 0) {
    __syncwarp();
    cluster_meet();
  }
}

}  // namespace
