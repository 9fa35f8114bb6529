// The loops of causal_conv1d on the CPU, each compiled once a vector unit: sums of taps along time (a row in a buffer)
// and across channels (channels contiguous), the activation, and what moves rows in and out of buffers.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/silu.h"
#include "support/conv_shape.h"
#include "support/convert.h"
#include "support/parallel.h"

namespace opgraft::cpu {
namespace {

constexpr int64_t CHANNELS = 16;  // rows together in the channel-last layout: a cache line of float
constexpr int64_t STEPS = 512;    // steps of a row in the buffers at a time, forward
constexpr int64_t COLUMNS = 256;  // channels of a step at a time, forward, channels last
constexpr int64_t HISTORY = MAX_CONV_WIDTH - 1;

// history and row lie in one buffer: row[-1] is the value before row[0].
template <typename A, int WIDTH>
OPGRAFT_INLINE void convolve(const A* row, const A* weight, A bias, A* out, int64_t length) {
  for (int64_t t = 0; t < length; ++t) {
    A sum = bias;
#pragma GCC unroll 8
    for (int k = 0; k < WIDTH; ++k) sum += weight[k] * row[t - (WIDTH - 1) + k];
    out[t] = sum;
  }
}

// grad[t] is of the sum before the activation and zero behind the row; before[-j] receives the gradient of history.
template <typename A, int WIDTH>
OPGRAFT_INLINE void convolve_transposed(const A* grad, const A* weight, A* out, int64_t length) {
  for (int64_t t = 0; t < length; ++t) {
    A sum = A(0);
#pragma GCC unroll 8
    for (int k = 0; k < WIDTH; ++k) sum += weight[k] * grad[t + (WIDTH - 1) - k];
    out[t] = sum;
  }
}

// The sum of x[t] y[t], or of x[t] where y is null. Independent partial sums over BLOCK steps make the loop a vector
// operation with a fixed order of additions; the blocks add up in double, so long rows lose no digits.
template <typename A>
OPGRAFT_INLINE double dot(const A* x, const A* y, int64_t length) {
  constexpr int64_t PARTS = 32;
  constexpr int64_t BLOCK = 16 * PARTS;
  double total = 0;
  for (int64_t first = 0; first < length; first += BLOCK) {
    const int64_t end = std::min(first + BLOCK, length);
    A part[PARTS] = {};
    int64_t t = first;
    for (; t + PARTS <= end; t += PARTS) {
      for (int64_t p = 0; p < PARTS; ++p) part[p] += y ? x[t + p] * y[t + p] : x[t + p];
    }
    for (int64_t p = 0; t < end; ++t, ++p) part[p] += y ? x[t] * y[t] : x[t];
    for (int64_t half = PARTS / 2; half > 0; half /= 2) {
      for (int64_t p = 0; p < half; ++p) part[p] += part[p + half];
    }
    total += part[0];
  }
  return total;
}

template <typename A>
OPGRAFT_INLINE void convolve_any(const A* row, const A* weight, A bias, A* out, int64_t length, int width) {
  switch (width) {
    case 1:
      return convolve<A, 1>(row, weight, bias, out, length);
    case 2:
      return convolve<A, 2>(row, weight, bias, out, length);
    case 3:
      return convolve<A, 3>(row, weight, bias, out, length);
    case 4:
      return convolve<A, 4>(row, weight, bias, out, length);
    case 5:
      return convolve<A, 5>(row, weight, bias, out, length);
    case 6:
      return convolve<A, 6>(row, weight, bias, out, length);
    case 7:
      return convolve<A, 7>(row, weight, bias, out, length);
    default:
      return convolve<A, 8>(row, weight, bias, out, length);
  }
}

template <typename A>
OPGRAFT_INLINE void convolve_transposed_any(const A* grad, const A* weight, A* out, int64_t length, int width) {
  switch (width) {
    case 1:
      return convolve_transposed<A, 1>(grad, weight, out, length);
    case 2:
      return convolve_transposed<A, 2>(grad, weight, out, length);
    case 3:
      return convolve_transposed<A, 3>(grad, weight, out, length);
    case 4:
      return convolve_transposed<A, 4>(grad, weight, out, length);
    case 5:
      return convolve_transposed<A, 5>(grad, weight, out, length);
    case 6:
      return convolve_transposed<A, 6>(grad, weight, out, length);
    case 7:
      return convolve_transposed<A, 7>(grad, weight, out, length);
    default:
      return convolve_transposed<A, 8>(grad, weight, out, length);
  }
}

// Does step t see the value `back` steps before it? Values before the row belong to the row's first sequence.
inline bool sees(const int32_t* seq_idx, int64_t t, int64_t back) {
  return seq_idx[t] >= 0 && seq_idx[std::max<int64_t>(t - back, 0)] == seq_idx[t];
}

template <typename A>
void convolve_packed(const A* row, const A* weight, A bias, A* out, int64_t first, int64_t length, int width,
                     const int32_t* seq_idx) {
  for (int64_t t = 0; t < length; ++t) {
    A sum = bias;
    for (int k = 0; k < width; ++k) {
      if (sees(seq_idx, first + t, width - 1 - k)) sum += weight[k] * row[t - (width - 1) + k];
    }
    out[t] = sum;
  }
}

template <typename A, typename T>
OPGRAFT_INLINE void widen_row(const T* in, A* out, int64_t length) {
  for (int64_t t = 0; t < length; ++t) out[t] = widen(in[t]);
}

template <typename A, typename T>
OPGRAFT_INLINE void narrow_row(const A* in, T* out, int64_t length) {
  for (int64_t t = 0; t < length; ++t) out[t] = narrow<T>(in[t]);
}

// `rows` channels side by side, transposed into rows `pitch` apart.
template <typename A, typename T>
OPGRAFT_INLINE void widen_columns(const T* in, int64_t stride, A* out, int64_t pitch, int64_t rows, int64_t length) {
  for (int64_t t = 0; t < length; ++t) {
    for (int64_t r = 0; r < rows; ++r) out[r * pitch + t] = widen(in[t * stride + r]);
  }
}

template <typename A, typename T>
OPGRAFT_INLINE void narrow_columns(const A* in, int64_t pitch, T* out, int64_t stride, int64_t rows, int64_t length) {
  for (int64_t t = 0; t < length; ++t) {
    for (int64_t r = 0; r < rows; ++r) out[t * stride + r] = narrow<T>(in[r * pitch + t]);
  }
}

template <typename A>
OPGRAFT_INLINE void activate_row(A* row, int64_t length) {
  for (int64_t t = 0; t < length; ++t) row[t] = silu_value(row[t]);
}

// grad becomes the gradient of the sum before the activation.
template <typename A>
OPGRAFT_INLINE void scale_by_slope(const A* sum, A* grad, int64_t length) {
  for (int64_t t = 0; t < length; ++t) grad[t] *= silu_slope(sum[t]);
}

template <typename A>
OPGRAFT_INLINE void weight_gradients(const A* row, const A* grad, double* grad_weight, double* grad_bias,
                                     int64_t length, int width) {
  for (int k = 0; k < width; ++k) grad_weight[k] += dot(grad, row - (width - 1) + k, length);
  *grad_bias += dot<A>(grad, nullptr, length);
}

// One step of `count` channels: rows[k] are the inputs that tap k sees, weight[k] the taps COLUMNS apart.
template <int WIDTH, typename T, typename A>
OPGRAFT_INLINE void convolve_step(const A* const* rows, const A* weight, const A* bias, T* out, int64_t count,
                                  bool silu) {
  A sums[COLUMNS];
  for (int64_t c = 0; c < count; ++c) {
    A sum = bias[c];
#pragma GCC unroll 8
    for (int k = 0; k < WIDTH; ++k) sum += weight[k * COLUMNS + c] * rows[k][c];
    sums[c] = sum;
  }
  if (silu) {
    for (int64_t c = 0; c < count; ++c) out[c] = narrow<T>(silu_value(sums[c]));
  } else {
    for (int64_t c = 0; c < count; ++c) out[c] = narrow<T>(sums[c]);
  }
}

template <typename T, typename A>
OPGRAFT_INLINE void convolve_step_any(const A* const* rows, const A* weight, const A* bias, T* out, int64_t count,
                                      int width, bool silu) {
  switch (width) {
    case 1:
      return convolve_step<1>(rows, weight, bias, out, count, silu);
    case 2:
      return convolve_step<2>(rows, weight, bias, out, count, silu);
    case 3:
      return convolve_step<3>(rows, weight, bias, out, count, silu);
    case 4:
      return convolve_step<4>(rows, weight, bias, out, count, silu);
    case 5:
      return convolve_step<5>(rows, weight, bias, out, count, silu);
    case 6:
      return convolve_step<6>(rows, weight, bias, out, count, silu);
    case 7:
      return convolve_step<7>(rows, weight, bias, out, count, silu);
    default:
      return convolve_step<8>(rows, weight, bias, out, count, silu);
  }
}

// target_clones does not take templates: one plain function a type.
#define OPGRAFT_CONV_SUMS(A)                                                                                           \
  OPGRAFT_CLONES void sum_taps(const A* row, const A* weight, A bias, A* out, int64_t length, int width, bool silu) {  \
    convolve_any(row, weight, bias, out, length, width);                                                               \
    if (silu) activate_row(out, length);                                                                               \
  }                                                                                                                    \
  OPGRAFT_CLONES void activate_loop(A* row, int64_t length) { activate_row(row, length); }                             \
  OPGRAFT_CLONES void slope_loop(const A* sum, A* grad, int64_t length) { scale_by_slope(sum, grad, length); }         \
  OPGRAFT_CLONES void spread_taps(const A* grad, const A* weight, A* out, int64_t length, int width) {                 \
    convolve_transposed_any(grad, weight, out, length, width);                                                         \
  }                                                                                                                    \
  OPGRAFT_CLONES void weight_loop(const A* row, const A* grad, double* grad_weight, double* grad_bias, int64_t length, \
                                  int width) {                                                                         \
    weight_gradients(row, grad, grad_weight, grad_bias, length, width);                                                \
  }
OPGRAFT_CONV_SUMS(float)
OPGRAFT_CONV_SUMS(double)

#define OPGRAFT_CONV_STEPS(T, A)                                                                                \
  OPGRAFT_CLONES void step_columns(const A* const* rows, const A* weight, const A* bias, T* out, int64_t count, \
                                   int width, bool silu) {                                                      \
    convolve_step_any(rows, weight, bias, out, count, width, silu);                                             \
  }
OPGRAFT_CONV_STEPS(float, float)
OPGRAFT_CONV_STEPS(double, double)
OPGRAFT_CONV_STEPS(Half, float)
OPGRAFT_CONV_STEPS(BFloat16, float)

#define OPGRAFT_CONV_MOVES(T, A)                                                                                     \
  OPGRAFT_CLONES void read_rows(const T* in, int64_t stride, A* out, int64_t pitch, int64_t rows, int64_t length) {  \
    stride == 1 && rows == 1 ? widen_row(in, out, length) : widen_columns(in, stride, out, pitch, rows, length);     \
  }                                                                                                                  \
  OPGRAFT_CLONES void write_rows(const A* in, int64_t pitch, T* out, int64_t stride, int64_t rows, int64_t length) { \
    stride == 1 && rows == 1 ? narrow_row(in, out, length) : narrow_columns(in, pitch, out, stride, rows, length);   \
  }
OPGRAFT_CONV_MOVES(float, float)
OPGRAFT_CONV_MOVES(double, double)
OPGRAFT_CONV_MOVES(Half, float)
OPGRAFT_CONV_MOVES(BFloat16, float)

}  // namespace
}  // namespace opgraft::cpu
