// Cross entropy: the loops over one row, behind plain pointers. cpu/cross_entropy.cpp binds them to the op.
//
// A row is walked in blocks that stay in L1. Each block takes the maximum so far as its shift, so that one read of the
// logits gives maximum, sum and the exponentials e^(x - shift); where the gradient is wanted they are kept (in the
// gradient itself, or in a float row for 16-bit types) and a second walk, over a row that is in L2, scales every block
// to the final maximum and sum. One exponential an element, one read and one write of memory. Blocks are summed in
// lanes, rows in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include "support/convert.h"
#include "support/exp.h"
#include "support/parallel.h"
#include "support/tanh.h"

namespace opgraft::cpu {
namespace {

constexpr int64_t BLOCK = 1024;

template <typename A>
struct Lanes {
  typedef A type __attribute__((vector_size(64)));
  static constexpr int64_t COUNT = 64 / sizeof(A);
};

template <typename A>
OPGRAFT_INLINE A block_maximum(const A* x, int64_t count) {
  constexpr int64_t WIDTH = Lanes<A>::COUNT;
  A top = std::numeric_limits<A>::lowest();
  int64_t i = 0;
  if (count >= 2 * WIDTH) {
    typename Lanes<A>::type first, second, one, two;
    __builtin_memcpy(&first, x, sizeof(first));
    __builtin_memcpy(&second, x + WIDTH, sizeof(second));
    for (i = 2 * WIDTH; i + 2 * WIDTH <= count; i += 2 * WIDTH) {
      __builtin_memcpy(&one, x + i, sizeof(one));
      __builtin_memcpy(&two, x + i + WIDTH, sizeof(two));
      first = one > first ? one : first;
      second = two > second ? two : second;
    }
    for (int64_t lane = 0; lane < WIDTH; ++lane) {
      top = first[lane] > top ? first[lane] : top;
      top = second[lane] > top ? second[lane] : top;
    }
  }
  for (; i < count; ++i) top = x[i] > top ? x[i] : top;
  return top;
}

template <typename A>
OPGRAFT_INLINE double block_sum(const A* x, int64_t count) {
  constexpr int64_t WIDTH = Lanes<A>::COUNT;
  typename Lanes<A>::type first = {}, second = {}, one, two;
  int64_t i = 0;
  for (; i + 2 * WIDTH <= count; i += 2 * WIDTH) {
    __builtin_memcpy(&one, x + i, sizeof(one));
    __builtin_memcpy(&two, x + i + WIDTH, sizeof(two));
    first += one;
    second += two;
  }
  first += second;
  double sum = 0;
  for (int64_t lane = 0; lane < WIDTH; ++lane) sum += first[lane];
  for (; i < count; ++i) sum += x[i];
  return sum;
}

// What a thread keeps while it walks a row.
template <typename A>
struct RowScratch {
  std::vector<A> exponentials;  // of 16-bit types, and of calls with options
  std::vector<A> seen;          // the logits as the loss sees them, of calls with options
  std::vector<A> shifts;        // one a block
};

template <typename A>
struct RowOptions {
  const A* weight = nullptr;
  A smoothing = 0;
  A softcap = 0;

  bool general() const { return smoothing != A(0) || softcap != A(0); }
};

template <typename A>
struct RowSums {
  A maximum = std::numeric_limits<A>::lowest();
  double sum = 0;
  double below = 0;  // sum of w (maximum - x), for smoothing
};

// d loss / d x[c] = (p[c] a - e w[c]) slope[c], and less b at the target.
template <typename A>
struct RowFactors {
  A a = 0;
  A b = 0;
  A e = 0;
  int64_t target = -1;
};

// `exponentials` null: only the sums are wanted. `seen` null: the call has no options.
template <typename T, typename A = Accumulate<T>>
OPGRAFT_INLINE RowSums<A> sum_range(const T* x, int64_t classes, const RowOptions<A>& options, A* exponentials, A* seen,
                                    A* shifts) {
  A values[BLOCK], powers[BLOCK];
  RowSums<A> row;
  for (int64_t begin = 0; begin < classes; begin += BLOCK) {
    const int64_t count = std::min(BLOCK, classes - begin);
    A* const value = seen == nullptr ? values : seen + begin;
    for (int64_t i = 0; i < count; ++i) value[i] = widen(x[begin + i]);
    if (options.softcap != A(0)) {
      for (int64_t i = 0; i < count; ++i) value[i] = options.softcap * hyperbolic_tangent(value[i] / options.softcap);
    }
    const A top = block_maximum(value, count);
    if (top > row.maximum) {
      row.sum *= std::exp(static_cast<double>(row.maximum) - static_cast<double>(top));
      row.maximum = top;
    }
    const A shift = row.maximum;
    A* const power = exponentials == nullptr ? powers : exponentials + begin;
    for (int64_t i = 0; i < count; ++i) power[i] = exponential(value[i] - shift);
    row.sum += block_sum(power, count);
    shifts[begin / BLOCK] = shift;
  }
  if (options.smoothing != A(0)) {
    for (int64_t begin = 0; begin < classes; begin += BLOCK) {
      const int64_t count = std::min(BLOCK, classes - begin);
      if (options.weight == nullptr) {
        for (int64_t i = 0; i < count; ++i) values[i] = row.maximum - seen[begin + i];
      } else {
        for (int64_t i = 0; i < count; ++i) values[i] = options.weight[begin + i] * (row.maximum - seen[begin + i]);
      }
      row.below += block_sum(values, count);
    }
  }
  return row;
}

// The gradient from the exponentials that sum_range kept. `exponentials` may be the gradient's own row.
template <typename T, typename A = Accumulate<T>>
OPGRAFT_INLINE void scale_range(T* gradient, int64_t classes, const RowOptions<A>& options, const RowSums<A>& row,
                                const RowFactors<A>& factors, const A* exponentials, const A* seen, const A* shifts) {
  for (int64_t begin = 0; begin < classes; begin += BLOCK) {
    const int64_t count = std::min(BLOCK, classes - begin);
    const double rise = static_cast<double>(shifts[begin / BLOCK]) - static_cast<double>(row.maximum);
    const A factor = static_cast<A>(std::exp(rise) / row.sum * static_cast<double>(factors.a));
    const int64_t target = factors.target - begin;
    const A* const power = exponentials + begin;
    T* const out = gradient + begin;
    const A at_target = target >= 0 && target < count ? power[target] * factor - factors.b : A(0);
    if (seen == nullptr) {
      for (int64_t i = 0; i < count; ++i) out[i] = narrow<T>(power[i] * factor);
      if (target >= 0 && target < count) out[target] = narrow<T>(at_target);
      continue;
    }
    A values[BLOCK];
    for (int64_t i = 0; i < count; ++i) values[i] = power[i] * factor;
    if (target >= 0 && target < count) values[target] = at_target;
    if (options.smoothing != A(0) && options.weight == nullptr) {
      for (int64_t i = 0; i < count; ++i) values[i] -= factors.e;
    } else if (options.smoothing != A(0)) {
      for (int64_t i = 0; i < count; ++i) values[i] -= factors.e * options.weight[begin + i];
    }
    if (options.softcap != A(0)) {
      for (int64_t i = 0; i < count; ++i) {
        const A t = seen[begin + i] / options.softcap;
        values[i] *= A(1) - t * t;
      }
    }
    for (int64_t i = 0; i < count; ++i) out[i] = narrow<T>(values[i]);
  }
}

// The gradient from what the forward kept of the row: its maximum and the logarithm of its sum.
template <typename T, typename A = Accumulate<T>>
OPGRAFT_INLINE void backward_range(const T* x, T* gradient, int64_t classes, const RowOptions<A>& options, A maximum,
                                   A log_sum, const RowFactors<A>& factors) {
  A values[BLOCK], slopes[BLOCK];
  for (int64_t begin = 0; begin < classes; begin += BLOCK) {
    const int64_t count = std::min(BLOCK, classes - begin);
    T* const out = gradient + begin;
    for (int64_t i = 0; i < count; ++i) values[i] = widen(x[begin + i]);
    if (options.softcap != A(0)) {
      for (int64_t i = 0; i < count; ++i) {
        const A t = hyperbolic_tangent(values[i] / options.softcap);
        values[i] = options.softcap * t;
        slopes[i] = A(1) - t * t;
      }
    }
    for (int64_t i = 0; i < count; ++i) values[i] = exponential((values[i] - maximum) - log_sum) * factors.a;
    const int64_t target = factors.target - begin;
    if (target >= 0 && target < count) values[target] -= factors.b;
    if (options.smoothing != A(0) && options.weight == nullptr) {
      for (int64_t i = 0; i < count; ++i) values[i] -= factors.e;
    } else if (options.smoothing != A(0)) {
      for (int64_t i = 0; i < count; ++i) values[i] -= factors.e * options.weight[begin + i];
    }
    if (options.softcap != A(0)) {
      for (int64_t i = 0; i < count; ++i) values[i] *= slopes[i];
    }
    for (int64_t i = 0; i < count; ++i) out[i] = narrow<T>(values[i]);
  }
}

// target_clones does not take templates: plain functions a dtype.
#define OPGRAFT_CROSS_ENTROPY_RANGES(T)                                                                                \
  OPGRAFT_CLONES void sum_row(const T* x, int64_t classes, const RowOptions<Accumulate<T>>& options,                   \
                              Accumulate<T>* exponentials, Accumulate<T>* seen, Accumulate<T>* shifts,                 \
                              RowSums<Accumulate<T>>& row) {                                                           \
    row = sum_range(x, classes, options, exponentials, seen, shifts);                                                  \
  }                                                                                                                    \
  OPGRAFT_CLONES void scale_row(T* gradient, int64_t classes, const RowOptions<Accumulate<T>>& options,                \
                                const RowSums<Accumulate<T>>& row, const RowFactors<Accumulate<T>>& factors,           \
                                const Accumulate<T>* exponentials, const Accumulate<T>* seen,                          \
                                const Accumulate<T>* shifts) {                                                         \
    scale_range(gradient, classes, options, row, factors, exponentials, seen, shifts);                                 \
  }                                                                                                                    \
  OPGRAFT_CLONES void backward_row(const T* x, T* gradient, int64_t classes, const RowOptions<Accumulate<T>>& options, \
                                   Accumulate<T> maximum, Accumulate<T> log_sum,                                       \
                                   const RowFactors<Accumulate<T>>& factors) {                                         \
    backward_range(x, gradient, classes, options, maximum, log_sum, factors);                                          \
  }
OPGRAFT_CROSS_ENTROPY_RANGES(float)
OPGRAFT_CROSS_ENTROPY_RANGES(double)
OPGRAFT_CROSS_ENTROPY_RANGES(Half)
OPGRAFT_CROSS_ENTROPY_RANGES(BFloat16)

}  // namespace
}  // namespace opgraft::cpu
