// From a tensor's dtype to a template parameter. float, double, half and bfloat16: all that the ops take.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <type_traits>

#include "support/check.h"

namespace opgraft {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;

template <typename T>
struct Type {
  using type = T;
};

// The type in which a kernel computes: float for the 16-bit types.
template <typename T>
using Accumulate = std::conditional_t<std::is_same_v<T, double>, double, float>;

inline ScalarType accumulate_type(ScalarType type) {
  return type == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// dispatch_floating("gelu", x, [&](auto tag) { using T = typename decltype(tag)::type; ... });
template <typename Body>
inline auto dispatch_floating(const char* op, const Tensor& tensor, const Body& body) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return body(Type<float>{});
    case ScalarType::Double:
      return body(Type<double>{});
    case ScalarType::Half:
      return body(Type<Half>{});
    case ScalarType::BFloat16:
      return body(Type<BFloat16>{});
    default:
      fail(op, "dtype ", torch::headeronly::toString(tensor.scalar_type()),
           " is not supported, expected Float, Double, Half or BFloat16");
  }
}

}  // namespace opgraft
