// Y = X W^T for more tokens than decode_gemm.cu serves: a tile is kTokens tokens x kColumns rows of W.
//
//   producer thread:        wait for a free stage ─► TMA of a chunk of W and a chunk of X
//   consumer warpgroups:    wait for a full stage ─► wgmma ─► free the stage before ─► after a tile: epilogue
//
// A block has a multiprocessor to itself, but for a little shared memory in which the block of a norm waits: what few
// tokens lack is bytes under way, and what many lack is room for sums.
//
// A cluster of CTAs is `splits` x `multicast_ctas`:
//   - multicast CTAs have the same tokens and neighbouring columns: each reads a share of X and multicasts it to all;
//   - split-K (store only): splits have the same tile and divide K. At the end each leaves its sums in its shared memory,
//     and each adds up some of the columns, in the order of splits: one run twice is bit-identical. Without split-K a
//     token's sums are the same bits for any number of tokens.
// Programmatic dependent launch as in decode_gemm.cu: stages fill with weights while the kernel ahead drains.
//
// gemm_epilogue.cuh says what becomes of the sums.
//
// With adapters K goes on: after W's own chunks come those of B, for which X is A x, which tiles of A make:
// gemm/adapter_maps.cuh.
#pragma once
#include "common/hopper.cuh"
#include "gemm/adapter_maps.cuh"
#include "gemm/gemm_epilogue.cuh"
#include "gemm/wgmma.cuh"

using namespace hopper;

namespace {

constexpr int kChunk = 64;        // of K: 128 bytes, one swizzle row
constexpr int kRowBytes = kChunk * 2;
constexpr int kAlignment = 1024;  // of swizzled boxes
// Where they are traded: 384 threads begin with 168 each, and 40 + 2 * 232 is three times that.
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

// Sizes of a kernel; cuda/gemm/tiles.py repeats those of launches.
template <int kTokens_, int kColumns_>
struct Sizes {
  static constexpr int kTokens = kTokens_, kColumns = kColumns_;
  static constexpr int kHigh = kTokens > 192 ? 2 : 1;  // times 64 tokens of a warpgroup
  static constexpr int kConsumers = kTokens / kHigh * 2;
  static constexpr bool kTrades = kHigh > 1;  // registers, for which a producer must be a whole warpgroup
  static constexpr int kThreads = kConsumers + (kTrades ? 128 : 32);
  static constexpr int kSharedBytes = 225 * 1024;  // all but 3 KiB, in which the block of a norm waits
  static constexpr int kSums = kColumns / 2;
  static constexpr int kXBytes = kTokens * kRowBytes, kWeightBytes = kColumns * kRowBytes;
  static constexpr int kStageBytes = kXBytes + kWeightBytes;
  static constexpr int kStages = kSharedBytes / (kStageBytes + 16);
  static_assert(kTokens * kColumns * 4 <= kStages * kStageBytes, "the sums of a split must fit");
};

template <class S>
struct Shared {
  alignas(kAlignment) uint8_t x[S::kStages][S::kXBytes];
  alignas(kAlignment) uint8_t w[S::kStages][S::kWeightBytes];
  uint64_t full[S::kStages], empty[S::kStages];
};

struct Tile {
  int first_token, column_tile;
  bool is_shrink;  // its columns are rows of A
};

// Which tiles and which split of K a block multiplies.
struct Work {
  int multicast_ctas, multicast_rank, splits, split;
  int first, stride, tiles;  // of the cluster's tiles, each `multicast_ctas` columns wide
  int token_tiles, wide_tiles, group;
  int shrink_tiles;                 // of all tokens, before those of W
  int makers, part;                 // with kParts, kBeside: clusters that make A x, and which part of it this one makes
  int first_chunk, own_chunks;      // of W, of each tile
  const AdapterMaps* adapters;      // whose chunks the last split has; null for the others, and without adapters

  template <class S, Adapted kAdapted>
  static __device__ Work of(int m, int rows, int k, int multicast_ctas, int group, const AdapterMaps* adapters) {
    Work work;
    const int rank = cluster_rank(), size = cluster_size(), chunks = (k + kChunk - 1) / kChunk;
    work.multicast_ctas = multicast_ctas, work.multicast_rank = rank % multicast_ctas;
    work.splits = size / multicast_ctas, work.split = rank / multicast_ctas;
    work.first = blockIdx.x / size, work.stride = gridDim.x / size;
    work.token_tiles = (m + S::kTokens - 1) / S::kTokens;
    work.wide_tiles = (rows + S::kColumns * multicast_ctas - 1) / (S::kColumns * multicast_ctas);
    work.shrink_tiles = kAdapted == kHalves ? work.token_tiles * adapters->shrink_tiles : 0;
    work.tiles = work.shrink_tiles + work.token_tiles * work.wide_tiles;
    work.group = group;
    work.first_chunk = chunks * work.split / work.splits;
    work.own_chunks = chunks * (work.split + 1) / work.splits - work.first_chunk;
    if constexpr (kAdapted == kParts || kAdapted == kBeside) {
      // The grid's first clusters have a part of a tile of A each; nothing that others wait for comes after it.
      work.makers = adapters->shrink_tiles * adapters->parts, work.part = work.first % adapters->parts;
      if (work.first < work.makers) {
        const int own = work.part * work.splits + work.split, all = adapters->parts * work.splits;
        work.first_chunk = chunks * own / all, work.own_chunks = chunks * (own + 1) / all - work.first_chunk;
        work.first /= adapters->parts, work.tiles = work.first + 1, work.shrink_tiles = adapters->shrink_tiles;
        work.adapters = nullptr;
        return work;
      }
      work.first -= work.makers, work.stride -= work.makers;
    }
    constexpr bool kHasDeltas = kAdapted == kHalves || kAdapted == kParts;
    if (kHasDeltas && work.wide_tiles > 0) {
      // The last split has the chunks of adapters, of one piece in most tiles, and fewer of W for them.
      const int all = chunks + adapters->chunks();
      auto begin_of = [&](int split) {
        return split == work.splits ? chunks : min(all * split / work.splits, chunks - work.splits + split);
      };
      work.first_chunk = begin_of(work.split);
      work.own_chunks = begin_of(work.split + 1) - work.first_chunk;
    }
    work.adapters = kHasDeltas && work.split == work.splits - 1 ? adapters : nullptr;
    return work;
  }

  // Tiles go through `group` token tiles before the next columns, so that both stay in the L2 cache for a while.
  template <class S>
  __device__ Tile tile(int index) const {
    if (index < shrink_tiles) return {index % token_tiles * S::kTokens, index / token_tiles, true};
    index -= shrink_tiles;
    const int of_group = group * wide_tiles, first_row = index / of_group * group;
    const int rows = min(group, token_tiles - first_row), within = index % of_group;
    return {(first_row + within % rows) * S::kTokens, within / rows * multicast_ctas + multicast_rank, false};
  }

  // Of those of all multicast CTAs, which have their X together.
  template <class S>
  __device__ __forceinline__ int first_piece(const Tile& tile) const {
    return adapters->first_piece((tile.column_tile - multicast_rank) * (S::kColumns / 16));
  }

  // Of W, or A, and then of the B's whose rows the tile has.
  template <class S>
  __device__ __forceinline__ int chunks_of(const Tile& tile) const {
    if (!adapters || tile.is_shrink) return own_chunks;
    const int end = (tile.column_tile - multicast_rank + multicast_ctas) * (S::kColumns / 16);
    return own_chunks + (adapters->end_piece(end) - first_piece<S>(tile)) * adapters->chunks();
  }

  template <class S>
  __device__ __forceinline__ int steps() const {
    if (!adapters) return max(0, (tiles - first + stride - 1) / stride) * own_chunks;
    int found = 0;
    for (int index = first; index < tiles; index += stride) found += chunks_of<S>(tile<S>(index));
    return found;
  }

  // Blocks of the grid that have a tile of W and, if K is divided, the end of it.
  __device__ __forceinline__ int blocks_with_adapters() const {
    return min(stride, tiles - shrink_tiles) * multicast_ctas;
  }
};

template <class S>
__device__ __forceinline__ void load_w(Shared<S>& s, int stage, const CUtensorMap& map, int column_tile, int chunk,
                                       uint64_t policy) {
  load_box(s.w[stage], &map, &s.full[stage], chunk * kChunk, 0, 0, column_tile * (S::kColumns / 16), policy);
}

// This block's share of the rows of X, into the same place of all multicast CTAs.
template <class S>
__device__ __forceinline__ void load_tokens(uint8_t* to, int row_bytes, uint64_t* full, const CUtensorMap& map,
                                            const Work& work, int first_token, int column, uint64_t policy) {
  if (work.multicast_ctas == 1) {
    load_box(to, &map, full, column, first_token, policy);
    return;
  }
  const int tokens = S::kTokens / work.multicast_ctas, first = tokens * work.multicast_rank;
  const uint16_t targets = ((1 << work.multicast_ctas) - 1) << (work.split * work.multicast_ctas);
  load_box_into(to + first * row_bytes, &map, full, column, first_token + first, targets, policy);
}

template <class S>
__device__ __forceinline__ void load_x(Shared<S>& s, int stage, const CUtensorMap& map, const Work& work,
                                       int first_token, int column, uint64_t policy) {
  load_tokens<S>(s.x[stage], kRowBytes, &s.full[stage], map, work, first_token, column, policy);
}

// What other blocks have stored is then there for the copy engine.
__device__ __forceinline__ void wait_for_shrunk(const Work& work) {
  lora::wait_for_parts(&parts_ready, work.shrink_tiles * work.splits);
  lora::fence_copies();
}

// Each block with a tile of W, once, after it has waited: at the end, where nothing waits for the answer.
__device__ __forceinline__ void leave_shrunk(const Work& work) {
  if (lora::is_last_served(&blocks_served, work.blocks_with_adapters())) parts_ready = 0;
}

template <class S, Epilogue kEpilogue, Adapted kAdapted>
__device__ void produce(Shared<S>& s, const Work& work, const CUtensorMap& w_map, const CUtensorMap& x_map,
                        const AdapterMaps* adapters) {
  // With one tile of tokens each weight is read once, and X by every block; with several, both are read again.
  const bool is_once = work.token_tiles == 1;
  const uint64_t again = is_once ? evict_last_policy() : evict_normal_policy();
  const uint64_t weights = is_once ? evict_first_policy() : again;
  const int steps = work.steps<S>();
  const int ahead = min(S::kStages, steps);
  int index = work.first, chunk = 0;
  [[maybe_unused]] bool has_shrunk = work.shrink_tiles == 0;
  Tile tile = work.tile<S>(index);
  int chunks = work.chunks_of<S>(tile);
  auto advance = [&] {
    if (++chunk < chunks) return;
    chunk = 0;
    index += work.stride;
    if (kAdapted == kNone || index < work.tiles) tile = work.tile<S>(index), chunks = work.chunks_of<S>(tile);
  };
  // Next to a chunk of B, A x is left by those who multiply it.
  auto bytes = [&] { return kAdapted == kParts && chunk >= work.own_chunks ? S::kWeightBytes : S::kStageBytes; };
  auto load_rows = [&](int stage) {
    if constexpr (kAdapted != kNone) {
      if (tile.is_shrink) {
        load_w<S>(s, stage, adapters->a, tile.column_tile, work.first_chunk + chunk, again);
        return;
      }
      if (chunk >= work.own_chunks) {
        const AdapterChunk own(*adapters, work.first_piece<S>(tile), chunk - work.own_chunks);
        load_box(s.w[stage], &adapters->b[own.piece], &s.full[stage], own.column, 0,
                 kEpilogue == kSwiglu ? -own.piece : 0,
                 tile.column_tile * (S::kColumns / 16) - adapters->starts[own.piece], again);
        return;
      }
    }
    load_w<S>(s, stage, w_map, tile.column_tile, work.first_chunk + chunk, weights);
  };
  auto load_tokens = [&](int stage) {
    if constexpr (kAdapted == kParts) {
      if (chunk >= work.own_chunks) return;
    }
    if constexpr (kAdapted == kHalves) {
      if (chunk >= work.own_chunks) {
        if (!has_shrunk) {
          wait_for_shrunk(work);
          has_shrunk = true;
        }
        const AdapterChunk own(*adapters, work.first_piece<S>(tile), chunk - work.own_chunks);
        load_x<S>(s, stage, adapters->shrunk, work, tile.first_token, own.shrunk_column(*adapters, own.half), again);
        return;
      }
    }
    load_x<S>(s, stage, x_map, work, tile.first_token, (work.first_chunk + chunk) * kChunk, again);
  };
  for (int i = 0; i < ahead; i++, advance()) {
    barrier_expect(&s.full[i], bytes());
    load_rows(i);
  }
  if constexpr (kAdapted != kNone) {
    // Tiles of W wait for a tile of A, which has as many chunks as they: it is done sooner if no chunk of it comes from
    // memory, next to theirs. B comes last, when nothing else is under way that its way from memory could hide behind.
    const Tile own = work.tile<S>(work.first);
    const int unit = own.column_tile * (S::kColumns / 16);
    if (own.is_shrink) {
      for (int i = ahead; i < work.own_chunks; i++)
        lora::prefetch_box(&adapters->a, (work.first_chunk + i) * kChunk, 0, 0, unit);
    } else {
      for (int i = max(work.own_chunks, ahead); i < work.chunks_of<S>(own); i++) {
        const AdapterChunk its(*adapters, work.first_piece<S>(own), i - work.own_chunks);
        if (its.half == 0)
          lora::prefetch_box(&adapters->b[its.piece], its.column, 0, kEpilogue == kSwiglu ? -its.piece : 0,
                             unit - adapters->starts[its.piece]);
      }
    }
  }
  wait_for_previous_kernel();
  index = work.first, chunk = 0;
  tile = work.tile<S>(index), chunks = work.chunks_of<S>(tile);
  for (int i = 0; i < ahead; i++, advance()) load_tokens(i);
  for (int i = ahead; i < steps; i++, advance()) {
    const int stage = i % S::kStages;
    barrier_wait(&s.empty[stage], (i / S::kStages - 1) & 1);
    barrier_expect(&s.full[stage], bytes());
    load_rows(stage);
    load_tokens(stage);
  }
  if constexpr (kAdapted == kHalves) {
    if (has_shrunk && work.shrink_tiles > 0) leave_shrunk(work);
  }
}

// Tells the multicast CTAs, which write into the stage, that this warp has read it.
template <class S>
__device__ __forceinline__ void release(Shared<S>& s, const Work& work, int stage) {
  const int lane = threadIdx.x % 32;
  if (work.multicast_ctas == 1) {
    if (lane == 0) barrier_arrive(&s.empty[stage]);
  } else if (lane < work.multicast_ctas) {
    barrier_arrive_nearby(address_in(&s.empty[stage], work.split * work.multicast_ctas + lane));
  }
}

// Chunks of a tile from `first` to `end`, at least one.
template <class S>
__device__ __forceinline__ void multiply_chunks(float (&d)[S::kHigh][S::kSums], Shared<S>& s, const Work& work,
                                                int first, int end, int warpgroup, int& stage, int& phase) {
  int before = 0;
  for (int chunk = first; chunk < end; chunk++) {
    barrier_wait(&s.full[stage], phase);
    wgmma_fence();
    const uint64_t x = tile_descriptor(s.x[stage] + warpgroup * S::kHigh * 64 * kRowBytes);
    const uint64_t w = tile_descriptor(s.w[stage]);
#pragma unroll
    for (int step = 0; step < kChunk / 16; step++)
#pragma unroll
      for (int high = 0; high < S::kHigh; high++)
        wgmma_or_begin<S::kColumns>(d[high], x + step * 2 + high * (64 * kRowBytes / 16), w + step * 2, chunk + step);
    wgmma_commit();
    wgmma_wait<1>();
    if (chunk > first) release<S>(s, work, before);  // one group is pending, so the products before it have ended
    before = stage;
    if (++stage == S::kStages) stage = 0, phase ^= 1;
  }
  wgmma_wait<0>();
  release<S>(s, work, before);
}

// Steps of 16 columns of a chunk of B, a bit each, that tokens of this warpgroup's need: of prompts, whose tokens have one
// adapter, one in four. As all four warps of it must go the same way, each looks at all of its tokens.
template <class S>
struct NeededSteps {
  static constexpr int kTokens = S::kHigh * 64, kLanes = 32;
  int slots[kTokens / kLanes];

  __device__ __forceinline__ void read(const AdapterMaps& maps, int m, int first_token) {
#pragma unroll
    for (int i = 0; i < kTokens / kLanes; i++) {
      const int token = first_token + i * kLanes + threadIdx.x % kLanes;
      slots[i] = token < m ? __ldcg(maps.slots + token) : -1;
    }
  }

  // From `column` of B's on.
  __device__ __forceinline__ uint32_t of(const AdapterMaps& maps, int column) const {
    uint32_t found = 0;
#pragma unroll
    for (int i = 0; i < kTokens / kLanes; i++) {
      const int first = (slots[i] * maps.rank - column) / 16, end = (slots[i] * maps.rank + maps.rank - column + 15) / 16;
      const int begin = max(first, 0), last = min(end, kAdapterColumns / 16);
      if (slots[i] >= 0 && begin < last) found |= (1u << last) - (1u << begin);
    }
#pragma unroll
    for (int mask = 1; mask < kLanes; mask *= 2) found |= __shfl_xor_sync(~0u, found, mask);
    return found;
  }
};

// Chunks of B of a tile, after those of W.
template <class S>
__device__ __forceinline__ void multiply_deltas(float (&d)[S::kHigh][S::kSums], Shared<S>& s, const Work& work,
                                                const AdapterMaps& maps, const NeededSteps<S>& needed, int first_piece,
                                                int deltas, int warpgroup, int& stage, int& phase) {
  for (int delta = 0; delta < deltas; delta++) {
    const AdapterChunk chunk(maps, first_piece, delta);
    uint32_t steps = needed.of(maps, chunk.column);
    barrier_wait(&s.full[stage], phase);
    const uint64_t x = tile_descriptor(s.x[stage] + warpgroup * S::kHigh * 64 * kRowBytes);
    const uint64_t w = tile_descriptor(s.w[stage]);
    while (steps) {
      const int step = __ffs(steps) - 1;
      steps &= steps - 1;
      wgmma_fence();
#pragma unroll
      for (int high = 0; high < S::kHigh; high++)
        wgmma_or_begin<S::kColumns>(d[high], x + step * 2 + high * (64 * kRowBytes / 16), w + step * 2, 1);
      wgmma_commit();
      wgmma_wait<0>();
    }
    release<S>(s, work, stage);
    if (++stage == S::kStages) stage = 0, phase ^= 1;
  }
}

// A x in parts, for the threads that multiply tiles of W: two a token.
struct Parts {
  const AdapterMaps* maps;
  int m, slot;  // the latter of the thread's token
  bool are_there;

  // After the kernel ahead.
  __device__ __forceinline__ void find_slot() {
    const int token = threadIdx.x / 2;
    slot = token < m ? __ldcg(maps->slots + token) : -1;
  }

  // Once in a block, at the end, where nothing waits for the answer.
  __device__ __forceinline__ void leave(const Work& work) const {
    if (are_there && threadIdx.x == 0) leave_shrunk(work);
  }
};

// A tile of W, and what adapters add to it. A x is left in the stages of B's chunks before the last chunks of W are
// multiplied, which are on their way meanwhile.
template <class S>
__device__ __forceinline__ void multiply_with_parts(float (&d)[S::kHigh][S::kSums], Shared<S>& s, const Work& work,
                                                    const Tile& tile, int warpgroup, int& stage, int& phase,
                                                    Parts& parts) {
  static_assert(S::kHigh == 1 && S::kConsumers == 2 * S::kTokens);
  const int first_piece = work.first_piece<S>(tile), deltas = work.chunks_of<S>(tile) - work.own_chunks;
  int next = work.own_chunks - min(work.own_chunks, S::kStages / 2);
  if (next > 0) multiply_chunks<S>(d, s, work, 0, next, warpgroup, stage, phase);
  for (int first = 0; first < deltas;) {
    const int ahead = work.own_chunks + first - next, count = min(deltas - first, S::kStages - ahead);
    if (!parts.are_there && threadIdx.x == 0) lora::wait_for_parts(&parts_ready, work.makers * work.splits);
    parts.are_there = true;
    // All have read what was in the stages before, and see what makers have written.
    asm volatile("bar.sync 1, %0;" ::"n"(S::kConsumers) : "memory");
    for (int i = 0; i < count; i++) {
      const AdapterChunk chunk(*parts.maps, first_piece, first + i);
      fill_from_parts(s.x[(stage + ahead + i) % S::kStages], *parts.maps, chunk, parts.m, parts.slot);
    }
    lora::fence_shared_copies();
    asm volatile("bar.sync 1, %0;" ::"n"(S::kConsumers) : "memory");
    first += count;
    multiply_chunks<S>(d, s, work, next, work.own_chunks + first, warpgroup, stage, phase);
    next = work.own_chunks + first;
  }
}

// Which steps of 16 columns a tile's tokens need, a word for each 64. They are read before W's chunks are multiplied and
// looked at after that, so that nothing waits for them.
template <class S>
struct NeededWords {
  static constexpr int kTokens = 64;
  uint32_t words[S::kTokens / kTokens];

  __device__ __forceinline__ void read(const AdapterMaps& maps, int m, int first_token) {
#pragma unroll
    for (int i = 0; i < S::kTokens / kTokens; i++)
      words[i] = first_token + i * kTokens < m ? __ldcg(maps.steps + first_token / kTokens + i) : 0;
  }

  __device__ __forceinline__ uint32_t all() const {
    uint32_t found = words[0];
#pragma unroll
    for (int i = 1; i < S::kTokens / kTokens; i++) found |= words[i];
    return found;
  }
};

// What a tile of a prompt has of B: of each of its pieces the steps that any of its tokens needs, and so many of them in a
// stage, where 64 columns of X and of W lie otherwise.
struct Steps {
  static constexpr int kColumns = 16, kBytes = kColumns * 2, kOfStage = kChunk / kColumns;
  uint32_t needed;
  int first_piece, count;

  template <class S>
  static __device__ __forceinline__ Steps of(const AdapterMaps& maps, const Work& work, const Tile& tile,
                                             uint32_t needed) {
    constexpr int kRowUnits = S::kColumns / 16;
    const int first = (tile.column_tile - work.multicast_rank) * kRowUnits, piece = maps.first_piece(first);
    const int pieces = maps.end_piece(first + work.multicast_ctas * kRowUnits) - piece;
    return {needed, piece, __popc(needed) * pieces};
  }

  // The piece and the first column of step `index`.
  __device__ __forceinline__ int piece(int index) const { return first_piece + index / __popc(needed); }
  __device__ __forceinline__ int column(int index) const {
    uint32_t left = needed;
    for (int i = index % __popc(needed); i > 0; i--) left &= left - 1;
    return (__ffs(left) - 1) * kColumns;
  }
};

// As `produce`, with `Steps` after W's chunks.
template <class S, Epilogue kEpilogue>
__device__ void produce_steps(Shared<S>& s, const Work& work, const CUtensorMap& w_map, const CUtensorMap& x_map,
                              const AdapterMaps& maps, int m) {
  const uint64_t policy = evict_normal_policy();
  int filled = 0;
  auto next_stage = [&](int bytes) {
    const int stage = filled % S::kStages;
    if (filled >= S::kStages) barrier_wait(&s.empty[stage], (filled / S::kStages - 1) & 1);
    barrier_expect(&s.full[stage], bytes);
    filled++;
    return stage;
  };
  const int ahead = work.first < work.tiles ? min(S::kStages, work.own_chunks) : 0;
  for (int i = 0; i < ahead; i++) {
    barrier_expect(&s.full[i], S::kStageBytes);
    load_w<S>(s, i, w_map, work.tile<S>(work.first).column_tile, i, policy);
  }
  wait_for_previous_kernel();
  for (int index = work.first; index < work.tiles; index += work.stride) {
    const Tile tile = work.tile<S>(index);
    NeededWords<S> words;
    words.read(maps, m, tile.first_token);
    for (int chunk = 0; chunk < work.own_chunks; chunk++) {
      int stage = filled;
      if (filled < ahead) {
        filled++;
      } else {
        stage = next_stage(S::kStageBytes);
        load_w<S>(s, stage, w_map, tile.column_tile, chunk, policy);
      }
      load_x<S>(s, stage, x_map, work, tile.first_token, chunk * kChunk, policy);
    }
    const Steps steps = Steps::of<S>(maps, work, tile, words.all());
    for (int first = 0; first < steps.count; first += Steps::kOfStage) {
      const int own = min(steps.count - first, Steps::kOfStage);
      const int stage = next_stage(own * (S::kTokens + S::kColumns) * Steps::kBytes);
      for (int i = 0; i < own; i++) {
        const int piece = steps.piece(first + i), column = steps.column(first + i);
        load_box(s.w[stage] + i * S::kColumns * Steps::kBytes, &maps.b[piece], &s.full[stage], column, 0,
                 kEpilogue == kSwiglu ? -piece : 0, tile.column_tile * (S::kColumns / 16) - maps.starts[piece], policy);
        load_tokens<S>(s.x[stage] + i * S::kTokens * Steps::kBytes, Steps::kBytes, &s.full[stage], maps.shrunk, work,
                       tile.first_token, piece * maps.columns + column, policy);
      }
    }
  }
}

template <class S>
__device__ __forceinline__ void multiply_steps(float (&d)[S::kHigh][S::kSums], Shared<S>& s, const Work& work, int count,
                                               int warpgroup, int& stage, int& phase) {
  for (int first = 0; first < count; first += Steps::kOfStage) {
    barrier_wait(&s.full[stage], phase);
    const uint64_t x = narrow_tile_descriptor(s.x[stage] + warpgroup * S::kHigh * 64 * Steps::kBytes);
    const uint64_t w = narrow_tile_descriptor(s.w[stage]);
    for (int i = 0; i < min(count - first, Steps::kOfStage); i++) {
      wgmma_fence();
#pragma unroll
      for (int high = 0; high < S::kHigh; high++)
        wgmma_or_begin<S::kColumns>(d[high], x + (i * S::kTokens + high * 64) * (Steps::kBytes / 16),
                                    w + i * S::kColumns * (Steps::kBytes / 16), 1);
      wgmma_commit();
      wgmma_wait<0>();
    }
    release<S>(s, work, stage);
    if (++stage == S::kStages) stage = 0, phase ^= 1;
  }
}

// Puts this split's sums where its stages were, once all its warps have read the last one.
template <class S>
__device__ __forceinline__ void leave_sums(const float (&d)[S::kHigh][S::kSums], Shared<S>& s) {
  float4* mine = reinterpret_cast<float4*>(s.x) + threadIdx.x;
  asm volatile("bar.sync 1, %0;" ::"n"(S::kConsumers) : "memory");
#pragma unroll
  for (int high = 0; high < S::kHigh; high++)
#pragma unroll
    for (int at = 0; at < S::kSums; at += 4)
      mine[(high * S::kSums + at) / 4 * S::kConsumers] =
          make_float4(d[high][at], d[high][at + 1], d[high][at + 2], d[high][at + 3]);
}

// Reduces the sums of all splits for this split's share of the groups, and stores them.
template <class S, class To>
__device__ void store_splits(Shared<S>& s, const Work& work, const To& target, int high) {
  const float4* mine = reinterpret_cast<float4*>(s.x) + threadIdx.x + high * (S::kSums / 4 * S::kConsumers);
  constexpr int kGroups = kGroupsOf<S, kStore>, kSplitsAtOnce = 2;  // that are read at a time
#pragma unroll 1
  for (int group = kGroups * work.split / work.splits; group < kGroups * (work.split + 1) / work.splits; group++) {
    float4 sums[kGroup] = {};
#pragma unroll 1
    for (int first = 0; first < work.splits; first += kSplitsAtOnce) {
      float4 more[kSplitsAtOnce][kGroup] = {};
#pragma unroll
      for (int i = 0; i < kSplitsAtOnce; i++) {
        if (first + i >= work.splits) break;
        const uint32_t theirs = address_in(mine, (first + i) * work.multicast_ctas + work.multicast_rank);
#pragma unroll
        for (int block = 0; block < kGroup; block++) {
          const int at = group * kGroup + block;
          if (at < S::kSums / 4) more[i][block] = load_in(theirs + at * (S::kConsumers * 16));
        }
      }
#pragma unroll
      for (int i = 0; i < kSplitsAtOnce; i++)
#pragma unroll
        for (int block = 0; block < kGroup; block++) {
          sums[block].x += more[i][block].x, sums[block].y += more[i][block].y;
          sums[block].z += more[i][block].z, sums[block].w += more[i][block].w;
        }
    }
    target.store(group, sums);
  }
}

// The sums of a tile of A; with kCounted this grid's own tiles of W wait for them. False where K is divided: then there
// is one tile.
template <class S, bool kCounted, class To>
__device__ bool store_shrunk(const float (&d)[S::kHigh][S::kSums], Shared<S>& s, const Work& work, const To& target) {
  if (work.splits > 1) {
    leave_sums<S>(d, s);
    cluster_sync();
    for (int high = 0; high < S::kHigh; high++) store_splits<S>(s, work, target.below(high), high);
  } else {
#pragma unroll
    for (int high = 0; high < S::kHigh; high++)
#pragma unroll
      for (int group = 0; group < kGroupsOf<S, kStore>; group++) {
        float4 sums[kGroup];
#pragma unroll
        for (int block = 0; block < kGroup; block++) {
          const int at = (group * kGroup + block) * 4;
          sums[block] = at < S::kSums ? make_float4(d[high][at], d[high][at + 1], d[high][at + 2], d[high][at + 3])
                                      : make_float4(0, 0, 0, 0);
        }
        if (group * kGroup * 8 < S::kColumns) target.below(high).store(group, sums);
      }
  }
  if (kCounted && work.wide_tiles > 0) {
    lora::fence_copies();
    asm volatile("bar.sync 1, %0;" ::"n"(S::kConsumers) : "memory");
    if (threadIdx.x == 0) lora::count_part(&parts_ready);
  }
  return work.splits == 1;
}

template <class S, Epilogue kEpilogue, Adapted kAdapted>
__device__ void consume(Shared<S>& s, const Work& work, void* y, int m, int n, const AdapterMaps* adapters) {
  constexpr int kTileColumns = S::kColumns / (kEpilogue == kSwiglu ? 2 : 1);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int stage = 0, phase = 0;
  float d[S::kHigh][S::kSums];
  const int lane_token = warp / 4 * S::kHigh * 64 + warp % 4 * 16 + lane / 4;
  [[maybe_unused]] Parts parts{adapters, m, -1, false};
  if constexpr (kAdapted == kParts) parts.find_slot();
  for (int index = work.first; index < work.tiles; index += work.stride) {
    const Tile tile = work.tile<S>(index);
    bool has_parts = false;
    if constexpr (kAdapted == kParts) {
      has_parts = work.adapters != nullptr;
      if (has_parts) multiply_with_parts<S>(d, s, work, tile, warp / 4, stage, phase, parts);
    }
    if constexpr (kAdapted == kSteps) {
      NeededWords<S> words;
      words.read(*adapters, m, tile.first_token);
      multiply_chunks<S>(d, s, work, 0, work.own_chunks, warp / 4, stage, phase);
      const Steps steps = Steps::of<S>(*adapters, work, tile, words.all());
      multiply_steps<S>(d, s, work, steps.count, warp / 4, stage, phase);
    } else if constexpr (kAdapted == kHalves) {
      const bool has_deltas = work.adapters && !tile.is_shrink;
      NeededSteps<S> needed;
      if (has_deltas) needed.read(*adapters, m, tile.first_token + warp / 4 * S::kHigh * 64);
      multiply_chunks<S>(d, s, work, 0, work.own_chunks, warp / 4, stage, phase);
      if (has_deltas)
        multiply_deltas<S>(d, s, work, *adapters, needed, work.first_piece<S>(tile),
                           work.chunks_of<S>(tile) - work.own_chunks, warp / 4, stage, phase);
    } else if (!has_parts) {
      multiply_chunks<S>(d, s, work, 0, work.own_chunks, warp / 4, stage, phase);
    }
    const int first_column = tile.column_tile * kTileColumns;
    const int first_token = tile.first_token + lane_token;
    if constexpr (kAdapted != kNone && kAdapted != kSteps) {
      if (tile.is_shrink) {
        const ShrunkTarget target(*adapters, m, first_token, tile.column_tile * S::kColumns, S::kColumns);
        bool goes_on;
        if constexpr (kAdapted == kHalves)
          goes_on = store_shrunk<S, true>(d, s, work, target);
        else
          goes_on = store_shrunk<S, kAdapted == kParts>(d, s, work, PartTarget(target, work.part));
        if (!goes_on) return;
        continue;
      }
    }
    const Target<kEpilogue> target{y, m, n, first_token, first_column, min(n, first_column + kTileColumns)};
    if constexpr (kEpilogue == kStore) {
      if (work.splits > 1) {  // there is one tile
        leave_sums<S>(d, s);
        cluster_sync();
        for (int high = 0; high < S::kHigh; high++) store_splits<S>(s, work, target.below(high), high);
        if constexpr (kAdapted == kParts) parts.leave(work);
        return;
      }
    }
#pragma unroll
    for (int high = 0; high < S::kHigh; high++) store_tile<S, kEpilogue>(d[high], target.below(high));
  }
  if constexpr (kAdapted == kParts) parts.leave(work);
}

template <class S, Epilogue kEpilogue, Adapted kAdapted = kNone>
__device__ void run(const CUtensorMap& w_map, const CUtensorMap& x_map, void* y, int m, int n, int k,
                    int multicast_ctas, int group, const AdapterMaps* adapters = nullptr) {
  static_assert(sizeof(Shared<S>) <= S::kSharedBytes && S::kStages >= 2);
  extern __shared__ __align__(kAlignment) uint8_t raw[];
  auto& s = *reinterpret_cast<Shared<S>*>(raw);
  const Work work = Work::of<S, kAdapted>(m, kEpilogue == kSwiglu ? 2 * n : n, k, multicast_ctas, group, adapters);
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kStages; i++) {
      barrier_init(&s.full[i], 1);
      barrier_init(&s.empty[i], S::kConsumers / 32 * multicast_ctas);
    }
    barrier_init_fence();
  }
  const bool is_cluster = work.splits * work.multicast_ctas > 1;
  if (is_cluster)
    cluster_meet();  // multicast copies arrive at the barriers of all blocks of the cluster
  else
    __syncthreads();
  launch_dependents();
  if (threadIdx.x < S::kConsumers) {
    if constexpr (S::kTrades) take_registers<kConsumerRegisters>();
    wait_for_previous_kernel();
    consume<S, kEpilogue, kAdapted>(s, work, y, m, n, adapters);
  } else {
    if constexpr (S::kTrades) leave_registers<kProducerRegisters>();
    if (threadIdx.x == S::kConsumers) {
      if constexpr (kAdapted == kSteps)
        produce_steps<S, kEpilogue>(s, work, w_map, x_map, *adapters, m);
      else
        produce<S, kEpilogue, kAdapted>(s, work, w_map, x_map, adapters);
    }
    __syncwarp();
    if (work.splits > 1) cluster_sync();
  }
  if (is_cluster) cluster_meet();  // no CTA may end while others still reach into its shared memory
}

}  // namespace

// Widths for which the multiprocessors get one tile each: 122 tiles of 160 rows for Qwen3-4B's gate and up, 128 of 192
// for 8B's. Prompts take 256 x 160 in pairs, since 128 x 256 copies more for each product.
#define OF_STORE_AND_SWIGLU_OF_ONE_TILE(GEMM) \
  GEMM(kStore, store, 64, 96)                 \
  GEMM(kStore, store, 64, 112)                \
  GEMM(kStore, store, 128, 96)                \
  GEMM(kStore, store, 128, 112)               \
  GEMM(kStore, store, 192, 96)                \
  GEMM(kStore, store, 192, 112)               \
  GEMM(kSwiglu, swiglu, 64, 96)               \
  GEMM(kSwiglu, swiglu, 64, 160)              \
  GEMM(kSwiglu, swiglu, 64, 192)              \
  GEMM(kSwiglu, swiglu, 128, 96)              \
  GEMM(kSwiglu, swiglu, 128, 160)             \
  GEMM(kSwiglu, swiglu, 128, 192)             \
  GEMM(kSwiglu, swiglu, 192, 96)              \
  GEMM(kSwiglu, swiglu, 192, 160)             \
  GEMM(kSwiglu, swiglu, 192, 192)
#define OF_STORE_AND_SWIGLU(GEMM)       \
  OF_STORE_AND_SWIGLU_OF_ONE_TILE(GEMM) \
  GEMM(kStore, store, 256, 160)         \
  GEMM(kSwiglu, swiglu, 256, 160)
