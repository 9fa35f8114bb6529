// silu_mul_fp8 on the CPU, the same bits as on CUDA: support/silu_rule.h and support/fp8_rule.h.
#include <torch/csrc/stable/library.h>

#include "cpu/fp8_row.h"
#include "cpu/row_inputs.h"
#include "ops.h"
#include "support/fp8_call.h"
#include "support/silu_rule.h"

namespace opgraft::cpu {
namespace {

OPGRAFT_INLINE float silu_value(float gate, float up) { return silu_product(gate, up); }

OPGRAFT_INLINE float silu_value(double gate, double up) {
  const double a = gate < -700.0 ? -700.0 : gate;
  return static_cast<float>(a / (1.0 + std::exp(-a)) * up);
}

// One plain function a dtype, since target_clones does not take templates.
#define OPGRAFT_SILU_FP8_ROWS(T)                                                                                       \
  OPGRAFT_CLONES void silu_row(const T* gate, const T* up, float* values, int64_t length, int64_t block, Fp8Rule rule, \
                               uint8_t* codes, float* scales) {                                                        \
    for (int64_t i = 0; i < length; ++i) values[i] = silu_value(widen(gate[i]), widen(up[i]));                         \
    encode_span(values, length, block, rule, codes, scales);                                                           \
  }
OPGRAFT_SILU_FP8_ROWS(float)
OPGRAFT_SILU_FP8_ROWS(double)
OPGRAFT_SILU_FP8_ROWS(Half)
OPGRAFT_SILU_FP8_ROWS(BFloat16)

}  // namespace

std::tuple<Tensor, Tensor> silu_mul_fp8(const Tensor& gate, const Tensor& up, int64_t block,
                                        std::optional<double> scale_upper_bound, bool power_of_two) {
  const RowShape shape = row_shape("silu_mul_fp8", "gate", gate);
  check_alike("silu_mul_fp8", "up", up, "gate", gate);
  const Fp8Shape fp8 = check_fp8("silu_mul_fp8", shape, block, scale_upper_bound, power_of_two);
  Fp8Results out = new_fp8(gate, shape, fp8);
  if (gate.numel() == 0) return {out.codes, out.scales};
  const RowView gates = as_rows(gate), ups = as_rows(up);
  uint8_t* const codes = out.code_data();
  float* const scales = out.scale_data();
  dispatch_floating("silu_mul_fp8", gate, [&](auto tag) {
    using T = typename decltype(tag)::type;
    parallel_for(0, shape.rows, row_grain(shape.length), [&](int64_t begin, int64_t end) {
      std::vector<float> values(shape.length);
      for (int64_t r = begin; r < end; ++r) {
        silu_row(row_of<T>(gates, r), row_of<T>(ups, r), values.data(), shape.length,
                 fp8.by_block ? FP8_BLOCK : shape.length, fp8.rule, codes + r * shape.length, scales + r * fp8.blocks);
      }
    });
  });
  return {out.codes, out.scales};
}

}  // namespace opgraft::cpu

STABLE_TORCH_LIBRARY_IMPL(opgraft, CPU, m) { m.impl("silu_mul_fp8", TORCH_BOX(&opgraft::cpu::silu_mul_fp8)); }
