// What the forward and backward kernels of selective_scan share: arguments, step sizes, exponentials, rows, sums.
#pragma once

#include "support/cuda.h"
#include "support/pack.h"
#include "support/selective_shape.h"
#include "support/tensor.h"
#include "support/twofold.h"

namespace opgraft::cuda {

// How B and C are read: in vectors along time or along states where strides and addresses allow it, else one by one.
enum class MatrixAccess { SINGLE, ALONG_STEPS, ALONG_STATES };

template <typename T>
struct ScanData {
  using W = DeviceAccumulate<T>;
  int64_t batch, channels, length, groups;
  int states;
  const T *u, *delta, *b, *c, *z;
  const W *a, *skip, *bias, *initial;
  MatrixStrides b_strides, c_strides;
  MatrixAccess access;
  bool use_softplus;

  __host__ __device__ __forceinline__ int64_t per_group() const { return channels / groups; }
};

// A row of channels that share B and C, in one segment of time: what one block works on.
struct BlockPlace {
  int64_t batch;
  int64_t group;
  int64_t channel;  // the first
  int count;        // channels that are there
  int64_t segment;
};

template <typename T>
__device__ __forceinline__ BlockPlace block_place(const ScanData<T>& d, int64_t per_block, int64_t index) {
  const int64_t blocks = (d.per_group() + per_block - 1) / per_block;
  BlockPlace place;
  const int64_t block = index % blocks;
  index /= blocks;
  place.group = index % d.groups;
  index /= d.groups;
  place.batch = index % d.batch;
  place.segment = index / d.batch;
  place.channel = place.group * d.per_group() + block * per_block;
  place.count = static_cast<int>(min(per_block, d.per_group() - block * per_block));
  return place;
}

template <typename T>
__device__ __forceinline__ BlockPlace block_place(const ScanData<T>& d, int64_t per_block) {
  return block_place(d, per_block, blockIdx.x);
}

// threadIdx.x, read once: the compiler would read it again and again, and wait for it, to save a register.
__device__ __forceinline__ int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ double exp2_fast(double x) { return exp2(x); }

__device__ __forceinline__ float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

inline constexpr double LOG2_E = 1.4426950408889634;
inline constexpr double SOFTPLUS_THRESHOLD = 20;  // torch's: above it softplus is the identity

// log(1 + e) + more for e from 0 to 1, within 2e-7 of the logarithm (on average 6e-8): no logarithm, no threshold.
__device__ __forceinline__ float log1p_polynomial(float e, float more) {
  float value = fmaf(0.0052327108f, e, -0.029505314f);
  value = fmaf(value, e, 0.07822609f);
  value = fmaf(value, e, -0.13663259f);
  value = fmaf(value, e, 0.19106014f);
  value = fmaf(value, e, -0.24842984f);
  value = fmaf(value, e, 0.33319097f);
  value = fmaf(value, e, -0.49999493f);
  value = fmaf(value, e, 0.99999997f);
  return fmaf(e, value, more);
}

// FAST: for 16-bit results.
template <bool FAST, typename A>
__device__ __forceinline__ A softplus(A x) {
  if constexpr (std::is_same_v<A, double>) {
    return x > SOFTPLUS_THRESHOLD ? x : log1p(exp(x));
  } else if constexpr (FAST) {
    return log1p_polynomial(exp2_fast(fabsf(x) * static_cast<float>(-LOG2_E)), fmaxf(x, 0.0f));
  } else {
    return x > 20.0f ? x : log1pf(expf(x));
  }
}

template <bool FAST, typename A>
__device__ __forceinline__ A sigmoid(A x) {
  if constexpr (std::is_same_v<A, double>) {
    return 1.0 / (1.0 + exp(-x));
  } else if constexpr (FAST) {
    return reciprocal_fast(1.0f + exp2_fast(x * static_cast<float>(-LOG2_E)));
  } else {
    return 1.0f / (1.0f + expf(-x));
  }
}

template <bool FAST, typename A>
__device__ __forceinline__ A softplus_slope(A x) {
  return !FAST && x > A(SOFTPLUS_THRESHOLD) ? A(1) : sigmoid<FAST>(x);
}

template <bool FAST, typename A>
__device__ __forceinline__ A silu(A x) {
  if constexpr (std::is_same_v<A, double>) {
    return x / (1.0 + exp(-x));
  } else if constexpr (FAST) {
    return x * sigmoid<true>(x);
  } else {
    return x / (1.0f + expf(-x));
  }
}

// Consecutive steps of a row: a vector.
using RowWords = Words<VECTOR_BYTES>;

// `left` of the steps are there; the others are zero. WIDE: rows are aligned and whole vectors long, so all of them are
// there or none.
template <bool WIDE, typename T>
__device__ __forceinline__ void load_row(const T* row, int left, RowWords& out) {
  if constexpr (WIDE) {
    out = {};
    if (left > 0) out = load_words<VECTOR_BYTES>(row);
  } else {
    DeviceAccumulate<T> wide[VECTOR_WIDTH<T>];
#pragma unroll
    for (int i = 0; i < VECTOR_WIDTH<T>; ++i) wide[i] = i < left ? widen(row[i]) : DeviceAccumulate<T>(0);
    out = pack<T, VECTOR_BYTES>(wide);
  }
}

// Written as an assignment, the compiler makes four stores of it in some kernels.
__device__ __forceinline__ void store_vector(void* row, const RowWords& words) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(row), "r"(words.word[0]), "r"(words.word[1]),
               "r"(words.word[2]), "r"(words.word[3])
               : "memory");
}

// Without a branch.
__device__ __forceinline__ void store_vector_if(bool there, void* row, const RowWords& words) {
  asm volatile(
      "{\n .reg .pred there;\n setp.ne.b32 there, %5, 0;\n"
      " @there st.global.v4.b32 [%0], {%1, %2, %3, %4};\n}" ::"l"(row),
      "r"(words.word[0]), "r"(words.word[1]), "r"(words.word[2]), "r"(words.word[3]), "r"(static_cast<int>(there))
      : "memory");
}

__device__ __forceinline__ void store_pair_if(bool there, float* to, float a, float b) {
  asm volatile(
      "{\n .reg .pred there;\n setp.ne.b32 there, %3, 0;\n @there st.global.v2.f32 [%0], {%1, %2};\n}" ::"l"(to),
      "f"(a), "f"(b), "r"(static_cast<int>(there))
      : "memory");
}

template <bool WIDE, typename T>
__device__ __forceinline__ void store_row(T* row, int left, const DeviceAccumulate<T> (&values)[VECTOR_WIDTH<T>]) {
  if constexpr (WIDE) {
    if (left > 0) store_vector(row, pack<T, VECTOR_BYTES>(values));
  } else {
#pragma unroll
    for (int i = 0; i < VECTOR_WIDTH<T>; ++i) {
      if (i < left) row[i] = narrow<T>(values[i]);
    }
  }
}

// Adds up COUNT values over the lanes at distances END / 2 down to FIRST. Every exchange halves what is left, so a lane
// ends with the sums from index `base`, COUNT * FIRST / END of them; where only one is left it goes on as a butterfly.
template <int COUNT, int FIRST, int END, int ALL, typename A>
__device__ __forceinline__ void scatter_sums(A (&values)[ALL], int lane, int& base) {
  if constexpr (FIRST < END) {
    constexpr int BY = END / 2;
    if constexpr (COUNT == 1) {
      values[0] += __shfl_xor_sync(WHOLE_WARP, values[0], BY);
      scatter_sums<1, FIRST, BY>(values, lane, base);
    } else {
      constexpr int HALF = COUNT / 2;
      const bool upper = lane & BY;
#pragma unroll
      for (int i = 0; i < HALF; ++i) {
        const A mine = upper ? values[HALF + i] : values[i];
        const A theirs = upper ? values[i] : values[HALF + i];
        values[i] = mine + __shfl_xor_sync(WHOLE_WARP, theirs, BY);
      }
      if (upper) base += HALF;
      scatter_sums<HALF, FIRST, BY>(values, lane, base);
    }
  }
}

template <int COUNT, typename A>
__device__ __forceinline__ void load_values(const A* from, A (&out)[COUNT]) {
  constexpr int WIDE = COUNT * sizeof(A) < 16 ? COUNT : 16 / sizeof(A);
#pragma unroll
  for (int v = 0; v < COUNT / WIDE; ++v) {
    const auto pack = reinterpret_cast<const Vector<A, WIDE>*>(from)[v];
#pragma unroll
    for (int i = 0; i < WIDE; ++i) out[v * WIDE + i] = pack.lane[i];
  }
}

// Brings what the next tile reads of a row into the L2 cache.
template <typename T>
__device__ __forceinline__ void prefetch_row(const T* row) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(row));
}

template <int COUNT, typename A>
__device__ __forceinline__ void store_values(A* to, const A (&in)[COUNT]) {
  constexpr int WIDE = COUNT * sizeof(A) < 16 ? COUNT : 16 / sizeof(A);
#pragma unroll
  for (int v = 0; v < COUNT / WIDE; ++v) {
    Vector<A, WIDE> pack;
#pragma unroll
    for (int i = 0; i < WIDE; ++i) pack.lane[i] = in[v * WIDE + i];
    reinterpret_cast<Vector<A, WIDE>*>(to)[v] = pack;
  }
}

}  // namespace opgraft::cuda
