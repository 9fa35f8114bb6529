// GELU, tanh form, forward and backward on CUDA: checks, allocation, stream and device around gelu_kernel.cuh.
#include <torch/csrc/stable/library.h>

#include "cuda/gelu_kernel.cuh"
#include "ops.h"
#include "support/check.h"
#include "support/cuda.h"
#include "support/tensor.h"

namespace opgraft::cuda {

Tensor gelu(const Tensor& x) {
  check_floating("gelu", "x", x);
  const Tensor input = as_contiguous(x);
  Tensor output = new_contiguous_like(x);
  dispatch_floating("gelu", x, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using D = typename DeviceType<T>::type;
    const Launch context(x);
    launch<D>(x.numel(), context.stream(), Forward<sizeof(T) == 2>{}, static_cast<D*>(output.mutable_data_ptr()),
              static_cast<const D*>(input.const_data_ptr()));
    Launch::check();
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
    using D = typename DeviceType<T>::type;
    const Launch context(x);
    launch<D>(x.numel(), context.stream(), Backward<sizeof(T) == 2>{}, static_cast<D*>(output.mutable_data_ptr()),
              static_cast<const D*>(incoming.const_data_ptr()), static_cast<const D*>(input.const_data_ptr()));
    Launch::check();
  });
  return output;
}

}  // namespace opgraft::cuda

STABLE_TORCH_LIBRARY_IMPL(opgraft, CUDA, m) {
  m.impl("gelu", TORCH_BOX(&opgraft::cuda::gelu));
  m.impl("gelu_backward", TORCH_BOX(&opgraft::cuda::gelu_backward));
}
