// Products of several matrices, each with its own tokens: Y = X W_e^T for the rows of expert e; or each with its own
// part of every token, which is read and written where it lies. Any GPU from Ampere on.
//
// Operands are swapped (swap-AB): a tile is kRows rows of W (output features) x kTokens tokens, so that few tokens
// waste little and each weight is read once. Weights are copied into shared memory as they are stored and dequantised
// to BF16 in registers, where `mma` takes them: formats differ in `weight_formats.cuh` alone.
//
// Where rows are few for the chip, a tile has 16 of them, and the four warps divide the columns of each chunk.
//
//   K is taken in chunks of kColumns. Of every 32 columns, thread t of four holds columns 8 t to 8 t + 7, of W and of X
//   alike: the order of K inside a sum is the same for both, and nothing has to be shuffled.
//
// Codes cost instructions as well as bytes. With few tokens they are multiplied as they are and the sums of 32 columns
// scaled, in float32. With more tokens weights are scaled, and rounded to BF16, before they are multiplied.
//
// Stages of cp.async are kept full; x is gathered while it is copied, in the order of `plan_experts`.
// Epilogues: store, and swiglu, for which rows g and g + 8 of 16 are gate and up of one feature.
#pragma once
#include "common/pdl.cuh"
#include "gemm/grouped_gemm_loads.cuh"
#include "gemm/limited_swiglu.cuh"

namespace grouped {

__device__ __forceinline__ void multiply(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                         uint32_t b1) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Adds scale * codes x of 32 columns for one tile of 16 rows and 8 tokens.
__device__ __forceinline__ void add_scaled(float (&d)[4], const uint4& low, const uint4& high, const uint4& b,
                                           float low_scale, float high_scale) {
  float sums[4] = {};
  multiply(sums, low.x, high.x, low.y, high.y, b.x, b.y);
  multiply(sums, low.z, high.z, low.w, high.w, b.z, b.w);
  d[0] += low_scale * sums[0], d[1] += low_scale * sums[1];
  d[2] += high_scale * sums[2], d[3] += high_scale * sums[3];
}

template <typename S>
__device__ __forceinline__ void multiply_chunk(float (&d)[S::kRowTiles][S::kTokenTiles][4], const uint8_t* stage) {
  using Format = typename S::Format;
  using Scales = typename Format::Scales;
  const Warp<S> warp;
  const uint4* codes = reinterpret_cast<const uint4*>(stage);
  const uint4* x = reinterpret_cast<const uint4*>(stage + S::kCodeBytes);
  const uint8_t* scales = stage + S::kCodeBytes + S::kXBytes;
#pragma unroll
  for (int i = 0; i < S::kVectors; i++) {
    const int vector = warp.split * S::kVectors + i;
    uint4 raw[S::kRowTiles][2];
    Scales scale[S::kRowTiles][2];
#pragma unroll
    for (int m = 0; m < S::kRowTiles; m++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int row = (warp.row_tile + m) * 16 + half * 8 + warp.g;
        raw[m][half] = codes[swizzled<S::kCodeVectors>(row, vector * 4 + warp.t)];
        if constexpr (Format::kQuantised)
          scale[m][half] = *reinterpret_cast<const Scales*>(scales + row * S::kScaleChunk + vector * sizeof(Scales));
      }
    }
#pragma unroll
    for (int fragment = 0; fragment < S::kFragments; fragment++) {
      uint4 b[S::kTokenTiles];
#pragma unroll
      for (int n = 0; n < S::kTokenTiles; n++)
        b[n] = x[swizzled<S::kXVectors>((warp.token_tile + n) * 8 + warp.g,
                                        (vector * S::kFragments + fragment) * 4 + warp.t)];
#pragma unroll
      for (int m = 0; m < S::kRowTiles; m++) {
        const float low_scale = Format::scale(scale[m][0], fragment), high_scale = Format::scale(scale[m][1], fragment);
        if constexpr (S::kScalesSums) {
          add_scaled(d[m][0], Format::raw(raw[m][0], fragment), Format::raw(raw[m][1], fragment), b[0], low_scale,
                     high_scale);
        } else {
          const uint4 low = Format::eight(raw[m][0], fragment, low_scale);
          const uint4 high = Format::eight(raw[m][1], fragment, high_scale);
#pragma unroll
          for (int n = 0; n < S::kTokenTiles; n++) {
            multiply(d[m][n], low.x, high.x, low.y, high.y, b[n].x, b[n].y);
            multiply(d[m][n], low.z, high.z, low.w, high.w, b[n].z, b[n].w);
          }
        }
      }
    }
  }
}

// Reduces what warps made of their splits of the columns, in the order of splits, for the first of them.
template <typename S>
__device__ __forceinline__ void gather_columns(float (&d)[S::kRowTiles][S::kTokenTiles][4], uint8_t* shared) {
  static_assert(S::kRowTiles == 1 && S::kTokenTiles == 1 && S::kWarpColumns == kWarps);
  float4* sums = reinterpret_cast<float4*>(shared);
  sums[threadIdx.x] = {d[0][0][0], d[0][0][1], d[0][0][2], d[0][0][3]};
  __syncthreads();
  float4 sum = sums[threadIdx.x % 32];
#pragma unroll
  for (int split = 1; split < kWarps; split++) {
    const float4 more = sums[split * 32 + threadIdx.x % 32];
    sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
  }
  d[0][0][0] = sum.x, d[0][0][1] = sum.y, d[0][0][2] = sum.z, d[0][0][3] = sum.w;
  __syncthreads();
}

// Through shared memory, so that features are written 16 bytes at a time.
template <typename S, Epilogue kEpilogue>
__device__ __forceinline__ void finish(const float (&d)[S::kRowTiles][S::kTokenTiles][4], uint8_t* shared,
                                       const Problem& p, const Work<S, kEpilogue>& work) {
  constexpr int kFeatures = kEpilogue == kSwiglu ? S::kRows / 2 : S::kRows, kPitch = kFeatures + 8;
  static_assert(S::kTokens * kPitch * 2 <= S::kStages * S::kStageBytes);
  const Warp<S> warp;
  bf16* out = reinterpret_cast<bf16*>(shared);
#pragma unroll
  for (int m = 0; m < S::kRowTiles; m++) {
#pragma unroll
    for (int n = 0; n < S::kTokenTiles; n++) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        bf16* to = out + ((warp.token_tile + n) * 8 + 2 * warp.t + i) * kPitch;
        if constexpr (kEpilogue == kSwiglu) {
          const float gated = limited_swiglu(d[m][n][i], d[m][n][2 + i], p.limit);
          to[(warp.row_tile + m) * 8 + warp.g] = __float2bfloat16_rn(gated);
        } else {
          to[(warp.row_tile + m) * 16 + warp.g] = __float2bfloat16_rn(d[m][n][i]);
          to[(warp.row_tile + m) * 16 + 8 + warp.g] = __float2bfloat16_rn(d[m][n][2 + i]);
        }
      }
    }
  }
  __syncthreads();
  const int features = kEpilogue == kSwiglu ? p.rows / 2 : p.rows;
  for (int i = threadIdx.x; i < work.count * (kFeatures / 8); i += kThreads) {
    const int token = i / (kFeatures / 8), feature = i % (kFeatures / 8) * 8;
    if (work.first_feature + feature >= features) continue;
    *reinterpret_cast<uint4*>(p.y + work.row_of_position(work.begin + token) * features + work.first_feature +
                              feature) = *reinterpret_cast<const uint4*>(out + token * kPitch + feature);
  }
}

template <typename S, Epilogue kEpilogue>
__device__ __forceinline__ void run(const Problem& p) {
  extern __shared__ __align__(128) uint8_t shared[];
  int* x_rows = reinterpret_cast<int*>(shared + S::kStages * S::kStageBytes);
  if (!p.weights_first) wait_for_previous_kernel();
  const Work<S, kEpilogue> work(p);
  if (work.count <= 0) {
    if (p.weights_first) wait_for_previous_kernel();
    return;
  }
  for (int i = threadIdx.x; i < S::kTokens; i += kThreads) {
    const int at = work.begin + i;
    x_rows[i] = i >= work.count ? -1 : p.sorted_tokens == nullptr ? int(work.row_of_position(at)) : p.sorted_tokens[at];
  }
  const int chunks = (p.k + S::kColumns - 1) / S::kColumns;
  for (int i = 0; i < S::kStages - 1; i++) {
    if (i < chunks) load_weights<S, kEpilogue>(shared + i * S::kStageBytes, p, work, i);
  }
  __syncthreads();
  if (p.weights_first) wait_for_previous_kernel();
  launch_dependents();
#pragma unroll
  for (int i = 0; i < S::kStages - 1; i++) {
    if (i < chunks) load_x<S>(shared + i * S::kStageBytes, p, x_rows, i);
    commit();  // also an empty group: `wait` counts groups, one for each stage
  }
  float d[S::kRowTiles][S::kTokenTiles][4] = {};
  int stage = 0, next_stage = S::kStages - 1;
  for (int chunk = 0; chunk < chunks; chunk++) {
    wait<S::kStages - 2>();
    __syncthreads();
    const int next = chunk + S::kStages - 1;
    if (next < chunks) {
      load_weights<S, kEpilogue>(shared + next_stage * S::kStageBytes, p, work, next);
      load_x<S>(shared + next_stage * S::kStageBytes, p, x_rows, next);
    }
    commit();
    multiply_chunk<S>(d, shared + stage * S::kStageBytes);
    if (++stage == S::kStages) stage = 0;
    if (++next_stage == S::kStages) next_stage = 0;
  }
  wait<0>();
  __syncthreads();
  if constexpr (S::kWarpColumns > 1) gather_columns<S>(d, shared);
  finish<S, kEpilogue>(d, shared, p, work);
}

}  // namespace grouped

// Tokens of a tile or `few`, the format, rows and tokens of a tile, warps along its rows and along a chunk's columns,
// vectors, stages, blocks of a multiprocessor; grouped_gemm.py repeats the sizes.
#define GROUPED_GEMM(NAME, SIZE, FORMAT, ROWS, TOKENS, WARP_ROWS, WARP_COLUMNS, VECTORS, STAGES, BLOCKS)   \
  extern "C" __global__ void __launch_bounds__(grouped::kThreads, BLOCKS)                                  \
      grouped_gemm_##NAME##_store_##SIZE(const __grid_constant__ grouped::Problem p) {                     \
    using Shape = grouped::Shape<formats::FORMAT, ROWS, TOKENS, WARP_ROWS, WARP_COLUMNS, VECTORS, STAGES>; \
    grouped::run<Shape, grouped::kStore>(p);                                                               \
  }                                                                                                        \
  extern "C" __global__ void __launch_bounds__(grouped::kThreads, BLOCKS)                                  \
      grouped_gemm_##NAME##_swiglu_##SIZE(const __grid_constant__ grouped::Problem p) {                    \
    using Shape = grouped::Shape<formats::FORMAT, ROWS, TOKENS, WARP_ROWS, WARP_COLUMNS, VECTORS, STAGES>; \
    grouped::run<Shape, grouped::kSwiglu>(p);                                                              \
  }
