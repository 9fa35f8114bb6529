// SiLU and its slope, for loops that are compiled once a vector unit.
#pragma once

#include "support/exp.h"
#include "support/parallel.h"

namespace opgraft::cpu {
namespace {

template <typename A>
OPGRAFT_INLINE A logistic(A x) {
  return A(1) / (A(1) + exponential(-x));
}

template <typename A>
OPGRAFT_INLINE A silu_value(A x) {
  const A s = logistic(x);
  return s == A(0) ? A(0) : x * s;
}

template <typename A>
OPGRAFT_INLINE A silu_slope(A x) {
  const A s = logistic(x);
  const A curve = s * (A(1) - s);
  return s + (curve == A(0) ? A(0) : x * curve);
}

}  // namespace
}  // namespace opgraft::cpu
