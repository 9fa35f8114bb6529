// rms_norm and add_rms_norm: the loops over a row, behind plain pointers. cpu/rms_norm.cpp binds them to the ops.
//
// A row is read from memory once and again from the cache: once for its sums, once for its result. Sums are taken in
// LANES independent parts, so that they are vector operations, and over PART elements at a time: a float that has added
// up thousands of squares would lose their last digits. Bytes: one read and one write an element forward
// (add_rms_norm two and two), two reads (three with the sum's gradient) and one write backward.
#pragma once

#include <cmath>
#include <cstdint>

#include "support/convert.h"
#include "support/parallel.h"

namespace opgraft::cpu {
namespace {

constexpr int LANES = 32;
constexpr int64_t PART = 4096;

template <typename A>
OPGRAFT_INLINE A add_lanes(A (&lanes)[LANES]) {
  for (int step = LANES / 2; step > 0; step /= 2) {
    for (int l = 0; l < step; ++l) lanes[l] += lanes[l + step];
  }
  return lanes[0];
}

template <typename T, typename A = Accumulate<T>>
OPGRAFT_INLINE A sum_of_squares(const T* x, int64_t length) {
  double total = 0;
  for (int64_t first = 0; first < length; first += PART) {
    const int64_t end = first + PART < length ? first + PART : length;
    A lanes[LANES] = {};
    int64_t i = first;
    for (; i + LANES <= end; i += LANES) {
      for (int l = 0; l < LANES; ++l) {
        const A value = widen(x[i + l]);
        lanes[l] += value * value;
      }
    }
    for (int l = 0; i < end; ++i, ++l) {
      const A value = widen(x[i]);
      lanes[l] += value * value;
    }
    total += add_lanes(lanes);
  }
  return static_cast<A>(total);
}

template <typename A>
OPGRAFT_INLINE A inverse_root(A squares, int64_t length, A eps) {
  return A(1) / std::sqrt(squares / static_cast<A>(length) + eps);
}

// factors: weight + offset, in the type in which the kernel computes.
template <typename T, typename A>
OPGRAFT_INLINE void scale_row(const T* x, const A* factors, T* y, int64_t length, A scale, bool round_first) {
  if (round_first) {
    for (int64_t i = 0; i < length; ++i) {
      y[i] = narrow<T>(static_cast<A>(widen(narrow<T>(widen(x[i]) * scale))) * factors[i]);
    }
  } else {
    for (int64_t i = 0; i < length; ++i) y[i] = narrow<T>(widen(x[i]) * scale * factors[i]);
  }
}

template <typename T, typename A>
OPGRAFT_INLINE void forward_row(const T* x, const A* factors, T* y, int64_t length, A eps, bool round_first) {
  const A scale = inverse_root(sum_of_squares(x, length), length, eps);
  scale_row(x, factors, y, length, scale, round_first);
}

template <typename T>
OPGRAFT_INLINE void sum_row(const T* x, const T* residual, T* summed, int64_t length) {
  for (int64_t i = 0; i < length; ++i) summed[i] = narrow<T>(widen(x[i]) + widen(residual[i]));
}

// share: the sum over rows so far of what the weight's gradient is made of.
template <typename T, typename A>
OPGRAFT_INLINE void backward_row(const T* grad, const T* x, const T* more, const A* factors, T* grad_x, A* share,
                                 int64_t length, A eps) {
  double all_squares = 0, all_products = 0;
  for (int64_t first = 0; first < length; first += PART) {
    const int64_t end = first + PART < length ? first + PART : length;
    A squares[LANES] = {}, products[LANES] = {};
    int64_t i = first;
    for (; i + LANES <= end; i += LANES) {
      for (int l = 0; l < LANES; ++l) {
        const A value = widen(x[i + l]);
        squares[l] += value * value;
        products[l] += value * (static_cast<A>(widen(grad[i + l])) * factors[i + l]);
      }
    }
    for (int l = 0; i < end; ++i, ++l) {
      const A value = widen(x[i]);
      squares[l] += value * value;
      products[l] += value * (static_cast<A>(widen(grad[i])) * factors[i]);
    }
    all_squares += add_lanes(squares);
    all_products += add_lanes(products);
  }
  const A scale = inverse_root(static_cast<A>(all_squares), length, eps);
  const A pull = scale * scale * scale * static_cast<A>(all_products) / static_cast<A>(length);
  if (more) {
    for (int64_t j = 0; j < length; ++j) {
      const A value = widen(x[j]), up = widen(grad[j]);
      grad_x[j] = narrow<T>(up * factors[j] * scale - value * pull + static_cast<A>(widen(more[j])));
      share[j] += up * (value * scale);
    }
  } else {
    for (int64_t j = 0; j < length; ++j) {
      const A value = widen(x[j]), up = widen(grad[j]);
      grad_x[j] = narrow<T>(up * factors[j] * scale - value * pull);
      share[j] += up * (value * scale);
    }
  }
}

// target_clones does not take templates: one plain function a dtype. A null pointer leaves its tensor out.
#define OPGRAFT_RMS_NORM_ROWS(T, A)                                                                                 \
  OPGRAFT_CLONES void norm_row(const T* x, const A* factors, T* y, int64_t length, A eps, bool round_first) {       \
    forward_row(x, factors, y, length, eps, round_first);                                                           \
  }                                                                                                                 \
  OPGRAFT_CLONES void add_row(const T* x, const T* residual, T* summed, int64_t length) {                           \
    sum_row(x, residual, summed, length);                                                                           \
  }                                                                                                                 \
  OPGRAFT_CLONES void gradient_row(const T* grad, const T* x, const T* more, const A* factors, T* grad_x, A* share, \
                                   int64_t length, A eps) {                                                         \
    backward_row(grad, x, more, factors, grad_x, share, length, eps);                                               \
  }
OPGRAFT_RMS_NORM_ROWS(float, float)
OPGRAFT_RMS_NORM_ROWS(double, double)
OPGRAFT_RMS_NORM_ROWS(Half, float)
OPGRAFT_RMS_NORM_ROWS(BFloat16, float)

}  // namespace
}  // namespace opgraft::cpu
