// Attention over a paged cache of latents in the absorbed form, for any GPU: all heads of a token share its context, whose
// latents are keys and, but for their rotated part, values. Every latent is copied to shared memory once for 16 heads.
//
//   copies     units of the context to come, `stages` in all
//   S [16 heads x 8 tokens of each warp] = Q K^T      Q stays in registers
//   P to shared memory under the running maximum of all warps
//   O [16 heads x 512 / warps values of each warp] += P V
//
// Work is divided as latent_line.cuh says; `latent_values.cu` puts items together again. What a unit holds beyond the
// context is zero in shared memory, as it may be anything in the cache, and 0 * NaN is not 0.
#include "latent_line.cuh"
#include "overlap.cuh"

using namespace latent;
using attention::exp2_fast;
using attention::kMinusInfinity;
using attention::mma;
using attention::packed;

namespace {

constexpr int kLine = kEntry + kPad;

template <int kWarps_>
struct Shape {
  static constexpr int kWarps = kWarps_, kThreads = kWarps * 32;
  static constexpr int kUnit = kWarps * 8;           // tokens
  static constexpr int kValues = kLatent / kWarps;   // of a warp
  static constexpr int kSums = kValues / 8;          // tensor core tiles of them
  static constexpr int kProbabilities = kUnit + kPad;
};

template <class S>
struct Shared {
  alignas(16) bf16 p[kHeads * S::kProbabilities];
  float tops[S::kWarps][kHeads], totals[S::kWarps][kHeads];
  int counts[S::kWarps];
};

// A warp's 8 tokens of a unit, which lie side by side in one block of the cache.
template <class S>
__device__ __forceinline__ void copy_tokens(bf16* stage, const Arguments& a, const Place<S::kUnit>& place, int block) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int token = place.unit * S::kUnit + warp * 8, left = place.seen - token;
  const bf16* from = a.cache;
  if (left > 0) from += block * a.block_stride + int64_t(token & ((1 << a.block_shift) - 1)) * kEntry;
#pragma unroll
  for (int i = 0; i < 8 * kEntry / 8 / 32; i++) {
    const int chunk = i * 32 + lane, line = chunk / (kEntry / 8), at = chunk % (kEntry / 8) * 8;
    const bool is_there = line < left;
    copy_16(stage + (warp * 8 + line) * kLine + at, is_there ? from + chunk * 8 : a.cache, is_there);
  }
}

// The block that holds a warp's tokens of a unit; any where they are not seen.
template <class S>
__device__ __forceinline__ int block_of(const Arguments& a, const Place<S::kUnit>& place) {
  const int token = place.unit * S::kUnit + int(threadIdx.x) / 32 * 8;
  return token < place.seen ? __ldcg(a.block_tables + int64_t(place.row) * a.table_stride + (token >> a.block_shift)) : 0;
}

// What a warp has of an item.
template <class S>
struct Work {
  uint32_t q[kEntry / 16][4];
  float sums[S::kSums][4];
  float top[2], total[2];  // of heads g and g + 8: the maximum; this thread's exponentials

  __device__ __forceinline__ void begin(const Arguments& a, const Place<S::kUnit>& place, int g, int t) {
    const bf16* from = a.q + (int64_t(place.query) * a.num_heads + place.tile * kHeads) * kEntry + 2 * t;
    const int heads = a.num_heads - place.tile * kHeads;
#pragma unroll
    for (int step = 0; step < kEntry / 16; step++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int head = g + 8 * (i & 1);
        q[step][i] = head < heads ? __ldcg(reinterpret_cast<const unsigned*>(from + head * kEntry + step * 16 + (i >> 1) * 8)) : 0;
      }
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
  __device__ __forceinline__ void multiply_keys(float (&scores)[4], const bf16* stage, int warp, int lane) {
    float some[4][4] = {};
    const bf16* line = stage + (warp * 8 + lane % 8) * kLine + lane / 8 * 8;
#pragma unroll
    for (int step = 0; step < kEntry / 16; step += 2) {
      uint32_t k[4];
      load_matrices(k, line + step * 16);
      mma(some[step % 4], q[step][0], q[step][1], q[step][2], q[step][3], k[0], k[1]);
      mma(some[step % 4 + 1], q[step + 1][0], q[step + 1][1], q[step + 1][2], q[step + 1][3], k[2], k[3]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) scores[i] = (some[0][i] + some[1][i]) + (some[2][i] + some[3][i]);
  }

  __device__ __forceinline__ void multiply_values(const bf16* p, const bf16* stage, int warp, int lane) {
#pragma unroll
    for (int step = 0; step < S::kUnit / 16; step++) {
      uint32_t x[4];
      load_matrices(x, p + lane % 16 * S::kProbabilities + step * 16 + lane / 16 * 8);
      const bf16* line = stage + (step * 16 + lane % 16) * kLine + warp * S::kValues + lane / 16 * 8;
#pragma unroll
      for (int n = 0; n < S::kSums; n += 2) {
        uint32_t v[4];
        load_transposed(v, line + n * 8);
        mma(sums[n], x[0], x[1], x[2], x[3], v[0], v[1]);
        mma(sums[n + 1], x[0], x[1], x[2], x[3], v[2], v[3]);
      }
    }
  }
};

template <class S>
__device__ __forceinline__ void attend(Shared<S>& s, Work<S>& w, const bf16* stage, const Arguments& a,
                                       const Place<S::kUnit>& here) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  float scores[4];
  w.multiply_keys(scores, stage, warp, lane);
  const int token = here.unit * S::kUnit + warp * 8 + 2 * t;
#pragma unroll
  for (int i = 0; i < 4; i++) scores[i] = token + (i & 1) < here.seen ? scores[i] * a.scale : kMinusInfinity;
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

// Leaves what the block has of an item: all of it in `whole`, or a part.
template <class S>
__device__ void leave(Shared<S>& s, const Work<S>& w, const Arguments& a, const Place<S::kUnit>& here, bool is_whole,
                      float* part) {
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
    float* to = part + head * kLatent + warp * S::kValues + 2 * t;
#pragma unroll
    for (int n = 0; n < S::kSums; n++)
      *reinterpret_cast<float2*>(to + n * 8) = make_float2(w.sums[n][2 * r], w.sums[n][2 * r + 1]);
    if (warp == 0 && t == 0) {
      part[kHeads * kLatent + head] = w.top[r];
      part[kHeads * (kLatent + 1) + head] = total;
    }
  }
}

template <class S>
__device__ void run(const Arguments& a) {
  extern __shared__ __align__(16) uint8_t raw[];
  auto& s = *reinterpret_cast<Shared<S>*>(raw);
  bf16* stages = reinterpret_cast<bf16*>(raw + (sizeof(s) + 15) / 16 * 16);
  const Rows rows(reinterpret_cast<int*>(stages + a.stages * S::kUnit * kLine), a.num_rows);
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int tiles = (a.num_heads + kHeads - 1) / kHeads;
  allow_next_kernel();
  wait_for_previous_kernel();
  const int units = count_units<S::kUnit, S::kThreads>(a, tiles, rows, s.counts);
  const Division division = {units, min(units, int(gridDim.x))};
  if (int(blockIdx.x) >= division.workers) return;
  const int first = division.first_of(blockIdx.x), last = division.first_of(blockIdx.x + 1);

  Place<S::kUnit> here, ahead;
  here.find(first, tiles, a.num_rows, rows);
  ahead = here;
  int next = first, next_block = block_of<S>(a, ahead), filled = 0;
  auto copy_ahead = [&] {
    if (next < last) {
      if (!ahead.is_empty()) copy_tokens<S>(stages + filled * S::kUnit * kLine, a, ahead, next_block);
      if (++next < last) {
        ahead.advance(tiles, a.num_rows, rows);
        next_block = block_of<S>(a, ahead);
      }
      filled = filled + 1 == a.stages ? 0 : filled + 1;
    }
    commit_copies();
  };
  for (int i = 0; i < a.stages - 1; i++) copy_ahead();

  Work<S> w;
  bool is_new = true;
  int begin = 0, used = 0;
  for (int unit = first; unit < last; unit++) {
    if (is_new) {
      begin = here.unit;
      w.begin(a, here, g, t);
    }
    if (a.stages == 3) wait_for_copies<1>();
    else wait_for_copies<0>();
    __syncthreads();  // what all warps copied is there, and none reads the unit before this one any more
    copy_ahead();
    if (!here.is_empty()) attend(s, w, stages + used * S::kUnit * kLine, a, here);
    used = used + 1 == a.stages ? 0 : used + 1;
    is_new = here.unit + 1 == here.units || unit + 1 == last;
    if (is_new) {
      const bool is_whole = here.unit + 1 == here.units && begin == 0;
      leave(s, w, a, here, is_whole, a.parts + (int64_t(blockIdx.x) * 2 + (begin == 0)) * kPart);
      if (begin == 0 && threadIdx.x == 0) {
        const int item_begin = unit - here.unit;
        const int count = division.worker_of(item_begin + here.units - 1) - int(blockIdx.x) + 1;
        a.items[here.query * tiles + here.tile] = {int(blockIdx.x), count};
      }
    }
    here.advance(tiles, a.num_rows, rows);
  }
}

}  // namespace

#define LATENT_ATTENTION(WARPS)                                                                             \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) latent_attention_##WARPS(Arguments arguments) { \
    run<Shape<WARPS>>(arguments);                                                                           \
  }

LATENT_ATTENTION(8)
LATENT_ATTENTION(4)
