// GELU as a pybind11 extension: checks, contiguous inputs, fresh output, then the loop or the launch.
//
// The includes name what is used. With <torch/extension.h> in their place, this file takes three times as long to
// compile.
#include "gelu.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/utils/pybind.h>

namespace {

constexpr int64_t GRAIN_ELEMENTS = 8192;

void check_input(const char* op, const char* name, const at::Tensor& x) {
#ifdef WITH_CUDA
  TORCH_CHECK(x.is_cpu() || x.is_cuda(), op, ": ", name, " is on ", x.device(), ", expected CPU or CUDA");
#else
  TORCH_CHECK(x.is_cpu(), op, ": ", name, " is on ", x.device(), ", and this build has the CPU kernel alone");
#endif
  TORCH_CHECK(x.is_floating_point(), op, ": ", name, " has dtype ", x.scalar_type(), ", expected a floating dtype");
}

at::Tensor fresh_like(const at::Tensor& x) {
  return at::empty_like(x, at::TensorOptions(), at::MemoryFormat::Contiguous);
}

at::Tensor gelu(const at::Tensor& x) {
  check_input("gelu", "x", x);
  const at::Tensor input = x.contiguous();
  const at::Tensor y = fresh_like(x);
#ifdef WITH_CUDA
  if (x.is_cuda()) {
    gelu_forward_cuda(input, y);
    return y;
  }
#endif
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "gelu", [&] {
    using A = at::opmath_type<scalar_t>;
    const scalar_t* in = input.const_data_ptr<scalar_t>();
    scalar_t* out = y.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, x.numel(), GRAIN_ELEMENTS, [=](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) out[i] = static_cast<scalar_t>(gelu_value(static_cast<A>(in[i])));
    });
  });
  return y;
}

at::Tensor gelu_backward(const at::Tensor& grad, const at::Tensor& x) {
  check_input("gelu_backward", "x", x);
  TORCH_CHECK(grad.sizes() == x.sizes() && grad.scalar_type() == x.scalar_type() && grad.device() == x.device(),
              "gelu_backward: grad must have the shape, dtype and device of x");
  // The gradient of a sum arrives expanded, with strides of 0: contiguous() makes it what the loop reads.
  const at::Tensor incoming = grad.contiguous();
  const at::Tensor input = x.contiguous();
  const at::Tensor result = fresh_like(x);
#ifdef WITH_CUDA
  if (x.is_cuda()) {
    gelu_backward_cuda(incoming, input, result);
    return result;
  }
#endif
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "gelu_backward", [&] {
    using A = at::opmath_type<scalar_t>;
    const scalar_t* up = incoming.const_data_ptr<scalar_t>();
    const scalar_t* in = input.const_data_ptr<scalar_t>();
    scalar_t* out = result.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, x.numel(), GRAIN_ELEMENTS, [=](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        out[i] = static_cast<scalar_t>(static_cast<A>(up[i]) * gelu_slope(static_cast<A>(in[i])));
      }
    });
  });
  return result;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("gelu", &gelu, "GELU, tanh form", pybind11::arg("x"));
  m.def("gelu_backward", &gelu_backward, "gradient of gelu", pybind11::arg("grad"), pybind11::arg("x"));
  m.attr("has_cuda") =
#ifdef WITH_CUDA
      true;
#else
      false;
#endif
}
