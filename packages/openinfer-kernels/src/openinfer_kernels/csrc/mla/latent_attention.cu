// Attention over a paged cache of latents in the absorbed form, for any GPU: all heads of a token share its context,
// whose latents are keys and, but for their rotated part, values. Every latent is copied to shared memory once for
// 16 heads.
//
//   copies     the work tile of the context to come, and the queries where an item begins; from Hopper on by the copy engine,
//              and two blocks share a multiprocessor, so that one computes while the other waits
//   S [16 heads x 8 tokens of each warp] = Q K^T
//   P to shared memory under the running maximum of all warps
//   O [16 heads x 512 / warps values of each warp] += P V
//
// latent_scheduler.cuh divides the work; `latent_merge.cu` reduces the partials of items. What a work tile holds beyond
// the context is zero in shared memory, as it may be anything in the cache, and 0 * NaN is not 0.
//
// The kernels `_from` see no token before `first_key`, which drafting layers ask for, and what the cache holds there may
// be anything, too. The others do without its comparisons.
#include "common/pdl.cuh"
#include "mla/latent_scheduler.cuh"

using namespace latent;
using attention::exp2_fast;
using attention::kMinusInfinity;
using attention::mma;
using attention::packed;

namespace {

constexpr int kPitch = kEntry + kPad;
constexpr int kStages = 2;
constexpr int kChunks = kEntry / 8;  // of 16 bytes, of a row

template <int kWarps_, bool kHasFirst_>
struct Shape {
  static constexpr int kWarps = kWarps_, kThreads = kWarps * 32;
  static constexpr bool kHasFirst = kHasFirst_;      // tokens before `first_key` are not seen
  static constexpr int kWorkTile = kWarps * 8;       // tokens
  static constexpr int kValues = kLatent / kWarps;   // of a warp
  static constexpr int kSums = kValues / 8;          // tensor core tiles of them
  static constexpr int kQueries = kHeads / kWarps;   // heads that a warp copies
  static constexpr int kProbabilities = kWorkTile + kPad;
};

template <class S>
struct Shared {
  alignas(16) bf16 entries[kStages][S::kWorkTile * kPitch];
  alignas(16) bf16 q[kHeads * kPitch];  // of the current item
  alignas(16) bf16 p[kHeads * S::kProbabilities];
  float tops[S::kWarps][kHeads], totals[S::kWarps][kHeads];
  int counts[S::kWarps];
  alignas(8) uint64_t arrived[kStages + 1];  // work tiles, queries
};

// --- copies to shared memory: each warp has 8 tokens of a work tile, and its share of the heads of a new item --------------

// Not those of hopper.cuh: a source that includes it is compiled for Hopper alone, and this one for all GPUs.
#if __CUDA_ARCH__ >= 900

__device__ __forceinline__ void init_arrivals(uint64_t* arrived, int warps) {
  for (int i = 0; i <= kStages; i++)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(arrived + i)), "r"(warps));
  asm volatile("fence.mbarrier_init.release.cluster;");
}

__device__ __forceinline__ void copy_vector(bf16* to, const bf16* from, uint64_t* arrived) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "n"(kEntry * 2), "r"(shared_address(arrived))
               : "memory");
}

// `vectors` vectors, a lane for each.
__device__ __forceinline__ void copy_vectors(bf16* to, const bf16* from, int vectors, uint64_t* arrived, int lane) {
  if (lane == 0)
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(arrived)),
                 "r"(vectors * kEntry * 2)
                 : "memory");
  __syncwarp();
  if (lane < vectors) copy_vector(to + lane * kPitch, from + lane * kEntry, arrived);
}

__device__ __forceinline__ void wait_for_vectors(uint64_t* arrived, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over;\n"
      "bra again;\n"
      "over:\n"
      "}\n" ::"r"(shared_address(arrived)),
      "r"(parity)
      : "memory");
}

// Zeros are plain stores, and the copies that later come to the same place are the copy engine's: without the fence the
// two have no order.
__device__ __forceinline__ void copies_see_zeros() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#else

__device__ __forceinline__ void init_arrivals(uint64_t*, int) {}

__device__ __forceinline__ void copy_vectors(bf16* to, const bf16* from, int vectors, uint64_t*, int lane) {
  for (int i = lane; i < vectors * kChunks; i += 32) copy_16(to + i / kChunks * kPitch + i % kChunks * 8, from + i * 8);
}

__device__ __forceinline__ void wait_for_vectors(uint64_t*, int) { wait_for_copies<0>(); }

__device__ __forceinline__ void copies_see_zeros() {}

#endif

// Zeros in the vectors from `first` to `last`, 16 bytes at a time.
__device__ __forceinline__ void clear_vectors(bf16* vectors, int first, int last, int lane) {
  if (first >= last) return;
  for (int i = first * kChunks + lane; i < last * kChunks; i += 32)
    *reinterpret_cast<uint4*>(vectors + i / kChunks * kPitch + i % kChunks * 8) = make_uint4(0, 0, 0, 0);
  copies_see_zeros();
}

// A work tile, of which a warp's 8 tokens are contiguous in one block of the cache.
template <class S>
__device__ __forceinline__ void copy_work_tile(Shared<S>& s, int stage, const Arguments& a,
                                               const WorkTile<S::kWorkTile>& place, int block) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int token = place.index * S::kWorkTile + warp * 8;
  const int vectors = place.is_empty() ? 0 : min(max(place.seen - token, 0), 8);
  bf16* entries = s.entries[stage] + warp * 8 * kPitch;
  if (!place.is_empty()) clear_vectors(entries, vectors, 8, lane);
  const bf16* from = a.cache + block * a.block_stride + int64_t(token & ((1 << a.block_shift) - 1)) * kEntry;
  if constexpr (S::kHasFirst) {
    const int unseen = min(max(a.first_key - token, 0), vectors);
    clear_vectors(entries, 0, unseen, lane);
    copy_vectors(entries + unseen * kPitch, from + unseen * kEntry, vectors - unseen, &s.arrived[stage], lane);
  } else copy_vectors(entries, from, vectors, &s.arrived[stage], lane);
}

// The queries of an item.
template <class S>
__device__ __forceinline__ void copy_queries(Shared<S>& s, const Arguments& a, const WorkTile<S::kWorkTile>& place) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = place.tile * kHeads + warp * S::kQueries;
  const int heads = min(max(a.num_heads - head, 0), S::kQueries);
  bf16* q = s.q + warp * S::kQueries * kPitch;
  clear_vectors(q, heads, S::kQueries, lane);
  copy_vectors(q, a.q + (int64_t(place.query) * a.num_heads + head) * kEntry, heads, &s.arrived[kStages], lane);
}

// The block that holds a warp's tokens of a work tile; any where they are not seen.
template <class S>
__device__ __forceinline__ int block_of(const Arguments& a, const WorkTile<S::kWorkTile>& place) {
  const int token = place.index * S::kWorkTile + int(threadIdx.x) / 32 * 8;
  return token < place.seen ? __ldcg(a.block_tables + int64_t(place.row) * a.table_stride + (token >> a.block_shift)) : 0;
}

// --- products ---------------------------------------------------------------------------------------------------------

// A warp's sums of an item.
template <class S>
struct Work {
  float sums[S::kSums][4];
  float top[2], total[2];  // of heads g and g + 8: the maximum; this thread's exponentials

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int n = 0; n < S::kSums; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) sums[n][i] = 0;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      top[r] = kMinusInfinity;
      total[r] = 0;
    }
  }

  // Scores of this warp's 8 tokens; four sums side by side, as each product waits for the one before in its sum.
  __device__ __forceinline__ void multiply_keys(float (&scores)[4], const bf16* q, const bf16* stage, int warp, int lane) {
    float some[4][4] = {};
    const bf16* row = stage + (warp * 8 + lane % 8) * kPitch + lane / 8 * 8;
    const bf16* queries = q + lane % 16 * kPitch + lane / 16 * 8;
#pragma unroll
    for (int step = 0; step < kEntry / 16; step += 2) {
      uint32_t k[4], x[4], y[4];
      load_matrices(k, row + step * 16);
      load_matrices(x, queries + step * 16);
      load_matrices(y, queries + step * 16 + 16);
      mma(some[step % 4], x[0], x[1], x[2], x[3], k[0], k[1]);
      mma(some[step % 4 + 1], y[0], y[1], y[2], y[3], k[2], k[3]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) scores[i] = (some[0][i] + some[1][i]) + (some[2][i] + some[3][i]);
  }

  __device__ __forceinline__ void multiply_values(const bf16* p, const bf16* stage, int warp, int lane) {
#pragma unroll
    for (int step = 0; step < S::kWorkTile / 16; step++) {
      uint32_t x[4];
      load_matrices(x, p + lane % 16 * S::kProbabilities + step * 16 + lane / 16 * 8);
      const bf16* row = stage + (step * 16 + lane % 16) * kPitch + warp * S::kValues + lane / 16 * 8;
#pragma unroll
      for (int n = 0; n < S::kSums; n += 2) {
        uint32_t v[4];
        load_transposed(v, row + n * 8);
        mma(sums[n], x[0], x[1], x[2], x[3], v[0], v[1]);
        mma(sums[n + 1], x[0], x[1], x[2], x[3], v[2], v[3]);
      }
    }
  }
};

template <class S>
__device__ __forceinline__ void attend(Shared<S>& s, Work<S>& w, const bf16* q, const bf16* stage, const Arguments& a,
                                       const WorkTile<S::kWorkTile>& here) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  float scores[4];
  w.multiply_keys(scores, q, stage, warp, lane);
  const int token = here.index * S::kWorkTile + warp * 8 + 2 * t;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int key = token + (i & 1);
    const bool is_seen = key < here.seen && (!S::kHasFirst || key >= a.first_key);
    scores[i] = is_seen ? scores[i] * a.scale : kMinusInfinity;
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float highest = fmaxf(scores[2 * r], scores[2 * r + 1]);
    highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
    highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
    if (t == 0) s.tops[warp][g + 8 * r] = highest;
  }
  __syncthreads();
  float factor[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float highest = w.top[r];
#pragma unroll
    for (int other = 0; other < S::kWarps; other++) highest = fmaxf(highest, s.tops[other][g + 8 * r]);
    factor[r] = highest == w.top[r] ? 1.0f : exp2_fast(w.top[r] - highest);
    w.top[r] = highest;
    const float low = exp2_fast(scores[2 * r] - highest), high = exp2_fast(scores[2 * r + 1] - highest);
    w.total[r] = w.total[r] * factor[r] + (low + high);
    *reinterpret_cast<uint32_t*>(s.p + (g + 8 * r) * S::kProbabilities + warp * 8 + 2 * t) = packed(low, high);
  }
  __syncthreads();
  if (__any_sync(~0u, !(factor[0] == 1.0f) || !(factor[1] == 1.0f))) {
#pragma unroll
    for (int n = 0; n < S::kSums; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) w.sums[n][i] *= factor[i >> 1];
  }
  w.multiply_values(s.p, stage, warp, lane);
}

// Leaves what the block has of an item: all of it in `whole`, or a partial.
template <class S>
__device__ void leave(Shared<S>& s, const Work<S>& w, const Arguments& a, const WorkTile<S::kWorkTile>& here,
                      bool is_whole, float* partial) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float total = w.total[r];
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    if (t == 0) s.totals[warp][g + 8 * r] = total;
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int head = g + 8 * r;
    if (head >= a.num_heads - here.tile * kHeads) continue;
    float total = 0;
#pragma unroll
    for (int other = 0; other < S::kWarps; other++) total += s.totals[other][head];
    if (is_whole) {
      const float inverse = 1.0f / total;
      bf16* to = a.whole + (int64_t(here.query) * a.num_heads + here.tile * kHeads + head) * kLatent + warp * S::kValues + 2 * t;
#pragma unroll
      for (int n = 0; n < S::kSums; n++)
        *reinterpret_cast<uint32_t*>(to + n * 8) = packed(w.sums[n][2 * r] * inverse, w.sums[n][2 * r + 1] * inverse);
      continue;
    }
    float* to = partial + head * kLatent + warp * S::kValues + 2 * t;
#pragma unroll
    for (int n = 0; n < S::kSums; n++)
      *reinterpret_cast<float2*>(to + n * 8) = make_float2(w.sums[n][2 * r], w.sums[n][2 * r + 1]);
    if (warp == 0 && t == 0) {
      partial[kHeads * kLatent + head] = w.top[r];
      partial[kHeads * (kLatent + 1) + head] = total;
    }
  }
}

template <class S>
__device__ void run(const Arguments& a) {
  extern __shared__ __align__(16) uint8_t raw[];
  auto& s = *reinterpret_cast<Shared<S>*>(raw);
  const Rows rows(reinterpret_cast<int*>(raw + sizeof(s)), a.num_rows);
  const int tiles = (a.num_heads + kHeads - 1) / kHeads;
  if (threadIdx.x == 0) init_arrivals(s.arrived, S::kWarps);
  launch_dependents();
  if (!a.early) wait_for_previous_kernel();
  const int work_tiles = count_work_tiles<S::kWorkTile, S::kThreads>(a, tiles, rows, s.counts);
  const Partition partition = {work_tiles, min(work_tiles, int(gridDim.x))};
  const bool has_work = int(blockIdx.x) < partition.workers;
  const int first = partition.first_of(blockIdx.x), last = partition.first_of(blockIdx.x + 1);
  WorkTile<S::kWorkTile> here, ahead;
  int next_block = 0;
  if (has_work) {
    here.find(first, tiles, a.num_rows, rows);
    ahead = here;
    next_block = block_of<S>(a, ahead);
  }
  if (a.early) wait_for_previous_kernel();
  if (!has_work) return;

  int next = first;
  auto copy_ahead = [&] {
    if (next < last) {
      copy_work_tile<S>(s, (next - first) % kStages, a, ahead, next_block);
      if (++next < last) {
        ahead.advance(tiles, a.num_rows, rows);
        next_block = block_of<S>(a, ahead);
      }
    }
    commit_copies();
  };
  copy_ahead();

  Work<S> w;
  bool is_new = true;
  int begin = 0, items = 0;
  for (int work_tile = first; work_tile < last; work_tile++) {
    if (is_new) {  // every warp has been through the last synchronisation of the item before, and has read its queries
      copy_queries<S>(s, a, here);
      commit_copies();
      begin = here.index;
      w.begin();
    }
    const int stage = (work_tile - first) % kStages;
    wait_for_vectors(&s.arrived[stage], (work_tile - first) / kStages & 1);
    if (is_new) wait_for_vectors(&s.arrived[kStages], items++ & 1);
    __syncthreads();  // what all warps copied and cleared is there, and none reads the work tile before this one any more
    copy_ahead();
    // Where a work tile has no token that is seen, -inf less -inf would be NaN.
    const bool is_unseen = S::kHasFirst && min((here.index + 1) * S::kWorkTile, here.seen) <= a.first_key;
    if (!here.is_empty() && !is_unseen) attend(s, w, s.q, s.entries[stage], a, here);
    is_new = here.index + 1 == here.count || work_tile + 1 == last;
    if (is_new) {
      const bool is_whole = here.index + 1 == here.count && begin == 0;
      leave(s, w, a, here, is_whole, a.partials + (int64_t(blockIdx.x) * 2 + (begin == 0)) * kPartial);
      if (begin == 0 && threadIdx.x == 0) {
        const int item_begin = work_tile - here.index;
        const int count = partition.worker_of(item_begin + here.count - 1) - int(blockIdx.x) + 1;
        a.items[here.query * tiles + here.tile] = {int(blockIdx.x), count};
      }
    }
    here.advance(tiles, a.num_rows, rows);
  }
}

}  // namespace

#define LATENT_ATTENTION(NAME, WARPS, BLOCKS, HAS_FIRST)                                                \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS) latent_attention_##NAME(Arguments arguments) { \
    run<Shape<WARPS, HAS_FIRST>>(arguments);                                                           \
  }

LATENT_ATTENTION(4, 4, 2, false)
LATENT_ATTENTION(2, 2, 1, false)
LATENT_ATTENTION(4_from, 4, 2, true)
LATENT_ATTENTION(2_from, 2, 1, true)
