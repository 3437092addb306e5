// Attention of a token's heads to a window of tokens and to compressed entries; one vector is key and value of all
// heads.
//
//     P = exp(s - m) / (sum exp(s - m) + exp(sink_h - m)),  s = scale q . k;  o = sum P k, rotated back by its position
//
// A block has one token and a split of its keys (split-KV): its heads are the rows of the tensor cores' tiles, so that
// every key is read once for all of them. Keys come in tiles of 16 by two buffers; scores of a tile are 16 heads x 8
// keys per warp, and each warp sums 64 dimensions of all heads' values. Where a token's keys are split, a second kernel
// merges the partials.
#include "attention/sparse.cuh"

namespace {

constexpr int kSize = 512;  // of a key
constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kTileKeys = 16;
constexpr int kRowBytes = 2 * kSize;
constexpr int kWarpSize = kSize / kWarps;  // dimensions of a warp's values

struct Arguments {
  const bf16* q;        // [T, heads, 512]
  const bf16* kv;       // [T, 512]
  const float* sinks;   // [heads]
  bf16* window;         // this layer of state slot 0: [room, 512]
  const int* selected;  // [T, k] or null
  bf16* out;            // [T, heads * 512]
  float* partial_values;  // [T, splits, heads, 512]: not divided
  float2* partial_sums;   // [T, splits, heads]: the largest score, the sum of weights
  StateRows rows;
  sparse::Entries entries;
  sparse::Rope rope;
  int64_t slot_stride;
  int room, num_seen, first_key;  // a token sees so many of the window's, none before position first_key
  int num_selected, heads, split_keys;
  float scale;
};

// 16-byte chunks of a row in shared memory lie so that eight rows of one column are in different banks.
__device__ __forceinline__ int swizzled(int row, int chunk) { return row * kRowBytes + (chunk ^ (row & 7)) * 16; }

struct Keys {
  sparse::Token at;
  int near, count;  // keys of the window; of all

  // Where a key is; null where it is masked.
  __device__ __forceinline__ const bf16* find(const Arguments& a, int token, int key) const {
    if (key >= count) return nullptr;
    if (key < near) {
      const int position = at.position - near + 1 + key;
      if (position >= at.start) return a.kv + int64_t(at.first + position - at.start) * kSize;
      return a.window + at.slot * a.slot_stride + int64_t(position % a.room) * kSize;
    }
    int entry = key - near;
    if (a.selected != nullptr) entry = a.selected[int64_t(token) * a.num_selected + entry];
    return entry < 0 ? nullptr : a.entries.cache + a.entries.offset(at.row, entry);
  }
};

__device__ Keys keys_of(const Arguments& a, int token) {
  Keys keys;
  keys.at = sparse::find_token(a.rows, token);
  keys.near = max(0, min(a.num_seen, keys.at.position + 1 - a.first_key));
  keys.count = keys.near;
  if (a.entries.cache == nullptr || keys.at.position < 0) return keys;
  const int seen = (keys.at.position + 1) / a.entries.ratio;
  keys.count += a.selected == nullptr ? seen : min(seen, a.num_selected);
  return keys;
}

// The output of two neighbouring dimensions of a head, rotated back.
__device__ __forceinline__ void write_pair(const Arguments& a, int token, int position, int head, int dim, float2 pair) {
  const int tail = kSize - 2 * a.rope.pairs;
  if (dim >= tail) pair = sparse::rotated(pair, a.rope.at(position, (dim - tail) / 2), -1.0f);
  *reinterpret_cast<__nv_bfloat162*>(a.out + (int64_t(token) * a.heads + head) * kSize + dim) =
      __floats2bfloat162_rn(pair.x, pair.y);
}

// kTiles of 16 heads. Grid: (tokens, splits, groups of as many heads).
template <int kTiles>
__device__ void attend(const Arguments& a) {
  extern __shared__ __align__(128) char memory[];
  char* queries = memory;                                  // [16 kTiles, 512]
  char* key_tiles = queries + kTiles * 16 * kRowBytes;     // 2 of [16, 512]
  float* scores = reinterpret_cast<float*>(key_tiles + 2 * kTileKeys * kRowBytes);  // [16 kTiles, 16]
  float* factors = scores + kTiles * 16 * kTileKeys;       // [16 kTiles]
  __shared__ bool is_seen[2][kTileKeys];
  const int token = blockIdx.x, thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int first_head = blockIdx.z * kTiles * 16;
  const Keys keys = keys_of(a, token);
  const int begin = blockIdx.y * a.split_keys, end = min(begin + a.split_keys, keys.count);
  // A token that sees no key at all gets zeros: from the splits' merging, or below.
  if (keys.at.position < 0 || (begin >= end && gridDim.y > 1)) {
    if (gridDim.y > 1 && blockIdx.z == 0 && thread < a.heads)
      a.partial_sums[(int64_t(token) * gridDim.y + blockIdx.y) * a.heads + thread] = {-CUDART_INF_F, 0};
    return;
  }
  const uint32_t query_base = __cvta_generic_to_shared(queries), key_base = __cvta_generic_to_shared(key_tiles);
  for (int i = thread; i < kTiles * 16 * 64; i += kThreads) {
    const int head = i / 64, chunk = i % 64;
    const bool is_there = first_head + head < a.heads;
    const bf16* from = a.q + (int64_t(token) * a.heads + (is_there ? first_head + head : 0)) * kSize + chunk * 8;
    sparse::copy_async(query_base + swizzled(head, chunk), from, is_there);
  }
  const auto fetch = [&](int tile) {
    const int buffer = tile & 1;
    for (int i = thread; i < kTileKeys * 64; i += kThreads) {
      const int row = i / 64, chunk = i % 64, key = begin + tile * kTileKeys + row;
      const bf16* from = key < end ? keys.find(a, token, key) : nullptr;
      if (chunk == 0) is_seen[buffer][row] = from != nullptr;
      sparse::copy_async(key_base + buffer * kTileKeys * kRowBytes + swizzled(row, chunk),
                         from == nullptr ? a.kv : from + chunk * 8, from != nullptr);
    }
    sparse::commit_copies();
  };
  float values[kTiles][kWarpSize / 8][4] = {};
  // The softmax of a head is computed by 4 neighbouring threads, 4 keys each.
  float top = -CUDART_INF_F, total = 0;
  const int num_tiles = (end - begin + kTileKeys - 1) / kTileKeys;
  fetch(0);
  for (int tile = 0; tile < num_tiles; tile++) {
    if (tile + 1 < num_tiles) {
      fetch(tile + 1);
      sparse::wait_for_copies<1>();
    } else {
      sparse::wait_for_copies<0>();
    }
    __syncthreads();
    const uint32_t tile_base = key_base + (tile & 1) * kTileKeys * kRowBytes;
    for (int block = warp; block < 2 * kTiles; block += kWarps) {  // 16 heads x 8 keys
      const int heads = block / 2 * 16, columns = block % 2 * 8;
      float sums[4] = {0, 0, 0, 0}, other[4] = {0, 0, 0, 0};
#pragma unroll 8
      for (int step = 0; step < kSize / 16; step += 2) {
        uint32_t left[2][4], right[4];
#pragma unroll
        for (int i = 0; i < 2; i++)
          sparse::load_matrices(left[i], query_base + swizzled(heads + lane % 16, (step + i) * 2 + lane / 16));
        sparse::load_matrices(right, tile_base + swizzled(columns + lane % 8, step * 2 + lane / 8));
        sparse::mma(sums, left[0], right[0], right[1]);
        sparse::mma(other, left[1], right[2], right[3]);
      }
      const int row = heads + lane / 4, column = columns + lane % 4 * 2;
      scores[row * kTileKeys + column] = sums[0] + other[0];
      scores[row * kTileKeys + column + 1] = sums[1] + other[1];
      scores[(row + 8) * kTileKeys + column] = sums[2] + other[2];
      scores[(row + 8) * kTileKeys + column + 1] = sums[3] + other[3];
    }
    __syncthreads();
    if (thread < kTiles * 64) {
      const int head = thread / 4, first = thread % 4 * 4;
      float4 four = *reinterpret_cast<const float4*>(scores + head * kTileKeys + first);
      float some[4] = {four.x, four.y, four.z, four.w};
      float highest = -CUDART_INF_F;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        some[i] = is_seen[tile & 1][first + i] ? some[i] * a.scale : -CUDART_INF_F;
        highest = fmaxf(highest, some[i]);
      }
      highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
      highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
      highest = fmaxf(highest, top);
      // Where all keys so far are masked, -inf less -inf would be NaN.
      const float factor = highest == -CUDART_INF_F ? 1.0f : __expf(top - highest);
      float sum = 0;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        some[i] = some[i] == -CUDART_INF_F ? 0.0f : __expf(some[i] - highest);
        sum += some[i];
      }
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      total = total * factor + sum;
      top = highest;
      // The weights take the place of the scores, in BF16.
      __syncwarp();
      const __nv_bfloat162 low = __floats2bfloat162_rn(some[0], some[1]), high = __floats2bfloat162_rn(some[2], some[3]);
      bf16* to = reinterpret_cast<bf16*>(scores + head * kTileKeys) + first;
      *reinterpret_cast<__nv_bfloat162*>(to) = low;
      *reinterpret_cast<__nv_bfloat162*>(to + 2) = high;
      if (thread % 4 == 0) factors[head] = factor;
    }
    __syncthreads();
    uint32_t right[kWarpSize / 16][4];
#pragma unroll
    for (int i = 0; i < kWarpSize / 16; i++)
      sparse::load_transposed(right[i], tile_base + swizzled(lane % 16, warp * (kWarpSize / 8) + i * 2 + lane / 16));
#pragma unroll
    for (int t = 0; t < kTiles; t++) {
      const int row = t * 16 + lane / 4;
      const float upper = factors[row], lower = factors[row + 8];
      uint32_t left[4];
      const uint32_t* low = reinterpret_cast<const uint32_t*>(scores + row * kTileKeys);
      const uint32_t* high = reinterpret_cast<const uint32_t*>(scores + (row + 8) * kTileKeys);
      left[0] = low[lane % 4], left[1] = high[lane % 4], left[2] = low[4 + lane % 4], left[3] = high[4 + lane % 4];
#pragma unroll
      for (int n = 0; n < kWarpSize / 8; n++) {
        float (&sums)[4] = values[t][n];
        sums[0] *= upper, sums[1] *= upper, sums[2] *= lower, sums[3] *= lower;
        sparse::mma(sums, left, right[n / 2][n % 2 * 2], right[n / 2][n % 2 * 2 + 1]);
      }
    }
    __syncthreads();
  }
  // `factors` now divide each head's sums; a split leaves its maximum and sum of weights instead.
  if (thread < kTiles * 64 && thread % 4 == 0) {
    const int row = thread / 4, head = first_head + row;
    if (gridDim.y == 1) {
      const float sink = head < a.heads ? a.sinks[head] : 0.0f, highest = fmaxf(top, sink);
      const float kept = __expf(top - highest);
      factors[row] = kept / (total * kept + __expf(sink - highest));
    } else if (head < a.heads) {
      a.partial_sums[(int64_t(token) * gridDim.y + blockIdx.y) * a.heads + head] = {top, total};
    }
  }
  __syncthreads();
#pragma unroll
  for (int t = 0; t < kTiles; t++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = t * 16 + half * 8 + lane / 4, head = first_head + row;
      if (head >= a.heads) continue;
      const float factor = factors[row];
#pragma unroll
      for (int n = 0; n < kWarpSize / 8; n++) {
        const int dim = warp * kWarpSize + n * 8 + lane % 4 * 2;
        const float2 pair = {values[t][n][2 * half], values[t][n][2 * half + 1]};
        if (gridDim.y == 1) {
          write_pair(a, token, keys.at.position, head, dim, {pair.x * factor, pair.y * factor});
        } else {
          const int64_t partial = (int64_t(token) * gridDim.y + blockIdx.y) * a.heads + head;
          *reinterpret_cast<float2*>(a.partial_values + partial * kSize + dim) = pair;
        }
      }
    }
  }
}

}  // namespace

#define ATTEND(NAME, TILES)                                                                                             \
  extern "C" __global__ void __launch_bounds__(kThreads, 1) window_attention_##NAME(const __grid_constant__ Arguments a) { \
    attend<TILES>(a);                                                                                                   \
  }

ATTEND(16, 1)
ATTEND(32, 2)
ATTEND(64, 4)

// Partials of a token's splits, and the sink, become its output. Grid: (tokens, heads).
extern "C" __global__ void __launch_bounds__(kThreads)
    merge_window_attention(const __grid_constant__ Arguments a, int splits) {
  const int token = blockIdx.x, head = blockIdx.y;
  const sparse::Token at = sparse::find_token(a.rows, token);
  if (at.position < 0) return;
  const int64_t first = int64_t(token) * splits * a.heads + head;
  float top = a.sinks[head];
  for (int split = 0; split < splits; split++) top = fmaxf(top, a.partial_sums[first + int64_t(split) * a.heads].x);
  float total = __expf(a.sinks[head] - top);
  float2 sums = {0, 0};
  for (int split = 0; split < splits; split++) {
    const int64_t row = first + int64_t(split) * a.heads;
    const float2 of_split = a.partial_sums[row];
    if (of_split.y == 0) continue;  // no key of this split
    const float factor = __expf(of_split.x - top);
    total += of_split.y * factor;
    const float2 some = *reinterpret_cast<const float2*>(a.partial_values + row * kSize + threadIdx.x * 2);
    sums.x += factor * some.x, sums.y += factor * some.y;
  }
  write_pair(a, token, at.position, head, threadIdx.x * 2, {sums.x / total, sums.y / total});
}

// The last tokens of each row into its window. Grid: (rows, room).
extern "C" __global__ void __launch_bounds__(64) keep_window(const __grid_constant__ Arguments a) {
  const StateRow row = state_row(a.rows, blockIdx.x);
  if (int(blockIdx.y) >= row.count) return;
  const int token = row.first + row.count - 1 - blockIdx.y, position = a.rows.context_lens[blockIdx.x] - 1 - blockIdx.y;
  bf16* to = a.window + row.slot * a.slot_stride + int64_t(position % a.room) * kSize;
  store(to + threadIdx.x * 8, load<8>(a.kv + int64_t(token) * kSize + threadIdx.x * 8));
}
