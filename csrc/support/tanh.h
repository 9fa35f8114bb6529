// tanh in a form that compilers vectorise.
#pragma once

#include <cmath>

#include "support/exp.h"

namespace opgraft::cpu {

// Near zero an odd polynomial (coefficients of Cephes' tanhf, |x| < 0.625), else 1 - 2 / (e^2|x| + 1). 2 ulp.
OPGRAFT_INLINE float hyperbolic_tangent(float x) {
  const float size = x < 0.0f ? -x : x;
  const float square = x * x;
  float p = -5.70498872745e-3f;
  p = p * square + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  const float near = x + x * square * p;
  const float bounded = size > 20.0f ? 20.0f : size;
  const float far = 1.0f - 2.0f / (exponential(2.0f * bounded) + 1.0f);
  const float found = size < 0.625f ? near : (x < 0.0f ? -far : far);
  return x != x ? x : found;
}

OPGRAFT_INLINE double hyperbolic_tangent(double x) { return std::tanh(x); }

}  // namespace opgraft::cpu
