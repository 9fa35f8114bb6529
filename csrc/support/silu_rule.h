// silu(gate) * up in float32 with the same bits on the CPU and on CUDA: products, sums and fused multiply-adds in a
// stated order, none of which a compiler may regroup.
//
//   a = max(gate, -87)        below, silu is under 2e-36; the gate's minus infinity counts as its limit, 0
//   e = 2^n p(f) = e^-a       with -a log2(e) = n + f, n an integer, |f| <= 1/2
//   silu = a * (1 / (1 + e)),  value = silu * up
// p is the polynomial of degree 5 with the least relative error on [-1/2, 1/2], 1.1e-7 at most.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "support/fp8_rule.h"

namespace opgraft {

OPGRAFT_ANYWHERE float fused_multiply_add(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

inline constexpr float SILU_C1 = 0.6931470036506653f;
inline constexpr float SILU_C2 = 0.24022242426872253f;
inline constexpr float SILU_C3 = 0.05550733581185341f;
inline constexpr float SILU_C4 = 0.009671512991189957f;
inline constexpr float SILU_C5 = 0.0013264724984765053f;

OPGRAFT_ANYWHERE float silu_product(float gate, float up) {
  constexpr float LIMIT = 87.0f;
  constexpr float LOG2_E = 1.44269504088896341f;
  constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low mantissa bits
  const float a = gate < -LIMIT ? -LIMIT : gate;
  const float bounded = a > LIMIT ? LIMIT : a;
  const float shifted = fused_multiply_add(bounded, -LOG2_E, ROUND);
  const float n = shifted - ROUND;
  const float f = fused_multiply_add(bounded, -LOG2_E, -n);
  float p = SILU_C5;
  p = fused_multiply_add(p, f, SILU_C4);
  p = fused_multiply_add(p, f, SILU_C3);
  p = fused_multiply_add(p, f, SILU_C2);
  p = fused_multiply_add(p, f, SILU_C1);
  p = fused_multiply_add(p, f, 1.0f);
  const float e = std::bit_cast<float>(std::bit_cast<uint32_t>(p) + (std::bit_cast<uint32_t>(shifted) << 23));
  const float silu = a * inverse_of_finite(1.0f + e);  // at most 2^126
  return silu * up;
}

}  // namespace opgraft
