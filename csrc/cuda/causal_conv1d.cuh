// What the kernels of causal_conv1d share: their arguments, the activation, and values at the rims of a row.
#pragma once

#include <initializer_list>

#include "support/check.h"
#include "support/cuda.h"

namespace opgraft::cuda {

struct ConvSizes {
  int64_t batch;
  int64_t channels;
  int64_t length;
  int width;  // where a kernel's own WIDTH is a bound only
};

template <typename T>
struct ConvInputs {
  const T* x;
  const T* weight;
  const T* bias;
  const T* initial;
  const int32_t* seq_idx;
  bool silu;
};

template <typename T>
struct ConvOutputs {
  T* out;
  T* final_state;
};

template <typename T>
struct ConvGradients {
  const T* grad;
  const T* grad_final;
  T* x;
  T* initial;
  T* weight;
  T* bias;
};

// Partial sums of the weights' and the bias's gradient: bound + 1 values a channel, of which the last width + 1 are
// there, `outer` * `inner` times: [outer][inner][bound + 1][channel] with channels last, else
// [outer][channel][inner][bound + 1].
template <typename A>
struct Partials {
  const A* sums;
  int bound;
  int64_t outer;
  int64_t inner;
  bool channel_last;
};

constexpr float LOG2_E = 1.442695041f;
constexpr float LN_2 = 0.693147181f;

__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float fast_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// FAST: two operations of the exponential unit, within 2^-21 of the value: for results that are rounded to 16 bits.
template <bool FAST, typename A>
__device__ __forceinline__ A logistic(A x) {
  if constexpr (std::is_same_v<A, double>) {
    return 1.0 / (1.0 + exp(-x));
  } else if constexpr (FAST) {
    return fast_reciprocal(1.0f + fast_exp2(-LOG2_E * x));
  } else {
    return 1.0f / (1.0f + expf(-x));
  }
}

template <bool FAST, typename A>
__device__ __forceinline__ A activate(A x) {
  return x * logistic<FAST>(x);
}

template <bool FAST, typename A>
__device__ __forceinline__ A activation_slope(A x) {
  const A s = logistic<FAST>(x);
  return s * fma(x, A(1) - s, A(1));
}

// The slope of SiLU at x over -log2(e), from x times -log2(e).
__device__ __forceinline__ float scaled_slope(float scaled) {
  const float s = fast_reciprocal(1.0f + fast_exp2(scaled));
  return s * fmaf(scaled, fmaf(s, -LN_2 * LN_2, LN_2 * LN_2), -LN_2);
}

// Does step t see the value `back` steps before it? Values before the row belong to the row's first sequence.
__device__ __forceinline__ bool sees(const int32_t* seq_idx, int64_t t, int back) {
  const int32_t own = seq_idx[t];
  return own >= 0 && seq_idx[t >= back ? t - back : 0] == own;
}

// The taps at the end of an array of WIDTH.
template <typename T, int WIDTH, typename A>
__device__ __forceinline__ void load_weights(const T* weight, int64_t channel, int width, A (&out)[WIDTH]) {
#pragma unroll
  for (int k = 0; k < WIDTH; ++k) {
    const int tap = k - (WIDTH - width);
    out[k] = tap >= 0 ? A(widen(weight[channel * width + tap])) : A(0);
  }
}

// The value at step t of a row, which may lie before it.
template <typename T, typename A = DeviceAccumulate<T>>
__device__ __forceinline__ A value_at(const T* row, const T* initial, int width, int64_t t, int64_t length) {
  if (t >= length) return A(0);
  if (t >= 0) return widen(row[t]);
  return initial && t >= -(width - 1) ? A(widen(initial[t + width - 1])) : A(0);
}

// The inputs that a continuation of the row needs, by lanes 0 to width - 2 of one warp.
template <typename T>
__device__ __forceinline__ void write_final_state(const T* row, const T* initial, const int32_t* seq_idx, int width,
                                                  int64_t length, int j, T* final_state) {
  if (j < width - 1) {
    const bool seen = !seq_idx || length == 0 || sees(seq_idx, length - 1, width - 2 - j);
    final_state[j] =
        narrow<T>(seen ? value_at(row, initial, width, length - (width - 1) + j, length) : DeviceAccumulate<T>(0));
  }
}

// What the final state's gradient adds to the value at step t (which may be before the row).
template <typename T>
__device__ __forceinline__ DeviceAccumulate<T> final_gradient(const T* grad_final, const int32_t* seq_idx, int width,
                                                              int64_t t, int64_t length) {
  const int64_t j = t - (length - (width - 1));
  if (!grad_final || j < 0 || j >= width - 1) return 0;
  if (seq_idx && length > 0 && !sees(seq_idx, length - 1, width - 2 - static_cast<int>(j))) return 0;
  return widen(grad_final[j]);
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <int N>
using Int = std::integral_constant<int, N>;

inline unsigned blocks_for(int64_t tasks, int64_t a_block) { return static_cast<unsigned>(ceil_div(tasks, a_block)); }

template <typename T>
inline constexpr ScalarType ACCUMULATE_TYPE = sizeof(T) == 8 ? ScalarType::Double : ScalarType::Float;

// The plans, a file each. `fits` says whether a plan takes a call; `like` gives the device of partial sums.

// Widths 2 to 4, length contiguous, any alignment that all tensors share.
template <typename T>
bool fits_rows(const ConvSizes& s, std::initializer_list<const T*> tensors);
template <typename T>
void forward_rows(const Launch& context, const ConvSizes& s, const ConvInputs<T>& in, const ConvOutputs<T>& to);
template <typename T>
void backward_rows(const Launch& context, const Tensor& like, const ConvSizes& s, const ConvInputs<T>& in,
                   const ConvGradients<T>& g);

// Widths 2 to 4, channels contiguous, an even number of channels where they are 16 bits.
template <typename T>
bool fits_columns(const ConvSizes& s, std::initializer_list<const T*> tensors);
template <typename T>
void forward_columns(const Launch& context, const ConvSizes& s, const ConvInputs<T>& in, const ConvOutputs<T>& to);
template <typename T>
void backward_columns(const Launch& context, const Tensor& like, const ConvSizes& s, const ConvInputs<T>& in,
                      const ConvGradients<T>& g);

// Any width, packed or not: right, element by element.
template <typename T>
void forward_general(const Launch& context, const ConvSizes& s, const ConvInputs<T>& in, const ConvOutputs<T>& to,
                     bool channel_last);
template <typename T>
void backward_general(const Launch& context, const Tensor& like, const ConvSizes& s, const ConvInputs<T>& in,
                      const ConvGradients<T>& g, bool channel_last);

template <typename T>
void add_partials(const Launch& context, const ConvSizes& s, const Partials<DeviceAccumulate<T>>& partials,
                  const ConvGradients<T>& g);

template <typename Body>
void dispatch_width(int width, const Body& body) {
  if (width == 2) return body(Int<2>{});
  if (width == 3) return body(Int<3>{});
  return body(Int<4>{});
}

}  // namespace opgraft::cuda
