// What the forward and backward kernels of selective_scan share: arguments, step sizes, exponentials, tiles.
#pragma once

#include "support/cuda.h"
#include "support/selective_shape.h"
#include "support/tensor.h"
#include "support/twofold.h"

namespace opgraft::cuda {

template <typename T>
struct ScanData {
  using W = DeviceAccumulate<T>;
  int64_t batch, channels, length, groups;
  int states;
  const T *u, *delta, *b, *c, *z;
  const W *a, *skip, *bias, *initial;
  MatrixStrides b_strides, c_strides;
  bool use_softplus;

  __device__ __forceinline__ int64_t per_group() const { return channels / groups; }
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
__device__ __forceinline__ BlockPlace block_place(const ScanData<T>& d, int64_t per_block) {
  const int64_t blocks = (d.per_group() + per_block - 1) / per_block;
  int64_t index = blockIdx.x;
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

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ double exp2_fast(double x) { return exp2(x); }

// 2^x on the FMA units: 2^n 2^f with |f| <= 1/2 and a polynomial of degree 5 for 2^f, fitted to the least largest
// relative error, 9e-8. Used for a share of the exponentials, so that neither unit is the limit alone.
__device__ __forceinline__ float exp2_polynomial(float x) {
  x = fmaxf(x, -126.0f);
  const float shifted = x + 12582912.0f;
  const float f = x - (shifted - 12582912.0f);
  float p = 1.326472690e-3f;
  p = fmaf(p, f, 9.671512661e-3f);
  p = fmaf(p, f, 5.550733744e-2f);
  p = fmaf(p, f, 2.402224208e-1f);
  p = fmaf(p, f, 6.931469776e-1f);
  p = fmaf(p, f, 1.0f);
  return __int_as_float(__float_as_int(p) + (__float_as_int(shifted) << 23));
}

inline constexpr double LOG2_E = 1.4426950408889634;
inline constexpr double SOFTPLUS_THRESHOLD = 20;  // torch's: above it softplus is the identity

// log(1 + e) by log(w) e / (w - 1) with w = 1 + e rounded, exact to a few ulp also where e is tiny (Kahan).
template <bool FAST, typename A>
__device__ __forceinline__ A softplus(A x) {
  if constexpr (std::is_same_v<A, double>) {
    return x > SOFTPLUS_THRESHOLD ? x : log1p(exp(x));
  } else if constexpr (FAST) {
    const float e = exp2_fast(x * static_cast<float>(LOG2_E));
    const float w = 1.0f + e;
    const float corrected = __logf(w) * __fdividef(e, w - 1.0f);
    const float value = w == 1.0f ? e : corrected;
    return x > 20.0f ? x : value;
  } else {
    return x > 20.0f ? x : log1pf(expf(x));
  }
}

template <bool FAST, typename A>
__device__ __forceinline__ A sigmoid(A x) {
  if constexpr (std::is_same_v<A, double>) {
    return 1.0 / (1.0 + exp(-x));
  } else if constexpr (FAST) {
    return __fdividef(1.0f, 1.0f + exp2_fast(-x * static_cast<float>(LOG2_E)));
  } else {
    return 1.0f / (1.0f + expf(-x));
  }
}

template <bool FAST, typename A>
__device__ __forceinline__ A silu(A x) {
  const A s = sigmoid<FAST>(x);
  return s == A(0) ? A(0) : x * s;
}

// ITEMS consecutive steps of a row, in whole vectors where the row allows it. Steps past `steps` are zero.
template <typename T, int ITEMS>
__device__ __forceinline__ void load_row(const T* row, int64_t steps, bool wide, Vector<T, ITEMS>& out) {
  if (wide && steps >= ITEMS) {
    out = *reinterpret_cast<const Vector<T, ITEMS>*>(row);
  } else {
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) out.lane[i] = i < steps ? row[i] : narrow<T>(DeviceAccumulate<T>(0));
  }
}

template <typename T, int ITEMS>
__device__ __forceinline__ void store_row(T* row, int64_t steps, bool wide, const Vector<T, ITEMS>& in) {
  if (wide && steps >= ITEMS) {
    *reinterpret_cast<Vector<T, ITEMS>*>(row) = in;
  } else {
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      if (i < steps) row[i] = in.lane[i];
    }
  }
}

// B or C of STEPS steps on their way into shared memory, [step][padded state]; states and steps that are not there
// become zero. Loads and stores are apart, so that a tile's loads are all in flight at once, and where they are few
// enough to wait in registers, during the tile before.
template <typename T, int STEPS, int PADDED, int THREADS>
class MatrixTile {
 public:
  __device__ __forceinline__ MatrixTile(const T* matrix, const MatrixStrides& strides, const BlockPlace& place)
      : base_(matrix + place.batch * strides.batch + place.group * strides.group),
        state_(strides.state),
        step_(strides.step) {}

  __device__ __forceinline__ void fetch(int64_t first, int64_t length, int states) {
    if constexpr (WAITS) load<COUNT>(0, first, length, states);
  }

  template <typename A>
  __device__ __forceinline__ void store(A* out, int64_t first, int64_t length, int states) {
    if constexpr (WAITS) {
      keep<COUNT>(0, out);
    } else {
      for (int k = 0; k < COUNT; k += BATCH) {
        load<BATCH>(k, first, length, states);
        keep<BATCH>(k, out);
      }
    }
  }

 private:
  static constexpr int ALL = STEPS * PADDED;
  static constexpr int COUNT = (ALL + THREADS - 1) / THREADS;
  static constexpr int BATCH = COUNT < 8 ? COUNT : 8;
  static constexpr bool WAITS = COUNT <= 4;
  static_assert(COUNT % BATCH == 0);

  // Neighbouring threads take neighbouring elements.
  __device__ __forceinline__ int step_of(int i) const { return state_ <= step_ ? i / PADDED : i % STEPS; }
  __device__ __forceinline__ int state_of(int i) const { return state_ <= step_ ? i % PADDED : i / STEPS; }

  template <int N>
  __device__ __forceinline__ void load(int from, int64_t first, int64_t length, int states) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const int i = threadIdx.x + (from + k) * THREADS;
      const int t = step_of(i), n = state_of(i);
      const bool there = i < ALL && n < states && first + t < length;
      held_[k] = there ? base_[n * state_ + (first + t) * step_] : narrow<T>(DeviceAccumulate<T>(0));
    }
  }

  template <int N, typename A>
  __device__ __forceinline__ void keep(int from, A* out) const {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const int i = threadIdx.x + (from + k) * THREADS;
      if (i < ALL) out[step_of(i) * PADDED + state_of(i)] = widen(held_[k]);
    }
  }

  const T* base_;
  int64_t state_;
  int64_t step_;
  T held_[BATCH];
};

// Asks for the line of a row that the next tile will read, where there is one.
template <typename T>
__device__ __forceinline__ void prefetch_row(const T* row, bool there) {
  if (there) asm volatile("prefetch.global.L2 [%0];" ::"l"(row));
}

}  // namespace opgraft::cuda
