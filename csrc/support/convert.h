// Between 16-bit types and float without branches, so that the loops around them are vectorised.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <bit>
#include <cstdint>

#include "support/dispatch.h"
#include "support/parallel.h"

namespace opgraft::cpu {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;

// condition ? yes : no as arithmetic: the compiler turns a chain of ?: into jumps, which end vectorisation.
OPGRAFT_INLINE uint32_t select(bool condition, uint32_t yes, uint32_t no) {
  return no ^ ((yes ^ no) & -static_cast<uint32_t>(condition));
}

OPGRAFT_INLINE float widen(float value) { return value; }
OPGRAFT_INLINE double widen(double value) { return value; }
OPGRAFT_INLINE float widen(const BFloat16& value) { return std::bit_cast<float>(static_cast<uint32_t>(value.x) << 16); }

// Exponent and mantissa moved into place and rescaled by 2^112; subnormals come out right by the multiplication.
OPGRAFT_INLINE float widen(const Half& value) {
  const uint32_t bits = value.x;
  const uint32_t magnitude = (bits & 0x7fffu) << 13;
  const float scaled = std::bit_cast<float>(magnitude) * 0x1p112f;
  const uint32_t finite = std::bit_cast<uint32_t>(scaled);
  const uint32_t special = magnitude | 0x7f800000u;  // infinity and NaN keep their mantissa
  const uint32_t sign = (bits & 0x8000u) << 16;
  return std::bit_cast<float>(select((bits & 0x7c00u) == 0x7c00u, special, finite) | sign);
}

template <typename T>
OPGRAFT_INLINE T narrow(Accumulate<T> value);

template <>
OPGRAFT_INLINE float narrow<float>(float value) {
  return value;
}

template <>
OPGRAFT_INLINE double narrow<double>(double value) {
  return value;
}

// Round to nearest, ties to even; NaN stays NaN.
template <>
OPGRAFT_INLINE BFloat16 narrow<BFloat16>(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x40u;
  return BFloat16(static_cast<uint16_t>(select((bits & 0x7fffffffu) > 0x7f800000u, quiet, rounded)),
                  BFloat16::from_bits());
}

// Round to nearest, ties to even. Adding 2^(e+13) to a float of exponent e makes the adder round at half's last bit;
// for subnormal results e is held at half's smallest exponent.
template <>
OPGRAFT_INLINE Half narrow<Half>(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Normal results: integer rounding at bit 13, exponent rebased by 112.
  const uint32_t normal = (magnitude - 0x38000000u + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
  // Subnormal results: 0.5 has its last bit at 2^-24, half's smallest subnormal.
  const uint32_t subnormal =
      std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - std::bit_cast<uint32_t>(0.5f);
  const uint32_t finite = select(magnitude < 0x38800000u, subnormal, normal);
  const uint32_t bounded = select(magnitude >= 0x477ff000u, 0x7c00u, finite);  // overflow: infinity
  const uint32_t not_a_number = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  const uint32_t result = select(magnitude > 0x7f800000u, not_a_number, bounded);
  return Half(static_cast<uint16_t>(result | sign), Half::from_bits());
}

}  // namespace opgraft::cpu
