// What attention uses of `csrc/common/hopper.cuh`, for a host compiler.
#pragma once
#include "cuda.hpp"

namespace hopper {

inline uint32_t shared_address(const void* pointer) { return uint32_t(static_cast<const uint8_t*>(pointer) - raw); }

// An mbarrier in its 8 bytes.
struct Phase {
  int16_t pending, arrivals;
  uint32_t parity : 1;
  int32_t bytes : 31;

  void end_if_complete() {
    if (pending == 0 && bytes == 0) pending = arrivals, parity ^= 1;
  }
};
static_assert(sizeof(Phase) == 8);

inline Phase& phase_of(uint64_t* barrier) { return *reinterpret_cast<Phase*>(barrier); }
inline void barrier_init(uint64_t* barrier, uint32_t arrivals) {
  phase_of(barrier) = {int16_t(arrivals), int16_t(arrivals), 0, 0};
}
inline void barrier_init_fence() {}
inline void barrier_expect(uint64_t* barrier, uint32_t bytes) {
  Phase& phase = phase_of(barrier);
  phase.pending--;
  phase.bytes += int(bytes);
  phase.end_if_complete();
}
inline void barrier_arrive(uint64_t* barrier) { barrier_expect(barrier, 0); }
inline void barrier_wait(uint64_t* barrier, uint32_t parity) {
  while (phase_of(barrier).parity == parity) emulated::let_others_run();
}
inline void complete(uint64_t* barrier, int bytes) {
  Phase& phase = phase_of(barrier);
  phase.bytes -= bytes;
  phase.end_if_complete();
}

// Where a byte lies in tiles that are swizzled by 128 bytes.
inline uint32_t swizzled(uint32_t address) { return address ^ ((address >> 7 & 7) << 4); }

inline void prefetch_map(const CUtensorMap*) {}
inline uint64_t evict_last_policy() { return 0; }

// A box of 16 rows of 64 values. Rows outside of the matrix end the process: a copy engine would fill them with zeros.
inline void load_box(void* target, const CUtensorMap* map, uint64_t* barrier, int x, int y, uint64_t) {
  const auto* values = reinterpret_cast<const uint16_t*>(map->opaque[0]);
  const int64_t columns = map->opaque[1], rows = map->opaque[2];
  if (y < 0 || y + 16 > rows) {
    fprintf(stderr, "a copy begins at row %d of %ld\n", y, long(rows));
    abort();
  }
  for (int row = 0; row < 16; row++)
    for (int chunk = 0; chunk < 8; chunk++)
      memcpy(raw + swizzled(shared_address(target) + row * 128 + chunk * 16),
             values + (y + row) * columns + x + chunk * 8, 16);
  complete(barrier, 16 * 128);
}

// Of clusters of one block: a kernel that asks another block is not emulated.
inline uint32_t address_in(const void*, uint32_t) { abort(); }
inline void store_in(uint32_t, float) { abort(); }
inline void cluster_sync() { abort(); }

inline void launch_dependents() {}
inline void wait_for_previous_kernel() {}
template <int kCount>
inline void take_registers() {}
template <int kCount>
inline void leave_registers() {}

inline uint64_t tile_descriptor(const void* tile) { return shared_address(tile) >> 4; }
inline void wgmma_fence() {}
inline void wgmma_commit() {}
// A warp's products are made by its lanes one after the other: none may go on and free what another still reads.
template <int kPending>
inline void wgmma_wait() {
  __syncwarp();
}

}  // namespace hopper
