// The producer of prefill attention over a cache in FP8: part of attention_prefill_hopper.cu, inside its namespace.
//
// Two warps for keys, two for values, each with half of the tokens of a tile. Codes and scales come by bulk copies, 16
// tokens at a time, to slots of the warp's own, ahead of what it converts; it brings them to BF16, code times scale
// rounded once, where the plain producer's tensor copies would have put them, so that consumers are the same.
#pragma once

template <class S>
struct Staging<S, true> {
  static constexpr int kSlots = S::D == 256 ? 1 : 4;  // at 256 there is no room for more
  static constexpr int kCodeBytes = kChunk * S::D, kBytes = kCodeBytes + 4 * kChunk;
  alignas(128) uint8_t slots[4][kSlots][kBytes];
  uint64_t full[4][kSlots];
};

template <class S>
__device__ __forceinline__ void init_staging(Staging<S, true>& staging) {
  for (int warp = 0; warp < 4; warp++)
    for (int i = 0; i < Staging<S, true>::kSlots; i++) barrier_init(&staging.full[warp][i], 1);
}

__device__ __forceinline__ void bulk_copy(void* target, const void* from, int bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(target)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

// 16 tokens from `slot` to rows `row` and following of a tile [boxes][keys][128 bytes], swizzled.
template <class S>
__device__ __forceinline__ void convert_chunk(uint8_t* tile, const uint8_t* slot, int row) {
  constexpr int kParts = S::D / 16;  // of 16 codes, of a token
  const int lane = threadIdx.x % 32;
  const float* scales = reinterpret_cast<const float*>(slot + Staging<S, true>::kCodeBytes);
#pragma unroll
  for (int i = 0; i < kChunk * kParts / 32; i++) {
    const int index = i * 32 + lane, token = index / kParts, part = index % kParts;
    const uint4 codes = *reinterpret_cast<const uint4*>(slot + index * 16);
    const float scale = scales[token];
    const uint2 a = e4m3_times_four(codes.x, scale), b = e4m3_times_four(codes.y, scale);
    const uint2 c = e4m3_times_four(codes.z, scale), d = e4m3_times_four(codes.w, scale);
    uint8_t* to = tile + (part / 4 * S::kKeys + row + token) * kRowBytes;
    const int chunk = part % 4 * 2, exchanged = (row + token) & 7;
    *reinterpret_cast<uint4*>(to + (chunk ^ exchanged) * 16) = make_uint4(a.x, a.y, b.x, b.y);
    *reinterpret_cast<uint4*>(to + ((chunk + 1) ^ exchanged) * 16) = make_uint4(c.x, c.y, d.x, d.y);
  }
}

template <class S>
__device__ void produce_fp8(Shared<S>& s, const typename S::Arguments& a, const typename S::Rows& rows,
                            int num_work_tiles, int warp) {
  using G = Staging<S, true>;
  constexpr int kChunks = S::kKeys / kChunk / 2, kWindow = 32;  // chunks of a warp in a tile; block ids known ahead
  const int lane = threadIdx.x % 32, is_value = warp / 2, first_row = warp % 2 * kChunks * kChunk;
  auto& tiles = is_value ? s.v : s.k;
  uint64_t* full = is_value ? s.v_full : s.k_full;
  uint64_t* empty = is_value ? s.v_empty : s.k_empty;
  const bool asks = warp == 2;
  const int block_mask = (1 << a.cache.block_shift) - 1;
  const int64_t value_offset = is_value ? a.cache.value_offset(S::D) : 0;
  uint32_t parities = 0;  // bit `slot`: of the copy that comes next
  int step = 0, index = blockIdx.x;
  for (int round = 0; index < num_work_tiles; round++) {
    const WorkTile tile = work_tile_at<S::kKeys>(s.work_tiles, rows, index);
    const int* table = a.block_tables + int64_t(tile.row) * a.table_stride;
    const int last_key = (tile.end_key - 1) / S::kKeys * S::kKeys;
    const int count = ((last_key - tile.begin_key) / S::kKeys + 1) * kChunks;
    // The chunks of this warp, in the order in which they are converted: tiles last to first, tokens ascending.
    auto token_of_chunk = [&](int k) { return last_key - k / kChunks * S::kKeys + first_row + k % kChunks * kChunk; };
    auto ids_from = [&](int first) {
      const int k = first + lane, token = token_of_chunk(k);
      return k < count && token < tile.end_key ? __ldcg(table + (token >> a.cache.block_shift)) : 0;
    };
    int window = 0, ids = ids_from(0), later = ids_from(kWindow);
    auto ask = [&](int k) {
      if (k == window + kWindow) {
        window = k;
        ids = later;
        later = ids_from(window + kWindow);
      }
      const int block = __shfl_sync(~0u, ids, k - window), token = token_of_chunk(k);
      if (lane != 0 || k >= count || token >= tile.end_key) return;
      const uint8_t* from = a.cache.key(block, tile.kv_head, token & block_mask, S::D) + value_offset;
      uint8_t* slot = s.staging.slots[warp][k % G::kSlots];
      uint64_t* barrier = &s.staging.full[warp][k % G::kSlots];
      barrier_expect(barrier, G::kBytes);
      if (block_mask == kChunk - 1) {
        bulk_copy(slot, from, G::kBytes, barrier);
      } else {
        bulk_copy(slot, from, G::kCodeBytes, barrier);
        bulk_copy(slot + G::kCodeBytes, from + a.cache.scale_offset(token & block_mask, S::D), 4 * kChunk, barrier);
      }
    };
    __syncwarp();
    for (int k = 0; k < G::kSlots; k++) ask(k);
    for (int k = 0; k < count; k++) {
      const int stage = step % kStages, slot = k % G::kSlots, row = first_row + k % kChunks * kChunk;
      // The phase that ends the stage's use before this one; in the first round it has none.
      if (k % kChunks == 0 && step >= kStages) barrier_wait(&empty[stage], (step / kStages - 1) & 1);
      if (token_of_chunk(k) < tile.end_key) {
        barrier_wait(&s.staging.full[warp][slot], parities >> slot & 1);
        parities ^= 1u << slot;
        convert_chunk<S>(tiles[stage], s.staging.slots[warp][slot], row);
      }
      __syncwarp();
      ask(k + G::kSlots);
      if ((k + 1) % kChunks != 0) continue;
      copies_see_writes();
      __syncwarp();
      if (lane == 0) barrier_arrive(&full[stage]);
      step++;
      if (k + 1 == kChunks && asks && lane == 0) index = ask_for_next(s, a, round);
    }
    index = asks ? __shfl_sync(~0u, index, 0) : take_next(s, round);
  }
  if (asks && lane == 0) stop_asking(a);
}
