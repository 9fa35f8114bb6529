// Pages of a large result, asked of the system as a thread comes to them.
//
// Memory that torch takes fresh from the system has no pages yet: each comes with a fault of its own on its first
// touch, and for a kernel that reads as much as it writes those faults are a third of its time. One call for the pages
// of a row (Linux 5.14 on; elsewhere nothing happens) costs two thirds of them, and leaves the row's zeros in cache.
// Huge pages cost less still, but not where a virtual machine has given its free ones back to the host.
#pragma once

#include <algorithm>
#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace opgraft::cpu {

// More than glibc serves from its heap, where pages have mostly been touched: a mapping of its own.
inline constexpr int64_t OWN_MAPPING_BYTES = int64_t(32) << 20;

class FreshPages {
 public:
  // What one thread will write, in ascending order, of a result of `whole` bytes.
  FreshPages(void* begin, void* end, int64_t whole)
      : next_(reinterpret_cast<uintptr_t>(begin) / PAGE * PAGE), end_(reinterpret_cast<uintptr_t>(end)) {
    if (begin == nullptr || whole <= OWN_MAPPING_BYTES) next_ = end_;
  }

  // Everything before `end` will be written now.
  void reach(const void* end) {
    const uintptr_t wanted = reinterpret_cast<uintptr_t>(end);
    if (wanted <= next_ || next_ >= end_) return;
    const uintptr_t last = std::min(std::max(wanted, next_ + STEP), end_);
    const uintptr_t pages = (last - next_ + PAGE - 1) / PAGE;
    if (!populate(next_, pages * PAGE))
      next_ = end_;
    else
      next_ += pages * PAGE;
  }

 private:
  static constexpr uintptr_t PAGE = 4096;
  static constexpr uintptr_t STEP = uintptr_t(128) << 10;  // stays in a core's own cache until it is written

  static bool populate([[maybe_unused]] uintptr_t begin, [[maybe_unused]] uintptr_t bytes) {
#if defined(__linux__) && defined(__x86_64__)
    constexpr int POPULATE_WRITE = 23;  // MADV_POPULATE_WRITE, which older headers do not have
    return madvise(reinterpret_cast<void*>(begin), bytes, POPULATE_WRITE) == 0;
#else
    return false;
#endif
  }

  uintptr_t next_;
  uintptr_t end_;
};

}  // namespace opgraft::cpu
