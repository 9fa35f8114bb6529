// exp in a form that compilers vectorise.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "support/parallel.h"

namespace opgraft::cpu {

// e^x = 2^n * e^r with n = round(x / ln 2), |r| <= ln(2)/2. ln 2 is split in two (Cody and Waite) so that r is exact;
// the polynomial is the Taylor series to r^7, whose remainder at ln(2)/2 is 5e-9. Error below 1 ulp on the finite
// range; results under 2^-126 go to zero, over FLT_MAX to infinity, NaN stays NaN.
OPGRAFT_INLINE float exponential(float x) {
  constexpr float LOG2_E = 1.44269504088896341f;
  constexpr float LN2_HIGH = 0.693359375f;
  constexpr float LN2_LOW = -2.12194440e-4f;
  constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low mantissa bits
  const float clamped = x < -87.4f ? -87.4f : (x > 88.8f ? 88.8f : x);
  const float shifted = clamped * LOG2_E + ROUND;
  const float n = shifted - ROUND;
  const float r = (clamped - n * LN2_HIGH) - n * LN2_LOW;
  float p = 1.0f / 5040.0f;
  p = p * r + 1.0f / 720.0f;
  p = p * r + 1.0f / 120.0f;
  p = p * r + 1.0f / 24.0f;
  p = p * r + 1.0f / 6.0f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  // Two factors of 2^(n/2): n reaches 128, where a single one would overflow its exponent.
  const int32_t exponent = static_cast<int32_t>(n);
  const int32_t half = exponent >> 1;
  const float scale = std::bit_cast<float>((half + 127) << 23);
  const float rest = std::bit_cast<float>((exponent - half + 127) << 23);
  const float result = p * scale * rest;
  return x < -87.4f ? 0.0f : (x > 88.8f ? INFINITY : (x != x ? x : result));
}

OPGRAFT_INLINE double exponential(double x) { return std::exp(x); }

}  // namespace opgraft::cpu
