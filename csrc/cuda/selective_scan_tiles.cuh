// Tiles of B and C of selective_scan on their way into shared memory.
#pragma once

#include "cuda/selective_scan.cuh"

namespace opgraft::cuda {

// B and C (or one of them) of STEPS steps on their way into shared memory, [step][PITCH], B's states from 0 and C's
// from ORDERS * PADDED; states and steps that are not there become zero. Vectors wait in registers during the tile
// before. There are ORDERS copies of a step's states, PADDED apart: the k-th has state n at n ^ k.
template <typename T, int STEPS, int PADDED, int PITCH, int ORDERS, int THREADS, bool WITH_B, bool WITH_C>
class MatrixTiles {
  using A = DeviceAccumulate<T>;
  static constexpr int ITEMS = VECTOR_WIDTH<T>;
  static constexpr int KINDS = WITH_B + WITH_C;
  static constexpr int ELEMENTS = STEPS * PADDED;
  static constexpr int VECTORS = ELEMENTS / ITEMS;
  static constexpr int COUNT = (KINDS * VECTORS + THREADS - 1) / THREADS;
  static constexpr int FIRST = WITH_B ? 0 : 1;
  static_assert(PADDED % ITEMS == 0 && STEPS % ITEMS == 0 && (ORDERS == 1 || ORDERS <= ITEMS));

 public:
  __device__ __forceinline__ MatrixTiles(const ScanData<T>& d, const BlockPlace& place, int thread)
      : d_(d),
        thread_(thread),
        b_(d.b + place.batch * d.b_strides.batch + place.group * d.b_strides.group),
        c_(d.c + place.batch * d.c_strides.batch + place.group * d.c_strides.group) {}

  __device__ __forceinline__ void fetch(int64_t tile, int steps) {
    if (d_.access == MatrixAccess::SINGLE) return;
    const bool along_steps = d_.access == MatrixAccess::ALONG_STEPS;
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
      const int v = thread_ + k * THREADS;
      const int kind = FIRST + v / VECTORS;
      const int t = step_of(v % VECTORS, along_steps), n = state_of(v % VECTORS, along_steps);
      const MatrixStrides& strides = kind ? d_.c_strides : d_.b_strides;
      const T* from = (kind ? c_ : b_) + n * strides.state + (tile + t) * strides.step;
      load_row<true>(from, v < KINDS * VECTORS && n < d_.states && t < steps, held_[k]);
    }
  }

  __device__ __forceinline__ void store(A* out, int64_t tile, int steps) {
    if (d_.access == MatrixAccess::SINGLE) {
      store_single(out, tile, steps);
    } else if (d_.access == MatrixAccess::ALONG_STEPS) {
      each_held([&](int kind, int v, const RowWords& held) {
        A* to = out + step_of(v, true) * PITCH + kind * ORDERS * PADDED;
        A wide[ITEMS];
        unpack<T>(held, wide);
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
#pragma unroll
          for (int k = 0; k < ORDERS; ++k) to[i * PITCH + k * PADDED + (state_of(v, true) ^ k)] = wide[i];
        }
      });
    } else {
      each_held([&](int kind, int v, const RowWords& held) {
        A* to = out + step_of(v, false) * PITCH + kind * ORDERS * PADDED + state_of(v, false);
        A wide[ITEMS];
        unpack<T>(held, wide);
#pragma unroll
        for (int k = 0; k < ORDERS; ++k) {
          A turned[ITEMS];
#pragma unroll
          for (int i = 0; i < ITEMS; ++i) turned[i] = wide[i ^ (k % ITEMS)];
          store_values(to + k * PADDED, turned);
        }
      });
    }
  }

 private:
  // Of a vector: neighbouring threads take neighbouring states of the same steps, or neighbours in memory.
  static __device__ __forceinline__ int step_of(int v, bool along_steps) {
    return along_steps ? v / PADDED * ITEMS : v / (PADDED / ITEMS);
  }
  static __device__ __forceinline__ int state_of(int v, bool along_steps) {
    return along_steps ? v % PADDED : v % (PADDED / ITEMS) * ITEMS;
  }

  template <typename Body>
  __device__ __forceinline__ void each_held(const Body& body) const {
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
      const int v = thread_ + k * THREADS;
      if (v < KINDS * VECTORS) body(FIRST + v / VECTORS, v % VECTORS, held_[k]);
    }
  }

  __device__ __forceinline__ void store_single(A* out, int64_t tile, int steps) const {
#pragma unroll 4
    for (int i = thread_; i < KINDS * ELEMENTS; i += THREADS) {
      const int kind = FIRST + i / ELEMENTS;
      const MatrixStrides& strides = kind ? d_.c_strides : d_.b_strides;
      const int rest = i % ELEMENTS;
      const bool by_state = strides.state <= strides.step;
      const int t = by_state ? rest / PADDED : rest % STEPS, n = by_state ? rest % PADDED : rest / STEPS;
      const T* from = (kind ? c_ : b_) + n * strides.state + (tile + t) * strides.step;
      const A value = n < d_.states && t < steps ? A(widen(*from)) : A(0);
#pragma unroll
      for (int k = 0; k < ORDERS; ++k) out[t * PITCH + (kind * ORDERS + k) * PADDED + (n ^ k)] = value;
    }
  }

  const ScanData<T>& d_;
  int thread_;
  const T* b_;
  const T* c_;
  RowWords held_[COUNT];
};

}  // namespace opgraft::cuda
