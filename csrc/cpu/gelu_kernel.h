// GELU, tanh form: the loops, behind plain pointers. cpu/gelu.cpp binds them to the op.
//
// One pass over contiguous memory. gelu(x) = x * s(2u) with u = sqrt(2/pi) (x + 0.044715 x^3) and s the logistic
// function, since (1 + tanh u) / 2 = s(2u): one exponential and one division an element, no cancellation for large
// |x|. Bytes: one read and one write an element forward, two reads and one write backward.
#pragma once

#include <cmath>
#include <cstdint>

#include "support/convert.h"
#include "support/exp.h"
#include "support/parallel.h"

namespace opgraft::cpu {
namespace {

template <typename A>
constexpr A TWO_SQRT_2_OVER_PI = static_cast<A>(1.5957691216057308);
template <typename A>
constexpr A CUBIC = static_cast<A>(0.044715);

// s(v) and s(v) s(-v) from e^-|v|, which never overflows. 1 - s(v) would cancel for large v; s(-v) does not.
template <typename A>
struct Logistic {
  A value;
  A curve;
};

template <typename A>
OPGRAFT_INLINE Logistic<A> logistic_of_twice_inner(A x) {
  const A twice_inner = TWO_SQRT_2_OVER_PI<A> * (x + CUBIC<A> * x * x * x);
  const A decay = exponential(-std::abs(twice_inner));
  const A large = A(1) / (A(1) + decay);
  const A small = decay * large;
  return {twice_inner < A(0) ? small : large, small * large};
}

template <typename A>
OPGRAFT_INLINE A value(A x) {
  const A s = logistic_of_twice_inner(x).value;
  // At -infinity the product would be -infinity * 0; the limit is 0.
  return s == A(0) ? A(0) : x * s;
}

// d/dx x s(v) = s + x s(v) s(-v) v' with v' = 2 sqrt(2/pi) (1 + 3 * 0.044715 x^2). Where the curve is 0 the second
// term's limit is 0, also at infinity.
template <typename A>
OPGRAFT_INLINE A slope(A x) {
  const Logistic<A> s = logistic_of_twice_inner(x);
  const A inner_slope = TWO_SQRT_2_OVER_PI<A> * (A(1) + A(3) * CUBIC<A> * x * x);
  return s.value + (s.curve == A(0) ? A(0) : x * s.curve * inner_slope);
}

template <typename T>
OPGRAFT_INLINE void forward_range(const T* x, T* y, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    y[i] = narrow<T>(value(widen(x[i])));
  }
}

template <typename T>
OPGRAFT_INLINE void backward_range(const T* grad, const T* x, T* out, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    out[i] = narrow<T>(widen(grad[i]) * slope(widen(x[i])));
  }
}

// target_clones does not take templates: one plain function a dtype.
#define OPGRAFT_GELU_RANGES(T)                                                                                        \
  OPGRAFT_CLONES void forward_loop(const T* x, T* y, int64_t begin, int64_t end) { forward_range(x, y, begin, end); } \
  OPGRAFT_CLONES void backward_loop(const T* grad, const T* x, T* out, int64_t begin, int64_t end) {                  \
    backward_range(grad, x, out, begin, end);                                                                         \
  }
OPGRAFT_GELU_RANGES(float)
OPGRAFT_GELU_RANGES(double)
OPGRAFT_GELU_RANGES(Half)
OPGRAFT_GELU_RANGES(BFloat16)

}  // namespace
}  // namespace opgraft::cpu
