// Packs of elements in registers: several widened or narrowed by one instruction, and copies that go to shared memory
// past the registers.
#pragma once

#include <cstdint>

#include "support/cuda.h"

namespace opgraft::cuda {

// 4, 8 or 16 bytes as the words of registers. A struct of 16-bit lanes is taken apart by the compiler: loads under a
// condition and stores then become one instruction an element.
template <int BYTES>
struct alignas(BYTES) Words {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16);
  uint32_t word[BYTES / 4];
};

template <int BYTES>
__device__ __forceinline__ Words<BYTES> load_words(const void* from) {
  if constexpr (BYTES == 16) {
    const uint4 read = *static_cast<const uint4*>(from);
    return {{read.x, read.y, read.z, read.w}};
  } else if constexpr (BYTES == 8) {
    const uint2 read = *static_cast<const uint2*>(from);
    return {{read.x, read.y}};
  } else {
    return {{*static_cast<const uint32_t*>(from)}};
  }
}

template <int BYTES>
__device__ __forceinline__ void store_words(void* to, const Words<BYTES>& words) {
  if constexpr (BYTES == 16) {
    *static_cast<uint4*>(to) = make_uint4(words.word[0], words.word[1], words.word[2], words.word[3]);
  } else if constexpr (BYTES == 8) {
    *static_cast<uint2*>(to) = make_uint2(words.word[0], words.word[1]);
  } else {
    *static_cast<uint32_t*>(to) = words.word[0];
  }
}

// out[i] = element i of the words in its accumulation type.
template <typename T, int BYTES>
__device__ __forceinline__ void unpack(const Words<BYTES>& words, DeviceAccumulate<T>* out) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
#pragma unroll
    for (int i = 0; i < BYTES / 4; ++i) {
      out[2 * i] = __uint_as_float(words.word[i] << 16);
      out[2 * i + 1] = __uint_as_float(words.word[i] & 0xffff0000u);
    }
  } else if constexpr (std::is_same_v<T, __half>) {
#pragma unroll
    for (int i = 0; i < BYTES / 4; ++i) {
      const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words.word[i]));
      out[2 * i] = pair.x;
      out[2 * i + 1] = pair.y;
    }
  } else if constexpr (std::is_same_v<T, float>) {
#pragma unroll
    for (int i = 0; i < BYTES / 4; ++i) out[i] = __uint_as_float(words.word[i]);
  } else {
#pragma unroll
    for (int i = 0; i < BYTES / 8; ++i) {
      out[i] = __hiloint2double(static_cast<int>(words.word[2 * i + 1]), static_cast<int>(words.word[2 * i]));
    }
  }
}

template <typename T, int BYTES>
__device__ __forceinline__ Words<BYTES> pack(const DeviceAccumulate<T>* values) {
  Words<BYTES> words;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
#pragma unroll
    for (int i = 0; i < BYTES / 4; ++i) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
      words.word[i] = *reinterpret_cast<const uint32_t*>(&pair);
    }
  } else if constexpr (std::is_same_v<T, __half>) {
#pragma unroll
    for (int i = 0; i < BYTES / 4; ++i) {
      const __half2 pair = __floats2half2_rn(values[2 * i], values[2 * i + 1]);
      words.word[i] = *reinterpret_cast<const uint32_t*>(&pair);
    }
  } else if constexpr (std::is_same_v<T, float>) {
#pragma unroll
    for (int i = 0; i < BYTES / 4; ++i) words.word[i] = __float_as_uint(values[i]);
  } else {
#pragma unroll
    for (int i = 0; i < BYTES / 8; ++i) {
      words.word[2 * i] = static_cast<uint32_t>(__double2loint(values[i]));
      words.word[2 * i + 1] = static_cast<uint32_t>(__double2hiint(values[i]));
    }
  }
  return words;
}

// Starts a copy of 4, 8 or 16 bytes to shared memory; zeros where `there` is false, and `from` is not read then. What
// is in flight so costs no register.
template <int BYTES>
__device__ __forceinline__ void copy_async(void* to, const void* from, bool there) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16);
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  const int bytes = there ? BYTES : 0;
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(bytes) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(address), "l"(from), "n"(BYTES), "r"(bytes)
                 : "memory");
  }
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all but the last PENDING groups of this thread's copies are there.
template <int PENDING>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Division of numbers below 2^31 by one divisor, as a product (Granlund and Montgomery 1994).
struct Divider {
  uint32_t divisor = 1;
  uint32_t factor = 1;
  uint32_t shift = 0;

  Divider() = default;
  explicit Divider(uint32_t by) : divisor(by) {
    while (shift < 32 && (uint64_t{1} << shift) < by) ++shift;
    factor = static_cast<uint32_t>(((uint64_t{1} << 32) * ((uint64_t{1} << shift) - by)) / by + 1);
  }

  __device__ __forceinline__ uint32_t quotient(uint32_t of) const { return (__umulhi(of, factor) + of) >> shift; }
};

}  // namespace opgraft::cuda
