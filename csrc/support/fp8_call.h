// The ops with fp8 results around their kernels, the same on every device: arguments checked, rows found, results
// allocated.
#pragma once

#include <optional>
#include <utility>

#include "support/norm_shape.h"

namespace opgraft {

// Codes of x's shape and their scales.
struct Fp8Results {
  Tensor codes;
  Tensor scales;

  uint8_t* code_data() { return static_cast<uint8_t*>(codes.mutable_data_ptr()); }
  float* scale_data() { return static_cast<float*>(scales.mutable_data_ptr()); }
};

// A scale for nothing at all is there where rows are empty; otherwise the kernel writes what is allocated.
inline Fp8Results new_fp8(const Tensor& x, RowShape shape, const Fp8Shape& fp8) {
  Fp8Results out{new_contiguous(x, x.sizes(), ScalarType::Float8_e4m3fn),
                 new_contiguous(x, with_last(x, fp8.blocks), ScalarType::Float)};
  if (shape.length == 0) torch::stable::fill_(out.scales, fp8_scale(0.0f, fp8.rule));
  return out;
}

// rms_norm_fp8, and add_rms_norm_fp8 where there is a residual.
struct NormFp8Call {
  RowShape shape;
  Fp8Shape fp8;
  RowView rows;
  std::optional<RowView> residuals;
  std::optional<Tensor> weight;
  double eps;
  double offset;
  bool cast_before_weight;
  Fp8Results out;
  std::optional<Tensor> summed;
};

// run(NormFp8Call&) computes; it is not asked where there is no element.
template <typename Run>
inline NormFp8Call norm_fp8(const char* op, const Tensor& x, const std::optional<Tensor>& residual,
                            const std::optional<Tensor>& weight, double eps, double offset, bool cast_before_weight,
                            int64_t block, std::optional<double> scale_upper_bound, bool power_of_two, const Run& run) {
  const RowShape shape = check_rms_norm(op, x, weight);
  if (residual) check_alike(op, "residual", *residual, "x", x);
  const Fp8Shape fp8 = check_fp8(op, shape, block, scale_upper_bound, power_of_two);
  NormFp8Call call{shape,
                   fp8,
                   as_rows(x),
                   residual ? std::optional<RowView>(as_rows(*residual)) : std::nullopt,
                   weight,
                   eps,
                   offset,
                   cast_before_weight,
                   new_fp8(x, shape, fp8),
                   residual ? std::optional<Tensor>(new_contiguous_like(x)) : std::nullopt};
  if (shape.rows > 0 && shape.length > 0) run(call);
  return call;
}

}  // namespace opgraft
