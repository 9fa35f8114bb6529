// rms_norm_fp8 and add_rms_norm_fp8 on CUDA: checks, allocation, stream and device around rms_norm_kernel.cuh.
#include <torch/csrc/stable/library.h>

#include "cuda/rms_norm_kernel.cuh"
#include "cuda/row_inputs.cuh"
#include "ops.h"

namespace opgraft::cuda {
namespace {

struct NormFp8 {
  Tensor codes;
  Tensor scales;
  Tensor summed;
};

NormFp8 norm_fp8(const char* op, const Tensor& x, const Tensor* residual, const OptionalTensor& weight, double eps,
                 double offset, bool cast_before_weight, const Fp8Shape& fp8, RowShape shape) {
  NormFp8 out{new_contiguous(x, x.sizes(), ScalarType::Float8_e4m3fn),
              new_contiguous(x, with_last(x, fp8.blocks), ScalarType::Float), residual ? new_contiguous_like(x) : x};
  if (shape.rows == 0) return out;
  if (shape.length == 0) {
    torch::stable::fill_(out.scales, fp8_scale(0.0f, fp8.rule));
    return out;
  }
  const RowView rows = as_rows(x);
  const RowView residuals = residual ? as_rows(*residual) : rows;
  const OptionalTensor factors = readable_weight(weight, x);
  dispatch_row(op, x, factors, [&](auto tag, auto weight_tag) {
    using D = typename DeviceType<typename decltype(tag)::type>::type;
    using W = typename DeviceType<typename decltype(weight_tag)::type>::type;
    const Launch context(x);
    NormInputs<D, W> in = norm_inputs<D, W>(shape, factors, eps, offset, cast_before_weight);
    in.x = device_rows<D>(rows);
    in.fp8 = {static_cast<uint8_t*>(out.codes.mutable_data_ptr()), static_cast<float*>(out.scales.mutable_data_ptr()),
              fp8.blocks, fp8.rule};
    if (residual) {
      in.residual = device_rows<D>(residuals);
      in.summed = static_cast<D*>(out.summed.mutable_data_ptr());
    }
    const bool wide = wide_rows<D>(shape.length, {in.x.stride, in.residual.stride},
                                   {in.x.data, in.residual.data, in.summed, in.weight, in.fp8.codes});
    const RowMapping mapping = row_mapping(shape.length, sizeof(D));
    if (residual && fp8.by_block) launch_norm<true, Result::FP8_BLOCKS>(in, mapping, wide, context.stream());
    if (residual && !fp8.by_block) launch_norm<true, Result::FP8_ROWS>(in, mapping, wide, context.stream());
    if (!residual && fp8.by_block) launch_norm<false, Result::FP8_BLOCKS>(in, mapping, wide, context.stream());
    if (!residual && !fp8.by_block) launch_norm<false, Result::FP8_ROWS>(in, mapping, wide, context.stream());
    Launch::check();
  });
  return out;
}

}  // namespace

std::tuple<Tensor, Tensor> rms_norm_fp8(const Tensor& x, const OptionalTensor& weight, double eps, double offset,
                                        bool cast_before_weight, int64_t block, std::optional<double> scale_upper_bound,
                                        bool power_of_two) {
  const RowShape shape = check_rms_norm("rms_norm_fp8", x, weight);
  const Fp8Shape fp8 = check_fp8("rms_norm_fp8", shape, block, scale_upper_bound, power_of_two);
  const NormFp8 out = norm_fp8("rms_norm_fp8", x, nullptr, weight, eps, offset, cast_before_weight, fp8, shape);
  return {out.codes, out.scales};
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm_fp8(const Tensor& x, const Tensor& residual,
                                                    const OptionalTensor& weight, double eps, double offset,
                                                    bool cast_before_weight, int64_t block,
                                                    std::optional<double> scale_upper_bound, bool power_of_two) {
  const RowShape shape = check_rms_norm("add_rms_norm_fp8", x, weight);
  check_alike("add_rms_norm_fp8", "residual", residual, "x", x);
  const Fp8Shape fp8 = check_fp8("add_rms_norm_fp8", shape, block, scale_upper_bound, power_of_two);
  const NormFp8 out = norm_fp8("add_rms_norm_fp8", x, &residual, weight, eps, offset, cast_before_weight, fp8, shape);
  return {out.codes, out.scales, out.summed};
}

}  // namespace opgraft::cuda

STABLE_TORCH_LIBRARY_IMPL(opgraft, CUDA, m) {
  m.impl("rms_norm_fp8", TORCH_BOX(&opgraft::cuda::rms_norm_fp8));
  m.impl("add_rms_norm_fp8", TORCH_BOX(&opgraft::cuda::add_rms_norm_fp8));
}
