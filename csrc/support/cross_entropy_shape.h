// The checks, sizes and options that the CPU and the CUDA kernels of cross_entropy share.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>

#include "support/check.h"
#include "support/dispatch.h"
#include "support/tensor.h"

namespace opgraft {

// Columns of a row are counted in 32 bits, with room to round up.
constexpr int64_t MAX_CLASSES = int64_t(1) << 30;

enum class Reduction : int64_t { NONE = 0, MEAN = 1, SUM = 2 };

struct CrossEntropyOptions {
  int64_t ignore_index = -100;
  double label_smoothing = 0;
  double z_loss = 0;
  double softcap = 0;  // 0: none
  Reduction reduction = Reduction::MEAN;
};

// From the ops' own arguments.
inline CrossEntropyOptions cross_entropy_options(int64_t ignore_index, double label_smoothing, double z_loss,
                                                 double softcap, int64_t reduction) {
  return {ignore_index, label_smoothing, z_loss, softcap, static_cast<Reduction>(reduction)};
}

// Logits as rows of classes: two strides tell where a row begins, so that a shifted (batch, time, classes) view needs
// no copy. Strides are in elements.
struct LogitRows {
  int64_t rows = 1;
  int64_t classes = 0;
  int64_t inner = 1;  // rows of one block
  int64_t inner_stride = 0;
  int64_t outer_stride = 0;

  // A division of 64 bits costs a GPU as much as a hundred logits.
  constexpr int64_t begin(int64_t row) const {
    if (row < inner) return row * inner_stride;
    return row / inner * outer_stride + row % inner * inner_stride;
  }
};

// Where the leading dimensions fold into two strides and classes are dense; otherwise the caller copies.
inline std::optional<LogitRows> fold_rows(const Tensor& logits) {
  const int64_t dims = logits.dim();
  const int64_t classes = logits.size(dims - 1);
  if (logits.stride(dims - 1) != 1 && classes > 1) return std::nullopt;
  struct Fold {
    int64_t count = 1;
    int64_t stride = 0;
  } inner, outer;
  // From the innermost leading dimension outwards. A dimension of size one has no say.
  for (int64_t d = dims - 2; d >= 0; --d) {
    const int64_t size = logits.size(d);
    const int64_t stride = logits.stride(d);
    if (size == 1) continue;
    if (inner.count == 1) {
      inner = {size, stride};
    } else if (outer.count == 1 && stride == inner.stride * inner.count) {
      inner.count *= size;
    } else if (outer.count == 1) {
      outer = {size, stride};
    } else if (stride == outer.stride * outer.count) {
      outer.count *= size;
    } else {
      return std::nullopt;
    }
  }
  return LogitRows{inner.count * outer.count, classes, inner.count, inner.stride, outer.stride};
}

inline LogitRows dense_rows(const Tensor& logits) {
  const int64_t classes = logits.size(logits.dim() - 1);
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < logits.dim(); ++d) rows *= logits.size(d);
  return {rows, classes, std::max<int64_t>(rows, 1), classes, 0};
}

inline void check_cross_entropy(const char* op, const Tensor& logits, const Tensor& target,
                                const std::optional<Tensor>& weight, const CrossEntropyOptions& options) {
  check_floating(op, "logits", logits);
  check(logits.dim() >= 1, op, "logits has no dimension of classes, expected (..., classes)");
  const int64_t classes = logits.size(logits.dim() - 1);
  check(classes >= 1 && classes < MAX_CLASSES, op, "logits has shape ", shape_text(logits), ", expected 1 to ",
        MAX_CLASSES - 1, " classes");
  check(target.scalar_type() == ScalarType::Long || target.scalar_type() == ScalarType::Int, op, "target has dtype ",
        torch::headeronly::toString(target.scalar_type()), ", expected Long or Int");
  check_same_device(op, "target", target, "logits", logits);
  bool fits = target.dim() == logits.dim() - 1;
  for (int64_t d = 0; fits && d < target.dim(); ++d) fits = target.size(d) == logits.size(d);
  check(fits, op, "target has shape ", shape_text(target), ", expected that of logits, ", shape_text(logits),
        ", without its last dimension");
  if (weight) {
    const ScalarType wide = accumulate_type(logits.scalar_type());
    check(weight->scalar_type() == wide, op, "weight has dtype ", torch::headeronly::toString(weight->scalar_type()),
          ", expected ", torch::headeronly::toString(wide));
    check_same_device(op, "weight", *weight, "logits", logits);
    check(weight->dim() == 1 && weight->size(0) == classes, op, "weight has shape ", shape_text(*weight),
          ", expected one value a class, (", classes, ",)");
  }
  check(options.label_smoothing >= 0 && options.label_smoothing <= 1, op, "label_smoothing is ",
        options.label_smoothing, ", expected 0 to 1");
  check(options.softcap >= 0 && std::isfinite(options.softcap), op, "softcap is ", options.softcap,
        ", expected a positive number, or 0 for none");
  const auto reduction = static_cast<int64_t>(options.reduction);
  check(reduction >= 0 && reduction <= 2, op, "reduction is ", reduction, ", expected 0 (none), 1 (mean) or 2 (sum)");
}

// The two numbers kept of every row, (2, ...): its maximum and the logarithm of the sum relative to it.
inline void check_row_statistics(const char* op, const Tensor& statistics, const Tensor& logits) {
  const ScalarType wide = accumulate_type(logits.scalar_type());
  bool fits = statistics.scalar_type() == wide && statistics.dim() == logits.dim() && statistics.size(0) == 2;
  for (int64_t d = 1; fits && d < statistics.dim(); ++d) fits = statistics.size(d) == logits.size(d - 1);
  check(fits, op, "statistics has shape ", shape_text(statistics), ", expected (2, ...) with the rows of logits, ",
        shape_text(logits), ", in the type that sums are taken in");
  check_same_device(op, "statistics", statistics, "logits", logits);
}

// The incoming gradient of the loss or of lse: one number, or one a row.
inline void check_loss_gradient(const char* op, const char* name, const std::optional<Tensor>& grad,
                                const Tensor& logits, const Tensor& target, bool per_row) {
  if (!grad) return;
  const ScalarType wide = accumulate_type(logits.scalar_type());
  check(grad->scalar_type() == wide, op, name, " has dtype ", torch::headeronly::toString(grad->scalar_type()),
        ", expected ", torch::headeronly::toString(wide));
  check_same_device(op, name, *grad, "logits", logits);
  if (per_row) {
    check_same_shape(op, name, *grad, "target", target);
  } else {
    check(grad->dim() == 0, op, name, " has shape ", shape_text(*grad), ", expected one number");
  }
}

}  // namespace opgraft
