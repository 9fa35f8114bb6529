// How the kernels over rows lay a row over threads. A function of the row's length and dtype alone, never of how many
// rows there are: a row gives the same bits in every batch.
//
// Thread t of THREADS owns the vectors t, t + THREADS, ... of VECTOR elements each. Sums over a row are taken in one
// stated order, which the CPU kernels with fp8 results follow too: lane l = t * VECTOR + e adds its elements in
// ascending order, then lanes are added pairwise, neighbours first (l with l ^ 1, then pairs with pairs), up to one.
#pragma once

#include <cstdint>

namespace opgraft {

inline constexpr int ROW_VECTOR_BYTES = 16;
inline constexpr int MAX_ROW_THREADS = 1024;

struct RowMapping {
  int threads = 32;     // a power of two
  int64_t vectors = 1;  // a thread
};

inline constexpr int64_t power_of_two_from(int64_t n) {
  int64_t power = 1;
  while (power < n) power *= 2;
  return power;
}

// A row in registers: up to 8 vectors a thread. One vector a thread while a warp covers the row, then four.
inline RowMapping row_mapping(int64_t length, int element_bytes) {
  const int64_t width = ROW_VECTOR_BYTES / element_bytes;
  const int64_t all = (length + width - 1) / width;
  RowMapping mapping;
  if (all <= 32) {
    mapping.threads = static_cast<int>(power_of_two_from(all < 8 ? 8 : all));
  } else {
    const int64_t threads = power_of_two_from((all + 3) / 4);
    mapping.threads = static_cast<int>(threads < 32 ? 32 : threads > MAX_ROW_THREADS ? MAX_ROW_THREADS : threads);
  }
  mapping.vectors = all > mapping.threads ? (all + mapping.threads - 1) / mapping.threads : 1;
  return mapping;
}

}  // namespace opgraft
