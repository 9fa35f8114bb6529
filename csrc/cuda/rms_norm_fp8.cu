// rms_norm_fp8 and add_rms_norm_fp8 on CUDA: stream and device around rms_norm_kernel.cuh.
#include <torch/csrc/stable/library.h>

#include "cuda/rms_norm_stream.cuh"
#include "cuda/row_inputs.cuh"
#include "ops.h"
#include "support/fp8_call.h"

namespace opgraft::cuda {
namespace {

template <Result RESULT, typename D, typename W>
void launch_fp8(const NormInputs<D, W>& in, bool add, bool wide, const Launch& context) {
  const RowMapping mapping = row_mapping(in.length, sizeof(D));
  if (add) return launch_norm<true, RESULT>(in, mapping, wide, context.stream());
  if (wide && launch_stream<RESULT>(in, mapping, context.multiprocessors(), context.stream())) return;
  launch_norm<false, RESULT>(in, mapping, wide, context.stream());
}

void run(NormFp8Call& call) {
  const Tensor& x = call.rows.tensor;
  const OptionalTensor factors = readable_weight(call.weight, x);
  dispatch_row("rms_norm_fp8", x, factors, [&](auto tag, auto weight_tag) {
    using D = typename DeviceType<typename decltype(tag)::type>::type;
    using W = typename DeviceType<typename decltype(weight_tag)::type>::type;
    const Launch context(x);
    NormInputs<D, W> in = norm_inputs<D, W>(call.shape, factors, call.eps, call.offset, call.cast_before_weight);
    in.x = device_rows<D>(call.rows);
    in.fp8 = {call.out.code_data(), call.out.scale_data(), call.fp8.blocks, call.fp8.rule};
    if (call.residuals) {
      in.residual = device_rows<D>(*call.residuals);
      in.summed = static_cast<D*>(call.summed->mutable_data_ptr());
    }
    const bool wide = wide_rows<D>(call.shape.length, {in.x.stride, in.residual.stride},
                                   {in.x.data, in.residual.data, in.summed, in.weight, in.fp8.codes});
    const bool add = call.residuals.has_value();
    if (call.fp8.by_block) {
      launch_fp8<Result::FP8_BLOCKS>(in, add, wide, context);
    } else {
      launch_fp8<Result::FP8_ROWS>(in, add, wide, context);
    }
    Launch::check();
  });
}

}  // namespace

std::tuple<Tensor, Tensor> rms_norm_fp8(const Tensor& x, const OptionalTensor& weight, double eps, double offset,
                                        bool cast_before_weight, int64_t block, std::optional<double> scale_upper_bound,
                                        bool power_of_two) {
  const NormFp8Call done = norm_fp8("rms_norm_fp8", x, std::nullopt, weight, eps, offset, cast_before_weight, block,
                                    scale_upper_bound, power_of_two, run);
  return {done.out.codes, done.out.scales};
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm_fp8(const Tensor& x, const Tensor& residual,
                                                    const OptionalTensor& weight, double eps, double offset,
                                                    bool cast_before_weight, int64_t block,
                                                    std::optional<double> scale_upper_bound, bool power_of_two) {
  const NormFp8Call done = norm_fp8("add_rms_norm_fp8", x, residual, weight, eps, offset, cast_before_weight, block,
                                    scale_upper_bound, power_of_two, run);
  return {done.out.codes, done.out.scales, *done.summed};
}

}  // namespace opgraft::cuda

STABLE_TORCH_LIBRARY_IMPL(opgraft, CUDA, m) {
  m.impl("rms_norm_fp8", TORCH_BOX(&opgraft::cuda::rms_norm_fp8));
  m.impl("add_rms_norm_fp8", TORCH_BOX(&opgraft::cuda::add_rms_norm_fp8));
}
