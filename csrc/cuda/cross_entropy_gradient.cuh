// Cross entropy on CUDA: a row's gradient, from the numbers that its statistics leave (cross_entropy.cuh).
#pragma once

#include "cuda/cross_entropy.cuh"

namespace opgraft::cuda {
namespace {

// The three numbers of a row's gradient, and what they are applied to.
template <typename A>
struct RowGradient {
  A maximum = 0;
  A log_sum = 0;  // as `probability` wants it
  A a = 0;        // with what that leaves over
  A b = 0;
  A e = 0;
  int64_t target = -1;
  bool zero = true;
};

template <bool GENERAL, typename T, typename A = DeviceAccumulate<T>>
__device__ __forceinline__ RowGradient<A> row_gradient(const CrossEntropyCall<T>& call, int64_t target, A maximum,
                                                       A log_sum, A grad_loss, A grad_lse) {
  RowGradient<A> row;
  row.maximum = maximum;
  row.log_sum = log_in_base(log_sum);
  row.a = grad_lse;
  row.zero = grad_lse == A(0);
  if (target == call.ignore_index) return row;
  row.zero = false;
  const A scaled = grad_loss * scale_of(call, LOSS_SCALE);
  const A weight = valid_target(call, target) ? (call.weight == nullptr ? A(1) : call.weight[target]) : A(NAN);
  row.target = target;
  row.b = scaled * weight;
  row.a += row.b;
  if constexpr (GENERAL) {
    row.b *= A(1) - call.smoothing;
    row.e = scaled * call.smoothing / static_cast<A>(call.layout.classes);
    row.a = grad_lse + row.b + scaled * call.smoothing * mean_weight(call);
  }
  row.a += grad_loss * scale_of(call, Z_SCALE) * A(2) * call.z_loss * (maximum + log_sum);
  row.a *= left_by_base(log_sum);
  return row;
}

// The gradient of one element, without the target's own term.
template <bool GENERAL, typename T, typename A = DeviceAccumulate<T>>
__device__ __forceinline__ A element_gradient(const CrossEntropyCall<T>& call, const RowGradient<A>& row, A x,
                                              int64_t column, bool is_target) {
  A slope = A(1);
  if constexpr (GENERAL) {
    if (call.softcap != A(0)) {
      const A t = tanh_of(x * (A(1) / call.softcap));
      x = call.softcap * t;
      slope = A(1) - t * t;
    }
  }
  A found = probability(x - row.maximum, row.log_sum) * row.a;
  if (is_target) found -= row.b;
  if constexpr (GENERAL) {
    if (call.smoothing != A(0)) found -= row.e * (call.weight == nullptr ? A(1) : call.weight[column]);
    found *= slope;
  }
  return found;
}

template <typename T, int WIDTH, typename A>
__device__ __forceinline__ Vector<T, WIDTH> narrow_all(const A (&values)[WIDTH]) {
  Vector<T, WIDTH> pack;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
#pragma unroll
    for (int i = 0; i < WIDTH; i += 2) {
      reinterpret_cast<__nv_bfloat162*>(&pack)[i / 2] = __floats2bfloat162_rn(values[i], values[i + 1]);
    }
  } else if constexpr (std::is_same_v<T, __half>) {
#pragma unroll
    for (int i = 0; i < WIDTH; i += 2) {
      reinterpret_cast<__half2*>(&pack)[i / 2] = __floats2half2_rn(values[i], values[i + 1]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) pack.lane[i] = values[i];
  }
  return pack;
}

template <typename T, int WIDTH, typename A>
__device__ __forceinline__ Vector<T, WIDTH> all_of(A value) {
  Vector<T, WIDTH> pack;
#pragma unroll
  for (int i = 0; i < WIDTH; ++i) pack.lane[i] = narrow<T>(value);
  return pack;
}

// The gradient of a vector whose first column is `column`, without the target's own term.
template <bool GENERAL, int WIDTH, typename T, typename A = DeviceAccumulate<T>>
__device__ __forceinline__ Vector<T, WIDTH> vector_gradient(const CrossEntropyCall<T>& call,
                                                            const RowGradient<A>& gradient,
                                                            const Vector<T, WIDTH>& pack, int64_t column) {
  A x[WIDTH], slope[WIDTH];
  widen_all(pack, x);
  const bool capped = GENERAL && call.softcap != A(0);
  if (capped) {
    const A scale = A(1) / call.softcap;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
      const A t = tanh_of(x[i] * scale);
      x[i] = call.softcap * t;
      slope[i] = A(1) - t * t;
    }
  }
#pragma unroll
  for (int i = 0; i < WIDTH; ++i) x[i] = probability(x[i] - gradient.maximum, gradient.log_sum) * gradient.a;
  if constexpr (GENERAL) {
    if (call.smoothing != A(0)) {
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) x[i] -= gradient.e * (call.weight == nullptr ? A(1) : call.weight[column + i]);
    }
  }
  if (capped) {
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) x[i] *= slope[i];
  }
  return narrow_all<T, WIDTH>(x);
}

// The gradient of the elements of a chunk, in aligned vectors of the output with single elements before and after.
// `thread` of THREADS does its share; `chunk` may lie in shared or in global memory, and need not be aligned as `out`
// is.
template <bool GENERAL, int THREADS, typename T>
__device__ __forceinline__ void write_gradient(const CrossEntropyCall<T>& call,
                                               const RowGradient<DeviceAccumulate<T>>& gradient, T* out, const T* chunk,
                                               int64_t first_column, int elements, int thread) {
  using A = DeviceAccumulate<T>;
  constexpr int WIDTH = VECTOR_WIDTH<T>;
  T* const begin = out + first_column;
  const int phase = static_cast<int>(reinterpret_cast<uintptr_t>(begin) % VECTOR_BYTES / sizeof(T));
  const int head = min(phase == 0 ? 0 : WIDTH - phase, elements);
  const int vectors = (elements - head) / WIDTH;
  const int tail = elements - head - vectors * WIDTH;
  const bool in_step = reinterpret_cast<uintptr_t>(chunk + head) % VECTOR_BYTES == 0;
  const int64_t target = gradient.target - first_column;

  const auto single = [&](int at) {
    const A found = element_gradient<GENERAL>(call, gradient, widen(chunk[at]), first_column + at, target == at);
    begin[at] = narrow<T>(gradient.zero ? A(0) : found);
  };
  for (int v = thread; v < vectors; v += THREADS) {
    const int at = head + v * WIDTH;
    Vector<T, WIDTH> pack;
    if (gradient.zero) {
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) pack.lane[i] = narrow<T>(A(0));
      *reinterpret_cast<Vector<T, WIDTH>*>(begin + at) = pack;
      continue;
    }
    if (in_step) {
      pack = *reinterpret_cast<const Vector<T, WIDTH>*>(chunk + at);
    } else {
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) pack.lane[i] = chunk[at + i];
    }
    pack = vector_gradient<GENERAL>(call, gradient, pack, first_column + at);
    __stcs(reinterpret_cast<uint4*>(begin + at), *reinterpret_cast<const uint4*>(&pack));
    if (target >= at && target < at + WIDTH) single(static_cast<int>(target));
  }
  if (thread < head) single(thread);
  if (thread < tail) single(head + vectors * WIDTH + thread);
}

}  // namespace
}  // namespace opgraft::cuda
