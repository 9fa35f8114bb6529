// GELU, tanh form, forward and backward on the CPU: checks, allocation and torch's thread pool around gelu_kernel.h.
#include <torch/csrc/stable/library.h>

#include "cpu/gelu_kernel.h"
#include "ops.h"
#include "support/check.h"
#include "support/dispatch.h"
#include "support/parallel.h"
#include "support/tensor.h"

namespace opgraft::cpu {

Tensor gelu(const Tensor& x) {
  check_floating("gelu", "x", x);
  const Tensor input = as_contiguous(x);
  Tensor output = new_contiguous_like(x);
  dispatch_floating("gelu", x, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* in = input.const_data_ptr<T>();
    T* out = output.mutable_data_ptr<T>();
    parallel_for(0, x.numel(), GRAIN_ELEMENTS, [=](int64_t begin, int64_t end) { forward_loop(in, out, begin, end); });
  });
  return output;
}

Tensor gelu_backward(const Tensor& grad, const Tensor& x) {
  check_floating("gelu_backward", "x", x);
  check_same_dtype("gelu_backward", "grad", grad, "x", x);
  check_same_device("gelu_backward", "grad", grad, "x", x);
  check_same_shape("gelu_backward", "grad", grad, "x", x);
  const Tensor incoming = as_contiguous(grad);
  const Tensor input = as_contiguous(x);
  Tensor output = new_contiguous_like(x);
  dispatch_floating("gelu_backward", x, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* up = incoming.const_data_ptr<T>();
    const T* in = input.const_data_ptr<T>();
    T* out = output.mutable_data_ptr<T>();
    parallel_for(0, x.numel(), GRAIN_ELEMENTS,
                 [=](int64_t begin, int64_t end) { backward_loop(up, in, out, begin, end); });
  });
  return output;
}

}  // namespace opgraft::cpu

STABLE_TORCH_LIBRARY_IMPL(opgraft, CPU, m) {
  m.impl("gelu", TORCH_BOX(&opgraft::cpu::gelu));
  m.impl("gelu_backward", TORCH_BOX(&opgraft::cpu::gelu_backward));
}
