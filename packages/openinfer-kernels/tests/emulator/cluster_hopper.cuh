// What low-bit products use of `csrc/common/hopper.cuh`, for a host compiler: blocks of a cluster run together. An address
// in the shared memory of a cluster is the block's rank and the offset there.
#pragma once
#include "bfloat16.hpp"
#include "clusters.hpp"

namespace hopper {

constexpr int kRankBits = 24;

inline uint32_t shared_address(const void* pointer) {
  return uint32_t(static_cast<const uint8_t*>(pointer) - emulated::shared_memory());
}
inline uint32_t address_in(const void* pointer, uint32_t rank) { return rank << kRankBits | shared_address(pointer); }
inline uint8_t* place_of(uint32_t address) {
  return emulated::memory_of(address >> kRankBits) + (address & ((1 << kRankBits) - 1));
}

// An mbarrier in its 8 bytes.
struct Phase {
  int16_t pending, arrivals;
  uint32_t parity : 1;
  int32_t bytes : 31;

  void end_if_complete() {
    if (pending < 0) abort();  // more came than were announced
    if (pending == 0 && bytes == 0) pending = arrivals, parity ^= 1;
  }
};
static_assert(sizeof(Phase) == 8);

inline Phase& phase_of(void* barrier) { return *static_cast<Phase*>(barrier); }
inline void barrier_init(uint64_t* barrier, uint32_t arrivals) {
  phase_of(barrier) = {int16_t(arrivals), int16_t(arrivals), 0, 0};
}
inline void barrier_init_fence() {}
inline void arrive(void* barrier, int bytes) {
  Phase& phase = phase_of(barrier);
  phase.pending--;
  phase.bytes += bytes;
  phase.end_if_complete();
}
inline void barrier_expect(uint64_t* barrier, uint32_t bytes) { arrive(barrier, int(bytes)); }
inline void barrier_arrive(uint64_t* barrier) { arrive(barrier, 0); }
inline void barrier_arrive_in(uint32_t barrier) { arrive(place_of(barrier), 0); }
inline void barrier_arrive_nearby(uint32_t barrier) { arrive(place_of(barrier), 0); }
inline void barrier_wait(uint64_t* barrier, uint32_t parity) {
  while (phase_of(barrier).parity == parity) emulated::let_others_run();
}
inline void barrier_wait_cluster(uint64_t* barrier, uint32_t parity) { barrier_wait(barrier, parity); }
inline void complete(void* barrier, int bytes) {
  Phase& phase = phase_of(barrier);
  phase.bytes -= bytes;
  phase.end_if_complete();
}

inline uint32_t cluster_rank() { return emulated::cluster_thread->rank; }
inline uint32_t cluster_size() { return emulated::blocks_of_cluster; }
inline void cluster_arrive() { emulated::arrive_in_cluster(); }
inline void cluster_wait() {
  while (emulated::cluster_thread->round == emulated::cluster_rounds) emulated::let_others_run();
}
inline void cluster_meet() { cluster_arrive(), cluster_wait(); }
inline void cluster_sync() { cluster_meet(); }
inline void store_in(uint32_t address, float value) { memcpy(place_of(address), &value, 4); }
inline float4 load_in(uint32_t address) {
  float4 value;
  memcpy(&value, place_of(address), 16);
  return value;
}

// Where a byte lies in tiles that are swizzled by 128 bytes; and with rows of 32 bytes by those.
inline uint32_t swizzled(uint32_t address, int row_bytes = 128) {
  return row_bytes == 32 ? address ^ ((address >> 7 & 1) << 4) : address ^ ((address >> 7 & 7) << 4);
}

inline uint64_t evict_first_policy() { return 0; }
inline uint64_t evict_normal_policy() { return 0; }
inline uint64_t evict_last_policy() { return 0; }

// A map is the address of a matrix of BF16, its columns, its rows, the rows of a box, and its columns, of which none is
// said where they are 64. Zeros beyond it.
inline void load_box_into(void* target, const CUtensorMap* map, uint64_t* barrier, int x, int y, uint16_t targets,
                          uint64_t) {
  const auto* values = reinterpret_cast<const uint16_t*>(map->opaque[0]);
  const int64_t columns = map->opaque[1], rows = map->opaque[2], box_rows = map->opaque[3];
  const int box_columns = map->opaque[4] ? map->opaque[4] : 64, row_bytes = box_columns * 2;
  for (int rank = 0; rank < emulated::blocks_of_cluster; rank++) {
    if (!(targets >> rank & 1)) continue;
    for (int row = 0; row < box_rows; row++)
      for (int column = 0; column < box_columns; column++) {
        const bool is_inside = y + row < rows && x + column < columns;
        const uint16_t value = is_inside ? values[(y + row) * columns + x + column] : 0;
        const uint32_t at = swizzled(shared_address(target) + row * row_bytes + column * 2, row_bytes);
        memcpy(emulated::memory_of(rank) + at, &value, 2);
      }
    complete(place_of(address_in(barrier, rank)), int(box_rows) * row_bytes);
  }
}
inline void load_box(void* target, const CUtensorMap* map, uint64_t* barrier, int x, int y, uint64_t policy) {
  load_box_into(target, map, barrier, x, y, 1 << cluster_rank(), policy);
}

// A map of four axes: address, sizes, strides in bytes of all but the first, and the box. Zeros beyond, on either side.
inline void load_box(void* target, const CUtensorMap* map, uint64_t* barrier, int x, int y, int z, int w, uint64_t) {
  const auto *sizes = map->opaque + 1, *strides = map->opaque + 5, *box = map->opaque + 8;
  const auto* bytes = reinterpret_cast<const uint8_t*>(map->opaque[0]);
  const long first[4] = {x, y, z, w};
  int row = 0;
  const int row_bytes = int(box[0]) * 2;
  for (int l = 0; l < int(box[3]); l++)
    for (int k = 0; k < int(box[2]); k++)
      for (int j = 0; j < int(box[1]); j++, row++)
        for (int i = 0; i < int(box[0]); i++) {
          const long at[4] = {x + i, y + j, z + k, w + l};
          bool is_inside = true;
          for (int axis = 0; axis < 4; axis++) is_inside &= at[axis] >= 0 && at[axis] < long(sizes[axis]);
          uint16_t value = 0;
          if (is_inside) {
            const long offset = at[0] * 2 + at[1] * long(strides[0]) + at[2] * long(strides[1]) + at[3] * long(strides[2]);
            memcpy(&value, bytes + offset, 2);
          }
          const uint32_t place = shared_address(target) + row * row_bytes + i * 2;
          memcpy(emulated::shared_memory() + swizzled(place, row_bytes), &value, 2);
        }
  complete(barrier, row * row_bytes);
}

inline void launch_dependents() {}
inline void wait_for_previous_kernel() {}
template <int kCount>
inline void take_registers() {}
template <int kCount>
inline void leave_registers() {}

inline uint64_t tile_descriptor(const void* tile) { return shared_address(tile) >> 4; }
constexpr uint64_t kNarrow = uint64_t(1) << 40;  // of a descriptor of rows of 32 bytes
inline uint64_t narrow_tile_descriptor(const void* tile) { return kNarrow | tile_descriptor(tile); }
inline void wgmma_fence() {}
inline void wgmma_commit() {}
// A warp's products are made by its lanes one after the other: none may go on and free what another still reads.
template <int kPending>
inline void wgmma_wait() {
  __syncwarp();
}

inline void values_of_row(uint64_t tile, int row, float (&values)[16]) {
  for (int part = 0; part < 2; part++) {
    uint16_t eight[8];
    const int row_bytes = tile & kNarrow ? 32 : 128;
    const uint32_t at = swizzled(uint32_t(tile << 4) + row * row_bytes + part * 16, row_bytes);
    memcpy(eight, emulated::shared_memory() + at, 16);
    for (int k = 0; k < 8; k++) values[8 * part + k] = emulated::from_bfloat16(eight[k]);
  }
}

// d[64 x N] (+)= a[64 x 16] b[N x 16]^T of a warp's 16 rows, both in shared memory.
template <int N>
inline void wgmma_or_begin(float (&d)[N / 2], uint64_t a, uint64_t b, int adds) {
  const int lane = emulated::lane(), warp = threadIdx.x / 32 % 4;
  float rows[2][16], values[16];
  for (int half = 0; half < 2; half++) values_of_row(a, warp * 16 + lane / 4 + half * 8, rows[half]);
  for (int column = 0; column < N / 4; column++) {
    values_of_row(b, column / 2 * 8 + 2 * (lane % 4) + column % 2, values);
    for (int half = 0; half < 2; half++) {
      float& sum = d[column / 2 * 4 + half * 2 + column % 2];
      if (!adds) sum = 0;
      for (int k = 0; k < 16; k++) sum += rows[half][k] * values[k];
    }
  }
}
template <int N>
inline void wgmma(float (&d)[N / 2], uint64_t a, uint64_t b) {
  wgmma_or_begin<N>(d, a, b, 1);
}

// d[64 x N] = a[64 x 16] b[N x 16]^T of a warp's 16 rows, as `csrc/lowbit/wgmma_registers.cuh` describes the operands.
template <int N>
inline void wgmma_of_registers(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int adds) {
  const emulated::Words words = emulated::shown(a);
  const int lane = emulated::lane();
  float rows[2][16];
  for (int half = 0; half < 2; half++)
    for (int k = 0; k < 16; k++)
      rows[half][k] = emulated::half_of(words[lane / 4 * 4 + k % 8 / 2][half + 2 * (k / 8)], k);
  for (int token = 0; token < N / 4; token++) {
    const int of_b = token / 2 * 8 + 2 * (lane % 4) + token % 2;
    float values[16];
    for (int part = 0; part < 2; part++) {
      uint16_t eight[8];
      memcpy(eight, emulated::shared_memory() + swizzled(uint32_t(b << 4) + of_b * 128 + part * 16), 16);
      for (int k = 0; k < 8; k++) values[8 * part + k] = emulated::from_bfloat16(eight[k]);
    }
    for (int half = 0; half < 2; half++) {
      float& sum = d[token / 2 * 4 + half * 2 + token % 2];
      if (!adds) sum = 0;
      for (int k = 0; k < 16; k++) sum += rows[half][k] * values[k];
    }
  }
}

inline float of_e4m3(uint32_t code) {
  const int exponent = code >> 3 & 15, fraction = code & 7;
  if ((code & 127) == 127) return NAN;
  const float size = exponent ? ldexpf(8 + fraction, exponent - 10) : ldexpf(fraction, -9);
  return code & 128 ? -size : size;
}
// The nearest number, of two as near the one of an even code; the largest one for what is larger.
inline uint32_t to_e4m3(float value) {
  if (std::isnan(value)) return 127;
  uint32_t nearest = 0;
  double distance = INFINITY;
  for (uint32_t code = 0; code < 127; code++) {
    const double here = fabs(fabs(double(value)) - of_e4m3(code));
    if (here < distance || (here == distance && code % 2 == 0)) nearest = code, distance = here;
  }
  return nearest | (std::signbit(value) ? 128 : 0);
}
inline uint32_t e4m3_pair(float low, float high) { return to_e4m3(low) | to_e4m3(high) << 8; }
inline float2 floats_of_e4m3(uint32_t pair) { return {of_e4m3(pair & 255), of_e4m3(pair >> 8 & 255)}; }
inline void fence_for_async_reads() {}

// d[64 x N] = a[64 x 32] b[N x 32]^T of E4M3. Sums are in float32, where a GPU has about 14 bits.
template <int N>
inline void wgmma_of_codes(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int adds) {
  const emulated::Words words = emulated::shown(a);
  const int lane = emulated::lane();
  float rows[2][32];
  for (int half = 0; half < 2; half++)
    for (int k = 0; k < 32; k++)
      rows[half][k] = of_e4m3(words[lane / 4 * 4 + k % 16 / 4][half + 2 * (k / 16)] >> (8 * (k % 4)) & 255);
  for (int token = 0; token < N / 4; token++) {
    const int of_b = token / 2 * 8 + 2 * (lane % 4) + token % 2;
    uint8_t values[32];
    for (int part = 0; part < 2; part++)
      memcpy(values + 16 * part, emulated::shared_memory() + swizzled(uint32_t(b << 4) + of_b * 128 + part * 16), 16);
    for (int half = 0; half < 2; half++) {
      float& sum = d[token / 2 * 4 + half * 2 + token % 2];
      if (!adds) sum = 0;
      for (int k = 0; k < 32; k++) sum += rows[half][k] * of_e4m3(values[k]);
    }
  }
}

}  // namespace hopper
