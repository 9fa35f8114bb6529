// rms_norm and add_rms_norm forward on CUDA: checks, allocation, stream and device around rms_norm_kernel.cuh.
#include <torch/csrc/stable/library.h>

#include "cuda/rms_norm_shifted.cuh"
#include "cuda/row_inputs.cuh"
#include "ops.h"

namespace opgraft::cuda {
namespace {

template <bool ADD, typename T, typename W>
void launch_plain(const NormInputs<T, W>& in, RowMapping mapping, bool wide, cudaStream_t stream) {
  if (!wide && launch_shifted<ADD>(in, mapping, stream)) return;
  launch_norm<ADD, Result::PLAIN>(in, mapping, wide, stream);
}

}  // namespace

Tensor rms_norm(const Tensor& x, const OptionalTensor& weight, double eps, double offset, bool cast_before_weight) {
  const RowShape shape = check_rms_norm("rms_norm", x, weight);
  Tensor y = new_contiguous_like(x);
  if (x.numel() == 0) return y;
  const RowView rows = as_rows(x);
  const OptionalTensor factors = readable_weight(weight, x);
  dispatch_row("rms_norm", x, factors, [&](auto tag, auto weight_tag) {
    using D = typename DeviceType<typename decltype(tag)::type>::type;
    using W = typename DeviceType<typename decltype(weight_tag)::type>::type;
    const Launch context(x);
    NormInputs<D, W> in = norm_inputs<D, W>(shape, factors, eps, offset, cast_before_weight);
    in.x = device_rows<D>(rows);
    in.y = static_cast<D*>(y.mutable_data_ptr());
    const bool wide = wide_rows<D>(shape.length, {in.x.stride}, {in.x.data, in.y, in.weight});
    launch_plain<false>(in, plain_mapping(shape.length, sizeof(D)), wide, context.stream());
    Launch::check();
  });
  return y;
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, const OptionalTensor& weight,
                                        double eps, double offset, bool cast_before_weight) {
  const RowShape shape = check_rms_norm("add_rms_norm", x, weight);
  check_alike("add_rms_norm", "residual", residual, "x", x);
  Tensor y = new_contiguous_like(x), summed = new_contiguous_like(x);
  if (x.numel() == 0) return {y, summed};
  const RowView rows = as_rows(x), residuals = as_rows(residual);
  const OptionalTensor factors = readable_weight(weight, x);
  dispatch_row("add_rms_norm", x, factors, [&](auto tag, auto weight_tag) {
    using D = typename DeviceType<typename decltype(tag)::type>::type;
    using W = typename DeviceType<typename decltype(weight_tag)::type>::type;
    const Launch context(x);
    NormInputs<D, W> in = norm_inputs<D, W>(shape, factors, eps, offset, cast_before_weight);
    in.x = device_rows<D>(rows);
    in.residual = device_rows<D>(residuals);
    in.y = static_cast<D*>(y.mutable_data_ptr());
    in.summed = static_cast<D*>(summed.mutable_data_ptr());
    const bool wide = wide_rows<D>(shape.length, {in.x.stride, in.residual.stride},
                                   {in.x.data, in.residual.data, in.y, in.summed, in.weight});
    launch_plain<true>(in, sum_mapping(shape.length, sizeof(D)), wide, context.stream());
    Launch::check();
  });
  return {y, summed};
}

}  // namespace opgraft::cuda

STABLE_TORCH_LIBRARY_IMPL(opgraft, CUDA, m) {
  m.impl("rms_norm", TORCH_BOX(&opgraft::cuda::rms_norm));
  m.impl("add_rms_norm", TORCH_BOX(&opgraft::cuda::add_rms_norm));
}
