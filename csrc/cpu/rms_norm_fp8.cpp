// rms_norm_fp8 and add_rms_norm_fp8 on the CPU, the same bits as on CUDA.
//
// A row is normalised into a float buffer, which stays in the cache, and encoded from there. Sums, products and scales
// follow support/row_mapping.h and support/fp8_rule.h; no product is added to anything but in a fused operation that is
// spelt out, so nothing depends on which of them a compiler contracts.
#include <torch/csrc/stable/library.h>

#include "cpu/fp8_row.h"
#include "cpu/row_inputs.h"
#include "ops.h"
#include "support/fp8_call.h"

namespace opgraft::cpu {
namespace {

template <typename T, typename A>
OPGRAFT_INLINE void normal_row(const T* x, const A* factors, float* values, int64_t length, RowMapping mapping,
                               A* lanes, A eps, bool round_first) {
  const A mean = squares_in_order(x, length, mapping, lanes) / static_cast<A>(length);
  const A scale = A(1) / std::sqrt(mean + eps);
  if (round_first) {
    for (int64_t i = 0; i < length; ++i) {
      values[i] = static_cast<float>(static_cast<A>(widen(narrow<T>(widen(x[i]) * scale))) * factors[i]);
    }
  } else {
    for (int64_t i = 0; i < length; ++i) values[i] = static_cast<float>(widen(x[i]) * scale * factors[i]);
  }
}

template <typename T>
OPGRAFT_INLINE void rounded_sum(const T* x, const T* residual, T* summed, int64_t length) {
  for (int64_t i = 0; i < length; ++i) summed[i] = narrow<T>(widen(x[i]) + widen(residual[i]));
}

// One plain function a dtype, since target_clones does not take templates.
#define OPGRAFT_NORM_FP8_ROWS(T, A)                                                                                 \
  OPGRAFT_CLONES void fp8_row(const T* x, const T* residual, T* summed, const A* factors, float* values,            \
                              int64_t length, RowMapping mapping, A* lanes, A eps, bool round_first, int64_t block, \
                              Fp8Rule rule, uint8_t* codes, float* scales) {                                        \
    if (residual) rounded_sum(x, residual, summed, length);                                                         \
    normal_row(residual ? static_cast<const T*>(summed) : x, factors, values, length, mapping, lanes, eps,          \
               round_first);                                                                                        \
    encode_span(values, length, block, rule, codes, scales);                                                        \
  }
OPGRAFT_NORM_FP8_ROWS(float, float)
OPGRAFT_NORM_FP8_ROWS(double, double)
OPGRAFT_NORM_FP8_ROWS(Half, float)
OPGRAFT_NORM_FP8_ROWS(BFloat16, float)

void run(NormFp8Call& call) {
  const RowShape shape = call.shape;
  const Fp8Shape& fp8 = call.fp8;
  uint8_t* const codes = call.out.code_data();
  float* const scales = call.out.scale_data();
  dispatch_floating("rms_norm_fp8", call.rows.tensor, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = Accumulate<T>;
    const std::vector<A> factors = row_factors<A>(call.weight, shape.length, call.offset);
    const RowMapping mapping = row_mapping(shape.length, sizeof(T));
    T* const sums = call.summed ? call.summed->template mutable_data_ptr<T>() : nullptr;
    parallel_for(0, shape.rows, row_grain(shape.length), [&](int64_t begin, int64_t end) {
      std::vector<float> values(shape.length);
      std::vector<A> lanes(mapping.threads * (ROW_VECTOR_BYTES / sizeof(T)));
      for (int64_t r = begin; r < end; ++r) {
        const int64_t at = r * shape.length;
        fp8_row(row_of<T>(call.rows, r), call.residuals ? row_of<T>(*call.residuals, r) : nullptr,
                sums ? sums + at : nullptr, factors.data(), values.data(), shape.length, mapping, lanes.data(),
                static_cast<A>(call.eps), call.cast_before_weight, fp8.by_block ? FP8_BLOCK : shape.length, fp8.rule,
                codes + at, scales + r * fp8.blocks);
      }
    });
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

}  // namespace opgraft::cpu

STABLE_TORCH_LIBRARY_IMPL(opgraft, CPU, m) {
  m.impl("rms_norm_fp8", TORCH_BOX(&opgraft::cpu::rms_norm_fp8));
  m.impl("add_rms_norm_fp8", TORCH_BOX(&opgraft::cpu::add_rms_norm_fp8));
}
