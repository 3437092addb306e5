// `csrc/common/ampere.cuh` for a host compiler.
#pragma once
#include "cuda.hpp"

namespace ampere {

// Nothing that is emulated has a use for it.
inline uint32_t shared_address(const void*) { abort(); }

inline void copy_16(void* to, const void* from, bool is_there = true) {
  if (is_there) memcpy(to, from, 16);
  else memset(to, 0, 16);
}
inline void commit_copies() {}
template <int kPending = 0>
inline void wait_for_copies() {}

// Value of an 8 x 8 matrix whose rows the lanes name.
struct Matrices {
  emulated::Words rows;

  explicit Matrices(const void* row) {
    uint32_t mine[2];
    memcpy(mine, &row, 8);
    rows = emulated::shown(mine);
  }
  uint32_t at(int matrix, int row, int column) const {
    const uint16_t* values;
    memcpy(&values, rows[matrix * 8 + row], 8);
    return values[column];
  }
};

inline void load_matrices(uint32_t (&to)[4], const void* row) {
  const Matrices matrices(row);
  const int r = emulated::lane() / 4, c = emulated::lane() % 4 * 2;
  for (int i = 0; i < 4; i++) to[i] = matrices.at(i, r, c) | matrices.at(i, r, c + 1) << 16;
  __syncwarp();
}

inline void load_transposed(uint32_t (&to)[4], const void* row) {
  const Matrices matrices(row);
  const int c = emulated::lane() / 4, r = emulated::lane() % 4 * 2;
  for (int i = 0; i < 4; i++) to[i] = matrices.at(i, r, c) | matrices.at(i, r + 1, c) << 16;
  __syncwarp();
}

}  // namespace ampere
