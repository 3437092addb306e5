// Y = X W^T with a quantised W, for so many tokens that the tensor cores decide: codes become BF16 in shared memory.
//
//   a warp of the producers:   wait for a free slot ─► bulk copies of codes
//   a thread of them:          wait for a free stage ─► TMA of a chunk of X
//   dequantising warpgroups:   wait for codes and for a free stage ─► W in BF16 ─► free the codes
//   multiplying warpgroups:    wait for both stages ─► wgmma ─► free the stages before ─► after a tile: epilogue
//
// Tokens are the tensor cores' 64-row side, as in gemm.cuh, and W, which all multiplying warpgroups of a block read, is
// dequantised once for the block, next to their products and not between them, as in lowbit_gemm.cuh.
//
// Codes lie in the tiles of lowbit_tiles.cuh. A block takes halves of them: 16 rows, those of warps 2 h and 2 h + 1. Halves
// are counted so that two neighbours have 32 neighbouring rows: half e is of tile 2 (e / 4) + e % 2, h = e / 2 % 2.
//
// A cluster of CTAs is `splits` x `multicast_ctas`, as in gemm.cuh. One run twice is bit-identical.
#pragma once
#include "common/hopper.cuh"
#include "gemm/gemm_epilogue.cuh"
#include "gemm/wgmma.cuh"
#include "lowbit/bulk_copies.cuh"
#include "lowbit/lowbit_tiles.cuh"

using namespace hopper;

namespace staged {

using lowbit::Scales;

constexpr int kChunk = 64, kChunksOfTile = lowbit::kTileColumns / kChunk;  // of K: 128 bytes, one swizzle row
constexpr int kRowBytes = kChunk * 2, kAlignment = 1024;                   // of swizzled boxes
constexpr int kWarpgroup = 128;
constexpr int kHalfRows = lowbit::kTileRows / 2, kPieceBytes = lowbit::kTileThreads * 16, kHalfPieceBytes = kPieceBytes / 2;
constexpr int kBlockBytes = 8 * kRowBytes;  // of 8 rows of W in a stage
constexpr int kMostSlots = 16;

// A weight and what a launch does; `Problem` of cuda/lowbit/staged_gemm.py.
struct Problem {
  const uint8_t* tiles;
  void* y;
  int m, n;               // of y
  int tile_rows, chunks;  // tiles along the rows of W, and along K
  int tile_bytes;
  Scales scales;
  int multicast_ctas, splits;
  int token_tiles, wide_tiles;  // tiles of the product: along its tokens, and along its rows those of multicast CTAs
  int token_group;              // token tiles that are multiplied before the next rows
  const float* factors;         // of each row of W, where the format has them
};

// Sizes of a kernel; cuda/lowbit/staged_gemm.py repeats those of launches. The registers of all warpgroups together are
// those that a block is launched with.
template <int kTokens_, int kColumns_>
struct Sizes {
  static constexpr int kTokens = kTokens_, kColumns = kColumns_;
  static constexpr int kHigh = kTokens > 192 ? 2 : 1;  // times 64 tokens of a warpgroup
  static constexpr int kConsumers = kTokens / kHigh * 2;
  static constexpr int kDequantisingWarps = kTokens == 128 ? 6 : 4, kDequantisers = kDequantisingWarps * 32;
  // Registers are traded where sums take many, for which producers must be a whole warpgroup.
  static constexpr bool kTrades = kHigh > 1;
  static constexpr int kThreads = kConsumers + kDequantisers + (kTrades ? kWarpgroup : 64);
  static constexpr int kConsumerRegisters = 192, kDequantiserRegisters = 88, kProducerRegisters = 40;
  static constexpr int kSharedBytes = 225 * 1024;
  static constexpr int kSums = kColumns / 2;
  static constexpr int kHalves = kColumns / kHalfRows;
  static constexpr int kXBytes = kTokens * kRowBytes, kWBytes = kColumns * kRowBytes;
  static constexpr int kXStages = kTokens == 256 ? 3 : kTokens == 192 ? 4 : 5, kWStages = kColumns > 128 ? 3 : 4;
};

struct Barriers {
  uint64_t codes_full[kMostSlots], codes_empty[kMostSlots];
  uint64_t x_full[8], x_empty[8], w_full[4], w_empty[4];
};

// Shared memory: stages of X, of W in BF16, slots of codes, barriers.
template <class S, typename Format>
struct Shared {
  static constexpr int kW = S::kXStages * S::kXBytes, kCodes = kW + S::kWStages * S::kWBytes;
  static constexpr int kBarriers = S::kSharedBytes - int(sizeof(Barriers));
  static constexpr int kPiecesBytes = S::kHalves * Format::kPieces * kHalfPieceBytes;  // of a slot
  static_assert(S::kXStages <= 8 && S::kWStages <= 4);
  static_assert(S::kTokens * S::kColumns * 4 <= kBarriers, "the sums of a split must fit");
  uint8_t* base;
  int end_bytes, slot_bytes, slots;  // of what follows the codes of a half

  __device__ Shared(uint8_t* base, int tile_bytes) : base(base) {
    end_bytes = tile_bytes - Format::kPieces * kPieceBytes;
    slot_bytes = kPiecesBytes + S::kHalves * end_bytes;
    slots = min(kMostSlots, (kBarriers - kCodes) / slot_bytes);
  }
  __device__ __forceinline__ uint8_t* x(int stage) const { return base + stage * S::kXBytes; }
  __device__ __forceinline__ uint8_t* w(int stage) const { return base + kW + stage * S::kWBytes; }
  __device__ __forceinline__ uint8_t* codes(int slot) const { return base + kCodes + slot * slot_bytes; }
  __device__ __forceinline__ Barriers& barriers() const { return *reinterpret_cast<Barriers*>(base + kBarriers); }
};

// A place in a ring.
struct Place {
  int at = 0, phase = 0;
  __device__ __forceinline__ void advance(int places) {
    if (++at == places) at = 0, phase ^= 1;
  }
};

struct Tile {
  int first_token, column_tile;
};

// Which tiles and which split of K a block multiplies.
template <class S, Epilogue kEpilogue>
struct Work {
  static constexpr int kHalvesOfTile = S::kHalves / (kEpilogue == kSwiglu ? 2 : 1);  // of gate where there is one
  int multicast_ctas, multicast_rank, splits, split;
  int first, stride, tiles;  // of the cluster's tiles, each `multicast_ctas` columns wide
  int token_tiles, wide_tiles, group;
  int first_chunk, num_chunks;  // of K: tiles of it
  int last_half;

  __device__ explicit Work(const Problem& p) {
    const int rank = cluster_rank(), size = p.multicast_ctas * p.splits;
    multicast_ctas = p.multicast_ctas, multicast_rank = rank % multicast_ctas;
    splits = p.splits, split = rank / multicast_ctas;
    first = blockIdx.x / size, stride = gridDim.x / size;
    token_tiles = p.token_tiles, wide_tiles = p.wide_tiles, group = p.token_group;
    tiles = token_tiles * wide_tiles;
    first_chunk = p.chunks * split / splits;
    num_chunks = p.chunks * (split + 1) / splits - first_chunk;
    last_half = p.tile_rows * (kEpilogue == kSwiglu ? 1 : 2) - 1;
  }

  // Tiles go through `group` token tiles before the next columns, so that both stay in the L2 cache for a while.
  __device__ Tile tile(int index) const {
    const int of_group = group * wide_tiles, first_row = index / of_group * group;
    const int rows = min(group, token_tiles - first_row), within = index % of_group;
    return {(first_row + within % rows) * S::kTokens, within / rows * multicast_ctas + multicast_rank};
  }

  // Half `index` of the block: of gate and of up in turns. Those after the last one are that one again.
  __device__ __forceinline__ int half(const Tile& tile, int index) const {
    return min(tile.column_tile * kHalvesOfTile + (kEpilogue == kSwiglu ? index / 2 : index), last_half);
  }
};

// Of a half of the block and its 8 rows: the block of 8 rows in a stage of W. Blocks of gate and of up alternate.
template <Epilogue kEpilogue>
__device__ __forceinline__ int half_of_block(int block) {
  return kEpilogue == kSwiglu ? block / 4 * 2 + block % 2 : block / 2;
}
template <Epilogue kEpilogue>
__device__ __forceinline__ int eight_of_block(int block) {
  return kEpilogue == kSwiglu ? block / 2 % 2 : block % 2;
}

// --- producers --------------------------------------------------------------------------------------------------------

// A warp: each lane copies a piece of a half, or what follows its codes, or two of these.
template <typename Format, class S, Epilogue kEpilogue>
__device__ void load_codes(const Shared<S, Format>& s, const Work<S, kEpilogue>& work, const Problem& p) {
  constexpr int kParts = Format::kPieces + 1, kCopies = S::kHalves * kParts, kOfLane = (kCopies + 31) / 32;
  const uint64_t policy = work.token_tiles == 1 ? evict_first_policy() : evict_normal_policy();
  const int lane = threadIdx.x % 32;
  Place slot;
  for (int index = work.first; index < work.tiles; index += work.stride) {
    const Tile tile = work.tile(index);
    const uint8_t* from[kOfLane];
    int to[kOfLane], bytes[kOfLane];
#pragma unroll
    for (int i = 0; i < kOfLane; i++) {
      const int copy = lane + 32 * i, of_block = copy / kParts, part = copy % kParts;
      const int half = work.half(tile, of_block);
      const int row = half / 4 * 2 + half % 2 + (kEpilogue == kSwiglu && of_block % 2 ? p.tile_rows / 2 : 0);
      from[i] = p.tiles + (int64_t(row) * p.chunks + work.first_chunk) * p.tile_bytes + part * kPieceBytes;
      if (part < Format::kPieces) {
        from[i] += half / 2 % 2 * kHalfPieceBytes;
        to[i] = (of_block * Format::kPieces + part) * kHalfPieceBytes;
        bytes[i] = kHalfPieceBytes;
      } else {
        to[i] = Shared<S, Format>::kPiecesBytes + of_block * s.end_bytes;
        bytes[i] = s.end_bytes;
      }
    }
    for (int chunk = 0; chunk < work.num_chunks; chunk++, slot.advance(s.slots)) {
      uint64_t* full = &s.barriers().codes_full[slot.at];
      if (lane == 0) {
        barrier_wait(&s.barriers().codes_empty[slot.at], slot.phase ^ 1);  // at first all slots are free
        barrier_expect(full, s.slot_bytes);
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kOfLane; i++) {
        if (lane + 32 * i < kCopies) lowbit::load_bulk(s.codes(slot.at) + to[i], from[i], bytes[i], full, policy);
        from[i] += p.tile_bytes;
      }
    }
  }
}

// A thread: this block's share of X, into the stage of all multicast CTAs.
template <typename Format, class S, Epilogue kEpilogue>
__device__ void load_x(const Shared<S, Format>& s, const Work<S, kEpilogue>& work, const CUtensorMap& map) {
  const uint64_t policy = work.token_tiles == 1 ? evict_last_policy() : evict_normal_policy();
  const int tokens = S::kTokens / work.multicast_ctas, first = tokens * work.multicast_rank;
  const uint16_t targets = ((1 << work.multicast_ctas) - 1) << (work.split * work.multicast_ctas);
  wait_for_previous_kernel();
  Place stage;
  for (int index = work.first; index < work.tiles; index += work.stride) {
    const int first_token = work.tile(index).first_token + first;
    int column = work.first_chunk * lowbit::kTileColumns;
    for (int left = work.num_chunks * kChunksOfTile; left > 0; left--, column += kChunk, stage.advance(S::kXStages)) {
      uint64_t* full = &s.barriers().x_full[stage.at];
      barrier_wait(&s.barriers().x_empty[stage.at], stage.phase ^ 1);
      barrier_expect(full, S::kXBytes);
      uint8_t* to = s.x(stage.at) + first * kRowBytes;
      if (work.multicast_ctas == 1)
        load_box(to, &map, full, column, first_token, policy);
      else
        load_box_into(to, &map, full, column, first_token, targets, policy);
    }
  }
}

// --- dequantising -----------------------------------------------------------------------------------------------------

// What a thread dequantises with: of the group of columns at hand.
template <typename Format>
struct Factors {
  typename Format::Zero zero;
  float scale;
};

// Several groups in a tile's columns, one, or one whose scales are BF16 numbers.
enum class How { kGroups, kOneGroup, kBf16 };

template <typename Format, class S, Epilogue kEpilogue>
struct Dequantiser {
  static constexpr int kStepsOfChunk = kChunk / 16, kStepsOfPiece = lowbit::kSteps / Format::kPieces;
  static constexpr int kWarps = S::kDequantisingWarps, kBlocks = S::kColumns / 8;
  const Shared<S, Format>& s;
  const Work<S, kEpilogue>& work;
  const Problem& p;
  int warp, lane;

  __device__ __forceinline__ Factors<Format> factors(const uint8_t* end, int row, int group) const {
    const Scales& scales = p.scales;
    const int at = scales.scale_rows == lowbit::kTileRows ? group * lowbit::kTileRows + row : group;
    float scale;
    if constexpr (Format::kFloat32Scales) {
      scale = reinterpret_cast<const float*>(end)[at];
    } else {
      const uint16_t bits = reinterpret_cast<const uint16_t*>(end)[at];
      scale = scales.float16_scales ? __half2float(__ushort_as_half(bits)) : __uint_as_float(uint32_t(bits) << 16);
    }
    if constexpr (Format::kHasZeros) {
      const auto* zeros = reinterpret_cast<const uint16_t*>(end + scales.zeros - Format::kPieces * kPieceBytes);
      const uint16_t zero = scales.zeros != 0 ? zeros[group * lowbit::kTileRows + row] : Format::kNoZeros;
      return {Format::zero(zero), scale};
    } else {
      return {{}, scale};
    }
  }

  // What follows the codes of a block's half, and the thread's row in its tile.
  __device__ __forceinline__ const uint8_t* end_of(const uint8_t* codes, int block) const {
    return codes + Shared<S, Format>::kPiecesBytes + half_of_block<kEpilogue>(block) * s.end_bytes;
  }
  __device__ __forceinline__ int row_of_tile(const Tile& tile, int block) const {
    return work.half(tile, half_of_block<kEpilogue>(block)) / 2 % 2 * kHalfRows + eight_of_block<kEpilogue>(block) * 8 +
           lane / 4;
  }
  __device__ __forceinline__ uint4 piece_of(const uint8_t* codes, int block, int chunk) const {
    const int piece = half_of_block<kEpilogue>(block) * Format::kPieces + chunk * kStepsOfChunk / kStepsOfPiece;
    return *reinterpret_cast<const uint4*>(codes + piece * kHalfPieceBytes +
                                           (eight_of_block<kEpilogue>(block) * 32 + lane) * 16);
  }

  // Eight rows of a chunk, a row of four lanes, into a stage of W.
  template <How kHow>
  __device__ __forceinline__ void store(const uint4& piece, Factors<Format> own, const uint8_t* end, int row_of_tile,
                                        int chunk, uint8_t* to) const {
    const int row = lane / 4, first_step = chunk * kStepsOfChunk;
    typename Format::Factor scale(own.scale);
#pragma unroll
    for (int step = 0; step < kStepsOfChunk; step++) {
      if constexpr (kHow == How::kGroups) {
        if (step > 0 && step % Format::kStepsOfGroup == 0) {
          own = factors(end, row_of_tile, (first_step + step) * p.scales.groups / lowbit::kSteps);
          scale = typename Format::Factor(own.scale);
        }
      }
      uint32_t pairs[2];
      const int at = (first_step + step) % kStepsOfPiece;
      if constexpr (kHow == How::kBf16)
        Format::high_weights(piece, at, own.zero, scale, pairs);
      else
        Format::weights(piece, at, own.zero, scale, pairs);
#pragma unroll
      for (int eighth = 0; eighth < 2; eighth++)
        *reinterpret_cast<uint32_t*>(to + ((2 * step + eighth) ^ row) * 16) = pairs[eighth];
    }
  }

  // A chunk of the slot. With one group all codes are read first, which wait for no store then.
  template <How kHow>
  __device__ __forceinline__ void dequantise(const uint8_t* codes, const Tile& tile, int chunk, Place& stage) const {
    constexpr int kMost = (kBlocks + kWarps - 1) / kWarps;
    uint64_t* empty = &s.barriers().w_empty[stage.at];
    uint8_t* to = s.w(stage.at) + warp * kBlockBytes + lane / 4 * kRowBytes + lane % 4 * 4;
    if constexpr (kHow == How::kGroups) {
      const int first_group = chunk * kStepsOfChunk * p.scales.groups / lowbit::kSteps;
      barrier_wait(empty, stage.phase ^ 1);
#pragma unroll 1
      for (int block = warp; block < kBlocks; block += kWarps, to += kWarps * kBlockBytes) {
        const uint8_t* end = end_of(codes, block);
        const int row = row_of_tile(tile, block);
        store<kHow>(piece_of(codes, block, chunk), factors(end, row, first_group), end, row, chunk, to);
      }
    } else {
      uint4 pieces[kMost];
      Factors<Format> all[kMost];
#pragma unroll
      for (int i = 0; i < kMost; i++) {
        const int block = min(i * kWarps + warp, kBlocks - 1);
        pieces[i] = piece_of(codes, block, chunk);
        all[i] = factors(end_of(codes, block), row_of_tile(tile, block), 0);
      }
      barrier_wait(empty, stage.phase ^ 1);
#pragma unroll
      for (int i = 0; i < kMost; i++)
        if (kBlocks % kWarps == 0 || i * kWarps + warp < kBlocks)
          store<kHow>(pieces[i], all[i], nullptr, 0, chunk, to + i * (kWarps * kBlockBytes));
    }
    lowbit::fence_for_async_reads();
    __syncwarp();
    if (lane == 0) barrier_arrive(&s.barriers().w_full[stage.at]);
    stage.advance(S::kWStages);
  }

  template <How kHow>
  __device__ void run_all() const {
    Place slot, stage;
    for (int index = work.first; index < work.tiles; index += work.stride) {
      const Tile tile = work.tile(index);
      for (int left = work.num_chunks; left > 0; left--, slot.advance(s.slots)) {
        barrier_wait(&s.barriers().codes_full[slot.at], slot.phase);
#pragma unroll
        for (int chunk = 0; chunk < kChunksOfTile; chunk++)
          dequantise<kHow>(s.codes(slot.at), tile, chunk, stage);
        if (lane == 0) barrier_arrive(&s.barriers().codes_empty[slot.at]);
      }
    }
  }

  __device__ void run() const {
    if (p.scales.groups > 1) {
      run_all<How::kGroups>();
      return;
    }
    if constexpr (Format::kHasHighWeights) {
      if (p.scales.bf16_numbers) {
        run_all<How::kBf16>();
        return;
      }
    }
    run_all<How::kOneGroup>();
  }
};

// --- multiplying ------------------------------------------------------------------------------------------------------

// Where a thread's sums go: tokens `token` and `token + 8`, and rows of W from half `half` of these on.
template <class S, Epilogue kEpilogue>
struct Target {
  void* y;
  int m, n;  // of y
  int token, half;

  __device__ __forceinline__ Target below(int high) const { return {y, m, n, token + high * 64, half}; }

  // Stores the sums of a group's column blocks; for swiglu those of gates and ups alternate.
  __device__ __forceinline__ void store(int group, const float4 (&sums)[kHeld<kEpilogue>]) const {
    uint32_t upper[kGroup], lower[kGroup];
#pragma unroll
    for (int block = 0; block < kGroup; block++) {
      if constexpr (kEpilogue == kStore) {
        const float4 four = sums[block];
        upper[block] = packed(four.x, four.y), lower[block] = packed(four.z, four.w);
      } else {
        const float4 gate = sums[2 * block], up = sums[2 * block + 1];
        upper[block] = gated(gate.x, gate.y, up.x, up.y), lower[block] = gated(gate.z, gate.w, up.z, up.w);
      }
    }
    const uint4 first = gathered(upper), second = gathered(lower);
    const int block = group * kGroup + threadIdx.x % 4, own = half + block / 2;
    const int column = (own / 2 * 4 + block % 2 * 2 + own % 2) * 8;
    if (block >= Work<S, kEpilogue>::kHalvesOfTile * 2 || column >= n) return;
    bf16* to = static_cast<bf16*>(y) + int64_t(token) * n + column;
    if (token < m) *reinterpret_cast<uint4*>(to) = first;
    if (token + 8 < m) *reinterpret_cast<uint4*>(to + int64_t(8) * n) = second;
  }
};

template <typename Format, class S, Epilogue kEpilogue>
struct Consumer {
  const Shared<S, Format>& s;
  const Work<S, kEpilogue>& work;
  const Problem& p;
  Place x_stage, w_stage;

  // Tells the multicast CTAs, which write into the stage of X, and the dequantising warps that this warp has read them.
  __device__ __forceinline__ void release(int x, int w) const {
    const int lane = threadIdx.x % 32;
    if (lane == 0) barrier_arrive(&s.barriers().w_empty[w]);
    if (work.multicast_ctas == 1) {
      if (lane == 0) barrier_arrive(&s.barriers().x_empty[x]);
    } else if (lane < work.multicast_ctas) {
      barrier_arrive_nearby(address_in(&s.barriers().x_empty[x], work.split * work.multicast_ctas + lane));
    }
  }

  __device__ __forceinline__ void multiply(float (&d)[S::kHigh][S::kSums], int warpgroup) {
    int x_before = 0, w_before = 0;
    const int chunks = work.num_chunks * kChunksOfTile;
    for (int chunk = 0; chunk < chunks; chunk++) {
      barrier_wait(&s.barriers().x_full[x_stage.at], x_stage.phase);
      barrier_wait(&s.barriers().w_full[w_stage.at], w_stage.phase);
      wgmma_fence();
      const uint64_t x = tile_descriptor(s.x(x_stage.at) + warpgroup * S::kHigh * 64 * kRowBytes);
      const uint64_t w = tile_descriptor(s.w(w_stage.at));
#pragma unroll
      for (int step = 0; step < kChunk / 16; step++)
#pragma unroll
        for (int high = 0; high < S::kHigh; high++)
          wgmma_or_begin<S::kColumns>(d[high], x + step * 2 + high * (64 * kRowBytes / 16), w + step * 2, chunk + step);
      wgmma_commit();
      wgmma_wait<1>();
      if (chunk > 0) release(x_before, w_before);  // one group is pending, so the products before it have ended
      x_before = x_stage.at, w_before = w_stage.at;
      x_stage.advance(S::kXStages);
      w_stage.advance(S::kWStages);
    }
    wgmma_wait<0>();
    release(x_before, w_before);
  }

  // Sums of a row of W times its factor.
  __device__ __forceinline__ void scale(float (&d)[S::kHigh][S::kSums], const Tile& tile) const {
#pragma unroll
    for (int block = 0; block < S::kColumns / 8; block++) {
      const int half = half_of_block<kEpilogue>(block), own = work.half(tile, half);
      const int first = (own / 2 * 4 + eight_of_block<kEpilogue>(block) * 2 + own % 2) * 8 + threadIdx.x % 4 * 2;
      if (first >= p.n) continue;
      const bool is_up = kEpilogue == kSwiglu && half % 2;
      const float2 factors = *reinterpret_cast<const float2*>(p.factors + first + (is_up ? p.n : 0));
#pragma unroll
      for (int high = 0; high < S::kHigh; high++) {
        d[high][4 * block] *= factors.x, d[high][4 * block + 1] *= factors.y;
        d[high][4 * block + 2] *= factors.x, d[high][4 * block + 3] *= factors.y;
      }
    }
  }

  // Puts this split's sums where its stages were, once all its warps have read the last one.
  __device__ __forceinline__ void leave_sums(const float (&d)[S::kHigh][S::kSums]) const {
    float4* mine = reinterpret_cast<float4*>(s.base) + threadIdx.x;
    asm volatile("bar.sync 1, %0;" ::"n"(S::kConsumers) : "memory");
#pragma unroll
    for (int high = 0; high < S::kHigh; high++)
#pragma unroll
      for (int at = 0; at < S::kSums; at += 4)
        mine[(high * S::kSums + at) / 4 * S::kConsumers] =
            make_float4(d[high][at], d[high][at + 1], d[high][at + 2], d[high][at + 3]);
  }

  // Reduces the sums of all splits for this split's share of the groups, and stores them.
  __device__ void store_splits(const Target<S, kEpilogue>& target, int high) const {
    const float4* mine = reinterpret_cast<float4*>(s.base) + threadIdx.x + high * (S::kSums / 4 * S::kConsumers);
    constexpr int kHeldBlocks = kHeld<kEpilogue>, kGroups = kGroupsOf<S, kEpilogue>;
#pragma unroll 1
    for (int group = kGroups * work.split / work.splits; group < kGroups * (work.split + 1) / work.splits; group++) {
      float4 sums[kHeldBlocks] = {};
#pragma unroll 1
      for (int split = 0; split < work.splits; split++) {
        const uint32_t theirs = address_in(mine, split * work.multicast_ctas + work.multicast_rank);
        float4 more[kHeldBlocks] = {};
#pragma unroll
        for (int block = 0; block < kHeldBlocks; block++) {
          const int at = group * kHeldBlocks + block;
          if (at < S::kSums / 4) more[block] = load_in(theirs + at * (S::kConsumers * 16));
        }
#pragma unroll
        for (int block = 0; block < kHeldBlocks; block++) {
          sums[block].x += more[block].x, sums[block].y += more[block].y;
          sums[block].z += more[block].z, sums[block].w += more[block].w;
        }
      }
      target.store(group, sums);
    }
  }

  __device__ __forceinline__ void store_whole(const float (&d)[S::kSums], const Target<S, kEpilogue>& target) const {
#pragma unroll
    for (int group = 0; group < kGroupsOf<S, kEpilogue>; group++) {
      float4 sums[kHeld<kEpilogue>];
#pragma unroll
      for (int block = 0; block < kHeld<kEpilogue>; block++) {
        const int at = (group * kHeld<kEpilogue> + block) * 4;
        sums[block] = at < S::kSums ? make_float4(d[at], d[at + 1], d[at + 2], d[at + 3]) : make_float4(0, 0, 0, 0);
      }
      target.store(group, sums);
    }
  }

  __device__ void run() {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float d[S::kHigh][S::kSums];
    for (int index = work.first; index < work.tiles; index += work.stride) {
      const Tile tile = work.tile(index);
      multiply(d, warp / 4);
      if constexpr (Format::kHasFactors) scale(d, tile);
      const int token = tile.first_token + warp / 4 * S::kHigh * 64 + warp % 4 * 16 + lane / 4;
      const Target<S, kEpilogue> target{p.y, p.m, p.n, token, tile.column_tile * Work<S, kEpilogue>::kHalvesOfTile};
      if (work.splits > 1) {  // there is one tile
        leave_sums(d);
        cluster_sync();
        for (int high = 0; high < S::kHigh; high++) store_splits(target.below(high), high);
        return;
      }
#pragma unroll
      for (int high = 0; high < S::kHigh; high++) store_whole(d[high], target.below(high));
    }
  }
};

template <typename Format, class S, Epilogue kEpilogue>
__device__ void run(const CUtensorMap& x_map, const Problem& p) {
  extern __shared__ __align__(kAlignment) uint8_t raw[];
  const Shared<S, Format> s(raw, p.tile_bytes);
  const Work<S, kEpilogue> work(p);
  if (threadIdx.x == 0) {
    Barriers& barriers = s.barriers();
    for (int i = 0; i < s.slots; i++) {
      barrier_init(&barriers.codes_full[i], 1);
      barrier_init(&barriers.codes_empty[i], S::kDequantisingWarps);
    }
    for (int i = 0; i < S::kXStages; i++) {
      barrier_init(&barriers.x_full[i], 1);
      barrier_init(&barriers.x_empty[i], S::kConsumers / 32 * p.multicast_ctas);
    }
    for (int i = 0; i < S::kWStages; i++) {
      barrier_init(&barriers.w_full[i], S::kDequantisingWarps);
      barrier_init(&barriers.w_empty[i], S::kConsumers / 32);
    }
    barrier_init_fence();
  }
  const bool is_cluster = work.splits * work.multicast_ctas > 1;
  if (is_cluster)
    cluster_meet();  // multicast copies arrive at the barriers of all blocks of the cluster
  else
    __syncthreads();
  launch_dependents();
  const int after = int(threadIdx.x) - S::kConsumers;
  if (after < 0) {
    if constexpr (S::kTrades) take_registers<S::kConsumerRegisters>();
    wait_for_previous_kernel();
    Consumer<Format, S, kEpilogue> consumer{s, work, p};
    consumer.run();
  } else {
    if (after < S::kDequantisers) {
      if constexpr (S::kTrades) leave_registers<S::kDequantiserRegisters>();
      const Dequantiser<Format, S, kEpilogue> dequantiser{s, work, p, after / 32, after % 32};
      dequantiser.run();
    } else {
      if constexpr (S::kTrades) leave_registers<S::kProducerRegisters>();
      const int warp = (after - S::kDequantisers) / 32;
      if (warp == 0) load_codes<Format, S, kEpilogue>(s, work, p);
      if (after == S::kDequantisers + 32) load_x<Format, S, kEpilogue>(s, work, x_map);
    }
    __syncwarp();
    if (work.splits > 1) cluster_sync();
  }
  if (is_cluster) {  // no CTA may end while others still reach into its shared memory
    __syncwarp();
    cluster_meet();
  }
}

}  // namespace staged

#define STAGED_GEMM(FORMAT, FORMAT_NAME, EPILOGUE, EPILOGUE_NAME, TOKENS, COLUMNS)                                \
  extern "C" __global__ void __launch_bounds__(staged::Sizes<TOKENS, COLUMNS>::kThreads, 1)                       \
      staged_gemm_##FORMAT_NAME##_##EPILOGUE_NAME##_##TOKENS##x##COLUMNS(                                         \
          const __grid_constant__ CUtensorMap x_map, const __grid_constant__ staged::Problem problem) {           \
    staged::run<lowbit::FORMAT, staged::Sizes<TOKENS, COLUMNS>, EPILOGUE>(x_map, problem);                        \
  }

#define STAGED_GEMMS(FORMAT, NAME)                   \
  STAGED_GEMM(FORMAT, NAME, kStore, store, 128, 96)    \
  STAGED_GEMM(FORMAT, NAME, kStore, store, 128, 160)   \
  STAGED_GEMM(FORMAT, NAME, kStore, store, 192, 96)    \
  STAGED_GEMM(FORMAT, NAME, kStore, store, 256, 96)    \
  STAGED_GEMM(FORMAT, NAME, kStore, store, 256, 160)   \
  STAGED_GEMM(FORMAT, NAME, kSwiglu, swiglu, 128, 96)  \
  STAGED_GEMM(FORMAT, NAME, kSwiglu, swiglu, 128, 160) \
  STAGED_GEMM(FORMAT, NAME, kSwiglu, swiglu, 192, 96) \
  STAGED_GEMM(FORMAT, NAME, kSwiglu, swiglu, 256, 160)
