// Errors as sentences: the op, the argument, what was given, what is wanted.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace opgraft {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// What a message may say of a tensor, put into words only where a check fails.
struct ShapeText {
  const Tensor& tensor;
};
struct DeviceText {
  const Tensor& tensor;
};
struct SizesText {
  std::initializer_list<int64_t> sizes;
};

inline ShapeText shape_text(const Tensor& tensor) { return {tensor}; }
inline DeviceText device_text(const Tensor& tensor) { return {tensor}; }

// Words are joined without streams: a process may hold a second, statically linked libstdc++, whose locales a stream of
// the first one would take for its own.
inline void append(std::string& text, const char* words) { text += words; }
inline void append(std::string& text, const std::string& words) { text += words; }

template <typename Number>
  requires std::is_arithmetic_v<Number>
inline void append(std::string& text, Number number) {
  text += std::to_string(number);
}

template <typename Size>
inline void append_sizes(std::string& text, int64_t count, const Size& size) {
  text += "(";
  for (int64_t i = 0; i < count; ++i) {
    if (i > 0) text += ", ";
    append(text, size(i));
  }
  text += count == 1 ? ",)" : ")";
}

inline void append(std::string& text, const ShapeText& shape) {
  append_sizes(text, shape.tensor.dim(), [&](int64_t dim) { return shape.tensor.size(dim); });
}

inline void append(std::string& text, const SizesText& sizes) {
  append_sizes(text, static_cast<int64_t>(sizes.sizes.size()), [&](int64_t dim) { return sizes.sizes.begin()[dim]; });
}

inline void append(std::string& text, const DeviceText& device) {
  if (device.tensor.is_cpu()) {
    text += "cpu";
  } else {
    text += device.tensor.is_cuda() ? "cuda:" : "device ";
    append(text, device.tensor.get_device_index());
  }
}

template <typename... Parts>
[[noreturn]] inline void fail(const char* op, const Parts&... parts) {
  std::string text = op;
  text += ": ";
  (append(text, parts), ...);
  throw std::runtime_error(text);
}

// check(condition, "gelu", "x has ", n, " dimensions, expected 2"): the words are only put together on failure.
template <typename... Parts>
inline void check(bool condition, const char* op, const Parts&... parts) {
  if (!condition) [[unlikely]] {
    fail(op, parts...);
  }
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
