// float8_e4m3fn results on the CPU: the largest magnitude of a span, codes, and the sum of squares in the order that
// support/row_mapping.h states. The rule is support/fp8_rule.h; every operation is as on CUDA, bit for bit.
#pragma once

#include <cmath>
#include <cstdint>

#include "support/convert.h"
#include "support/fp8_rule.h"
#include "support/row_mapping.h"

namespace opgraft::cpu {
namespace {

// Saturated, to nearest, ties to even, in integer arithmetic as narrow<Half> does it; NaN becomes 0x7f.
OPGRAFT_INLINE uint8_t encode(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 24) & 0x80u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Normal results, 2^-6 and more: integer rounding at bit 20, exponent rebased by 120.
  const uint32_t normal = (magnitude - 0x3c000000u + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20;
  // Subnormal results: 2^14 has its last bit at 2^-9, e4m3's smallest subnormal.
  const uint32_t subnormal =
      std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0x1p14f) - std::bit_cast<uint32_t>(0x1p14f);
  const uint32_t finite = select(magnitude < 0x3c800000u, subnormal, normal);
  const uint32_t bounded = select(magnitude >= 0x43e00000u, 0x7eu, finite);  // 448
  return static_cast<uint8_t>(select(magnitude > 0x7f800000u, 0x7fu, bounded | sign));
}

// NaN wins: as an integer its magnitude is above infinity's.
OPGRAFT_INLINE float largest_magnitude(const float* values, int64_t length) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < length; ++i) {
    const uint32_t magnitude = std::bit_cast<uint32_t>(values[i]) & 0x7fffffffu;
    largest = largest > magnitude ? largest : magnitude;
  }
  return std::bit_cast<float>(largest);
}

// One row's values to codes and scales, a scale for every `block` of them.
OPGRAFT_INLINE void encode_span(const float* values, int64_t length, int64_t block, Fp8Rule rule, uint8_t* codes,
                                float* scales) {
  for (int64_t first = 0; first < length; first += block) {
    const int64_t count = first + block < length ? block : length - first;
    const float scale = fp8_scale(largest_magnitude(values + first, count), rule);
    const float inverse = 1.0f / scale;
    for (int64_t i = 0; i < count; ++i) codes[first + i] = encode(values[first + i] * inverse);
    scales[first / block] = scale;
  }
}

OPGRAFT_INLINE float square_add(float value, float sum) { return __builtin_fmaf(value, value, sum); }
OPGRAFT_INLINE double square_add(double value, double sum) { return __builtin_fma(value, value, sum); }

// `lanes` has room for mapping.threads vectors of 16 bytes of T.
template <typename T, typename A>
OPGRAFT_INLINE A squares_in_order(const T* x, int64_t length, RowMapping mapping, A* lanes) {
  int64_t count = static_cast<int64_t>(mapping.threads) * (ROW_VECTOR_BYTES / static_cast<int64_t>(sizeof(T)));
  for (int64_t l = 0; l < count; ++l) lanes[l] = A(0);
  for (int64_t first = 0; first < length; first += count) {
    const int64_t here = first + count < length ? count : length - first;
    for (int64_t l = 0; l < here; ++l) {
      const A value = widen(x[first + l]);
      if constexpr (sizeof(T) == 2) {
        lanes[l] += value * value;  // the square is exact: fused or not, the same bits
      } else {
        lanes[l] = square_add(value, lanes[l]);
      }
    }
  }
  for (; count > 1; count /= 2) {
    for (int64_t l = 0; l < count / 2; ++l) lanes[l] = lanes[2 * l] + lanes[2 * l + 1];
  }
  return lanes[0];
}

}  // namespace
}  // namespace opgraft::cpu
