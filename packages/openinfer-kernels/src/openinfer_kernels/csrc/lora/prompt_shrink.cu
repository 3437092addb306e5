// `A x` of many tokens, as a product takes it that has adapters as more columns of its K (gemm/adapter_maps.cuh): in BF16,
// and zero but in the columns of each token's own slot.
//
//   producer thread:      wait for a free stage ─► TMA of a chunk of X and of the same columns of A's rows
//   consumer warpgroup:   wait for a full stage ─► wgmma ─► free the stage before ─► after the last: its sums
//
// What it should take is the time to read X once. So a block has 64 tokens and all of K, with as many bytes under way as
// it has room for, and of A it reads the rows of its tokens' slots alone, in units of 16: of prompts, whose tokens have one
// adapter, those of one slot. More units than `kMostUnits` are multiplied one such part after the other, each of which
// reads X again. Where there are too few tokens for all multiprocessors, a cluster's blocks divide K, and each adds up some
// of the columns, in order.
#include "common/hopper.cuh"
#include "gemm/wgmma.cuh"
#include "lora/halves.cuh"

using namespace hopper;

namespace {

// cuda/lora/prompt_shrink.py repeats some of them.
constexpr int kTokens = 64;       // of a block
constexpr int kRowsOfUnit = 16;   // of A
constexpr int kMostUnits = 8;     // that are multiplied at a time
constexpr int kStepColumns = 16;  // of a step of the product
constexpr int kMostSplits = 8;    // of K
constexpr int kChunk = 64;        // of K: 128 bytes, one swizzle row
constexpr int kConsumers = 128, kThreads = kConsumers + 32;
constexpr int kRowBytes = kChunk * 2, kXBytes = kTokens * kRowBytes, kBytesOfUnit = kRowsOfUnit * kRowBytes;
constexpr int kRingBytes = 160 * 1024, kMostStages = kRingBytes / (kXBytes + kBytesOfUnit);
constexpr int kSharedBytes = 194 * 1024;
constexpr int kAlignment = 1024;  // of swizzled boxes

struct PromptShrink {
  const int* slots;  // [T]
  uint16_t* out;     // [T, pieces, columns]
  uint32_t* steps;   // [ceil(T / 64)]: 16 columns that the tokens need, a bit each
  int num_tokens, inner, pieces, rank, num_slots, columns;
};

struct Shared {
  alignas(kAlignment) uint8_t ring[kRingBytes];
  float4 sums[kMostUnits * kRowsOfUnit / 8][kConsumers];  // of a block of a cluster
  uint64_t full[kMostStages], empty[kMostStages];
  int slots[kTokens];  // -1: none
};
static_assert(sizeof(Shared) <= kSharedBytes);

// Of the slots of a warp's tokens, all of the block's, a bit for each unit of rows that they have: `rows` a slot.
__device__ __forceinline__ uint32_t units_of(const Shared& s, int rows, int unit) {
  uint32_t found = 0;
#pragma unroll
  for (int token = threadIdx.x % 32; token < kTokens; token += 32) {
    const int slot = s.slots[token], begin = slot * rows / unit, end = (slot * rows + rows - 1) / unit + 1;
    if (slot >= 0) found |= (1u << end) - (1u << begin);
  }
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) found |= __shfl_xor_sync(~0u, found, mask);
  return found;
}

// What all of a block's threads know.
struct Work {
  int first_token, split, splits;
  int first_chunk, own_chunks;
  uint32_t units;  // of A's rows, a bit each, that the block's tokens need
  int stages, stage_bytes;

  // Rows of A that products of so many units have: a prompt's, or what leaves those beyond them unread.
  static __device__ __forceinline__ int rows_of(int units) { return (units <= 3 ? units : kMostUnits) * kRowsOfUnit; }

  __device__ __forceinline__ Work(const PromptShrink& given, const Shared& s) {
    splits = cluster_size(), split = cluster_rank();
    first_token = blockIdx.x / splits * kTokens;
    const int chunks = given.inner / kChunk, rows = given.pieces * given.rank;
    first_chunk = chunks * split / splits, own_chunks = chunks * (split + 1) / splits - first_chunk;
    units = units_of(s, rows, kRowsOfUnit);
    stage_bytes = kXBytes + rows_of(min(__popc(units), kMostUnits)) * kRowBytes;
    stages = min(kMostStages, kRingBytes / stage_bytes);
  }
};

// The first units, as many as are multiplied together.
__device__ __forceinline__ uint32_t next_part(uint32_t units) {
  uint32_t rest = units;
#pragma unroll
  for (int i = 0; i < kMostUnits; i++) rest &= rest - 1;
  return units ^ rest;
}

__device__ void produce(Shared& s, const Work& work, const CUtensorMap& x_map, const CUtensorMap& a_map) {
  const bool copies = threadIdx.x == kConsumers;
  const uint64_t policy = evict_normal_policy(), again = evict_last_policy();
  int step = 0;
  for (uint32_t units = work.units; units;) {
    const uint32_t part = next_part(units);
    units ^= part;
    for (int chunk = 0; copies && chunk < work.own_chunks; chunk++, step++) {
      const int stage = step % work.stages, column = (work.first_chunk + chunk) * kChunk;
      if (step >= work.stages) barrier_wait(&s.empty[stage], (step / work.stages - 1) & 1);
      uint8_t* to = s.ring + stage * work.stage_bytes;
      barrier_expect(&s.full[stage], kXBytes + __popc(part) * kBytesOfUnit);
      load_box(to, &x_map, &s.full[stage], column, work.first_token, policy);
      to += kXBytes;
      for (uint32_t left = part; left; left &= left - 1, to += kBytesOfUnit)
        load_box(to, &a_map, &s.full[stage], column, (__ffs(left) - 1) * kRowsOfUnit, again);
    }
    __syncwarp();
    if (work.splits > 1) cluster_sync(), cluster_sync();  // with those who add up
  }
}

// Where a stage is, and in which of its phases.
struct Place {
  int stage = 0, phase = 0;
};

template <int kRows>
__device__ __forceinline__ void multiply(float (&d)[kRows / 2], Shared& s, const Work& work, Place& place) {
  int before = 0;
  auto release = [&](int stage) {
    if (threadIdx.x % 32 == 0) barrier_arrive(&s.empty[stage]);
  };
  for (int chunk = 0; chunk < work.own_chunks; chunk++) {
    barrier_wait(&s.full[place.stage], place.phase);
    wgmma_fence();
    const uint64_t x = tile_descriptor(s.ring + place.stage * work.stage_bytes);
    const uint64_t a = tile_descriptor(s.ring + place.stage * work.stage_bytes + kXBytes);
#pragma unroll
    for (int step = 0; step < kChunk / 16; step++)
      wgmma_or_begin<kRows>(d, x + step * 2, a + step * 2, chunk + step);
    wgmma_commit();
    wgmma_wait<1>();
    if (chunk > 0) release(before);  // one group is pending, so the products before it have ended
    before = place.stage;
    if (++place.stage == work.stages) place.stage = 0, place.phase ^= 1;
  }
  wgmma_wait<0>();
  release(before);
}

// Eight rows of A: a thread's tokens are `token` and the eighth after it, two rows each.
__device__ __forceinline__ void store(const PromptShrink& given, const Shared& s, const Work& work, int row,
                                      const float4& sums) {
  const int rows = given.pieces * given.rank, of = row / rows, piece = row % rows / given.rank;
  const int own = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, token = work.first_token + own;
  const int64_t token_values = int64_t(given.pieces) * given.columns;
  uint16_t* at = given.out + token * token_values + piece * given.columns + of * given.rank + row % given.rank +
                 threadIdx.x % 4 * 2;
  if (s.slots[own] == of) *reinterpret_cast<uint32_t*>(at) = lora::Halves(sums.x, sums.y).high;
  if (s.slots[own + 8] == of) *reinterpret_cast<uint32_t*>(at + 8 * token_values) = lora::Halves(sums.z, sums.w).high;
}

// The row of A that is the first of those whose sums a block of 8 of a part has.
__device__ __forceinline__ int row_of(uint32_t part, int block) {
  for (int i = 0; i < block / 2; i++) part &= part - 1;
  return (__ffs(part) - 1) * kRowsOfUnit + block % 2 * 8;
}

template <int kRows>
__device__ void make_part(const PromptShrink& given, Shared& s, const Work& work, uint32_t part, Place& place) {
  float d[kRows / 2];
  multiply<kRows>(d, s, work, place);
  // By way of shared memory also where K is not divided: what is stored is then not known to a compiler, which made
  // hundreds of registers of it.
#pragma unroll
  for (int block = 0; block < kRows / 8; block++)
    s.sums[block][threadIdx.x] = make_float4(d[4 * block], d[4 * block + 1], d[4 * block + 2], d[4 * block + 3]);
  if (work.splits > 1) cluster_sync();
#pragma unroll 1
  for (int block = work.split; block < 2 * __popc(part); block += work.splits) {
    float4 theirs[kMostSplits] = {};
    if (work.splits == 1)
      theirs[0] = s.sums[block][threadIdx.x];
    else {
#pragma unroll
      for (int split = 0; split < kMostSplits; split++)
        if (split < work.splits) theirs[split] = load_in(address_in(&s.sums[block][threadIdx.x], split));
    }
    float4 sums = theirs[0];
#pragma unroll
    for (int split = 1; split < kMostSplits; split++) {
      sums.x += theirs[split].x, sums.y += theirs[split].y;
      sums.z += theirs[split].z, sums.w += theirs[split].w;
    }
    store(given, s, work, row_of(part, block), sums);
  }
  if (work.splits > 1) cluster_sync();  // no block goes on while others read its sums
}

// Zeros in the columns of other slots, and of none.
__device__ __forceinline__ void clear_others(const PromptShrink& given, const Shared& s, const Work& work) {
  const int groups = given.columns / 8, of_token = given.pieces * groups, own_groups = given.rank / 8;
  const int tokens = min(kTokens, given.num_tokens - work.first_token);
  for (int i = work.split * kConsumers + threadIdx.x; i < tokens * of_token; i += work.splits * kConsumers) {
    const int token = i / of_token, piece = i % of_token / groups, group = i % groups;
    if (group / own_groups == s.slots[token]) continue;
    uint16_t* to = given.out + (int64_t(work.first_token + token) * given.pieces + piece) * given.columns + group * 8;
    *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
  }
}

__device__ void consume(const PromptShrink& given, Shared& s, const Work& work) {
  clear_others(given, s, work);
  Place place;
  for (uint32_t units = work.units; units;) {
    const uint32_t part = next_part(units);
    units ^= part;
    const int rows = Work::rows_of(__popc(part));
    if (rows == 16)
      make_part<16>(given, s, work, part, place);
    else if (rows == 32)
      make_part<32>(given, s, work, part, place);
    else if (rows == 48)
      make_part<48>(given, s, work, part, place);
    else
      make_part<kMostUnits * kRowsOfUnit>(given, s, work, part, place);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    prompt_shrink(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap a_map,
                  const __grid_constant__ PromptShrink given) {
  extern __shared__ __align__(kAlignment) uint8_t raw[];
  auto& s = *reinterpret_cast<Shared*>(raw);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kMostStages; i++) {
      barrier_init(&s.full[i], 1);
      barrier_init(&s.empty[i], kConsumers / 32);
    }
    barrier_init_fence();
  }
  launch_dependents();
  wait_for_previous_kernel();
  if (threadIdx.x < kTokens) {
    const int token = blockIdx.x / cluster_size() * kTokens + threadIdx.x;
    const int slot = token < given.num_tokens ? __ldcg(given.slots + token) : -1;
    s.slots[threadIdx.x] = slot < given.num_slots ? max(slot, -1) : -1;
  }
  __syncthreads();
  const Work work(given, s);
  if (threadIdx.x < 32 && work.split == 0) {
    const uint32_t steps = units_of(s, given.rank, kStepColumns);
    if (threadIdx.x == 0) given.steps[work.first_token / kTokens] = steps;
  }
  if (threadIdx.x < kConsumers)
    consume(given, s, work);
  else
    produce(s, work, x_map, a_map);
}
