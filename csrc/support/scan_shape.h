// A scan's tensor as (outer, length, inner): the dimension that is walked, what is before it and what is after it.
#pragma once

#include <cstdint>
#include <optional>

#include "support/check.h"

namespace opgraft {

struct ScanShape {
  int64_t outer = 1;
  int64_t length = 1;
  int64_t inner = 1;

  constexpr int64_t rows() const { return outer * inner; }
};

inline ScanShape scan_shape(const char* op, const char* argument, const Tensor& tensor, int64_t dim) {
  const int64_t dims = tensor.dim();
  check(dims > 0, op, argument, " has no dimension to scan over, expected at least one");
  check(dim >= -dims && dim < dims, op, "dim is ", dim, ", expected a dimension of ", argument, ", which has ", dims);
  const int64_t walked = dim < 0 ? dim + dims : dim;
  ScanShape shape;
  for (int64_t d = 0; d < dims; ++d) {
    (d < walked ? shape.outer : d == walked ? shape.length : shape.inner) *= tensor.size(d);
  }
  return shape;
}

// The shape of one step: the tensor's without the dimension that is walked.
inline void check_step_shape(const char* op, const char* argument, const Tensor& step, const char* whole_argument,
                             const Tensor& whole, int64_t dim) {
  const int64_t walked = dim < 0 ? dim + whole.dim() : dim;
  bool same = step.dim() == whole.dim() - 1;
  for (int64_t d = 0; same && d < step.dim(); ++d) {
    same = step.size(d) == whole.size(d < walked ? d : d + 1);
  }
  check(same, op, argument, " has shape ", shape_text(step), ", expected that of ", whole_argument, ", ",
        shape_text(whole), ", without dimension ", walked);
}

// decay and `whole` (the updates or the states) alike, and an initial state that fits them.
inline ScanShape check_linear_scan(const char* op, const Tensor& decay, const char* whole_argument, const Tensor& whole,
                                   const std::optional<Tensor>& initial, int64_t dim) {
  check_floating(op, "decay", decay);
  check_alike(op, whole_argument, whole, "decay", decay);
  const ScanShape shape = scan_shape(op, "decay", decay, dim);
  if (initial) {
    check_same_dtype(op, "initial", *initial, "decay", decay);
    check_same_device(op, "initial", *initial, "decay", decay);
    check_step_shape(op, "initial", *initial, "decay", decay, dim);
  }
  return shape;
}

}  // namespace opgraft
