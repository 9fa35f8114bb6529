// What the kernels over rows share: vectors of a row, weights of another dtype, and reductions in a fixed order.
#pragma once

#include <cstring>

#include "support/cuda.h"
#include "support/overlap.h"
#include "support/row_mapping.h"

namespace opgraft::cuda {

inline constexpr unsigned FULL_WARP = 0xffffffffu;

// WIDTH elements as 32-bit words. An array of 16-bit lanes would cost a register a lane.
template <typename T, int WIDTH>
struct Words {
  static constexpr int COUNT = WIDTH * static_cast<int>(sizeof(T)) / 4;
  uint32_t word[COUNT];
};

// Whole vectors of 16 bytes, to which the pointer must be aligned.
template <typename T, int WIDTH>
__device__ __forceinline__ Words<T, WIDTH> load_words(const T* pointer) {
  Words<T, WIDTH> words;
#pragma unroll
  for (int v = 0; v < Words<T, WIDTH>::COUNT / 4; ++v) {
    const uint4 part = reinterpret_cast<const uint4*>(pointer)[v];
    words.word[4 * v] = part.x;
    words.word[4 * v + 1] = part.y;
    words.word[4 * v + 2] = part.z;
    words.word[4 * v + 3] = part.w;
  }
  return words;
}

// What L2 does with lines that a load brings, in the words that createpolicy would make (those of CUTLASS' cache
// hints).
enum class Keep : uint64_t {
  NORMAL = 0x1000000000000000,
  LAST = 0x14F0000000000000,  // they go after all others
};

// Tensors that L2 cannot hold are read with the mark to be kept, though nobody reads them again: what is written
// meanwhile is then written back sooner, and the memory serves the mix of both faster (1 to 4 % on an H200). Smaller
// ones would drive out results that the next kernel finds in L2.
inline Keep keep_of(int64_t bytes) {
  int device = 0, held = 0;
  STD_CUDA_CHECK(cudaGetDevice(&device));
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&held, cudaDevAttrL2CacheSize, device));
  return bytes > held ? Keep::LAST : Keep::NORMAL;
}

// Known when compiled: a load with a mark, even one without consequence, takes few rows 1 to 3 % longer.
template <Keep KEEP, typename T, int WIDTH>
__device__ __forceinline__ Words<T, WIDTH> load_marked(const T* pointer) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if constexpr (KEEP != Keep::NORMAL) {
    Words<T, WIDTH> words;
#pragma unroll
    for (int w = 0; w < Words<T, WIDTH>::COUNT; w += 4) {
      asm volatile("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                   : "=r"(words.word[w]), "=r"(words.word[w + 1]), "=r"(words.word[w + 2]), "=r"(words.word[w + 3])
                   : "l"(reinterpret_cast<const uint32_t*>(pointer) + w), "l"(KEEP));
    }
    return words;
  }
#endif
  return load_words<T, WIDTH>(pointer);
}

template <typename T, int WIDTH>
__device__ __forceinline__ void store_words(T* pointer, const Words<T, WIDTH>& words) {
  static_assert(Words<T, WIDTH>::COUNT == 4);
  *reinterpret_cast<uint4*>(pointer) = {words.word[0], words.word[1], words.word[2], words.word[3]};
}

// Lanes two by two, as they lie in a word.
template <typename T>
__device__ __forceinline__ float2 widen_word(uint32_t word) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
  } else {
    __half2 pair;
    memcpy(&pair, &word, sizeof(pair));
    return __half22float2(pair);
  }
}

template <typename T>
__device__ __forceinline__ uint32_t narrow_word(float low, float high) {
  uint32_t word;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    memcpy(&word, &pair, sizeof(word));
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    memcpy(&word, &pair, sizeof(word));
  }
  return word;
}

template <typename T, int WIDTH>
__device__ __forceinline__ void unpack(const Words<T, WIDTH>& words, float (&lanes)[WIDTH]) {
#pragma unroll
  for (int w = 0; w < Words<T, WIDTH>::COUNT; ++w) {
    if constexpr (sizeof(T) == 2) {
      const float2 pair = widen_word<T>(words.word[w]);
      lanes[2 * w] = pair.x;
      lanes[2 * w + 1] = pair.y;
    } else {
      lanes[w] = __uint_as_float(words.word[w]);
    }
  }
}

template <typename T, int WIDTH>
__device__ __forceinline__ Words<T, WIDTH> pack(const float (&lanes)[WIDTH]) {
  Words<T, WIDTH> words;
#pragma unroll
  for (int w = 0; w < Words<T, WIDTH>::COUNT; ++w) {
    if constexpr (sizeof(T) == 2) {
      words.word[w] = narrow_word<T>(lanes[2 * w], lanes[2 * w + 1]);
    } else {
      words.word[w] = __float_as_uint(lanes[w]);
    }
  }
  return words;
}

template <typename T, int WIDTH>
__device__ __forceinline__ Words<T, WIDTH> constant_words(float value) {
  float lanes[WIDTH];
#pragma unroll
  for (int i = 0; i < WIDTH; ++i) lanes[i] = value;
  return pack<T>(lanes);
}

// The compiler forgets what it knows of the words: it unpacks them again after a reduction, where it would hold two
// registers a word across it.
template <typename T, int WIDTH>
__device__ __forceinline__ void forget(Words<T, WIDTH>& words) {
#pragma unroll
  for (int w = 0; w < Words<T, WIDTH>::COUNT; ++w) asm volatile("" : "+r"(words.word[w]));
}

// The lanes of one thread, neighbours first.
template <typename A, int WIDTH>
__device__ __forceinline__ A sum_lanes(const A (&lanes)[WIDTH]) {
  A part[WIDTH];
#pragma unroll
  for (int i = 0; i < WIDTH; ++i) part[i] = lanes[i];
#pragma unroll
  for (int step = 1; step < WIDTH; step *= 2) {
#pragma unroll
    for (int i = 0; i < WIDTH; i += 2 * step) part[i] += part[i + step];
  }
  return part[0];
}

struct Add {
  template <typename A>
  __device__ __forceinline__ A operator()(A one, A other) const {
    return one + other;
  }
};

// NaN wins.
struct Largest {
  __device__ __forceinline__ float operator()(float one, float other) const {
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(one), "f"(other));
    return result;
  }
};

// Over `threads` neighbouring lanes of a warp, a power of two up to 32. Every lane gets the result.
template <typename Combine, typename A, int COUNT>
__device__ __forceinline__ void reduce_lanes(A (&values)[COUNT], int threads, Combine combine) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    if (step < threads) {
#pragma unroll
      for (int i = 0; i < COUNT; ++i) values[i] = combine(values[i], __shfl_xor_sync(FULL_WARP, values[i], step));
    }
  }
}

// A barrier over the threads of one row: several rows in a block wait for themselves alone.
__device__ __forceinline__ void row_barrier(int group, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "r"(threads) : "memory");
}

// Over the threads of a row, a power of two; `slots` is shared memory of COUNT values a warp of the row, and must not
// be written again before the next barrier of the row. Every thread gets the result. WARPS: the threads are known to be
// whole warps.
template <bool WARPS = false, typename Combine, typename A, int COUNT>
__device__ __forceinline__ void reduce_row(A (&values)[COUNT], int threads, int group, int thread, A* slots,
                                           Combine combine) {
  reduce_lanes(values, WARPS ? 32 : threads, combine);
  if (threads <= 32) return;
  const int warps = threads / 32;
  const int lane = thread % 32;
  if (lane == 0) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) slots[(thread / 32) * COUNT + i] = values[i];
  }
  row_barrier(group, threads);
#pragma unroll
  for (int i = 0; i < COUNT; ++i) values[i] = slots[(lane & (warps - 1)) * COUNT + i];
  reduce_lanes(values, warps, combine);
}

// 16 bytes from global to shared memory behind the thread's back, in groups that it waits for.
__device__ __forceinline__ void copy_async(void* to, const void* from) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_async(void* to, const void* from, Keep keep) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "l"(keep)
               : "memory");
#else
  copy_async(to, from);
#endif
}
// Of the 16 bytes the first `bytes`; the others become zeros, and are not read.
__device__ __forceinline__ void copy_async(void* to, const void* from, int bytes) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// A tensor seen as rows of contiguous elements.
template <typename T>
struct Rows {
  T* data = nullptr;
  int64_t stride = 0;  // in elements

  __device__ __forceinline__ T* row(int64_t index) const { return data + index * stride; }
  // Behind the last of `rows` rows.
  __device__ __forceinline__ T* end(int64_t rows, int64_t length) const { return row(rows - 1) + length; }
};

}  // namespace opgraft::cuda
