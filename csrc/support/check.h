// Errors as sentences: the op, the argument, what was given, what is wanted.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>

namespace opgraft {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename... Parts>
[[noreturn]] inline void fail(const char* op, const Parts&... parts) {
  std::ostringstream text;
  text << op << ": ";
  ((text << parts), ...);
  throw std::runtime_error(text.str());
}

// check(condition, "gelu", "x has ", n, " dimensions, expected 2"): the words are only put together on failure.
template <typename... Parts>
inline void check(bool condition, const char* op, const Parts&... parts) {
  if (!condition) [[unlikely]] {
    fail(op, parts...);
  }
}

inline std::string shape_text(const Tensor& tensor) {
  std::ostringstream text;
  text << "(";
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    text << (dim ? ", " : "") << tensor.size(dim);
  }
  text << (tensor.dim() == 1 ? ",)" : ")");
  return text.str();
}

inline std::string device_text(const Tensor& tensor) {
  if (tensor.is_cpu()) return "cpu";
  std::ostringstream text;
  text << (tensor.is_cuda() ? "cuda:" : "device ") << tensor.get_device_index();
  return text.str();
}

inline bool is_floating(ScalarType type) {
  return type == ScalarType::Float || type == ScalarType::Double || type == ScalarType::Half ||
         type == ScalarType::BFloat16;
}

inline void check_floating(const char* op, const char* argument, const Tensor& tensor) {
  check(is_floating(tensor.scalar_type()), op, argument, " has dtype ",
        torch::headeronly::toString(tensor.scalar_type()), ", expected Float, Double, Half or BFloat16");
}

inline void check_same_dtype(const char* op, const char* argument, const Tensor& tensor, const char* other_argument,
                             const Tensor& other) {
  check(tensor.scalar_type() == other.scalar_type(), op, argument, " has dtype ",
        torch::headeronly::toString(tensor.scalar_type()), ", expected that of ", other_argument, ", ",
        torch::headeronly::toString(other.scalar_type()));
}

inline void check_same_device(const char* op, const char* argument, const Tensor& tensor, const char* other_argument,
                              const Tensor& other) {
  check(tensor.device() == other.device(), op, argument, " is on ", device_text(tensor), ", expected the device of ",
        other_argument, ", ", device_text(other));
}

inline void check_same_shape(const char* op, const char* argument, const Tensor& tensor, const char* other_argument,
                             const Tensor& other) {
  bool same = tensor.dim() == other.dim();
  for (int64_t dim = 0; same && dim < tensor.dim(); ++dim) {
    same = tensor.size(dim) == other.size(dim);
  }
  check(same, op, argument, " has shape ", shape_text(tensor), ", expected that of ", other_argument, ", ",
        shape_text(other));
}

// Same dtype, device and shape.
inline void check_alike(const char* op, const char* argument, const Tensor& tensor, const char* other_argument,
                        const Tensor& other) {
  check_same_dtype(op, argument, tensor, other_argument, other);
  check_same_device(op, argument, tensor, other_argument, other);
  check_same_shape(op, argument, tensor, other_argument, other);
}

}  // namespace opgraft
