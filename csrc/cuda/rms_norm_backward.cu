// rms_norm and add_rms_norm backward on CUDA: checks, allocation and the two launches of rms_norm_backward_kernel.cuh.
#include <torch/csrc/stable/library.h>

#include "cuda/rms_norm_backward_kernel.cuh"
#include "cuda/row_inputs.cuh"
#include "ops.h"

namespace opgraft::cuda {
namespace {

// grad_weight in the weight's own dtype; without a weight it has no element.
std::tuple<Tensor, Tensor> backward(const char* op, const Tensor& grad, const OptionalTensor& grad_summed,
                                    const Tensor& x, const OptionalTensor& weight, double eps, double offset) {
  const RowShape shape = check_rms_norm(op, x, weight);
  check_alike(op, "grad", grad, "x", x);
  if (grad_summed) check_alike(op, "grad_residual", *grad_summed, "x", x);
  Tensor grad_x = new_contiguous_like(x);
  Tensor grad_weight = weight ? new_contiguous_like(*weight) : new_contiguous(x, {0});
  if (x.numel() == 0) {
    torch::stable::zero_(grad_weight);
    return {grad_x, grad_weight};
  }
  const RowView grads = as_rows(grad), rows = as_rows(x);
  const std::optional<RowView> more = grad_summed ? std::optional<RowView>(as_rows(*grad_summed)) : std::nullopt;
  const OptionalTensor factors = readable_weight(weight, x);
  dispatch_row(op, x, factors, [&](auto tag, auto weight_tag) {
    using D = typename DeviceType<typename decltype(tag)::type>::type;
    using W = typename DeviceType<typename decltype(weight_tag)::type>::type;
    using A = DeviceAccumulate<D>;
    const Launch context(x);
    NormGradients<D, W> in;
    in.grad = device_rows<D>(grads);
    in.x = device_rows<D>(rows);
    if (more) in.grad_summed = device_rows<D>(*more);
    in.weight = optional_data<W>(factors);
    in.grad_x = static_cast<D*>(grad_x.mutable_data_ptr());
    in.rows = shape.rows;
    in.length = shape.length;
    in.eps = static_cast<A>(eps);
    in.offset = static_cast<A>(offset);
    in.share_of_mean = static_cast<A>(1.0 / static_cast<double>(shape.length));
    const bool wide = wide_rows<D>(shape.length, {in.grad.stride, in.x.stride, in.grad_summed.stride},
                                   {in.grad.data, in.x.data, in.grad_summed.data, in.weight, in.grad_x});
    const BackwardPlan plan = backward_plan<D, W>(shape.rows, shape.length, wide, context.multiprocessors());
    OptionalTensor partial;
    if (weight) {
      partial = new_contiguous(x, {plan.shares, shape.length}, accumulate_type(x.scalar_type()));
      in.partial = static_cast<A*>(partial->mutable_data_ptr());
    }
    launch_backward(in, plan, context.stream());
    Launch::check();
    if (!weight) return;
    dispatch_floating(op, *weight, [&](auto own_tag) {
      using Own = typename DeviceType<typename decltype(own_tag)::type>::type;
      launch_add_shares(static_cast<const A*>(in.partial), static_cast<Own*>(grad_weight.mutable_data_ptr()),
                        plan.shares, shape.length, context.stream());
      Launch::check();
    });
  });
  return {grad_x, grad_weight};
}

}  // namespace

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad, const Tensor& x, const OptionalTensor& weight,
                                             double eps, double offset) {
  return backward("rms_norm_backward", grad, std::nullopt, x, weight, eps, offset);
}

std::tuple<Tensor, Tensor> add_rms_norm_backward(const Tensor& grad, const OptionalTensor& grad_residual,
                                                 const Tensor& summed, const OptionalTensor& weight, double eps,
                                                 double offset) {
  return backward("add_rms_norm_backward", grad, grad_residual, summed, weight, eps, offset);
}

}  // namespace opgraft::cuda

STABLE_TORCH_LIBRARY_IMPL(opgraft, CUDA, m) {
  m.impl("rms_norm_backward", TORCH_BOX(&opgraft::cuda::rms_norm_backward));
  m.impl("add_rms_norm_backward", TORCH_BOX(&opgraft::cuda::add_rms_norm_backward));
}
