// Cross entropy on the CPU: the row's few numbers and torch's thread pool around cross_entropy_kernel.h. The formulas
// are those of cuda/cross_entropy.cuh.
#include <torch/csrc/stable/library.h>

#include "cpu/cross_entropy_kernel.h"
#include "cpu/fresh_pages.h"
#include "ops.h"
#include "support/cross_entropy_call.h"

namespace opgraft::cpu {
namespace {

int64_t target_of(const CrossEntropyInputs& in, int64_t row) {
  return in.wide_target() ? in.target.const_data_ptr<int64_t>()[row] : in.target.const_data_ptr<int32_t>()[row];
}

void check_targets(const char* op, const CrossEntropyInputs& in) {
  for (int64_t row = 0; row < in.layout.rows; ++row) {
    const int64_t found = target_of(in, row);
    check(found == in.options.ignore_index || (found >= 0 && found < in.layout.classes), op, "target is ", found,
          " in row ", row, ", expected a class from 0 to ", in.layout.classes - 1, " or ignore_index, ",
          in.options.ignore_index);
  }
}

// What multiplies losses and gradients of all rows: the mean's denominators, and the mean class weight for smoothing.
struct Scales {
  double loss = 1;
  double z = 1;
  double mean_weight = 1;
};

template <typename A>
Scales measure(const CrossEntropyInputs& in) {
  Scales scales;
  const A* const weight = optional_data<A>(in.weight);
  if (in.mean()) {
    double kept = 0, weights = 0;
    for (int64_t row = 0; row < in.layout.rows; ++row) {
      const int64_t target = target_of(in, row);
      if (target == in.options.ignore_index) continue;
      kept += 1;
      weights += weight == nullptr ? 1 : static_cast<double>(weight[target]);
    }
    scales.loss = 1 / weights;
    scales.z = 1 / kept;
  }
  if (weight != nullptr) {
    double all = 0;
    for (int64_t c = 0; c < in.layout.classes; ++c) all += weight[c];
    scales.mean_weight = all / static_cast<double>(in.layout.classes);
  }
  return scales;
}

template <typename A>
RowOptions<A> row_options(const CrossEntropyInputs& in) {
  return {optional_data<A>(in.weight), static_cast<A>(in.options.label_smoothing), static_cast<A>(in.options.softcap)};
}

template <typename A>
double row_weight(const CrossEntropyInputs& in, int64_t target) {
  return in.weight ? static_cast<double>(optional_data<A>(in.weight)[target]) : 1;
}

template <typename A>
RowFactors<A> row_factors(const CrossEntropyInputs& in, const Scales& scales, int64_t target, double lse,
                          double grad_loss, double grad_lse) {
  const double scaled = grad_loss * scales.loss;
  const double b = scaled * (1 - in.options.label_smoothing) * row_weight<A>(in, target);
  const double e = scaled * in.options.label_smoothing / static_cast<double>(in.layout.classes);
  const double a = b + scaled * in.options.label_smoothing * scales.mean_weight +
                   2 * grad_loss * scales.z * in.options.z_loss * lse + grad_lse;
  return {static_cast<A>(a), static_cast<A>(b), static_cast<A>(e), target};
}

template <typename A>
double row_loss(const CrossEntropyInputs& in, const Scales& scales, int64_t target, const RowSums<A>& row,
                double log_sum, double picked) {
  if (target == in.options.ignore_index) return 0;
  const double maximum = row.maximum;
  double loss = (1 - in.options.label_smoothing) * row_weight<A>(in, target) * ((maximum - picked) + log_sum);
  if (in.options.label_smoothing != 0) {
    const double below = row.below / static_cast<double>(in.layout.classes);
    loss += in.options.label_smoothing * (scales.mean_weight * log_sum + below);
  }
  const double lse = maximum + log_sum;
  return loss * scales.loss + in.options.z_loss * lse * lse * scales.z;
}

int64_t row_grain(int64_t classes) { return std::max<int64_t>(1, GRAIN_ELEMENTS / classes); }

template <typename T>
void zero_row(T* gradient, int64_t classes) {
  std::fill_n(gradient, classes, narrow<T>(Accumulate<T>(0)));
}

// The pages of rows from `first` to `last` of a gradient; none where there is no gradient.
template <typename T>
FreshPages pages_of(T* gradient, const CrossEntropyInputs& in, int64_t first, int64_t last) {
  const int64_t classes = in.layout.classes;
  if (gradient == nullptr) return FreshPages(nullptr, nullptr, 0);
  return FreshPages(gradient + first * classes, gradient + last * classes,
                    in.layout.rows * classes * static_cast<int64_t>(sizeof(T)));
}

template <typename T, typename A = Accumulate<T>>
void forward_rows(const CrossEntropyInputs& in, const Scales& scales, A* losses, A* lses, A* statistics, T* gradient) {
  const RowOptions<A> given = row_options<A>(in);
  const int64_t rows = in.layout.rows, classes = in.layout.classes;
  const T* const logits = static_cast<const T*>(in.logits.const_data_ptr());
  parallel_for(0, rows, row_grain(classes), [&](int64_t first, int64_t last) {
    RowScratch<A> scratch;
    scratch.shifts.resize((classes + BLOCK - 1) / BLOCK);
    const bool general = given.general();
    if (general) scratch.seen.resize(classes);
    if (gradient != nullptr && (general || !std::is_same_v<T, A>)) scratch.exponentials.resize(classes);
    FreshPages pages = pages_of(gradient, in, first, last);
    for (int64_t row = first; row < last; ++row) {
      const T* const x = logits + in.layout.begin(row);
      T* const out = gradient == nullptr ? nullptr : gradient + row * classes;
      if (out != nullptr) pages.reach(out + classes);
      A* exponentials = scratch.exponentials.empty() ? nullptr : scratch.exponentials.data();
      if constexpr (std::is_same_v<T, A>) {
        if (exponentials == nullptr) exponentials = out;
      }
      A* const seen = general ? scratch.seen.data() : nullptr;
      RowSums<A> sums;
      sum_row(x, classes, given, exponentials, seen, scratch.shifts.data(), sums);
      const double log_sum = std::log(sums.sum);
      const double lse = static_cast<double>(sums.maximum) + log_sum;
      const int64_t target = target_of(in, row);
      const bool kept = target != in.options.ignore_index;
      const double picked = !kept ? 0 : general ? seen[target] : static_cast<double>(widen(x[target]));
      losses[row] = static_cast<A>(row_loss(in, scales, target, sums, log_sum, picked));
      lses[row] = static_cast<A>(lse);
      statistics[row] = std::isnan(log_sum) ? static_cast<A>(log_sum) : sums.maximum;
      statistics[rows + row] = static_cast<A>(log_sum);
      if (out == nullptr) continue;
      if (!kept) {
        zero_row(out, classes);
        continue;
      }
      const RowFactors<A> factors = row_factors<A>(in, scales, target, lse, 1, 0);
      scale_row(out, classes, given, sums, factors, exponentials, seen, scratch.shifts.data());
    }
  });
}

template <typename T, typename A = Accumulate<T>>
void backward_rows(CrossEntropyBackward& call, const Scales& scales) {
  const CrossEntropyInputs& in = call.in;
  const RowOptions<A> given = row_options<A>(in);
  const int64_t rows = in.layout.rows, classes = in.layout.classes;
  const T* const logits = static_cast<const T*>(in.logits.const_data_ptr());
  const A* const statistics = call.statistics.const_data_ptr<A>();
  const A* const loss_gradient = optional_data<A>(call.grad_loss);
  const A* const lse_gradient = optional_data<A>(call.grad_lse);
  T* const gradient = call.gradient.mutable_data_ptr<T>();
  parallel_for(0, rows, row_grain(classes), [&](int64_t first, int64_t last) {
    FreshPages pages = pages_of(gradient, in, first, last);
    for (int64_t row = first; row < last; ++row) {
      const double from_loss = loss_gradient == nullptr ? 0 : loss_gradient[call.per_row() ? row : 0];
      const double from_lse = lse_gradient == nullptr ? 0 : lse_gradient[row];
      const int64_t target = target_of(in, row);
      T* const out = gradient + row * classes;
      pages.reach(out + classes);
      RowFactors<A> factors;
      factors.a = static_cast<A>(from_lse);
      if (target != in.options.ignore_index) {
        const double lse = static_cast<double>(statistics[row]) + static_cast<double>(statistics[rows + row]);
        factors = row_factors<A>(in, scales, target, lse, from_loss, from_lse);
      } else if (from_lse == 0) {
        zero_row(out, classes);
        continue;
      }
      backward_row(logits + in.layout.begin(row), out, classes, given, statistics[row], statistics[rows + row],
                   factors);
    }
  });
}

void forward(const char* op, CrossEntropyForward& call) {
  check_targets(op, call.in);
  dispatch_floating(op, call.in.logits, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = Accumulate<T>;
    const Scales scales = measure<A>(call.in);
    A* const losses = call.losses.mutable_data_ptr<A>();
    forward_rows<T>(call.in, scales, losses, call.lse.mutable_data_ptr<A>(), call.statistics.mutable_data_ptr<A>(),
                    call.gradient ? call.gradient->mutable_data_ptr<T>() : nullptr);
    if (!call.reduced()) return;
    double sum = 0;
    for (int64_t row = 0; row < call.in.layout.rows; ++row) sum += losses[row];
    // The mean of no rows is NaN, as torch has it.
    *call.loss.mutable_data_ptr<A>() = std::isinf(scales.z) ? static_cast<A>(NAN) : static_cast<A>(sum);
  });
}

void backward(const char* op, CrossEntropyBackward& call) {
  check_targets(op, call.in);
  dispatch_floating(op, call.in.logits, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = Accumulate<T>;
    backward_rows<T>(call, measure<A>(call.in));
  });
}

bool is_one(const Tensor& number) {
  return number.scalar_type() == ScalarType::Double ? *number.const_data_ptr<double>() == 1.0
                                                    : *number.const_data_ptr<float>() == 1.0f;
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> cross_entropy(const Tensor& logits, const Tensor& target,
                                                 const OptionalTensor& weight, int64_t ignore_index,
                                                 double label_smoothing, double z_loss, double softcap,
                                                 int64_t reduction) {
  const auto options = cross_entropy_options(ignore_index, label_smoothing, z_loss, softcap, reduction);
  CrossEntropyForward call = prepare_cross_entropy("cross_entropy", logits, target, weight, options, false);
  forward("cross_entropy", call);
  return {call.loss, call.lse, call.statistics};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> cross_entropy_with_gradient(const Tensor& logits, const Tensor& target,
                                                                       const OptionalTensor& weight,
                                                                       int64_t ignore_index, double label_smoothing,
                                                                       double z_loss, double softcap,
                                                                       int64_t reduction) {
  const char* const op = "cross_entropy_with_gradient";
  const auto options = cross_entropy_options(ignore_index, label_smoothing, z_loss, softcap, reduction);
  CrossEntropyForward call = prepare_cross_entropy(op, logits, target, weight, options, true);
  forward(op, call);
  return {call.loss, call.lse, call.statistics, *call.gradient};
}

Tensor cross_entropy_backward(const Tensor& logits, const Tensor& target, const OptionalTensor& weight,
                              const Tensor& statistics, const OptionalTensor& grad_loss, const OptionalTensor& grad_lse,
                              int64_t ignore_index, double label_smoothing, double z_loss, double softcap,
                              int64_t reduction) {
  const char* const op = "cross_entropy_backward";
  const auto options = cross_entropy_options(ignore_index, label_smoothing, z_loss, softcap, reduction);
  CrossEntropyBackward call =
      prepare_cross_entropy_backward(op, logits, target, weight, statistics, grad_loss, grad_lse, options);
  backward(op, call);
  return call.gradient;
}

void cross_entropy_rescale_(Tensor gradient, const Tensor& grad_loss, const Tensor& logits, const Tensor& target,
                            const OptionalTensor& weight, const Tensor& statistics, int64_t ignore_index,
                            double label_smoothing, double z_loss, double softcap, int64_t reduction) {
  const char* const op = "cross_entropy_rescale_";
  const auto options = cross_entropy_options(ignore_index, label_smoothing, z_loss, softcap, reduction);
  CrossEntropyBackward call =
      prepare_cross_entropy_rescale(op, gradient, grad_loss, logits, target, weight, statistics, options);
  if (!is_one(grad_loss)) backward(op, call);
}

}  // namespace opgraft::cpu

STABLE_TORCH_LIBRARY_IMPL(opgraft, CPU, m) {
  m.impl("cross_entropy", TORCH_BOX(&opgraft::cpu::cross_entropy));
  m.impl("cross_entropy_with_gradient", TORCH_BOX(&opgraft::cpu::cross_entropy_with_gradient));
  m.impl("cross_entropy_backward", TORCH_BOX(&opgraft::cpu::cross_entropy_backward));
  m.impl("cross_entropy_rescale_", TORCH_BOX(&opgraft::cpu::cross_entropy_rescale_));
}
