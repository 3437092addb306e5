// Y = X W^T with a quantised W, for any number of tokens: codes are streamed once and dequantised in registers.
//
// Operands are swapped (swap-AB), as in decode_gemm.cu: 64 rows of W are the tensor cores' 64-row side, whose operand a
// warpgroup may hold in registers, and tokens the other, in shared memory. So a code goes from memory to shared memory
// to a register, in which it becomes a BF16, and a dequantised weight is never stored.
//
//   two producer threads:   wait for a free slot ─► bulk copies of tiles of W; TMA of boxes of X
//   warpgroups:             wait for a full slot ─► dequantise ─► wgmma ─► free the slots ─► after a tile: epilogue
//
// W and X have rings of slots of their own: codes are there, and the first of them dequantised, before the kernel ahead
// has ended (programmatic dependent launch), and only X waits for it.
//
//     tokens of a tile    warpgroups             blocks on a multiprocessor
//     8, 16               two, which divide K    2
//     32                  two with 64 rows each  2
//     64, 128             three                  1
//     192, 256            two                    1
//
// Scaling::kSums       the codes are multiplied and the sums of 128 columns scaled, in float32: exact, but for two sets
//                      of sums; for groups of 128 columns or more
// Scaling::kE4m3       the same with products of E4M3, activations as two such numbers each: e4m3_products.cuh
// Scaling::kE4m3Groups the same, and the sums of each 32 columns scaled: for groups of 32 and of 64
// Scaling::kWeights    weights are scaled and rounded to BF16 before they are multiplied
// Scaling::kBf16Groups the same of groups of 64 or 32 with BF16 scales and no zero points, in fewer instructions
// Scaling::kWoven      the same of one group to a tile: a part of the next box is dequantised after each product
//
// With kPlanned there are several matrices, each with the tokens that a plan of experts gives it: a block takes one tile of
// some matrix after the other. Rows of X are in the plan's order.
//
// A cluster of CTAs is splits, which divide K of one tile and add up their sums in order, or multicast CTAs with the
// same tokens, which each read a share of X for all, or both: where there are more tiles than blocks, splits multiply
// whole tiles first, alone or as multicast CTAs, so that the last round of tiles keeps all multiprocessors busy. One run
// twice is bit-identical.
#pragma once
#include "common/hopper.cuh"
#include "gemm/gemm_epilogue.cuh"
#include "gemm/limited_swiglu.cuh"
#include "lowbit/e4m3_products.cuh"
#include "lowbit/lowbit_tiles.cuh"
#include "lowbit/wgmma_registers.cuh"

using namespace hopper;

namespace lowbit {

enum class Scaling { kSums, kE4m3, kE4m3Groups, kWeights, kBf16Groups, kWoven };

// Sums of a token's activations that are kept for a chunk, where these are split into two numbers of E4M3; else 0.
template <Scaling kScaling>
constexpr int kSumsOfFactor = kScaling == Scaling::kE4m3 ? 1 : kScaling == Scaling::kE4m3Groups ? kMmasOfTile : 0;

constexpr int kBoxColumns = 64, kBoxesOfTile = kTileColumns / kBoxColumns;  // of X: 128 bytes, one swizzle row
constexpr int kStepsOfBox = kBoxColumns / 16;
constexpr int kAlignment = 1024;  // of swizzled boxes
constexpr int kWarpgroup = 128;
constexpr int kMostSlots = 16;

// A weight and what a launch does; `Problem` of cuda/lowbit/lowbit_gemm.py.
struct Problem {
  const uint8_t* tiles;
  void* y;
  int m, n;                // of y
  int tile_rows, chunks;   // tiles along the rows of W, which end at multiples of 64 rows, and along K
  int tile_bytes;
  Scales scales;
  int multicast_ctas, splits;   // each is 1 or the blocks of a cluster
  int token_tiles, wide_tiles;  // tiles of the product: along its tokens, and along its rows those of multicast CTAs
  int token_group;              // token tiles that are multiplied before the next rows
  int whole_tiles;              // wide ones, before splits divide K of a tile of those that are left
  const int4* plan;             // of several matrices: (matrix, first token, tokens, how many of these are not empty)
  int64_t matrix_bytes;
  float limit;                  // of their gates
  int weights_first;            // whether the plan is older than the kernel ahead
  int whole_slots;              // whether the map of X has boxes of a slot, (64 columns, tokens, boxes, 1)
};

struct ProblemWithFactors : Problem {
  const float* factors;  // of each row of W
};

template <bool kHasFactors>
struct ProblemType {
  using Type = Problem;
};
template <>
struct ProblemType<true> {
  using Type = ProblemWithFactors;
};
template <typename Format>
using ProblemOf = typename ProblemType<Format::kHasFactors>::Type;

template <int kTokens_, int kGroups_ = 0>
struct Sizes {
  static constexpr int kTokens = kTokens_, kGroups = kGroups_;
  static constexpr bool kSplits = kGroups > 0;  // activations, into two numbers of E4M3
  static constexpr int kRowWarpgroups = kTokens <= 16 ? 1 : kTokens == 64 || kTokens == 128 ? 3 : 2;
  static constexpr int kChunks = kRowWarpgroups == 1 ? 2 : 1;  // of a slot of W: one for each warpgroup that divides K
  static constexpr int kConsumers = kRowWarpgroups * kChunks * kWarpgroup;
  static constexpr int kBlocks = kTokens <= 32 ? 2 : 1;
  // Registers are traded where sums take many, for which a producer must be a whole warpgroup.
  static constexpr bool kTrades = kTokens >= 64;
  static constexpr int kThreads = kConsumers + (kTrades ? kWarpgroup : 64 + (kSplits ? kSplitWarps * 32 : 0));
  static constexpr int kConsumerRegisters = kRowWarpgroups == 3 ? 152 : 232, kProducerRegisters = 40;
  static constexpr int kSharedBytes = (kBlocks == 1 ? 225 : kTokens <= 16 ? 113 : 105) * 1024;
  static constexpr int kSums = kTokens / 2;
  static constexpr int kBoxBytes = kTokens * kBoxColumns * 2;
  static constexpr int kBoxes = kTokens <= 64 ? kChunks * kBoxesOfTile : 1;  // of a slot of X
  static constexpr int kXSlots = kTokens == 16 || kTokens == 64 ? 4 : kTokens == 192 ? 6 : 5;
  static constexpr int kXBytes = kBoxBytes * kBoxes;
  static constexpr int kTilesOfSlot = 2 * kRowWarpgroups * kChunks;
  static constexpr bool kPushes = kTokens <= 16;  // sums of splits to the first of them, which has room for them
  static constexpr int kMostPushed = 4;
  static constexpr int kFactorBytes = kSplits ? kXSlots * kChunks * kTokens * (1 + kGroups) * 4 : 0;
  static constexpr bool kGathers = kTokens >= 64;  // results of several tokens into 16 bytes, before they are stored
};

template <int kTokens>
struct Barriers {
  using S = Sizes<kTokens>;
  uint64_t w_full[kMostSlots], w_empty[kMostSlots], x_full[S::kXSlots], x_empty[S::kXSlots];
  uint64_t x_split[S::kXSlots];  // where activations are
  uint64_t pushed;
};

// Shared memory: X, W, the sums that a warpgroup hands to the other one, factors of tokens, barriers.
template <int kTokens, int kGroups_>
struct Shared {
  static constexpr int kGroups = kGroups_;
  using S = Sizes<kTokens, kGroups>;
  static constexpr int kW = S::kXSlots * S::kXBytes;
  static constexpr int kSumsBytes = S::kSums * kWarpgroup * 4;
  static constexpr int kHandedBytes = (S::kChunks > 1 ? kSumsBytes : 0) + (S::kPushes ? S::kMostPushed * kSumsBytes : 0);
  static constexpr int kBarriers = S::kSharedBytes - int(sizeof(Barriers<kTokens>));
  static constexpr int kFactors = kBarriers - S::kFactorBytes, kHanded = kFactors - kHandedBytes;
  uint8_t* base;
  int w_slots, w_bytes;

  __device__ Shared(uint8_t* base, int tile_bytes) : base(base) {
    w_bytes = S::kTilesOfSlot * tile_bytes;
    w_slots = min(kMostSlots, (kHanded - kW) / w_bytes);
  }
  __device__ uint8_t* x(int slot) const { return base + slot * S::kXBytes; }
  __device__ uint8_t* w(int slot) const { return base + kW + slot * w_bytes; }
  __device__ float* handed() const { return reinterpret_cast<float*>(base + kHanded); }
  __device__ float* pushed(int split) const { return handed() + split * S::kSums * kWarpgroup; }
  // Of the first token, in a chunk of a slot of X.
  __device__ Factor<kGroups>* factor(int slot, int chunk) const {
    return reinterpret_cast<Factor<kGroups>*>(base + kFactors) + (slot * S::kChunks + chunk) * kTokens;
  }
  __device__ Barriers<kTokens>& barriers() const { return *reinterpret_cast<Barriers<kTokens>*>(base + kBarriers); }
};

// A place in a ring.
struct Slot {
  int at = 0, phase = 0;
  __device__ __forceinline__ void advance(int slots) {
    if (++at == slots) at = 0, phase ^= 1;
  }
};

struct Tile {
  int first_token, row_tile, end_token, matrix;
};

// What a block multiplies at a time: a tile, or its split of one.
struct Piece {
  Tile tile;
  int first_chunk, num_chunks;
  bool is_split;
};

template <int kTokens, bool kPlanned = false>
struct Work {
  const int4* plan;
  int m;
  int multicast_ctas, multicast_rank, splits, split;
  int first, stride, whole_pieces;  // of a block, or of multicast CTAs together: wide tiles
  int whole_tiles, split_tile, pieces;
  int token_tiles, wide_tiles, token_group;
  int chunks, first_chunk, num_chunks;  // of a tile, and of its split

  __device__ explicit Work(const Problem& p) : plan(p.plan), m(p.m) {
    const int rank = cluster_rank(), cluster = int(blockIdx.x) / int(cluster_size());
    multicast_ctas = p.multicast_ctas, multicast_rank = multicast_ctas > 1 ? rank : 0;
    splits = p.splits, split = splits > 1 ? rank : 0;
    first = blockIdx.x / multicast_ctas, stride = gridDim.x / multicast_ctas;
    token_tiles = p.token_tiles, wide_tiles = p.wide_tiles, token_group = p.token_group;
    const int tiles = kPlanned ? plan[0].w * wide_tiles : token_tiles * wide_tiles;
    whole_tiles = splits > 1 ? p.whole_tiles : tiles;
    whole_pieces = (max(0, whole_tiles - first) + stride - 1) / stride;
    split_tile = cluster;  // of those that are left
    pieces = whole_pieces + (splits > 1 && split_tile < (tiles - whole_tiles) * multicast_ctas);
    chunks = p.chunks;
    first_chunk = chunks * split / splits;
    num_chunks = chunks * (split + 1) / splits - first_chunk;
  }

  __device__ bool divides() const { return pieces > whole_pieces; }

  __device__ Piece piece(int index) const {
    if (index < whole_pieces) return {tile(first + index * stride, multicast_rank), 0, chunks, false};
    const int wide = whole_tiles + split_tile / multicast_ctas;
    return {tile(wide, split_tile % multicast_ctas), first_chunk, num_chunks, true};
  }

  // Wide tiles go through `token_group` token tiles before the next rows, so that both stay in the L2 cache for a while.
  __device__ Tile tile(int wide, int rank) const {
    if constexpr (kPlanned) {
      const int4 planned = plan[wide / wide_tiles];
      return {planned.y, wide % wide_tiles, planned.y + planned.z, planned.x};
    }
    if (token_tiles == 1) return {0, wide * multicast_ctas + rank, m, 0};
    const int of_group = token_group * wide_tiles, first_row = wide / of_group * token_group;
    const int rows = min(token_group, token_tiles - first_row), within = wide % of_group;
    return {(first_row + within % rows) * kTokens, within / rows * multicast_ctas + rank, m, 0};
  }
};

__device__ __forceinline__ void load_bulk(void* target, const void* from, uint32_t bytes, uint64_t* barrier,
                                          uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
          shared_address(target)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// --- producers --------------------------------------------------------------------------------------------------------

// Each is one thread. Nothing is divided inside their loops: a thread alone takes some cycles for each instruction.
template <int kTokens, Epilogue kEpilogue, int kGroups, bool kPlanned>
struct Producer {
  using S = Sizes<kTokens, kGroups>;
  const Problem& p;
  const Work<kTokens, kPlanned>& work;
  const Shared<kTokens, kGroups>& s;

  __device__ void load_w() const {
    const bool is_read_once = kPlanned ? kTokens <= 32 : work.token_tiles == 1;
    const uint64_t policy = is_read_once ? evict_first_policy() : evict_normal_policy();
    constexpr int kTiles = 2 * S::kRowWarpgroups;
    // The lower and the higher rows of a warpgroup are neighbours, or of gate and of up.
    const int64_t along_k = int64_t(p.chunks) * p.tile_bytes, next = along_k * (kEpilogue == kSwiglu ? 1 : 2);
    const int64_t half = along_k * (kEpilogue == kSwiglu ? p.tile_rows / 2 : 1);
    Slot slot;
    for (int index = 0; index < work.pieces; index++) {
      const Piece piece = work.piece(index);
      const int row_tile = piece.tile.row_tile;
      // Pairs of tiles after the last one are that one again: their sums are stored nowhere.
      const int first = row_tile * S::kRowWarpgroups, after = p.tile_rows / 2 - 1 - first;
      const int pair = first + min(0, after);
      const uint8_t* from = p.tiles + pair * next + int64_t(piece.first_chunk) * p.tile_bytes;
      if constexpr (kPlanned) from += piece.tile.matrix * p.matrix_bytes;
      for (int left = piece.num_chunks; left > 0; left -= S::kChunks, slot.advance(s.w_slots)) {
        const int bytes = min(S::kChunks, left) * p.tile_bytes;
        uint64_t* full = &s.barriers().w_full[slot.at];
        uint8_t* to = s.w(slot.at);
        barrier_wait(&s.barriers().w_empty[slot.at], slot.phase ^ 1);  // at first all slots are free
        barrier_expect(full, kTiles * bytes);
#pragma unroll
        for (int i = 0; i < kTiles; i++) {
          load_bulk(to, from + max(0, min(i / 2, after)) * next + (i % 2 ? half : 0), bytes, full, policy);
          to += S::kChunks * p.tile_bytes;
        }
        from += bytes;
      }
    }
  }

  // A copy for each slot: with one for each of its boxes this thread's instructions took longer than the products. What
  // lies after the columns of a split is copied as well, and not multiplied.
  __device__ __forceinline__ void load_slots_of_x(const CUtensorMap& map, uint64_t policy) const {
    Slot slot;
    for (int index = 0; index < work.pieces; index++) {
      const Piece piece = work.piece(index);
      int box = piece.first_chunk * kBoxesOfTile;
      for (int left = piece.num_chunks * kBoxesOfTile; left > 0; left -= S::kBoxes, slot.advance(S::kXSlots)) {
        uint64_t* full = &s.barriers().x_full[slot.at];
        barrier_wait(&s.barriers().x_empty[slot.at], slot.phase ^ 1);
        barrier_expect(full, S::kXBytes);
        load_box(s.x(slot.at), &map, full, 0, piece.tile.first_token, box, 0, policy);
        box += S::kBoxes;
      }
    }
  }

  __device__ void load_x(const CUtensorMap& map) const {
    const uint64_t policy = work.token_tiles == 1 ? evict_last_policy() : evict_normal_policy();
    if constexpr (S::kBoxes > 1) {
      if (p.whole_slots) {
        wait_for_previous_kernel();
        load_slots_of_x(map, policy);
        return;
      }
    }
    const int share = kTokens / work.multicast_ctas;
    const uint16_t targets = (1 << work.multicast_ctas) - 1;
    wait_for_previous_kernel();
    Slot slot;
    for (int index = 0; index < work.pieces; index++) {
      const Piece piece = work.piece(index);
      // Splits have columns of their own, so that each reads all shares.
      const bool is_shared = work.multicast_ctas > 1 && !piece.is_split;
      const int first = is_shared ? share * work.multicast_rank : 0, first_token = piece.tile.first_token + first;
      int column = piece.first_chunk * kTileColumns;
      for (int left = piece.num_chunks * kBoxesOfTile; left > 0; left -= S::kBoxes, slot.advance(S::kXSlots)) {
        const int boxes = min(S::kBoxes, left);
        uint64_t* full = &s.barriers().x_full[slot.at];
        uint8_t* to = s.x(slot.at) + first * (kBoxColumns * 2);
        barrier_wait(&s.barriers().x_empty[slot.at], slot.phase ^ 1);
        barrier_expect(full, boxes * S::kBoxBytes);
#pragma unroll
        for (int box = 0; box < S::kBoxes; box++, column += kBoxColumns) {
          if (box >= boxes) break;
          if (is_shared) {
            load_box_into(to + box * S::kBoxBytes, &map, full, column, first_token, targets, policy);
          } else {
            for (int part = 0; part < kTokens; part += share)
              load_box(to + box * S::kBoxBytes + part * (kBoxColumns * 2), &map, full, column, first_token + part, policy);
          }
        }
      }
    }
  }
};

// --- consumers ----------------------------------------------------------------------------------------------------------

// The 64 columns of a box as four fragments, not scaled; `zeros` of both rows.
template <typename Format>
__device__ __forceinline__ void codes_of_box(uint32_t (&a)[kStepsOfBox][4], const Rows<Format>& rows,
                                             const typename Format::Zero (&zeros)[2], int box) {
  constexpr int kStepsOfPiece = kSteps / Format::kPieces;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const uint4 piece = rows.piece(half, box * kStepsOfBox / kStepsOfPiece);
#pragma unroll
    for (int step = 0; step < kStepsOfBox; step++) {
      uint32_t pairs[2];
      Format::codes(piece, (box * kStepsOfBox + step) % kStepsOfPiece, zeros[half], pairs);
      a[step][half] = pairs[0], a[step][half + 2] = pairs[1];
    }
  }
}

// What weights of a thread's two rows are made with: of the group of the columns at hand.
template <typename Format>
struct Factors {
  typename Format::Zero zeros[2];
  typename Format::Factor scales[2];

  __device__ __forceinline__ Factors(const Rows<Format>& rows, const Scales& s, int group)
      : zeros{rows.zero(s, 0, group), rows.zero(s, 1, group)},
        scales{typename Format::Factor(rows.scale(s, 0, group)), typename Format::Factor(rows.scale(s, 1, group))} {}
};

// The same of BF16 scales and without zero points.
template <typename Format>
struct Bf16Factors {
  typename Format::Zero zeros[2];
  typename Format::Bf16Factor scales[2];

  __device__ __forceinline__ Bf16Factors(const Rows<Format>& rows, const Scales& s, int group)
      : scales{typename Format::Bf16Factor(rows.template stored_scale<uint16_t>(s, 0, group)),
               typename Format::Bf16Factor(rows.template stored_scale<uint16_t>(s, 1, group))} {
    if constexpr (Format::kHasZeros) zeros[0] = zeros[1] = Format::zero(Format::kNoZeros);
  }
};

// A thread's 16 bytes of codes of both rows, in which a box begins.
template <typename Format>
struct Pieces {
  static constexpr int kStepsOfPiece = kSteps / Format::kPieces;
  uint4 of[2];

  __device__ __forceinline__ Pieces(const Rows<Format>& rows, int box)
      : of{rows.piece(0, box * kStepsOfBox / kStepsOfPiece), rows.piece(1, box * kStepsOfBox / kStepsOfPiece)} {}

  // A fragment of 16 columns, scaled. With kHigh scales are BF16 numbers.
  template <bool kHigh, typename Given>
  __device__ __forceinline__ void weights(uint32_t (&a)[4], const Given& factors, int box, int step) const {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int at = (box * kStepsOfBox + step) % kStepsOfPiece;
      uint32_t pairs[2];
      if constexpr (kHigh)
        Format::high_weights(of[half], at, factors.zeros[half], factors.scales[half], pairs);
      else
        Format::weights(of[half], at, factors.zeros[half], factors.scales[half], pairs);
      a[half] = pairs[0], a[half + 2] = pairs[1];
    }
  }
};

// The 64 columns of a box, scaled; `factors` are those of the first group, which may be the only one.
template <typename Format, bool kHigh = false>
__device__ __forceinline__ void weights_of_box(uint32_t (&a)[kStepsOfBox][4], const Rows<Format>& rows,
                                               const Factors<Format>& factors, const Problem& p, int box) {
  const Pieces<Format> pieces(rows, box);
#pragma unroll
  for (int first = 0; first < kStepsOfBox; first += Format::kStepsOfGroup) {  // columns of one group
    Factors<Format> own = factors;
    if constexpr (!kHigh) {
      const int group = (box * kStepsOfBox + first) * p.scales.groups / kSteps;
      if (p.scales.groups > 1) own = Factors<Format>(rows, p.scales, group);
    }
#pragma unroll
    for (int step = first; step < first + Format::kStepsOfGroup; step++) pieces.template weights<kHigh>(a[step], own, box, step);
  }
}

// The same with a scale of their own for each group of columns: `Bf16Factors`.
template <typename Format>
__device__ __forceinline__ void weights_of_bf16_groups(uint32_t (&a)[kStepsOfBox][4], const Rows<Format>& rows,
                                                       const Problem& p, int box) {
  const Pieces<Format> pieces(rows, box);
#pragma unroll
  for (int first = 0; first < kStepsOfBox; first += Format::kStepsOfGroup) {
    const Bf16Factors<Format> own(rows, p.scales, (box * kStepsOfBox + first) * p.scales.groups / kSteps);
#pragma unroll
    for (int step = first; step < first + Format::kStepsOfGroup; step++) pieces.template weights<false>(a[step], own, box, step);
  }
}

template <int kTokens>
__device__ __forceinline__ void multiply_box(float (&d)[kTokens / 2], const uint32_t (&a)[kStepsOfBox][4],
                                             const uint8_t* box, int adds) {
  const uint64_t x = tile_descriptor(box);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kStepsOfBox; step++)
    wgmma_of_registers<kTokens>(d, a[step], x + step * 2, adds || step > 0);
  wgmma_commit();
}

template <typename Format, int kTokens, Scaling kScaling, Epilogue kEpilogue, bool kPlanned>
struct Consumer {
  static constexpr int kGroups = kSumsOfFactor<kScaling>;
  using S = Sizes<kTokens, kGroups>;
  static constexpr bool kOfBf16Groups =
      kScaling == Scaling::kBf16Groups || (kScaling == Scaling::kWeights && Format::kBf16Groups);
  const ProblemOf<Format>& p;
  const Work<kTokens, kPlanned>& work;
  const Shared<kTokens, kGroups>& s;
  int warpgroup, thread;  // of the block, of the warpgroup
  Slot w_slot, x_slot;

  __device__ __forceinline__ void release_w(int slot) const {
    if (thread % 32 == 0) barrier_arrive(&s.barriers().w_empty[slot]);
  }

  // Tells the multicast CTAs, which write into the slot, that this warp has read it. Where they have become splits they
  // still wait for each other so: their parts of K differ by one chunk at most, which is fewer boxes than there are slots.
  __device__ __forceinline__ void release_x(int slot) const {
    const int lane = thread % 32;
    if (work.multicast_ctas == 1) {
      if (lane == 0) barrier_arrive(&s.barriers().x_empty[slot]);
    } else if (lane < work.multicast_ctas) {
      barrier_arrive_nearby(address_in(&s.barriers().x_empty[slot], lane));
    }
  }

  __device__ __forceinline__ Rows<Format> rows(int slot, int chunk) const {
    const int of_warpgroup = S::kRowWarpgroups > 1 ? 2 * warpgroup : 0;
    const uint8_t* first = s.w(slot) + (of_warpgroup * S::kChunks + chunk) * p.tile_bytes;
    return {{first, first + S::kChunks * p.tile_bytes}, thread};
  }

  // One slot of W and of X for each step: warpgroups that divide K have a chunk each.
  __device__ __forceinline__ void multiply_slots(float (&d)[S::kSums], int num_chunks) {
    static_assert(S::kBoxes == S::kChunks * kBoxesOfTile);
    const int chunk = S::kChunks > 1 ? warpgroup : 0;
#pragma unroll
    for (int i = 0; i < S::kSums; i++) d[i] = 0;
    for (int done = 0; done < num_chunks; done += S::kChunks) {
      barrier_wait(&s.barriers().w_full[w_slot.at], w_slot.phase);
      if (done + chunk < num_chunks) {
        const Rows<Format> from = rows(w_slot.at, chunk);
        const uint8_t* boxes = s.x(x_slot.at) + chunk * kBoxesOfTile * S::kBoxBytes;
        float part[S::kSums];
        float (&sums)[S::kSums] = kScaling == Scaling::kSums ? part : d;
        const float scales[2] = {from.scale(p.scales, 0, 0), from.scale(p.scales, 1, 0)};
        const typename Format::Zero zeros[2] = {from.zero(p.scales, 0, 0), from.zero(p.scales, 1, 0)};
        uint32_t a[kBoxesOfTile][kStepsOfBox][4];
#pragma unroll
        for (int box = 0; box < kBoxesOfTile; box++) {
          if constexpr (kScaling == Scaling::kSums)
            codes_of_box<Format>(a[box], from, zeros, box);
          else if constexpr (kOfBf16Groups)
            weights_of_bf16_groups<Format>(a[box], from, p, box);
          else
            weights_of_box<Format>(a[box], from, Factors<Format>(from, p.scales, 0), p, box);
          if (box == 0) barrier_wait(&s.barriers().x_full[x_slot.at], x_slot.phase);
          multiply_box<kTokens>(sums, a[box], boxes + box * S::kBoxBytes, kScaling != Scaling::kSums || box > 0);
        }
        release_w(w_slot.at);
        wgmma_wait<0>();
        if constexpr (kScaling == Scaling::kSums) {
#pragma unroll
          for (int i = 0; i < S::kSums; i++) d[i] += scales[i / 2 % 2] * part[i];
        }
      } else {
        release_w(w_slot.at);
        barrier_wait(&s.barriers().x_full[x_slot.at], x_slot.phase);
      }
      release_x(x_slot.at);
      w_slot.advance(s.w_slots);
      x_slot.advance(S::kXSlots);
    }
  }

  // The bytes of codes of four bits of 16 columns, in the words that have 32 of them: those of even steps or of odd ones.
  template <int kHalves>
  static __device__ __forceinline__ constexpr uint32_t codes_of_half(int half) {
    return kHalves == 1 ? ~0u : half == 0 ? 0x00FF00FFu : 0xFF00FF00u;
  }

  // As `multiply_slots`, in E4M3.
  __device__ __forceinline__ void multiply_codes(float (&d)[S::kSums], int num_chunks) {
    static_assert(S::kChunks > 1);
    const int chunk = warpgroup;
#pragma unroll
    for (int i = 0; i < S::kSums; i++) d[i] = 0;
    for (int done = 0; done < num_chunks; done += S::kChunks) {
      barrier_wait(&s.barriers().w_full[w_slot.at], w_slot.phase);
      if (done + chunk < num_chunks) {
        const Rows<Format> from = rows(w_slot.at, chunk);
        const float scales[2] = {from.scale(p.scales, 0, 0), from.scale(p.scales, 1, 0)};
        const float zeros[2] = {E4m3Operands<Format>::zero(from.zero(p.scales, 0, 0)),
                                E4m3Operands<Format>::zero(from.zero(p.scales, 1, 0))};
        uint32_t a[kMmasOfTile][4];
        E4m3Operands<Format>::operands(from, a);
        barrier_wait(&s.barriers().x_split[x_slot.at], x_slot.phase);
        const uint64_t x = tile_descriptor(s.x(x_slot.at) + chunk * (2 * kTokens * kTileColumns));
        const Factor<1>* factors = s.factor(x_slot.at, chunk) + thread % 4 * 2;
        float sums[2 * S::kSums];
        wgmma_fence();
#pragma unroll
        for (int mma = 0; mma < kMmasOfTile; mma++)
          wgmma_of_codes<2 * kTokens>(sums, a[mma], x + mma * (kMmaColumns / 16), mma > 0);
        wgmma_commit();
        release_w(w_slot.at);
        wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < S::kSums; i++) {
          const Factor<1>& factor = factors[i / 4 * 8 + i % 2];
          float sum = factor.scale * (sums[i] + sums[i + S::kSums] * 0.0625f);
          if constexpr (Format::kHasZeros) sum -= zeros[i / 2 % 2] * factor.sums[0];
          d[i] += scales[i / 2 % 2] * sum;
        }
      } else {
        release_w(w_slot.at);
        barrier_wait(&s.barriers().x_split[x_slot.at], x_slot.phase);
      }
      release_x(x_slot.at);
      w_slot.advance(s.w_slots);
      x_slot.advance(S::kXSlots);
    }
  }

  // The same where 32 columns of a chunk have scales of their own, or 16: then in two products, each with zeros in the
  // place of the other's codes.
  __device__ __forceinline__ void multiply_grouped_codes(float (&d)[S::kSums], int num_chunks) {
    static_assert(S::kChunks > 1 && S::kGroups == kMmasOfTile);
    constexpr int kAtOnce = kTokens == 8 ? 2 : 1;  // sums of a group, which take registers
    constexpr int kHalves = 2 / Format::kStepsOfGroup, kParts = kMmasOfTile * kHalves;
    const int chunk = warpgroup;
#pragma unroll
    for (int i = 0; i < S::kSums; i++) d[i] = 0;
    for (int done = 0; done < num_chunks; done += S::kChunks) {
      barrier_wait(&s.barriers().w_full[w_slot.at], w_slot.phase);
      const bool is_there = done + chunk < num_chunks;
      const Rows<Format> from = rows(w_slot.at, chunk);
      uint32_t a[kMmasOfTile][4];
      if (is_there) E4m3Operands<Format>::operands(from, a);
      barrier_wait(&s.barriers().x_split[x_slot.at], x_slot.phase);
      if (is_there) {
        const uint64_t x = tile_descriptor(s.x(x_slot.at) + chunk * (2 * kTokens * kTileColumns));
        const Factor<kMmasOfTile>* factors = s.factor(x_slot.at, chunk) + thread % 4 * 2;
        float part[S::kSums];  // of the chunk, before its tokens' scale
#pragma unroll
        for (int i = 0; i < S::kSums; i++) part[i] = 0;
#pragma unroll
        for (int first = 0; first < kParts; first += kAtOnce) {
          float sums[kAtOnce][2 * S::kSums];
          uint32_t operands[kAtOnce][4];
#pragma unroll
          for (int at = 0; at < kAtOnce; at++)
#pragma unroll
            for (int i = 0; i < 4; i++)
              operands[at][i] = a[(first + at) / kHalves][i] & codes_of_half<kHalves>((first + at) % kHalves);
          wgmma_fence();
#pragma unroll
          for (int at = 0; at < kAtOnce; at++)
            wgmma_of_codes<2 * kTokens>(sums[at], operands[at], x + (first + at) / kHalves * (kMmaColumns / 16), false);
          wgmma_commit();
          float scales[kAtOnce][2];  // read while the tensor cores multiply
          typename Format::Zero stored[kAtOnce][2];
#pragma unroll
          for (int at = 0; at < kAtOnce; at++) {
            const int group = (first + at) * p.scales.groups / kParts;
#pragma unroll
            for (int half = 0; half < 2; half++) {
              scales[at][half] = from.scale(p.scales, half, group);
              if constexpr (Format::kHasFactors) scales[at][half] *= Format::kScaleOfSums;
              stored[at][half] = from.zero(p.scales, half, group);
            }
          }
          wgmma_wait<0>();
#pragma unroll
          for (int at = 0; at < kAtOnce; at++) {
#pragma unroll
            for (int i = 0; i < S::kSums; i++) {
              const int half = i / 2 % 2;
              part[i] += scales[at][half] * (sums[at][i] + sums[at][i + S::kSums] * 0.0625f);
              if constexpr (Format::kHasZeros) {
                const float inputs = factors[i / 4 * 8 + i % 2].sums[first + at];
                d[i] -= scales[at][half] * E4m3Operands<Format>::zero(stored[at][half]) * inputs;
                if constexpr (E4m3Operands<Format>::kHasMiddles)
                  d[i] += E4m3Operands<Format>::middle(stored[at][half]) * inputs;
              }
            }
          }
        }
#pragma unroll
        for (int i = 0; i < S::kSums; i++) d[i] += factors[i / 4 * 8 + i % 2].scale * part[i];
      }
      release_w(w_slot.at);
      release_x(x_slot.at);
      w_slot.advance(s.w_slots);
      x_slot.advance(S::kXSlots);
    }
  }

  // With many tokens weights are scaled, by scales that are BF16 numbers in fewer instructions.
  __device__ __forceinline__ void multiply_scaled(float (&d)[S::kSums], int num_chunks) {
    if constexpr (Format::kHasHighWeights && kScaling == Scaling::kWeights) {
      if (p.scales.bf16_numbers && p.scales.groups == 1 && !(Format::kHighOfMiddle && p.scales.zeros != 0)) {
        multiply_boxes<true>(d, num_chunks);
        return;
      }
    }
    multiply_boxes<false>(d, num_chunks);
  }

  // One slot of X for each box, so that the tensor cores go on while the next box is dequantised.
  template <bool kHigh>
  __device__ __forceinline__ void multiply_boxes(float (&d)[S::kSums], int num_chunks) {
    static_assert(S::kXSlots > kBoxesOfTile);
    static_assert(S::kBoxes == 1 && S::kChunks == 1);
    int before = 0;
    for (int chunk = 0; chunk < num_chunks; chunk++) {
      barrier_wait(&s.barriers().w_full[w_slot.at], w_slot.phase);
      const Rows<Format> from = rows(w_slot.at, 0);
      const Factors<Format> factors(from, p.scales, 0);
      uint32_t a[kBoxesOfTile][kStepsOfBox][4];
#pragma unroll
      for (int box = 0; box < kBoxesOfTile; box++) {
        if constexpr (kOfBf16Groups)
          weights_of_bf16_groups<Format>(a[box], from, p, box);
        else
          weights_of_box<Format, kHigh>(a[box], from, factors, p, box);
        if (box == kBoxesOfTile - 1) release_w(w_slot.at);
        barrier_wait(&s.barriers().x_full[x_slot.at], x_slot.phase);
        multiply_box<kTokens>(d, a[box], s.x(x_slot.at), chunk + box);
        wgmma_wait<1>();
        if (chunk + box > 0) release_x(before);  // one group is pending, so the products before it have ended
        before = x_slot.at;
        x_slot.advance(S::kXSlots);
      }
      w_slot.advance(s.w_slots);
    }
    wgmma_wait<0>();
    release_x(before);
  }

  // While 16 columns of a box are multiplied, the same of the next box are dequantised.
  __device__ __forceinline__ void multiply_woven(float (&d)[S::kSums], int num_chunks) {
    static_assert(S::kXSlots > kBoxesOfTile);
    static_assert(S::kBoxes == 1 && S::kChunks == 1);
    barrier_wait(&s.barriers().w_full[w_slot.at], w_slot.phase);
    Rows<Format> from = rows(w_slot.at, 0);
    Factors<Format> factors(from, p.scales, 0);
    uint32_t a[kBoxesOfTile][kStepsOfBox][4];
    const Pieces<Format> first(from, 0);
#pragma unroll
    for (int step = 0; step < kStepsOfBox; step++) first.template weights<false>(a[0][step], factors, 0, step);
    int before = 0;
    for (int chunk = 0; chunk < num_chunks; chunk++) {
#pragma unroll
      for (int box = 0; box < kBoxesOfTile; box++) {
        const int next = (box + 1) % kBoxesOfTile;
        if (next == 0) {
          release_w(w_slot.at);
          w_slot.advance(s.w_slots);
          if (chunk + 1 < num_chunks) barrier_wait(&s.barriers().w_full[w_slot.at], w_slot.phase);
          from = rows(w_slot.at, 0);  // after the last chunk, of what is stale
          factors = Factors<Format>(from, p.scales, 0);
        }
        const Pieces<Format> pieces(from, next);
        barrier_wait(&s.barriers().x_full[x_slot.at], x_slot.phase);
        const uint64_t x = tile_descriptor(s.x(x_slot.at));
        wgmma_fence();
        wgmma_of_registers<kTokens>(d, a[box][0], x, chunk + box);
        wgmma_commit();
        wgmma_wait<1>();  // of the box before, whose fragments are no longer read
        if (chunk + box > 0) release_x(before);
        pieces.template weights<false>(a[next][0], factors, next, 0);
#pragma unroll
        for (int step = 1; step < kStepsOfBox; step++) {
          wgmma_of_registers<kTokens>(d, a[box][step], x + step * 2, 1);
          pieces.template weights<false>(a[next][step], factors, next, step);
        }
        wgmma_commit();
        before = x_slot.at;
        x_slot.advance(S::kXSlots);
      }
    }
    wgmma_wait<0>();
    release_x(before);
  }

  __device__ __forceinline__ int feature(int row_tile, int of_warpgroup, int of_thread, int half) const {
    const int pair = row_tile * S::kRowWarpgroups + of_warpgroup, in_warp = of_thread / 32 * 16 + of_thread % 32 / 4;
    if constexpr (kEpilogue == kSwiglu) return pair / 2 * 64 + pair % 2 * 8 + in_warp;
    return pair * 64 + half * 8 + in_warp;
  }

  // Those of a thread's two rows, where the format has any; they are read while a tile is multiplied.
  struct RowFactors {
    float of[2];
    __device__ __forceinline__ RowFactors(const Consumer& consumer, int row_tile) {
      if constexpr (Format::kHasFactors) {
        const auto& p = consumer.p;
        const int first = consumer.feature(row_tile, S::kRowWarpgroups > 1 ? consumer.warpgroup : 0, consumer.thread, 0);
        const int next = kEpilogue == kSwiglu ? p.n : 8;  // up is after all of gate
        // Rows of the last warpgroups may not be there.
        of[0] = first < p.n ? p.factors[first] : 0;
        of[1] = first < p.n - (kEpilogue == kSwiglu ? 0 : 8) ? p.factors[first + next] : 0;
      }
    }
    __device__ __forceinline__ void multiply(float (&d)[S::kSums]) const {
      if constexpr (Format::kHasFactors) {
#pragma unroll
        for (int i = 0; i < S::kSums; i++) d[i] *= of[i / 2 % 2];
      }
    }
  };

  // Sums of tokens `token` and `token + 1`: of the lower row, then of the higher one.
  __device__ __forceinline__ void store_four(float4 four, int token, int feature, int end_token) const {
    const float first[2] = {four.x, four.y}, second[2] = {four.z, four.w};
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if (token + i >= end_token || feature >= p.n) continue;
      if constexpr (kEpilogue == kFloat32) {
        float* to = static_cast<float*>(p.y) + int64_t(token + i) * p.n + feature;
        to[0] = first[i];
        if (feature + 8 < p.n) to[8] = second[i];
      } else {
        bf16* to = static_cast<bf16*>(p.y) + int64_t(token + i) * p.n + feature;
        if constexpr (kEpilogue == kStore) {
          to[0] = __float2bfloat16_rn(first[i]);
          if (feature + 8 < p.n) to[8] = __float2bfloat16_rn(second[i]);
        } else if constexpr (kPlanned) {
          to[0] = __float2bfloat16_rn(limited_swiglu(first[i], second[i], p.limit));
        } else {
          to[0] = __float2bfloat16_rn(silu(rounded(first[i])) * rounded(second[i]));
        }
      }
    }
  }

  __device__ __forceinline__ void store(const float (&d)[S::kSums], const Tile& tile) const {
    const int first = feature(tile.row_tile, S::kRowWarpgroups > 1 ? warpgroup : 0, thread, 0);
#pragma unroll
    for (int block = 0; block < kTokens / 8; block++)
      store_four(make_float4(d[4 * block], d[4 * block + 1], d[4 * block + 2], d[4 * block + 3]),
                 tile.first_token + 8 * block + thread % 4 * 2, first, tile.end_token);
  }

  static __device__ __forceinline__ uint32_t transposed(uint32_t matrix) {
    uint32_t result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(matrix));
    return result;
  }

  // Eight features of a token at a time. A matrix of 8 features x 8 tokens is transposed in registers, and four threads
  // exchange theirs for a matrix each.
  __device__ __forceinline__ void store_gathered(const float (&d)[S::kSums], const Tile& tile) const {
    constexpr int kMatricesOfBlock = kEpilogue == kSwiglu ? 1 : 2, kBlocksAtOnce = kGroup / kMatricesOfBlock;
    const int lane = thread % 32, quarter = lane % 4;
    const int first = feature(tile.row_tile, warpgroup, thread / 32 * 32, 0) + quarter % kMatricesOfBlock * 8;
    bf16* y = static_cast<bf16*>(p.y);
#pragma unroll
    for (int block = 0; block < kTokens / 8; block += kBlocksAtOnce) {
      uint32_t words[kGroup];
#pragma unroll
      for (int i = 0; i < kBlocksAtOnce; i++) {
        const int at = 4 * (block + i);
        if constexpr (kEpilogue == kSwiglu) {
          if constexpr (kPlanned)
            words[i] = transposed(packed(limited_swiglu(d[at], d[at + 2], p.limit),
                                         limited_swiglu(d[at + 1], d[at + 3], p.limit)));
          else
            words[i] = transposed(gated(d[at], d[at + 1], d[at + 2], d[at + 3]));
        } else {
          words[2 * i] = transposed(packed(d[at], d[at + 1]));
          words[2 * i + 1] = transposed(packed(d[at + 2], d[at + 3]));
        }
      }
      const uint4 eight = gathered(words);
      const int token = tile.first_token + 8 * (block + quarter / kMatricesOfBlock) + lane / 4;
      if (token < tile.end_token && first < p.n) *reinterpret_cast<uint4*>(y + int64_t(token) * p.n + first) = eight;
    }
  }

  // The other warpgroup's sums, where the two divide K, come to the first one; false for the other.
  __device__ __forceinline__ bool hand_over(float (&d)[S::kSums]) const {
    if constexpr (S::kChunks == 1) return true;
    float* place = s.handed() + thread;
    if (warpgroup == 1) {
      asm volatile("bar.sync 1, %0;" ::"n"(S::kConsumers) : "memory");  // the last tile's have been read
#pragma unroll
      for (int i = 0; i < S::kSums; i++) place[i * kWarpgroup] = d[i];
      asm volatile("bar.sync 2, %0;" ::"n"(S::kConsumers) : "memory");
      return false;
    }
    asm volatile("bar.sync 1, %0;" ::"n"(S::kConsumers) : "memory");
    asm volatile("bar.sync 2, %0;" ::"n"(S::kConsumers) : "memory");
#pragma unroll
    for (int i = 0; i < S::kSums; i++) d[i] += place[i * kWarpgroup];
    return true;
  }

  // Sends this split's sums to the first one, or, there, adds the others' in their order; false for the others.
  __device__ __forceinline__ bool push(float (&d)[S::kSums]) const {
    if (work.split != 0) {
      const uint32_t place = address_in(s.pushed(work.split) + thread, 0);
#pragma unroll
      for (int i = 0; i < S::kSums; i++) store_in(place + i * (kWarpgroup * 4), d[i]);
      barrier_arrive_in(address_in(&s.barriers().pushed, 0));
      return false;
    }
    barrier_wait_cluster(&s.barriers().pushed, 0);  // the only phase: a cluster divides one tile
    for (int split = 1; split < work.splits; split++) {
#pragma unroll
      for (int i = 0; i < S::kSums; i++) d[i] += s.pushed(split)[i * kWarpgroup + thread];
    }
    return true;
  }

  // Adds up this split's share of the sums of all splits, in their order, and stores them. They lie where X and W were.
  __device__ void pull(const float (&d)[S::kSums], const Tile& tile) const {
    constexpr int kMostSplits = 8, kVectors = kTokens / 8 * S::kConsumers;
    float4* mine = reinterpret_cast<float4*>(s.base);
    asm volatile("bar.sync 3, %0;" ::"n"(S::kConsumers) : "memory");  // all have read the last slots
#pragma unroll
    for (int block = 0; block < kTokens / 8; block++)
      mine[block * S::kConsumers + int(threadIdx.x)] =
          make_float4(d[4 * block], d[4 * block + 1], d[4 * block + 2], d[4 * block + 3]);
    cluster_sync();
    const int end = kVectors * (work.split + 1) / work.splits;
    for (int at = kVectors * work.split / work.splits + threadIdx.x; at < end; at += S::kConsumers) {
      float4 parts[kMostSplits];
#pragma unroll
      for (int split = 0; split < kMostSplits; split++)
        if (split < work.splits) parts[split] = load_in(address_in(mine + at, split));
      float4 sum = parts[0];
#pragma unroll
      for (int split = 1; split < kMostSplits; split++) {
        if (split >= work.splits) break;
        sum.x += parts[split].x, sum.y += parts[split].y, sum.z += parts[split].z, sum.w += parts[split].w;
      }
      const int holder = at % S::kConsumers, of_thread = holder % kWarpgroup;
      store_four(sum, tile.first_token + at / S::kConsumers * 8 + of_thread % 4 * 2,
                 feature(tile.row_tile, holder / kWarpgroup, of_thread, 0), tile.end_token);
    }
  }

  __device__ void run() {
    float d[S::kSums];
    for (int index = 0; index < work.pieces; index++) {
      const Piece piece = work.piece(index);
      const Tile tile = piece.tile;
      const RowFactors factors(*this, tile.row_tile);
      if constexpr (kScaling == Scaling::kE4m3)
        multiply_codes(d, piece.num_chunks);
      else if constexpr (kScaling == Scaling::kE4m3Groups)
        multiply_grouped_codes(d, piece.num_chunks);
      else if constexpr (kScaling == Scaling::kWoven)
        multiply_woven(d, piece.num_chunks);
      else if constexpr (S::kBoxes == 1)
        multiply_scaled(d, piece.num_chunks);
      else
        multiply_slots(d, piece.num_chunks);
      factors.multiply(d);
      if (!hand_over(d)) continue;
      if (piece.is_split) {  // the last one
        if constexpr (S::kPushes) {
          if (push(d)) store(d, tile);
        } else {
          pull(d, tile);
        }
        return;
      }
      if constexpr (S::kGathers && kEpilogue != kFloat32)
        store_gathered(d, tile);
      else
        store(d, tile);
    }
  }
};

template <typename Format, int kTokens, Scaling kScaling, Epilogue kEpilogue, bool kPlanned = false>
__device__ __forceinline__ void run(const CUtensorMap& x_map, const ProblemOf<Format>& p) {
  constexpr int kGroups = kSumsOfFactor<kScaling>;
  using S = Sizes<kTokens, kGroups>;
  extern __shared__ __align__(kAlignment) uint8_t raw[];
  const Shared<kTokens, kGroups> s(raw, p.tile_bytes);
  if constexpr (kPlanned) {
    if (!p.weights_first) wait_for_previous_kernel();
  }
  const Work<kTokens, kPlanned> work(p);
  if (threadIdx.x == 0) {
    Barriers<kTokens>& barriers = s.barriers();
    for (int i = 0; i < s.w_slots; i++) {
      barrier_init(&barriers.w_full[i], 1);
      barrier_init(&barriers.w_empty[i], S::kConsumers / 32);
    }
    for (int i = 0; i < S::kXSlots; i++) {
      barrier_init(&barriers.x_full[i], 1);
      barrier_init(&barriers.x_split[i], kSplitWarps);
      barrier_init(&barriers.x_empty[i], S::kConsumers / 32 * p.multicast_ctas);
    }
    if (work.splits > 1) barrier_init(&barriers.pushed, (work.splits - 1) * kWarpgroup);
    barrier_init_fence();
  }
  const bool is_cluster = cluster_size() > 1, multicasts = p.multicast_ctas > 1;
  __syncwarp();
  if (is_cluster) cluster_arrive();
  __syncthreads();
  // Multicast copies arrive at the barriers of all blocks of the cluster; splits need those of the others only when
  // they have sums, so that their copies begin at once.
  if (multicasts) cluster_wait();
  launch_dependents();
  if (threadIdx.x < S::kConsumers) {
    Consumer<Format, kTokens, kScaling, kEpilogue, kPlanned> consumer{
        p, work, s, __shfl_sync(~0u, int(threadIdx.x) / kWarpgroup, 0), int(threadIdx.x) % kWarpgroup, {}, {}};
    if constexpr (S::kTrades) take_registers<S::kConsumerRegisters>();
    if (work.splits > 1 && !multicasts) cluster_wait();
    consumer.run();
  } else {
    if constexpr (S::kTrades) leave_registers<S::kProducerRegisters>();
    const Producer<kTokens, kEpilogue, kGroups, kPlanned> producer{p, work, s};
    if (threadIdx.x == S::kConsumers) producer.load_w();
    if (threadIdx.x == S::kConsumers + 32) producer.load_x(x_map);
    if constexpr (S::kSplits) {
      const int of_split = int(threadIdx.x) - S::kConsumers - 64;
      if (of_split >= 0) {
        const Splitter<Format, kTokens, S::kChunks, S::kXSlots, Work<kTokens, kPlanned>, Shared<kTokens, kGroups>>
            splitter{work, s, of_split / 32, of_split % 32};
        splitter.run();
      }
    }
    __syncwarp();
    if (work.splits > 1 && !multicasts) cluster_wait();
    if (!S::kPushes && work.divides()) cluster_sync();
  }
  // No CTA may end while others still reach into its shared memory; a thread that has ended counts as arrived.
  if (multicasts || (work.splits > 1 && (!S::kPushes || work.split == 0))) {
    __syncwarp();
    cluster_meet();
  }
}

}  // namespace lowbit

#define LOWBIT_GEMM(FORMAT, FORMAT_NAME, TOKENS, SCALING, SCALING_NAME, EPILOGUE, EPILOGUE_NAME)                   \
  extern "C" __global__ void __launch_bounds__(lowbit::Sizes<TOKENS, lowbit::kSumsOfFactor<lowbit::Scaling::SCALING>>::kThreads, \
                                               lowbit::Sizes<TOKENS>::kBlocks)                                     \
      lowbit_gemm_##FORMAT_NAME##_##EPILOGUE_NAME##_##SCALING_NAME##_##TOKENS(                                     \
          const __grid_constant__ CUtensorMap x_map,                                                               \
          const __grid_constant__ lowbit::ProblemOf<lowbit::FORMAT> problem) {                                     \
    lowbit::run<lowbit::FORMAT, TOKENS, lowbit::Scaling::SCALING, EPILOGUE>(x_map, problem);                       \
  }

#define LOWBIT_GEMM_SUMS(FORMAT, NAME, EPILOGUE, EPILOGUE_NAME)             \
  LOWBIT_GEMM(FORMAT, NAME, 8, kSums, sums, EPILOGUE, EPILOGUE_NAME)        \
  LOWBIT_GEMM(FORMAT, NAME, 16, kSums, sums, EPILOGUE, EPILOGUE_NAME)       \
  LOWBIT_GEMM(FORMAT, NAME, 32, kSums, sums, EPILOGUE, EPILOGUE_NAME)       \
  LOWBIT_GEMM(FORMAT, NAME, 64, kSums, sums, EPILOGUE, EPILOGUE_NAME)

#define LOWBIT_GEMM_WEIGHTS(FORMAT, NAME, EPILOGUE, EPILOGUE_NAME)          \
  LOWBIT_GEMM(FORMAT, NAME, 8, kWeights, weights, EPILOGUE, EPILOGUE_NAME)  \
  LOWBIT_GEMM(FORMAT, NAME, 16, kWeights, weights, EPILOGUE, EPILOGUE_NAME) \
  LOWBIT_GEMM(FORMAT, NAME, 32, kWeights, weights, EPILOGUE, EPILOGUE_NAME) \
  LOWBIT_GEMM(FORMAT, NAME, 64, kWeights, weights, EPILOGUE, EPILOGUE_NAME) \
  LOWBIT_GEMM(FORMAT, NAME, 128, kWeights, weights, EPILOGUE, EPILOGUE_NAME) \
  LOWBIT_GEMM(FORMAT, NAME, 192, kWeights, weights, EPILOGUE, EPILOGUE_NAME) \
  LOWBIT_GEMM(FORMAT, NAME, 256, kWeights, weights, EPILOGUE, EPILOGUE_NAME)

#define LOWBIT_GEMM_BF16_GROUPS(FORMAT, NAME, EPILOGUE, EPILOGUE_NAME)             \
  LOWBIT_GEMM(FORMAT, NAME, 8, kBf16Groups, bf16groups, EPILOGUE, EPILOGUE_NAME)   \
  LOWBIT_GEMM(FORMAT, NAME, 16, kBf16Groups, bf16groups, EPILOGUE, EPILOGUE_NAME)  \
  LOWBIT_GEMM(FORMAT, NAME, 32, kBf16Groups, bf16groups, EPILOGUE, EPILOGUE_NAME)  \
  LOWBIT_GEMM(FORMAT, NAME, 64, kBf16Groups, bf16groups, EPILOGUE, EPILOGUE_NAME)  \
  LOWBIT_GEMM(FORMAT, NAME, 128, kBf16Groups, bf16groups, EPILOGUE, EPILOGUE_NAME) \
  LOWBIT_GEMM(FORMAT, NAME, 192, kBf16Groups, bf16groups, EPILOGUE, EPILOGUE_NAME) \
  LOWBIT_GEMM(FORMAT, NAME, 256, kBf16Groups, bf16groups, EPILOGUE, EPILOGUE_NAME)

#define LOWBIT_GEMM_E4M3(FORMAT, NAME, EPILOGUE, EPILOGUE_NAME)        \
  LOWBIT_GEMM(FORMAT, NAME, 8, kE4m3, e4m3, EPILOGUE, EPILOGUE_NAME)   \
  LOWBIT_GEMM(FORMAT, NAME, 16, kE4m3, e4m3, EPILOGUE, EPILOGUE_NAME)

#define LOWBIT_GEMM_E4M3_GROUPS(FORMAT, NAME, EPILOGUE, EPILOGUE_NAME)             \
  LOWBIT_GEMM(FORMAT, NAME, 8, kE4m3Groups, e4m3groups, EPILOGUE, EPILOGUE_NAME)   \
  LOWBIT_GEMM(FORMAT, NAME, 16, kE4m3Groups, e4m3groups, EPILOGUE, EPILOGUE_NAME)

// Of several matrices, with a plan.
#define LOWBIT_EXPERTS(FORMAT, FORMAT_NAME, TOKENS, SCALING, SCALING_NAME, EPILOGUE, EPILOGUE_NAME)                    \
  extern "C" __global__ void __launch_bounds__(lowbit::Sizes<TOKENS, lowbit::kSumsOfFactor<lowbit::Scaling::SCALING>>::kThreads, \
                                               lowbit::Sizes<TOKENS>::kBlocks)                                         \
      lowbit_experts_##FORMAT_NAME##_##EPILOGUE_NAME##_##SCALING_NAME##_##TOKENS(                                      \
          const __grid_constant__ CUtensorMap x_map, const __grid_constant__ lowbit::Problem problem) {                \
    lowbit::run<lowbit::FORMAT, TOKENS, lowbit::Scaling::SCALING, EPILOGUE, true>(x_map, problem);                     \
  }

#define LOWBIT_EXPERTS_OF(FORMAT, NAME, EPILOGUE, EPILOGUE_NAME)                 \
  LOWBIT_EXPERTS(FORMAT, NAME, 128, kWeights, weights, EPILOGUE, EPILOGUE_NAME)  \
  LOWBIT_EXPERTS(FORMAT, NAME, 256, kWeights, weights, EPILOGUE, EPILOGUE_NAME)

#define LOWBIT_EXPERTS_SUMS(FORMAT, NAME, EPILOGUE, EPILOGUE_NAME)               \
  LOWBIT_EXPERTS(FORMAT, NAME, 8, kE4m3, e4m3, EPILOGUE, EPILOGUE_NAME)          \
  LOWBIT_EXPERTS(FORMAT, NAME, 8, kSums, sums, EPILOGUE, EPILOGUE_NAME)          \
  LOWBIT_EXPERTS(FORMAT, NAME, 32, kSums, sums, EPILOGUE, EPILOGUE_NAME)

#define LOWBIT_EXPERTS_GROUPS(FORMAT, NAME, EPILOGUE, EPILOGUE_NAME)                         \
  LOWBIT_EXPERTS(FORMAT, NAME, 8, kE4m3Groups, e4m3groups, EPILOGUE, EPILOGUE_NAME)          \
  LOWBIT_EXPERTS(FORMAT, NAME, 8, kWeights, weights, EPILOGUE, EPILOGUE_NAME)                \
  LOWBIT_EXPERTS(FORMAT, NAME, 32, kWeights, weights, EPILOGUE, EPILOGUE_NAME)

#define LOWBIT_EXPERTS_BF16_GROUPS(FORMAT, NAME, EPILOGUE, EPILOGUE_NAME)              \
  LOWBIT_EXPERTS(FORMAT, NAME, 8, kBf16Groups, bf16groups, EPILOGUE, EPILOGUE_NAME)    \
  LOWBIT_EXPERTS(FORMAT, NAME, 32, kBf16Groups, bf16groups, EPILOGUE, EPILOGUE_NAME)   \
  LOWBIT_EXPERTS(FORMAT, NAME, 128, kBf16Groups, bf16groups, EPILOGUE, EPILOGUE_NAME)  \
  LOWBIT_EXPERTS(FORMAT, NAME, 256, kBf16Groups, bf16groups, EPILOGUE, EPILOGUE_NAME)
