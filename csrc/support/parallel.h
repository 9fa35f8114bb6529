// CPU kernels: torch's own thread pool, and clones for the vector units of the machine that runs them.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>

// A wheel must run on any x86-64 and use AVX2 or AVX-512 where there is one. Arm's baseline has its vector unit.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define OPGRAFT_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define OPGRAFT_CLONES
#endif

// A function with OPGRAFT_CLONES is compiled once a vector unit; what it calls must be inlined into each copy.
#define OPGRAFT_INLINE inline __attribute__((always_inline))

namespace opgraft {

// Elements a thread should get at least: below it, waking a thread costs more than the work (about 5 us).
inline constexpr int64_t GRAIN_ELEMENTS = 16384;

using torch::stable::parallel_for;

}  // namespace opgraft
