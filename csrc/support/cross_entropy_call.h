// cross_entropy around its kernels, the same on every device: arguments checked and made readable, results allocated.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "support/cross_entropy_shape.h"

namespace opgraft {

// The arguments in the form that kernels read. Keeps alive what was copied.
struct CrossEntropyInputs {
  Tensor logits;
  Tensor target;
  std::optional<Tensor> weight;
  LogitRows layout;
  CrossEntropyOptions options;

  bool mean() const { return options.reduction == Reduction::MEAN; }
  bool wide_target() const { return target.scalar_type() == ScalarType::Long; }
};

struct CrossEntropyForward {
  CrossEntropyInputs in;
  Tensor losses;      // one a row
  Tensor lse;         // one a row
  Tensor statistics;  // maxima, then logarithms
  Tensor loss;        // the sum of the losses, or the losses themselves
  std::optional<Tensor> gradient;

  bool reduced() const { return in.options.reduction != Reduction::NONE; }
};

struct CrossEntropyBackward {
  CrossEntropyInputs in;
  Tensor statistics;
  std::optional<Tensor> grad_loss;  // one number, or one a row
  std::optional<Tensor> grad_lse;   // one a row
  Tensor gradient;

  bool per_row() const { return in.options.reduction == Reduction::NONE; }
};

inline CrossEntropyInputs cross_entropy_inputs(const char* op, const Tensor& logits, const Tensor& target,
                                               const std::optional<Tensor>& weight,
                                               const CrossEntropyOptions& options) {
  check_cross_entropy(op, logits, target, weight, options);
  const std::optional<LogitRows> folded = fold_rows(logits);
  return {folded ? logits : as_contiguous(logits), as_contiguous(target), as_contiguous(weight),
          folded ? *folded : dense_rows(logits), options};
}

inline CrossEntropyForward prepare_cross_entropy(const char* op, const Tensor& logits, const Tensor& target,
                                                 const std::optional<Tensor>& weight,
                                                 const CrossEntropyOptions& options, bool with_gradient) {
  CrossEntropyInputs in = cross_entropy_inputs(op, logits, target, weight, options);
  const ScalarType wide = accumulate_type(logits.scalar_type());
  std::vector<int64_t> both{2};
  for (int64_t d = 0; d < target.dim(); ++d) both.push_back(target.size(d));
  const Tensor losses = new_contiguous(logits, target.sizes(), wide);
  return {std::move(in),
          losses,
          new_contiguous(logits, target.sizes(), wide),
          new_contiguous(logits, both, wide),
          options.reduction == Reduction::NONE ? losses : new_contiguous(logits, {}, wide),
          with_gradient ? std::optional<Tensor>(new_contiguous_like(logits)) : std::nullopt};
}

inline CrossEntropyBackward prepare_cross_entropy_backward(const char* op, const Tensor& logits, const Tensor& target,
                                                           const std::optional<Tensor>& weight,
                                                           const Tensor& statistics,
                                                           const std::optional<Tensor>& grad_loss,
                                                           const std::optional<Tensor>& grad_lse,
                                                           const CrossEntropyOptions& options) {
  CrossEntropyInputs in = cross_entropy_inputs(op, logits, target, weight, options);
  check_row_statistics(op, statistics, logits);
  check_loss_gradient(op, "grad_loss", grad_loss, logits, target, options.reduction == Reduction::NONE);
  check_loss_gradient(op, "grad_lse", grad_lse, logits, target, true);
  return {std::move(in), as_contiguous(statistics), as_contiguous(grad_loss), as_contiguous(grad_lse),
          new_contiguous_like(logits)};
}

// The same into memory that holds the gradient for an incoming gradient of one.
inline CrossEntropyBackward prepare_cross_entropy_rescale(const char* op, const Tensor& gradient,
                                                          const Tensor& grad_loss, const Tensor& logits,
                                                          const Tensor& target, const std::optional<Tensor>& weight,
                                                          const Tensor& statistics,
                                                          const CrossEntropyOptions& options) {
  check_alike(op, "gradient", gradient, "logits", logits);
  check(gradient.is_contiguous(), op, "gradient is not contiguous, expected what cross_entropy_with_gradient gave");
  check(options.reduction != Reduction::NONE, op, "reduction is 0 (none), expected 1 (mean) or 2 (sum)");
  CrossEntropyInputs in = cross_entropy_inputs(op, logits, target, weight, options);
  check_row_statistics(op, statistics, logits);
  check_loss_gradient(op, "grad_loss", grad_loss, logits, target, false);
  return {std::move(in), as_contiguous(statistics), grad_loss, std::nullopt, gradient};
}

}  // namespace opgraft
