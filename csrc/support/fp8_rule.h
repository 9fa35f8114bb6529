// The rule by which a row or a block becomes float8_e4m3fn, the same bits on the CPU and on CUDA. All in float32,
// every operation rounded to nearest, ties to even:
//   scale   = max(amax / 448, SMALLEST_SCALE), rounded up to a power of two where that is asked for,
//             at most the upper bound (rounded down to a power of two), NaN where an element is NaN;
//   inverse = 1 / scale;   code = e4m3(value * inverse), to nearest, ties to even, saturated at +-448, NaN stays NaN.
// Codes times scale give back the values. Infinity makes the scale infinite: finite elements become 0, infinite ones
// NaN; under an upper bound they saturate.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#if defined(__CUDACC__)
#define OPGRAFT_ANYWHERE __host__ __device__ __forceinline__
#else
#include "support/parallel.h"
#define OPGRAFT_ANYWHERE OPGRAFT_INLINE
#endif

namespace opgraft {

inline constexpr float FP8_LARGEST = 448.0f;
// A row of zeros needs some scale. vLLM takes the same one: 1 / (448 * 512).
inline constexpr float SMALLEST_SCALE = 1.0f / (448.0f * 512.0f);
inline constexpr int64_t FP8_BLOCK = 128;

struct Fp8Rule {
  float bound = 0.0f;  // of the scale; infinity for none
  bool power_of_two = false;
};

OPGRAFT_ANYWHERE float power_of_two_from_above(float positive) {
  return std::bit_cast<float>((std::bit_cast<uint32_t>(positive) + 0x7fffffu) & 0xff800000u);
}

OPGRAFT_ANYWHERE float power_of_two_from_below(float positive) {
  return std::bit_cast<float>(std::bit_cast<uint32_t>(positive) & 0xff800000u);
}

// 1 / d, rounded to nearest, for d from 2^-126 up to 2^126. On CUDA Newton's step on the hardware's approximation, in 3
// instructions: exact for every such d (tests/gpu/exact_division.cu tries them all).
OPGRAFT_ANYWHERE float inverse_of_finite(float d) {
#if defined(__CUDA_ARCH__)
  float guess;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(guess) : "f"(d));
  return __fmaf_rn(__fmaf_rn(-d, guess, 1.0f), guess, guess);
#else
  return 1.0f / d;
#endif
}

// The same, and 0 for infinity.
OPGRAFT_ANYWHERE float inverse_of(float d) { return d == INFINITY ? 0.0f : inverse_of_finite(d); }

// amax / 448, rounded to nearest, where it is a normal number: a product with the rounded inverse, corrected by what it
// left over (Markstein 1990). Tried for every float32 by tests/gpu/exact_division.cu.
OPGRAFT_ANYWHERE float over_largest(float amax) {
#if defined(__CUDA_ARCH__)
  constexpr float INVERSE = 1.0f / FP8_LARGEST;
  const float quotient = __fmul_rn(amax, INVERSE);
  const float corrected = __fmaf_rn(__fmaf_rn(-FP8_LARGEST, quotient, amax), INVERSE, quotient);
  return amax == INFINITY ? amax : corrected;
#else
  return amax / FP8_LARGEST;
#endif
}

// The bound is a power of two already where the rule asks for one.
OPGRAFT_ANYWHERE float fp8_scale(float amax, Fp8Rule rule) {
  if (amax != amax) return amax;
  float scale = over_largest(amax);
  scale = scale > SMALLEST_SCALE ? scale : SMALLEST_SCALE;
  if (rule.power_of_two) scale = power_of_two_from_above(scale);
  return scale < rule.bound ? scale : rule.bound;
}

}  // namespace opgraft
