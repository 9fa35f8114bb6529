// Arguments of the ops over rows: checks, and tensors seen as rows without a copy where their strides allow it.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "support/check.h"
#include "support/dispatch.h"
#include "support/fp8_rule.h"
#include "support/tensor.h"

namespace opgraft {

struct RowShape {
  int64_t rows = 1;
  int64_t length = 0;
};

inline RowShape row_shape(const char* op, const char* argument, const Tensor& tensor) {
  check_floating(op, argument, tensor);
  check(tensor.dim() > 0, op, argument, " has no dimension, expected rows along its last one");
  RowShape shape{1, tensor.size(tensor.dim() - 1)};
  for (int64_t d = 0; d + 1 < tensor.dim(); ++d) shape.rows *= tensor.size(d);
  return shape;
}

// One weight an element of a row, in any floating dtype.
inline void check_row_weight(const char* op, const std::optional<Tensor>& weight, const Tensor& x, RowShape shape) {
  if (!weight) return;
  check_floating(op, "weight", *weight);
  check_same_device(op, "weight", *weight, "x", x);
  check(weight->dim() == 1 && weight->size(0) == shape.length, op, "weight has shape ", shape_text(*weight),
        ", expected one value an element of a row, (", shape.length, ",)");
}

inline RowShape check_rms_norm(const char* op, const Tensor& x, const std::optional<Tensor>& weight) {
  const RowShape shape = row_shape(op, "x", x);
  check_row_weight(op, weight, x, shape);
  return shape;
}

// The distance of two rows where elements of a row are neighbours and rows lie at one distance, as in a slice of
// packed projections.
inline std::optional<int64_t> row_stride(const Tensor& tensor) {
  const int64_t dims = tensor.dim();
  const int64_t length = tensor.size(dims - 1);
  if (length > 1 && tensor.stride(dims - 1) != 1) return std::nullopt;
  std::optional<int64_t> stride;
  int64_t next = 0;
  for (int64_t d = dims - 2; d >= 0; --d) {
    if (tensor.size(d) == 1) continue;
    if (!stride) {
      stride = tensor.stride(d);
    } else if (tensor.stride(d) != next) {
      return std::nullopt;
    }
    next = tensor.stride(d) * tensor.size(d);
  }
  return stride ? stride : length;
}

// A tensor whose rows can be walked: itself, or a contiguous copy.
struct RowView {
  Tensor tensor;
  int64_t stride;
};

inline RowView as_rows(const Tensor& tensor) {
  if (const std::optional<int64_t> stride = row_stride(tensor)) return {tensor, *stride};
  return {torch::stable::contiguous(tensor), tensor.size(tensor.dim() - 1)};
}

// Kernels read a weight of x's dtype or of the dtype in which they compute; others are converted.
inline std::optional<Tensor> readable_weight(const std::optional<Tensor>& weight, const Tensor& x) {
  if (!weight) return std::nullopt;
  const ScalarType own = weight->scalar_type();
  const ScalarType wide = accumulate_type(x.scalar_type());
  const bool known = own == x.scalar_type() || own == wide;
  return as_contiguous(known ? *weight : torch::stable::to(*weight, wide));
}

// dispatch_row("op", x, weight, [&](auto tag, auto weight_tag) {...}): x's dtype, and the weight's, that of x or the
// dtype in which kernels compute.
template <typename Body>
inline void dispatch_row(const char* op, const Tensor& x, const std::optional<Tensor>& weight, const Body& body) {
  dispatch_floating(op, x, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (weight && weight->scalar_type() != x.scalar_type()) {
      body(tag, Type<Accumulate<T>>{});
    } else {
      body(tag, tag);
    }
  });
}

struct Fp8Shape {
  int64_t blocks = 1;  // scales a row
  Fp8Rule rule;
  bool by_block = false;
};

inline Fp8Shape check_fp8(const char* op, RowShape shape, int64_t block, std::optional<double> bound,
                          bool power_of_two) {
  check(block == 0 || block == FP8_BLOCK, op, "block is ", block, ", expected 0 (a scale a row) or ", FP8_BLOCK);
  const float limit = bound ? static_cast<float>(*bound) : INFINITY;
  check(!bound || (limit >= 0x1p-126f && limit < INFINITY), op, "scale_upper_bound is ", bound ? *bound : 0.0,
        ", expected a number from 2^-126 to the largest float32, or None");
  Fp8Shape found;
  found.by_block = block != 0;
  found.blocks = found.by_block ? (shape.length + FP8_BLOCK - 1) / FP8_BLOCK : 1;
  found.rule = {bound && power_of_two ? power_of_two_from_below(limit) : limit, power_of_two};
  return found;
}

// x's shape with the last dimension replaced.
inline std::vector<int64_t> with_last(const Tensor& x, int64_t last) {
  std::vector<int64_t> sizes = sizes_without(x, -1);
  sizes.push_back(last);
  return sizes;
}

}  // namespace opgraft
