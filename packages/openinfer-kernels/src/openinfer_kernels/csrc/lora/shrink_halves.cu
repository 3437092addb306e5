// `A x` as a product takes it that has adapters as more columns of its K (gemm/adapter_maps.cuh): for each token the
// columns of all slots, zero but for its own, in two BF16 halves that make up the float32 sum.
//
// A cluster's blocks divide the columns of x; the first adds up their sums, in order.
#include "common/hopper.cuh"
#include "lora/shrink.cuh"

namespace {

constexpr int kMostSplits = 5;

struct ShrunkHalves {
  uint16_t* halves;  // [T, pieces, 2, columns]
  int rank, columns;
};

template <int kGroups>
__device__ __forceinline__ void shrink_halves(const Shrink& given, const ShrunkHalves& out) {
  __shared__ Tokens<kGroups> tokens;
  __shared__ Sums<kGroups> sums;
  __shared__ float partials[kMostSplits - 1][8 * kGroups][kRows + 1];
  const Place place(given, tokens.kCount);
  const bool is_asked = shrink_columns<kGroups>(given, place, tokens, sums);
  if (given.splits > 1) {
    if (is_asked && place.split > 0) {
      for (int i = threadIdx.x; i < tokens.kCount * kRows; i += blockDim.x) {
        const uint32_t target = hopper::address_in(&partials[place.split - 1][i / kRows][i % kRows], 0);
        hopper::store_in(target, sum_of<kGroups>(sums, i / kRows, i % kRows));
      }
    }
    hopper::cluster_sync();
    if (place.split > 0) return;
  }
  for (int i = threadIdx.x; i < tokens.kCount * kRows; i += blockDim.x) {
    const int token = i / kRows, row = place.tile * kRows + i % kRows;
    if (place.first + token >= given.num_tokens || row >= given.rows) continue;
    float sum = 0;
    if (is_asked && tokens.slots[token] == place.slot) {
      sum = sum_of<kGroups>(sums, token, i % kRows);
      for (int split = 1; split < given.splits; split++) sum += partials[split - 1][token][i % kRows];
    }
    const uint32_t high = rounded_bits(sum);
    const int64_t pieces = given.rows / out.rank, piece = row / out.rank;
    uint16_t* to = out.halves + ((place.first + token) * pieces + piece) * 2 * out.columns;
    to += place.slot * out.rank + row % out.rank;
    to[0] = uint16_t(high);
    to[out.columns] = uint16_t(rounded_bits(sum - value_of(high)));
  }
}

}  // namespace

#define SHRINK_HALVES(GROUPS)                                                                              \
  extern "C" __global__ void __launch_bounds__(32 * kWarpsOf<GROUPS>)                                                   \
      shrink_halves_##GROUPS(const __grid_constant__ Shrink given, const __grid_constant__ ShrunkHalves out) {   \
    shrink_halves<GROUPS>(given, out);                                                                     \
  }

SHRINK_HALVES(1)
SHRINK_HALVES(4)
