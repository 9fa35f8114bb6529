// rms_norm and add_rms_norm, forward and backward, on the CPU: checks, allocation and torch's thread pool around
// rms_norm_kernel.h.
#include <torch/csrc/stable/library.h>

#include "cpu/rms_norm_kernel.h"
#include "cpu/row_inputs.h"
#include "ops.h"

namespace opgraft::cpu {
namespace {

// The weight's gradient is summed over this many parts of the rows, whatever the number of threads, so that it has the
// same bits with every number of them.
constexpr int64_t MAX_SHARES = 128;
constexpr int64_t SHARE_ROWS = 16;  // at least

std::tuple<Tensor, Tensor> backward(const char* op, const Tensor& grad, const OptionalTensor& grad_summed,
                                    const Tensor& x, const OptionalTensor& weight, double eps, double offset) {
  const RowShape shape = check_rms_norm(op, x, weight);
  check_alike(op, "grad", grad, "x", x);
  if (grad_summed) check_alike(op, "grad_residual", *grad_summed, "x", x);
  Tensor grad_x = new_contiguous_like(x);
  Tensor grad_weight = weight ? new_contiguous_like(*weight) : new_contiguous(x, {0});
  const RowView grads = as_rows(grad), rows = as_rows(x);
  const std::optional<RowView> more = grad_summed ? std::optional<RowView>(as_rows(*grad_summed)) : std::nullopt;
  const int64_t part = std::max(SHARE_ROWS, (shape.rows + MAX_SHARES - 1) / MAX_SHARES);
  const int64_t shares = (shape.rows + part - 1) / part;
  dispatch_floating(op, x, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = Accumulate<T>;
    const std::vector<A> factors = row_factors<A>(weight, shape.length, offset);
    std::vector<A> share(std::max<int64_t>(1, shares) * shape.length, A(0));
    T* out = grad_x.mutable_data_ptr<T>();
    const int64_t grain = std::max<int64_t>(1, row_grain(shape.length) / part);
    parallel_for(0, shares, grain, [&](int64_t begin, int64_t end) {
      for (int64_t s = begin; s < end; ++s) {
        for (int64_t r = s * part; r < std::min(shape.rows, (s + 1) * part); ++r) {
          gradient_row(row_of<T>(grads, r), row_of<T>(rows, r), more ? row_of<T>(*more, r) : nullptr, factors.data(),
                       out + r * shape.length, share.data() + s * shape.length, shape.length, static_cast<A>(eps));
        }
      }
    });
    if (!weight) return;
    for (int64_t s = 1; s < shares; ++s) {
      for (int64_t i = 0; i < shape.length; ++i) share[i] += share[s * shape.length + i];
    }
    dispatch_floating(op, *weight, [&](auto own_tag) {
      using W = typename decltype(own_tag)::type;
      W* to = grad_weight.mutable_data_ptr<W>();
      for (int64_t i = 0; i < shape.length; ++i) to[i] = narrow<W>(static_cast<Accumulate<W>>(share[i]));
    });
  });
  return {grad_x, grad_weight};
}

}  // namespace

Tensor rms_norm(const Tensor& x, const OptionalTensor& weight, double eps, double offset, bool cast_before_weight) {
  const RowShape shape = check_rms_norm("rms_norm", x, weight);
  Tensor y = new_contiguous_like(x);
  const RowView rows = as_rows(x);
  dispatch_floating("rms_norm", x, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = Accumulate<T>;
    const std::vector<A> factors = row_factors<A>(weight, shape.length, offset);
    T* out = y.mutable_data_ptr<T>();
    parallel_for(0, shape.rows, row_grain(shape.length), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        norm_row(row_of<T>(rows, r), factors.data(), out + r * shape.length, shape.length, static_cast<A>(eps),
                 cast_before_weight);
      }
    });
  });
  return y;
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad, const Tensor& x, const OptionalTensor& weight,
                                             double eps, double offset) {
  return backward("rms_norm_backward", grad, std::nullopt, x, weight, eps, offset);
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, const OptionalTensor& weight,
                                        double eps, double offset, bool cast_before_weight) {
  const RowShape shape = check_rms_norm("add_rms_norm", x, weight);
  check_alike("add_rms_norm", "residual", residual, "x", x);
  Tensor y = new_contiguous_like(x), summed = new_contiguous_like(x);
  const RowView rows = as_rows(x), residuals = as_rows(residual);
  dispatch_floating("add_rms_norm", x, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = Accumulate<T>;
    const std::vector<A> factors = row_factors<A>(weight, shape.length, offset);
    T *out = y.mutable_data_ptr<T>(), *sums = summed.mutable_data_ptr<T>();
    parallel_for(0, shape.rows, row_grain(shape.length), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        T* sum = sums + r * shape.length;
        add_row(row_of<T>(rows, r), row_of<T>(residuals, r), sum, shape.length);
        norm_row(sum, factors.data(), out + r * shape.length, shape.length, static_cast<A>(eps), cast_before_weight);
      }
    });
  });
  return {y, summed};
}

std::tuple<Tensor, Tensor> add_rms_norm_backward(const Tensor& grad, const OptionalTensor& grad_residual,
                                                 const Tensor& summed, const OptionalTensor& weight, double eps,
                                                 double offset) {
  return backward("add_rms_norm_backward", grad, grad_residual, summed, weight, eps, offset);
}

}  // namespace opgraft::cpu

STABLE_TORCH_LIBRARY_IMPL(opgraft, CPU, m) {
  m.impl("rms_norm", TORCH_BOX(&opgraft::cpu::rms_norm));
  m.impl("rms_norm_backward", TORCH_BOX(&opgraft::cpu::rms_norm_backward));
  m.impl("add_rms_norm", TORCH_BOX(&opgraft::cpu::add_rms_norm));
  m.impl("add_rms_norm_backward", TORCH_BOX(&opgraft::cpu::add_rms_norm_backward));
}
