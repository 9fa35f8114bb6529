// Cross entropy on the CPU: checks, allocation, the row's few numbers and torch's thread pool around
// cross_entropy_kernel.h. The formulas are those of cuda/cross_entropy.cuh.
#include <torch/csrc/stable/library.h>

#include "cpu/cross_entropy_kernel.h"
#include "ops.h"
#include "support/check.h"
#include "support/cross_entropy_shape.h"
#include "support/dispatch.h"
#include "support/tensor.h"

namespace opgraft::cpu {
namespace {

ScalarType wide_type(const Tensor& logits) {
  return logits.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// The inputs in the form that the loops read. Keeps alive what was copied.
struct Inputs {
  Tensor logits;
  Tensor target;
  OptionalTensor weight;
  LogitRows layout;

  int64_t target_of(int64_t row) const {
    return target.scalar_type() == ScalarType::Long ? target.const_data_ptr<int64_t>()[row]
                                                    : target.const_data_ptr<int32_t>()[row];
  }
};

Inputs read_inputs(const char* op, const Tensor& logits, const Tensor& target, const OptionalTensor& weight,
                   const CrossEntropyOptions& options) {
  check_cross_entropy(op, logits, target, weight, options);
  const auto folded = fold_rows(logits);
  Inputs inputs{folded ? logits : as_contiguous(logits), as_contiguous(target), as_contiguous(weight),
                folded ? *folded : dense_rows(logits)};
  for (int64_t row = 0; row < inputs.layout.rows; ++row) {
    const int64_t found = inputs.target_of(row);
    check(found == options.ignore_index || (found >= 0 && found < inputs.layout.classes), op, "target is ", found,
          " in row ", row, ", expected a class from 0 to ", inputs.layout.classes - 1, " or ignore_index, ",
          options.ignore_index);
  }
  return inputs;
}

// What multiplies losses and gradients of all rows: the mean's denominators, and the mean class weight for smoothing.
struct Scales {
  double loss = 1;
  double z = 1;
  double mean_weight = 1;
};

template <typename A>
Scales measure(const Inputs& inputs, const CrossEntropyOptions& options) {
  Scales scales;
  const A* const weight = optional_data<A>(inputs.weight);
  if (options.reduction == Reduction::MEAN) {
    double kept = 0, weights = 0;
    for (int64_t row = 0; row < inputs.layout.rows; ++row) {
      const int64_t target = inputs.target_of(row);
      if (target == options.ignore_index) continue;
      kept += 1;
      weights += weight == nullptr ? 1 : static_cast<double>(weight[target]);
    }
    scales.loss = 1 / weights;
    scales.z = 1 / kept;
  }
  if (weight != nullptr) {
    double all = 0;
    for (int64_t c = 0; c < inputs.layout.classes; ++c) all += weight[c];
    scales.mean_weight = all / static_cast<double>(inputs.layout.classes);
  }
  return scales;
}

template <typename A>
RowOptions<A> row_options(const Inputs& inputs, const CrossEntropyOptions& options) {
  return {optional_data<A>(inputs.weight), static_cast<A>(options.label_smoothing), static_cast<A>(options.softcap)};
}

template <typename A>
double row_weight(const Inputs& inputs, int64_t target) {
  return inputs.weight ? static_cast<double>(optional_data<A>(inputs.weight)[target]) : 1;
}

template <typename A>
RowFactors<A> row_factors(const Inputs& inputs, const CrossEntropyOptions& options, const Scales& scales,
                          int64_t target, double lse, double grad_loss, double grad_lse) {
  const double scaled = grad_loss * scales.loss;
  const double b = scaled * (1 - options.label_smoothing) * row_weight<A>(inputs, target);
  const double e = scaled * options.label_smoothing / static_cast<double>(inputs.layout.classes);
  const double a = b + scaled * options.label_smoothing * scales.mean_weight +
                   2 * grad_loss * scales.z * options.z_loss * lse + grad_lse;
  return {static_cast<A>(a), static_cast<A>(b), static_cast<A>(e), target};
}

template <typename A>
double row_loss(const Inputs& inputs, const CrossEntropyOptions& options, const Scales& scales, int64_t target,
                const RowSums<A>& row, double log_sum, double picked) {
  if (target == options.ignore_index) return 0;
  const double maximum = row.maximum;
  double loss = (1 - options.label_smoothing) * row_weight<A>(inputs, target) * ((maximum - picked) + log_sum);
  if (options.label_smoothing != 0) {
    const double below = row.below / static_cast<double>(inputs.layout.classes);
    loss += options.label_smoothing * (scales.mean_weight * log_sum + below);
  }
  const double lse = maximum + log_sum;
  return loss * scales.loss + options.z_loss * lse * lse * scales.z;
}

int64_t row_grain(int64_t classes) { return std::max<int64_t>(1, GRAIN_ELEMENTS / classes); }

template <typename T>
void zero_row(T* gradient, int64_t classes) {
  std::fill_n(gradient, classes, narrow<T>(Accumulate<T>(0)));
}

template <typename T, typename A = Accumulate<T>>
void forward_rows(const Inputs& inputs, const CrossEntropyOptions& options, const Scales& scales, A* losses, A* lses,
                  A* statistics, T* gradient) {
  const RowOptions<A> given = row_options<A>(inputs, options);
  const int64_t rows = inputs.layout.rows, classes = inputs.layout.classes;
  const T* const logits = static_cast<const T*>(inputs.logits.const_data_ptr());
  parallel_for(0, rows, row_grain(classes), [&](int64_t first, int64_t last) {
    RowScratch<A> scratch;
    scratch.shifts.resize((classes + BLOCK - 1) / BLOCK);
    const bool general = given.general();
    if (general) scratch.seen.resize(classes);
    if (gradient != nullptr && (general || !std::is_same_v<T, A>)) scratch.exponentials.resize(classes);
    for (int64_t row = first; row < last; ++row) {
      const T* const x = logits + inputs.layout.begin(row);
      T* const out = gradient == nullptr ? nullptr : gradient + row * classes;
      A* exponentials = scratch.exponentials.empty() ? nullptr : scratch.exponentials.data();
      if constexpr (std::is_same_v<T, A>) {
        if (exponentials == nullptr) exponentials = out;
      }
      A* const seen = general ? scratch.seen.data() : nullptr;
      RowSums<A> sums;
      sum_row(x, classes, given, exponentials, seen, scratch.shifts.data(), sums);
      const double log_sum = std::log(sums.sum);
      const double lse = static_cast<double>(sums.maximum) + log_sum;
      const int64_t target = inputs.target_of(row);
      const bool kept = target != options.ignore_index;
      const double picked = !kept ? 0 : general ? seen[target] : static_cast<double>(widen(x[target]));
      losses[row] = static_cast<A>(row_loss(inputs, options, scales, target, sums, log_sum, picked));
      lses[row] = static_cast<A>(lse);
      statistics[row] = std::isnan(log_sum) ? static_cast<A>(log_sum) : sums.maximum;
      statistics[rows + row] = static_cast<A>(log_sum);
      if (out == nullptr) continue;
      if (!kept) {
        zero_row(out, classes);
        continue;
      }
      const RowFactors<A> factors = row_factors<A>(inputs, options, scales, target, lse, 1, 0);
      scale_row(out, classes, given, sums, factors, exponentials, seen, scratch.shifts.data());
    }
  });
}

template <typename T, typename A = Accumulate<T>>
void backward_rows(const Inputs& inputs, const CrossEntropyOptions& options, const Scales& scales,
                   const OptionalTensor& grad_loss, const OptionalTensor& grad_lse, const A* statistics, T* gradient) {
  const RowOptions<A> given = row_options<A>(inputs, options);
  const int64_t rows = inputs.layout.rows, classes = inputs.layout.classes;
  const T* const logits = static_cast<const T*>(inputs.logits.const_data_ptr());
  const A* const loss_gradient = optional_data<A>(grad_loss);
  const A* const lse_gradient = optional_data<A>(grad_lse);
  const bool per_row = options.reduction == Reduction::NONE;
  parallel_for(0, rows, row_grain(classes), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const double from_loss = loss_gradient == nullptr ? 0 : loss_gradient[per_row ? row : 0];
      const double from_lse = lse_gradient == nullptr ? 0 : lse_gradient[row];
      const int64_t target = inputs.target_of(row);
      T* const out = gradient + row * classes;
      RowFactors<A> factors;
      factors.a = static_cast<A>(from_lse);
      if (target != options.ignore_index) {
        const double lse = static_cast<double>(statistics[row]) + static_cast<double>(statistics[rows + row]);
        factors = row_factors<A>(inputs, options, scales, target, lse, from_loss, from_lse);
      } else if (from_lse == 0) {
        zero_row(out, classes);
        continue;
      }
      backward_row(logits + inputs.layout.begin(row), out, classes, given, statistics[row], statistics[rows + row],
                   factors);
    }
  });
}

struct Results {
  Tensor loss;
  Tensor lse;
  Tensor statistics;
};

Results forward(const char* op, const Tensor& logits, const Tensor& target, const OptionalTensor& weight,
                const CrossEntropyOptions& options, Tensor* gradient) {
  const Inputs inputs = read_inputs(op, logits, target, weight, options);
  const ScalarType wide = wide_type(logits);
  std::vector<int64_t> sizes{2};
  for (int64_t d = 0; d < target.dim(); ++d) sizes.push_back(target.size(d));
  Tensor per_row = new_contiguous(logits, target.sizes(), wide);
  Tensor lse = new_contiguous(logits, target.sizes(), wide);
  Tensor statistics = new_contiguous(logits, sizes, wide);
  if (options.reduction == Reduction::NONE) {
    dispatch_floating(op, logits, [&](auto tag) {
      using T = typename decltype(tag)::type;
      using A = Accumulate<T>;
      forward_rows<T>(inputs, options, measure<A>(inputs, options), per_row.mutable_data_ptr<A>(),
                      lse.mutable_data_ptr<A>(), statistics.mutable_data_ptr<A>(),
                      gradient == nullptr ? nullptr : gradient->mutable_data_ptr<T>());
    });
    return {per_row, lse, statistics};
  }
  Tensor loss = new_contiguous(logits, {}, wide);
  dispatch_floating(op, logits, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = Accumulate<T>;
    const Scales scales = measure<A>(inputs, options);
    A* const losses = per_row.mutable_data_ptr<A>();
    forward_rows<T>(inputs, options, scales, losses, lse.mutable_data_ptr<A>(), statistics.mutable_data_ptr<A>(),
                    gradient == nullptr ? nullptr : gradient->mutable_data_ptr<T>());
    double sum = 0;
    for (int64_t row = 0; row < inputs.layout.rows; ++row) sum += losses[row];
    // The mean of no rows is NaN, as torch has it.
    *loss.mutable_data_ptr<A>() = std::isinf(scales.z) ? static_cast<A>(NAN) : static_cast<A>(sum);
  });
  return {loss, lse, statistics};
}

void check_gradient(const char* op, const char* name, const OptionalTensor& grad, const Tensor& logits,
                    const Tensor& target, bool per_row) {
  if (!grad) return;
  check(grad->scalar_type() == wide_type(logits), op, name, " has dtype ",
        torch::headeronly::toString(grad->scalar_type()), ", expected ",
        torch::headeronly::toString(wide_type(logits)));
  check_same_device(op, name, *grad, "logits", logits);
  if (per_row) {
    check_same_shape(op, name, *grad, "target", target);
  } else {
    check(grad->dim() == 0, op, name, " has shape ", shape_text(*grad), ", expected one number");
  }
}

void backward_into(const char* op, Tensor& gradient, const OptionalTensor& grad_loss, const OptionalTensor& grad_lse,
                   const Tensor& logits, const Tensor& target, const OptionalTensor& weight, const Tensor& statistics,
                   const CrossEntropyOptions& options) {
  const Inputs inputs = read_inputs(op, logits, target, weight, options);
  check_row_statistics(op, statistics, logits);
  const Tensor kept = as_contiguous(statistics);
  const OptionalTensor loss_gradient = as_contiguous(grad_loss), lse_gradient = as_contiguous(grad_lse);
  dispatch_floating(op, logits, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = Accumulate<T>;
    backward_rows<T>(inputs, options, measure<A>(inputs, options), loss_gradient, lse_gradient,
                     kept.const_data_ptr<A>(), gradient.mutable_data_ptr<T>());
  });
}

CrossEntropyOptions options_of(int64_t ignore_index, double label_smoothing, double z_loss, double softcap,
                               int64_t reduction) {
  return {ignore_index, label_smoothing, z_loss, softcap, static_cast<Reduction>(reduction)};
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> cross_entropy(const Tensor& logits, const Tensor& target,
                                                 const OptionalTensor& weight, int64_t ignore_index,
                                                 double label_smoothing, double z_loss, double softcap,
                                                 int64_t reduction) {
  const auto options = options_of(ignore_index, label_smoothing, z_loss, softcap, reduction);
  Results found = forward("cross_entropy", logits, target, weight, options, nullptr);
  return {found.loss, found.lse, found.statistics};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> cross_entropy_with_gradient(const Tensor& logits, const Tensor& target,
                                                                       const OptionalTensor& weight,
                                                                       int64_t ignore_index, double label_smoothing,
                                                                       double z_loss, double softcap,
                                                                       int64_t reduction) {
  const auto options = options_of(ignore_index, label_smoothing, z_loss, softcap, reduction);
  check_floating("cross_entropy_with_gradient", "logits", logits);
  Tensor gradient = new_contiguous_like(logits);
  Results found = forward("cross_entropy_with_gradient", logits, target, weight, options, &gradient);
  return {found.loss, found.lse, found.statistics, gradient};
}

Tensor cross_entropy_backward(const Tensor& logits, const Tensor& target, const OptionalTensor& weight,
                              const Tensor& statistics, const OptionalTensor& grad_loss, const OptionalTensor& grad_lse,
                              int64_t ignore_index, double label_smoothing, double z_loss, double softcap,
                              int64_t reduction) {
  const char* const op = "cross_entropy_backward";
  check_floating(op, "logits", logits);
  check_gradient(op, "grad_loss", grad_loss, logits, target, reduction == 0);
  check_gradient(op, "grad_lse", grad_lse, logits, target, true);
  Tensor gradient = new_contiguous_like(logits);
  backward_into(op, gradient, grad_loss, grad_lse, logits, target, weight, statistics,
                options_of(ignore_index, label_smoothing, z_loss, softcap, reduction));
  return gradient;
}

void cross_entropy_rescale_(Tensor gradient, const Tensor& grad_loss, const Tensor& logits, const Tensor& target,
                            const OptionalTensor& weight, const Tensor& statistics, int64_t ignore_index,
                            double label_smoothing, double z_loss, double softcap, int64_t reduction) {
  const char* const op = "cross_entropy_rescale_";
  check_alike(op, "gradient", gradient, "logits", logits);
  check_gradient(op, "grad_loss", grad_loss, logits, target, false);
  const bool one = logits.scalar_type() == ScalarType::Double ? *grad_loss.const_data_ptr<double>() == 1.0
                                                              : *grad_loss.const_data_ptr<float>() == 1.0f;
  if (!one) {
    backward_into(op, gradient, grad_loss, std::nullopt, logits, target, weight, statistics,
                  options_of(ignore_index, label_smoothing, z_loss, softcap, reduction));
  }
}

}  // namespace opgraft::cpu

STABLE_TORCH_LIBRARY_IMPL(opgraft, CPU, m) {
  m.impl("cross_entropy", TORCH_BOX(&opgraft::cpu::cross_entropy));
  m.impl("cross_entropy_with_gradient", TORCH_BOX(&opgraft::cpu::cross_entropy_with_gradient));
  m.impl("cross_entropy_backward", TORCH_BOX(&opgraft::cpu::cross_entropy_backward));
  m.impl("cross_entropy_rescale_", TORCH_BOX(&opgraft::cpu::cross_entropy_rescale_));
}
