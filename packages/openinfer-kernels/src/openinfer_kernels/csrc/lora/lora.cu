// Low-rank adapters: what the adapter of each token adds to a product, several adapters and none in one batch.
//
//     shrink    s[z, t, p, k] = sum over the columns i of split z of x[t, i] A[slot(t)][p, k, i]
//     expand    y[t, o] = bf16(y[t, o] + sum over k of (sum over z of s[z, t, p(o), k]) B[slot(t)][o, k])
//     swiglu    out[t, o] = silu(g) u, g and u being what expand makes of rows o and F + o
//
// Hu et al. 2021, "LoRA", section 4.1; the two halves are those of Chen et al. 2023, "Punica". Slots are read on the
// device, so that a captured step serves any adapters. A block is of one slot and does nothing where none of its tokens
// has it; the block of slot 0 also serves tokens of none. Sums are float32, and each in an order that depends on neither
// the batch nor the token's place in it: a column of the tensor cores' product is computed by itself.
//
// What a decode step loses here is the time of two more kernels per product. So a block loads its part of A or B before
// it waits for the kernel ahead, and the product that follows a shrink fetches its weights meanwhile. Which slots there
// are is only guessed before the wait, and read again after it.
#include "lora/shrink.cuh"

namespace {

constexpr int kMostPieces = 8;
constexpr int kRowsOfWarp = 32;   // of an expand
constexpr int kRowsOfBlock = kRowsOfWarp * kWarps;
constexpr int kRankStep = 16;

struct Expand {
  uint16_t* y;          // [T, out]
  uint16_t* gated;      // [T, out / 2], of swiglu alone
  const float* shrunk;  // [splits, T, P r]
  const uint16_t* b;    // [slots, out, r], with these strides
  const int* slots;     // [T]
  int64_t slot_stride, row_stride;
  int num_tokens, outer, pieces, rank, num_slots;
  int row_blocks, splits;
  int starts[kMostPieces + 1];
};

// As silu of common/vectors.cuh, so that the result is that of the product's own gate.
__device__ __forceinline__ float silu(float value) { return __fdividef(value, 1.0f + __expf(-value)); }

template <int kGroups>
__device__ __forceinline__ void shrink(const Shrink& given) {
  __shared__ Tokens<kGroups> tokens;
  __shared__ Sums<kGroups> sums;
  const Place place(given, tokens.kCount);
  const int slot = place.slot;
  const bool is_asked = shrink_columns<kGroups>(given, place, tokens, sums);
  if (!is_asked && !(slot == 0 && tokens.has(-1))) return;
  for (int i = threadIdx.x; i < tokens.kCount * kRows; i += blockDim.x) {
    const int token = i / kRows, row = i % kRows, found = tokens.slots[token];
    if ((found != slot && !(slot == 0 && found == -1)) || place.tile * kRows + row >= given.rows) continue;
    const int64_t at = int64_t(place.split) * given.num_tokens + place.first + token;
    given.shrunk[at * given.rows + place.tile * kRows + row] = found == slot ? sum_of<kGroups>(sums, token, row) : 0;
  }
}

// Four values of a row of B; zeros beyond its end.
__device__ __forceinline__ uint2 four(const uint16_t* row, int k, int rank, bool is_there) {
  return is_there && k < rank ? *reinterpret_cast<const uint2*>(row + k) : make_uint2(0, 0);
}

// What an expand adds to 16 rows from `row` on, for each group of tokens that is asked for: d as in `lora::mma`.
template <int kGroups>
__device__ __forceinline__ void expand_tile(float (&d)[kGroups][4], const Expand& given, const uint2 (&held)[2],
                                            const bool (&asked)[kGroups], int slot, int first, int row) {
  const int group = threadIdx.x % 32 / 4, quarter = threadIdx.x % 4;
  const uint16_t* b = given.b + slot * given.slot_stride + (row + group) * given.row_stride;
  for (int piece = 0; piece < given.pieces; piece++) {
    const int begin = given.starts[piece], end = given.starts[piece + 1];
    if (end <= row || begin >= row + kRows) continue;
    const bool has_upper = row + group >= begin && row + group < end;
    const bool has_lower = row + group + 8 >= begin && row + group + 8 < end;
    for (int k = 0; k < given.rank; k += kRankStep) {
      const int own = k + quarter * 4;
      uint2 upper = held[0], lower = held[1];
      if (k > 0) {
        upper = four(b, own, given.rank, true);
        lower = four(b + 8 * given.row_stride, own, given.rank, row + group + 8 < given.outer);
      }
      if (!has_upper) upper = make_uint2(0, 0);
      if (!has_lower) lower = make_uint2(0, 0);
#pragma unroll
      for (int i = 0; i < kGroups; i++) {
        if (!asked[i]) continue;
        const int token = first + i * 8 + group;
        float4 sum = make_float4(0, 0, 0, 0);
        if (token < given.num_tokens && own < given.rank) {
          const int64_t stride = int64_t(given.num_tokens) * given.pieces * given.rank;
          const float* s = given.shrunk + (int64_t(token) * given.pieces + piece) * given.rank + own;
#pragma unroll 4
          for (int split = 0; split < given.splits; split++, s += stride) {
            const float4 part = *reinterpret_cast<const float4*>(s);
            sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
          }
        }
        const Halves one(sum.x, sum.y), other(sum.z, sum.w);
        lora::mma(d[i], upper.x, lower.x, upper.y, lower.y, one.low, other.low);
        lora::mma(d[i], upper.x, lower.x, upper.y, lower.y, one.high, other.high);
      }
    }
  }
}

// kSwiglu: a warp has 16 rows of gate and the 16 of up that belong to them; else 32 rows.
template <int kGroups, bool kSwiglu>
__device__ __forceinline__ void expand(const Expand& given) {
  __shared__ Tokens<kGroups> tokens;
  const int warp = threadIdx.x / 32, group = threadIdx.x % 32 / 4, quarter = threadIdx.x % 4;
  const int block = blockIdx.x % given.row_blocks, index = blockIdx.x / given.row_blocks;
  const int slot = index % given.num_slots, first = index / given.num_slots * tokens.kCount;
  const int width = kSwiglu ? given.outer / 2 : given.outer;  // rows of a warp's first tile are below it
  launch_dependents();

  const int row = kSwiglu ? (block * kWarps + warp) * kRows : block * kRowsOfBlock + warp * kRowsOfWarp;
  const int rows[2] = {row, kSwiglu ? row + width : row + kRows};
  uint2 held[2][2] = {};
  auto load_b = [&] {
#pragma unroll
    for (int tile = 0; tile < 2; tile++) {
      const int own = rows[tile] + group;
      const uint16_t* b = given.b + slot * given.slot_stride + own * given.row_stride;
      held[tile][0] = four(b, quarter * 4, given.rank, own < given.outer);
      held[tile][1] = four(b + 8 * given.row_stride, quarter * 4, given.rank, own + 8 < given.outer);
    }
  };
  tokens.read(given.slots, first, given.num_tokens, given.num_slots);
  __syncthreads();
  const bool guessed = tokens.has(slot);
  if (guessed) load_b();
  __syncthreads();
  wait_for_previous_kernel();
  tokens.read(given.slots, first, given.num_tokens, given.num_slots);
  __syncthreads();
  const bool is_asked = tokens.has(slot), serves_none = kSwiglu && slot == 0 && tokens.has(-1);
  if ((!is_asked && !serves_none) || row >= width) return;

  bool asked[kGroups];
#pragma unroll
  for (int i = 0; i < kGroups; i++) asked[i] = tokens.has(i, slot);
  // Of the product: all of them are under way before anything is stored, since y may be where it is read from.
  uint16_t before[2][kGroups][4];
#pragma unroll
  for (int i = 0; i < kGroups; i++) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int token = i * 8 + quarter * 2 + j % 2, found = tokens.slots[token];
      const uint16_t* y = given.y + int64_t(first + token) * given.outer;
#pragma unroll
      for (int tile = 0; tile < 2; tile++) {
        const int own = rows[tile] + group + j / 2 * 8;
        const bool is_used = (found == slot || (serves_none && found == -1)) && own < given.outer;
        before[tile][i][j] = is_used ? __ldcg(y + own) : uint16_t(0);
      }
    }
  }
  float d[2][kGroups][4] = {};
  if (is_asked) {
    if (!guessed) load_b();
#pragma unroll
    for (int tile = 0; tile < 2; tile++)
      if (rows[tile] < given.outer) expand_tile<kGroups>(d[tile], given, held[tile], asked, slot, first, rows[tile]);
  }
#pragma unroll
  for (int i = 0; i < kGroups; i++) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int token = i * 8 + quarter * 2 + j % 2, found = tokens.slots[token];
      if (found != slot && !(serves_none && found == -1)) continue;
      uint16_t* y = given.y + int64_t(first + token) * given.outer;
      const bool has_delta = found == slot;
      if constexpr (kSwiglu) {
        const int own = row + group + j / 2 * 8;
        if (own >= width) continue;
        // Both are rounded as the product without an adapter rounds them, and the gate's result once more.
        float gate = value_of(before[0][i][j]), up = value_of(before[1][i][j]);
        if (has_delta) gate = rounded(gate + d[0][i][j]), up = rounded(up + d[1][i][j]);
        given.gated[int64_t(first + token) * width + own] = uint16_t(rounded_bits(silu(gate) * up));
      } else {
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
          const int own = rows[tile] + group + j / 2 * 8;
          if (own < given.starts[0] || own >= given.starts[given.pieces]) continue;
          y[own] = uint16_t(rounded_bits(value_of(before[tile][i][j]) + d[tile][i][j]));
        }
      }
    }
  }
}

}  // namespace

// Rows of `row_vectors` times 16 bytes from pinned host memory, in which they follow each other, to the device, where
// they may lie apart; null: zeros. Unless `scale` is 1 they are BF16 values, which are multiplied by it.
// cuda/common/memory.py repeats it.
struct WeightCopy {
  const uint4* from;
  uint8_t* to;
  int64_t vectors, row_vectors, pitch;
  float scale;
};

__device__ __forceinline__ uint32_t scaled_pair(uint32_t pair, float scale) {
  const uint32_t low = lora::rounded_bits(lora::value_of(pair & 0xffff) * scale);
  return low | lora::rounded_bits(lora::value_of(pair >> 16) * scale) << 16;
}

__device__ __forceinline__ uint4 scaled(uint4 eight, float scale) {
  return make_uint4(scaled_pair(eight.x, scale), scaled_pair(eight.y, scale), scaled_pair(eight.z, scale),
                    scaled_pair(eight.w, scale));
}

constexpr int kMostCopies = 64;  // of a launch: an adapter has hundreds

struct WeightCopies {
  WeightCopy each[kMostCopies];
};

// A row of the grid makes a copy.
extern "C" __global__ void lora_place_weights(const __grid_constant__ WeightCopies copies) {
  const WeightCopy& copy = copies.each[blockIdx.y];
  const int64_t stride = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < copy.vectors; i += stride) {
    uint4* target = reinterpret_cast<uint4*>(copy.to + i / copy.row_vectors * copy.pitch) + i % copy.row_vectors;
    const uint4 values = copy.from ? copy.from[i] : make_uint4(0, 0, 0, 0);
    *target = copy.scale == 1 ? values : scaled(values, copy.scale);
  }
}

#define LORA(GROUPS)                                                                                                \
  extern "C" __global__ void __launch_bounds__(32 * kWarpsOf<GROUPS>) lora_shrink_##GROUPS(const __grid_constant__ Shrink given) { \
    shrink<GROUPS>(given);                                                                                          \
  }                                                                                                                 \
  extern "C" __global__ void __launch_bounds__(kThreads) lora_expand_##GROUPS(const __grid_constant__ Expand given) { \
    expand<GROUPS, false>(given);                                                                                   \
  }                                                                                                                 \
  extern "C" __global__ void __launch_bounds__(kThreads)                                                            \
      lora_expand_swiglu_##GROUPS(const __grid_constant__ Expand given) {                                           \
    expand<GROUPS, true>(given);                                                                                    \
  }

LORA(1)
LORA(4)
