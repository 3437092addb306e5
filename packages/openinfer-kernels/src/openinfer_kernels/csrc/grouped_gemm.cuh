// Products of several matrices, each with its own tokens: Y = X W_e^T for the rows of expert e. Any GPU from Ampere on.
//
// The product is turned around: a tile is kRows rows of W (output features) x kTokens tokens, so that few tokens waste
// little and each weight is read once. Weights are copied into shared memory as they are stored and widened to BF16 in
// registers, where `mma` takes them: formats differ in `weight_formats.cuh` alone.
//
// Where rows are few for the chip, a tile has 16 of them, and the four warps divide the columns of each chunk.
//
//   K is taken in chunks of kColumns. Of every 32 columns, thread t of four holds columns 8 t to 8 t + 7, of W and of X
//   alike: the order of K inside a sum is the same for both, and nothing has to be shuffled.
//
// Codes cost instructions as well as bytes. With few tokens they are multiplied as they are and the sums of 32 columns
// scaled, in float32. With more tokens weights are scaled, and rounded to BF16, before they are multiplied.
//
// Stages of cp.async are kept full; x is gathered while it is copied, along the line of tokens of `plan_experts`.
// Epilogues: store, and swiglu, for which rows g and g + 8 of 16 are gate and up of one feature.
#pragma once
#include "limited_swiglu.cuh"
#include "overlap.cuh"
#include "weight_formats.cuh"

namespace grouped {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kUnit = 16;  // bytes of one copy

enum Epilogue { kStore, kSwiglu };

struct Problem {
  const uint8_t* codes;    // [matrices, rows, row bytes]
  const uint8_t* scales;   // [matrices, rows / scale_rows, scale pitch]
  const bf16* x;           // [.., k]
  bf16* y;                 // [positions, rows], or [positions, rows / 2]
  const int4* tiles;       // (matrix, first position, positions) of each blockIdx.y; null: one matrix for all of them
  const int* line;         // the row of x of each position; null: its own
  int rows, k, row_bytes;       // of a matrix; bytes of a row of codes, a multiple of 16, of 64 where they are few bits
  int scale_rows, scale_pitch;  // rows that share a scale; bytes of a row of scales
  int num_positions;            // where there are no tiles
  int weights_first;            // whether tiles are older than the kernel ahead, so that weights may be read before it ends
  float limit;
};

template <typename Format_, int kRows_, int kTokens_, int kWarpRows_, int kWarpColumns_, int kUnits_, int kStages_>
struct Shape {
  using Format = Format_;
  static constexpr int kRows = kRows_, kTokens = kTokens_, kStages = kStages_;
  static constexpr int kUnits = kUnits_;                          // of codes, per thread and row
  static constexpr int kParts = Format::kParts;                   // of 8 values, in one of them
  static constexpr int kWarpRows = kWarpRows_, kWarpColumns = kWarpColumns_;      // warps along rows, along a chunk
  static constexpr int kWarpTokens = kWarps / kWarpRows / kWarpColumns;           // and along tokens
  static constexpr int kColumns = 32 * kUnits * kParts * kWarpColumns;            // of a chunk
  static constexpr int kRowTiles = kRows / 16 / kWarpRows, kTokenTiles = kTokens / 8 / kWarpTokens;
  static constexpr int kCodeUnits = 4 * kUnits * kWarpColumns, kXUnits = kColumns * 2 / kUnit;  // of a row's chunk
  static constexpr int kScaleChunk = kColumns / 32 * Format::kScaleBytes;
  static constexpr int kScaleUnit = kScaleChunk < kUnit ? kScaleChunk : kUnit;    // of one copy
  static constexpr int kCodeBytes = kRows * kCodeUnits * kUnit, kXBytes = kTokens * kXUnits * kUnit;
  static constexpr int kStageBytes = kCodeBytes + kXBytes + kRows * kScaleChunk;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static constexpr bool kScalesSums = Format::kQuantised && kTokenTiles == 1;
};

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies kBytes without waiting; zeros where `present` is false, and then `from` is not read.
template <int kBytes>
__device__ __forceinline__ void copy(uint32_t to, const void* from, bool present) {
  const int bytes = present ? kBytes : 0;
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(kBytes),
                 "r"(bytes));
}

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;"); }

template <int kPending>
__device__ __forceinline__ void wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Where unit `unit` of row `row` lies, so that the eight threads that read at once hit all banks.
template <int kUnitsOfRow>
__device__ __forceinline__ int place(int row, int unit) {
  if constexpr (kUnitsOfRow < 8) return row * kUnitsOfRow + unit;
  return row * kUnitsOfRow + (unit ^ row % 2 * 4);
}

__device__ __forceinline__ void multiply(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                         uint32_t b1) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Which part of a block's tile a warp multiplies.
template <typename S>
struct Warp {
  int g, t;                     // of mma: lane / 4, lane % 4
  int row_tile, token_tile;     // the first of each
  int part;                     // of a chunk's columns

  __device__ Warp() {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, side = warp % (kWarps / S::kWarpColumns);
    g = lane / 4, t = lane % 4, part = warp / (kWarps / S::kWarpColumns);
    row_tile = side / S::kWarpTokens * S::kRowTiles, token_tile = side % S::kWarpTokens * S::kTokenTiles;
  }
};

// Which weights and positions a block multiplies.
template <typename S, Epilogue kEpilogue>
struct Work {
  int matrix, begin, count, first_feature;

  __device__ Work(const Problem& p) {
    first_feature = blockIdx.x * (kEpilogue == kSwiglu ? S::kRows / 2 : S::kRows);
    if (p.tiles != nullptr) {
      const int4 tile = p.tiles[blockIdx.y];
      matrix = tile.x, begin = tile.y, count = tile.z;
    } else {
      matrix = 0, begin = blockIdx.y * S::kTokens, count = min(S::kTokens, p.num_positions - begin);
    }
  }

  // The row of the matrix that row `row` of the tile is, or -1.
  __device__ __forceinline__ int row_of(const Problem& p, int row) const {
    if constexpr (kEpilogue == kStore) return first_feature + row < p.rows ? first_feature + row : -1;
    const int feature = first_feature + row / 16 * 8 + row % 8;
    return feature >= p.rows / 2 ? -1 : row % 16 < 8 ? feature : feature + p.rows / 2;
  }
};

// What one thread copies of each chunk: places that do not change from chunk to chunk, in bytes.
template <typename S, Epilogue kEpilogue>
struct Loader {
  using Format = typename S::Format;
  static constexpr uint32_t kAbsent = 0xFFFFFFFFu;
  static constexpr int kCodeRows = kThreads / S::kCodeUnits, kXRows = kThreads / S::kXUnits;  // copied at once
  static constexpr int kCodeCopies = S::kRows / kCodeRows, kXCopies = (S::kTokens + kXRows - 1) / kXRows;
  static constexpr int kScaleUnits = Format::kScaleBytes > 0 ? S::kScaleChunk / S::kScaleUnit : 1;  // of a row's chunk
  static constexpr int kScaleCopies = (S::kRows * kScaleUnits + kThreads - 1) / kThreads;
  static constexpr int kCodeChunk = S::kCodeUnits * kUnit, kXChunk = S::kXUnits * kUnit;            // bytes of a row
  static_assert(kCodeRows % 2 == 0 && kXRows % 2 == 0 && S::kRows % kCodeRows == 0 && kThreads % kScaleUnits == 0);

  const uint8_t *codes, *scales, *x;
  uint32_t code_at[kCodeCopies], scale_at[kScaleCopies], x_at[kXCopies];
  int code_end, scale_end, x_end;  // of the chunks' beginnings: beyond, there is nothing
  uint32_t code_to, scale_to, x_to;

  __device__ Loader(const Problem& p, const Work<S, kEpilogue>& work, uint8_t* shared) {
    const int code_unit = threadIdx.x % S::kCodeUnits, code_row = threadIdx.x / S::kCodeUnits;
    const int x_unit = threadIdx.x % S::kXUnits, x_row = threadIdx.x / S::kXUnits;
    codes = p.codes + int64_t(work.matrix) * p.rows * p.row_bytes;
    x = reinterpret_cast<const uint8_t*>(p.x);
    code_end = p.row_bytes - code_unit * kUnit;
    x_end = p.k * 2 - x_unit * kUnit;
    code_to = shared_address(shared) + place<S::kCodeUnits>(code_row, code_unit) * kUnit;
    x_to = shared_address(shared) + S::kCodeBytes + place<S::kXUnits>(x_row, x_unit) * kUnit;
#pragma unroll
    for (int i = 0; i < kCodeCopies; i++) {
      const int row = work.row_of(p, i * kCodeRows + code_row);
      code_at[i] = row < 0 ? kAbsent : uint32_t(row) * p.row_bytes + code_unit * kUnit;
    }
#pragma unroll
    for (int i = 0; i < kXCopies; i++) {
      const int token = i * kXRows + x_row, at = work.begin + token;
      if (token < work.count)
        x_at[i] = uint32_t(p.line == nullptr ? at : p.line[at]) * p.k * 2 + x_unit * kUnit;
      else
        x_at[i] = kAbsent;
    }
    if constexpr (Format::kQuantised) {
      const int unit = threadIdx.x % kScaleUnits;
      scales = p.scales + int64_t(work.matrix) * (p.rows / p.scale_rows) * p.scale_pitch;
      scale_end = p.scale_pitch - unit * S::kScaleUnit;
      scale_to = shared_address(shared) + S::kCodeBytes + S::kXBytes + threadIdx.x * S::kScaleUnit;
#pragma unroll
      for (int i = 0; i < kScaleCopies; i++) {
        const int row = (i * kThreads + threadIdx.x) / kScaleUnits, source = row < S::kRows ? work.row_of(p, row) : -1;
        scale_at[i] = source < 0 ? kAbsent : uint32_t(source / p.scale_rows) * p.scale_pitch + unit * S::kScaleUnit;
      }
    }
  }

  __device__ __forceinline__ void load_weights(int stage, int chunk) const {
    const int byte = chunk * kCodeChunk;
#pragma unroll
    for (int i = 0; i < kCodeCopies; i++) {
      const bool present = code_at[i] != kAbsent && byte < code_end;
      copy<kUnit>(code_to + stage * S::kStageBytes + i * kCodeRows * kCodeChunk, codes + (present ? code_at[i] + byte : 0),
                  present);
    }
    if constexpr (Format::kQuantised) {
      const int scale_byte = chunk * S::kScaleChunk;
#pragma unroll
      for (int i = 0; i < kScaleCopies; i++) {
        const bool present = scale_at[i] != kAbsent && scale_byte < scale_end;
        if (S::kRows * kScaleUnits % kThreads == 0 || i * kThreads + threadIdx.x < S::kRows * kScaleUnits)
          copy<S::kScaleUnit>(scale_to + stage * S::kStageBytes + i * kThreads * S::kScaleUnit,
                              scales + (present ? scale_at[i] + scale_byte : 0), present);
      }
    }
  }

  __device__ __forceinline__ void load_x(int stage, int chunk) const {
    const int byte = chunk * kXChunk;
#pragma unroll
    for (int i = 0; i < kXCopies; i++) {
      if (S::kTokens % kXRows && i * kXRows + threadIdx.x / S::kXUnits >= S::kTokens) break;
      const bool present = x_at[i] != kAbsent && byte < x_end;
      copy<kUnit>(x_to + stage * S::kStageBytes + i * kXRows * kXChunk, x + (present ? x_at[i] + byte : 0), present);
    }
  }
};

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
  for (int i = 0; i < S::kUnits; i++) {
    const int unit = warp.part * S::kUnits + i;
    uint4 raw[S::kRowTiles][2];
    Scales scale[S::kRowTiles][2];
#pragma unroll
    for (int m = 0; m < S::kRowTiles; m++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int row = (warp.row_tile + m) * 16 + half * 8 + warp.g;
        raw[m][half] = codes[place<S::kCodeUnits>(row, unit * 4 + warp.t)];
        if constexpr (Format::kQuantised)
          scale[m][half] = *reinterpret_cast<const Scales*>(scales + row * S::kScaleChunk + unit * sizeof(Scales));
      }
    }
#pragma unroll
    for (int part = 0; part < S::kParts; part++) {
      uint4 b[S::kTokenTiles];
#pragma unroll
      for (int n = 0; n < S::kTokenTiles; n++)
        b[n] = x[place<S::kXUnits>((warp.token_tile + n) * 8 + warp.g, (unit * S::kParts + part) * 4 + warp.t)];
#pragma unroll
      for (int m = 0; m < S::kRowTiles; m++) {
        const float low_scale = Format::scale(scale[m][0], part), high_scale = Format::scale(scale[m][1], part);
        if constexpr (S::kScalesSums) {
          add_scaled(d[m][0], Format::raw(raw[m][0], part), Format::raw(raw[m][1], part), b[0], low_scale, high_scale);
        } else {
          const uint4 low = Format::eight(raw[m][0], part, low_scale);
          const uint4 high = Format::eight(raw[m][1], part, high_scale);
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

// Adds up what warps made of their parts of the columns, in the order of parts, for the first of them.
template <typename S>
__device__ __forceinline__ void gather_columns(float (&d)[S::kRowTiles][S::kTokenTiles][4], uint8_t* shared) {
  static_assert(S::kRowTiles == 1 && S::kTokenTiles == 1 && S::kWarpColumns == kWarps);
  float4* sums = reinterpret_cast<float4*>(shared);
  sums[threadIdx.x] = {d[0][0][0], d[0][0][1], d[0][0][2], d[0][0][3]};
  __syncthreads();
  float4 sum = sums[threadIdx.x % 32];
#pragma unroll
  for (int part = 1; part < kWarps; part++) {
    const float4 more = sums[part * 32 + threadIdx.x % 32];
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
          to[(warp.row_tile + m) * 8 + warp.g] = __float2bfloat16_rn(limited_swiglu(d[m][n][i], d[m][n][2 + i], p.limit));
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
    *reinterpret_cast<uint4*>(p.y + int64_t(work.begin + token) * features + work.first_feature + feature) =
        *reinterpret_cast<const uint4*>(out + token * kPitch + feature);
  }
}

template <typename S, Epilogue kEpilogue>
__device__ __forceinline__ void run(const Problem& p) {
  extern __shared__ __align__(128) uint8_t shared[];
  if (!p.weights_first) wait_for_previous_kernel();
  const Work<S, kEpilogue> work(p);
  if (work.count <= 0) {
    if (p.weights_first) wait_for_previous_kernel();
    return;
  }
  const Loader<S, kEpilogue> loader(p, work, shared);
  const int chunks = (p.k + S::kColumns - 1) / S::kColumns;
  for (int i = 0; i < S::kStages - 1; i++) {
    if (i < chunks) loader.load_weights(i, i);
  }
  if (p.weights_first) wait_for_previous_kernel();
  allow_next_kernel();
#pragma unroll
  for (int i = 0; i < S::kStages - 1; i++) {
    if (i < chunks) loader.load_x(i, i);
    commit();
  }
  float d[S::kRowTiles][S::kTokenTiles][4] = {};
  int stage = 0, next_stage = S::kStages - 1;
  for (int chunk = 0; chunk < chunks; chunk++) {
    wait<S::kStages - 2>();
    __syncthreads();
    const int next = chunk + S::kStages - 1;
    if (next < chunks) {
      loader.load_weights(next_stage, next);
      loader.load_x(next_stage, next);
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

// Tokens of a tile or FEW, the format, rows and tokens of a tile, warps along its rows and along a chunk's columns, units,
// stages, blocks of a multiprocessor; grouped_gemm.py repeats the sizes.
#define GROUPED_GEMM(NAME, SIZE, FORMAT, ROWS, TOKENS, WARP_ROWS, WARP_COLUMNS, UNITS, STAGES, BLOCKS)                \
  extern "C" __global__ void __launch_bounds__(grouped::kThreads, BLOCKS)                                             \
      grouped_gemm_##NAME##_store_##SIZE(const __grid_constant__ grouped::Problem p) {                                \
    using Shape = grouped::Shape<formats::FORMAT, ROWS, TOKENS, WARP_ROWS, WARP_COLUMNS, UNITS, STAGES>;              \
    grouped::run<Shape, grouped::kStore>(p);                                                                          \
  }                                                                                                                   \
  extern "C" __global__ void __launch_bounds__(grouped::kThreads, BLOCKS)                                             \
      grouped_gemm_##NAME##_swiglu_##SIZE(const __grid_constant__ grouped::Problem p) {                               \
    using Shape = grouped::Shape<formats::FORMAT, ROWS, TOKENS, WARP_ROWS, WARP_COLUMNS, UNITS, STAGES>;              \
    grouped::run<Shape, grouped::kSwiglu>(p);                                                                         \
  }
