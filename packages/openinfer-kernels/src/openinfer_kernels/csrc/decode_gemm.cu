// Y = X W^T for few tokens: weights are streamed once, by TMA, at the speed of memory.
//
// The product is turned around: a tile is 64 rows of W (output features) x all tokens, so the tensor cores' 64-row
// side is the weights and the tokens are the narrow side. What a step of a model loses is not bandwidth but the time
// between two products, so everything here keeps the tail of a kernel short and lets the next one begin early:
//
//   - a block has whole tiles, several one after the other, and no sums to share; where there are too few tiles for
//     the chip, a cluster of blocks cuts K and the sums go to its first block through distributed shared memory;
//   - programmatic dependent launch: the next kernel's blocks move in while this one's drain, and fill their stages
//     with weights, which depend on nothing; only X waits.
//
//   producer warp:        wait for a free stage ─► TMA of a W chunk and an X chunk
//   consumer warpgroup:   wait for a full stage ─► wgmma ─► free the stage ─► at the end of a tile: epilogue
//
// Epilogues:  store     y = s_t (x W^T)                           s_t: 1, or 1 / rms of the token, see `sums`
//             add       r = r + x W^T, and the sum of squares of r over this tile's features
//             swiglu    y = silu(s_t g) * (s_t u), gate and up rows interleaved by 8: rows 16 i .. 16 i + 7 are gate
// RMSNorm costs no pass: its weight is folded into W when it is uploaded, its 1 / rms is `s_t`.
#include "hopper.cuh"

using bf16 = __nv_bfloat16;
using namespace hopper;

namespace {

#ifndef BOXES
#define BOXES 2
#endif
constexpr int kRows = 64;                    // features of a tile
constexpr int kBox = 64;                     // K of one box: 128 bytes, one swizzle row
constexpr int kBoxes = BOXES;
constexpr int kColumns = kBox * kBoxes;      // K of a chunk
constexpr int kConsumers = 128;              // one warpgroup
constexpr int kThreads = kConsumers + 32;    // and the producer
constexpr int kBoxBytes = kRows * kBox * 2;
constexpr int kWeightBytes = kBoxBytes * kBoxes;
constexpr int kMostBlocksPerTile = 4;

enum Epilogue { kStore = 0, kAdd = 1, kSwiglu = 2 };

struct Arguments {
  bf16* y;               // [m, n] (swiglu: [m, n / 2]); the residual for kAdd
  const float* sums;     // [num_sums, kTokens]: sums of squares of X per token, in pieces; null: s_t = 1
  float* sums_out;       // kAdd: [n / 64, kTokens]
  int m, n, k, num_sums;
  int blocks_per_tile;   // the cluster's size; above 1, a cluster has one tile
  float inverse_width, eps;  // of the norm: mean = sum * inverse_width
};

template <int kTokens, int kStages>
struct Shared {
  alignas(1024) uint8_t w[kStages][kWeightBytes];
  alignas(1024) uint8_t x[kStages][kTokens * kColumns * 2];
  float parts[kMostBlocksPerTile - 1][kTokens / 2][kConsumers];
  float scale[kTokens];
  float squares[kConsumers / 32][kTokens];
  uint64_t full[kStages], empty[kStages], parts_full;
};

__device__ __forceinline__ void consumers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory"); }

__device__ __forceinline__ void load_w(uint8_t* target, const CUtensorMap& map, uint64_t* barrier, int tile, int chunk,
                                       uint64_t policy) {
#pragma unroll
  for (int box = 0; box < kBoxes; box++)
    load_box(target + box * kBoxBytes, &map, barrier, chunk * kColumns + box * kBox, tile * kRows, policy);
}

template <int kTokens>
__device__ __forceinline__ void load_x(uint8_t* target, const CUtensorMap& map, uint64_t* barrier, int chunk,
                                       uint64_t policy) {
#pragma unroll
  for (int box = 0; box < kBoxes; box++)
    load_box(target + box * kTokens * kBox * 2, &map, barrier, chunk * kColumns + box * kBox, 0, policy);
}

template <int kTokens, int kEpilogue>
__device__ void finish_tile(float (&d)[kTokens / 2], int tile, const Arguments& a, float* scale, float (*squares)[kTokens]) {
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int row = tile * kRows + warp * 16 + lane / 4;
#pragma unroll
  for (int c = 0; c < kTokens / 8; c++) {
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int token = c * 8 + 2 * (lane % 4) + j;
      float first = d[4 * c + j], second = d[4 * c + 2 + j];
      if constexpr (kEpilogue == kAdd) {
        float square = 0;
        if (token < a.m) {
          bf16* r = a.y + int64_t(token) * a.n + row;
          bf16 sum = __float2bfloat16(__bfloat162float(r[0]) + first);
          bf16 other = __float2bfloat16(__bfloat162float(r[8]) + second);
          r[0] = sum;
          r[8] = other;
          first = __bfloat162float(sum);
          second = __bfloat162float(other);
          square = first * first + second * second;
        }
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) square += __shfl_xor_sync(~0u, square, mask);
        if (lane < 4) squares[warp][token] = square;
      } else if (token < a.m) {
        first *= scale[token];
        second *= scale[token];
        if constexpr (kEpilogue == kStore) {
          bf16* y = a.y + int64_t(token) * a.n + row;
          y[0] = __float2bfloat16(first);
          y[8] = __float2bfloat16(second);
        } else {
          const int feature = tile * (kRows / 2) + warp * 8 + lane / 4;
          const float gate = __bfloat162float(__float2bfloat16(first)), up = __bfloat162float(__float2bfloat16(second));
          const float silu = gate / (1.0f + __expf(-gate));
          a.y[int64_t(token) * (a.n / 2) + feature] = __float2bfloat16(__bfloat162float(__float2bfloat16(silu)) * up);
        }
      }
    }
  }
  if constexpr (kEpilogue == kAdd) {
    consumers_sync();
    if (thread < kTokens) {
      float sum = 0;
      for (int w = 0; w < kConsumers / 32; w++) sum += squares[w][thread];
      a.sums_out[tile * kTokens + thread] = sum;
    }
    consumers_sync();
  }
}

// Sends this block's sums to the cluster's first block, or, there, adds the others' in the order of ranks.
template <int kTokens, int kStages>
__device__ bool gather_parts(float (&d)[kTokens / 2], int rank, int size, Shared<kTokens, kStages>& s) {
  const int thread = threadIdx.x;
  if (rank != 0) {
    const uint32_t parts = address_in(&s.parts[rank - 1][0][thread], 0);
#pragma unroll
    for (int i = 0; i < kTokens / 2; i++) store_in(parts + i * kConsumers * 4, d[i]);
    barrier_arrive_in(address_in(&s.parts_full, 0));
    return false;
  }
  barrier_wait_cluster(&s.parts_full, 0);
  for (int other = 0; other < size - 1; other++) {
#pragma unroll
    for (int i = 0; i < kTokens / 2; i++) d[i] += s.parts[other][i][thread];
  }
  return true;
}

template <int kTokens, int kStages, int kEpilogue>
__device__ void run(const CUtensorMap& w_map, const CUtensorMap& x_map, const Arguments& a) {
  extern __shared__ uint8_t raw[];
  using S = Shared<kTokens, kStages>;
  S& s = *reinterpret_cast<S*>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t(1023));
  const int thread = threadIdx.x, size = a.blocks_per_tile;
  const int rank = size > 1 ? cluster_rank() : 0;
  const int clusters = gridDim.x / size, tiles = a.n / kRows, per_tile = a.k / kColumns;
  const int first_tile = blockIdx.x / size;
  const int first_chunk = per_tile * rank / size, num_chunks = per_tile * (rank + 1) / size - first_chunk;
  const int steps = (tiles - first_tile + clusters - 1) / clusters * num_chunks;
  if (thread == 0) {
    for (int i = 0; i < kStages; i++) {
      barrier_init(&s.full[i], 1);
      barrier_init(&s.empty[i], kConsumers / 32);
    }
    barrier_init(&s.parts_full, (size - 1) * kConsumers);
    barrier_init_fence();
  }
  if (size > 1)
    cluster_sync();
  else
    __syncthreads();
  allow_next_kernel();
  constexpr int kXBytes = kTokens * kColumns * 2;
  if (thread >= kConsumers) {
    if (thread % 32 != 0) return;
    const uint64_t once = evict_first_policy(), again = evict_last_policy();
    const int ahead = min(kStages, steps);
    for (int i = 0; i < ahead; i++) {
      barrier_expect(&s.full[i], kWeightBytes + kXBytes);
      load_w(s.w[i], w_map, &s.full[i], first_tile + i / num_chunks * clusters, first_chunk + i % num_chunks, once);
    }
    wait_for_previous_kernel();
    for (int i = 0; i < ahead; i++) load_x<kTokens>(s.x[i], x_map, &s.full[i], first_chunk + i % num_chunks, again);
    int tile = first_tile + ahead / num_chunks * clusters, chunk = ahead % num_chunks;
    for (int i = ahead; i < steps; i++) {
      const int stage = i % kStages;
      barrier_wait(&s.empty[stage], (i / kStages - 1) & 1);
      barrier_expect(&s.full[stage], kWeightBytes + kXBytes);
      load_w(s.w[stage], w_map, &s.full[stage], tile, first_chunk + chunk, once);
      load_x<kTokens>(s.x[stage], x_map, &s.full[stage], first_chunk + chunk, again);
      if (++chunk == num_chunks) {
        chunk = 0;
        tile += clusters;
      }
    }
    return;
  }
  wait_for_previous_kernel();
  if (thread < kTokens) {
    float sum = 0;
    for (int i = 0; i < a.num_sums; i++) sum += __ldcg(a.sums + i * kTokens + thread);
    s.scale[thread] = a.sums == nullptr ? 1.0f : rsqrtf(sum * a.inverse_width + a.eps);
  }
  consumers_sync();
  float d[kTokens / 2];
#pragma unroll
  for (int i = 0; i < kTokens / 2; i++) d[i] = 0;
  int tile = first_tile, chunk = 0;
  for (int i = 0; i < steps; i++) {
    const int stage = i % kStages;
    barrier_wait(&s.full[stage], (i / kStages) & 1);
    wgmma_fence();
#pragma unroll
    for (int box = 0; box < kBoxes; box++) {
      const uint64_t w = tile_descriptor(s.w[stage] + box * kBoxBytes);
      const uint64_t x = tile_descriptor(s.x[stage] + box * kTokens * kBox * 2);
#pragma unroll
      for (int step = 0; step < kBox / 16; step++) wgmma<kTokens>(d, w + step * 2, x + step * 2);
    }
    wgmma_commit();
    wgmma_wait<0>();
    if (thread % 32 == 0) barrier_arrive(&s.empty[stage]);
    if (++chunk < num_chunks) continue;
    if (size == 1 || gather_parts<kTokens, kStages>(d, rank, size, s)) finish_tile<kTokens, kEpilogue>(d, tile, a, s.scale, s.squares);
#pragma unroll
    for (int j = 0; j < kTokens / 2; j++) d[j] = 0;
    chunk = 0;
    tile += clusters;
  }
}

}  // namespace

#define DECODE_GEMM(TOKENS, STAGES, NAME, EPILOGUE)                                                             \
  extern "C" __global__ void __launch_bounds__(kThreads, 1) decode_gemm_##NAME##_##TOKENS(                       \
      const __grid_constant__ CUtensorMap w_map, const __grid_constant__ CUtensorMap x_map, Arguments arguments) { \
    run<TOKENS, STAGES, EPILOGUE>(w_map, x_map, arguments);                                                       \
  }

#define ALL_EPILOGUES(TOKENS, STAGES)          \
  DECODE_GEMM(TOKENS, STAGES, store, kStore)   \
  DECODE_GEMM(TOKENS, STAGES, add, kAdd)       \
  DECODE_GEMM(TOKENS, STAGES, swiglu, kSwiglu)

#ifndef STAGES_8
#define STAGES_8 5
#define STAGES_16 5
#define STAGES_32 4
#define STAGES_64 3
#endif
ALL_EPILOGUES(8, STAGES_8)
ALL_EPILOGUES(16, STAGES_16)
ALL_EPILOGUES(32, STAGES_32)
ALL_EPILOGUES(64, STAGES_64)
