// silu_mul_fp8 on CUDA: checks, allocation, stream and device around silu_mul_fp8_kernel.cuh.
#include <torch/csrc/stable/library.h>

#include <numeric>

#include "cuda/row_inputs.cuh"
#include "cuda/silu_mul_fp8_kernel.cuh"
#include "ops.h"
#include "support/fp8_call.h"

namespace opgraft::cuda {

namespace {

// A block's scale needs no other block: rows that lie end to end are taken as shorter ones of up to SHORT_BLOCKS
// blocks, which occupy the device even where there is one row, and wait for no other warp.
constexpr int64_t SHORT_BLOCKS = 8;

template <typename D>
void cut_rows(SiluInputs<D>& in) {
  if (in.length % FP8_BLOCK != 0 || in.gate.stride != in.length || in.up.stride != in.length) return;
  const int64_t blocks = std::gcd(in.length / FP8_BLOCK, SHORT_BLOCKS);
  in.rows *= in.fp8.blocks / blocks;
  in.fp8.blocks = blocks;
  in.length = in.gate.stride = in.up.stride = blocks * FP8_BLOCK;
}

}  // namespace

std::tuple<Tensor, Tensor> silu_mul_fp8(const Tensor& gate, const Tensor& up, int64_t block,
                                        std::optional<double> scale_upper_bound, bool power_of_two) {
  const RowShape shape = row_shape("silu_mul_fp8", "gate", gate);
  check_alike("silu_mul_fp8", "up", up, "gate", gate);
  const Fp8Shape fp8 = check_fp8("silu_mul_fp8", shape, block, scale_upper_bound, power_of_two);
  Fp8Results out = new_fp8(gate, shape, fp8);
  if (gate.numel() == 0) return {out.codes, out.scales};
  const RowView gates = as_rows(gate), ups = as_rows(up);
  dispatch_floating("silu_mul_fp8", gate, [&](auto tag) {
    using D = typename DeviceType<typename decltype(tag)::type>::type;
    const Launch context(gate);
    SiluInputs<D> in;
    in.gate = device_rows<D>(gates);
    in.up = device_rows<D>(ups);
    in.fp8 = {out.code_data(), out.scale_data(), fp8.blocks, fp8.rule};
    in.rows = shape.rows;
    in.length = shape.length;
    const bool wide =
        wide_rows<D>(shape.length, {in.gate.stride, in.up.stride}, {in.gate.data, in.up.data, in.fp8.codes});
    if (fp8.by_block) cut_rows(in);
    const RowMapping mapping = row_mapping(in.length, sizeof(D));
    if (fp8.by_block) {
      launch_silu<true>(in, mapping, wide, context.multiprocessors(), context.stream());
    } else {
      launch_silu<false>(in, mapping, wide, context.multiprocessors(), context.stream());
    }
    Launch::check();
  });
  return {out.codes, out.scales};
}

}  // namespace opgraft::cuda

STABLE_TORCH_LIBRARY_IMPL(opgraft, CUDA, m) { m.impl("silu_mul_fp8", TORCH_BOX(&opgraft::cuda::silu_mul_fp8)); }
