// The control arm: opgraft's own GELU kernel bound raw with pybind11, as people bind kernels before they register them.
// No schema, no fake, no gradient: torch.compile cannot look inside and breaks the graph at every call.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>

#include "cpu/gelu_kernel.h"

#ifdef WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

void gelu_on_cuda(const void* x, void* y, int64_t elements, c10::ScalarType type, cudaStream_t stream);
#endif

namespace {

template <typename T>
void gelu_on_cpu(const at::Tensor& x, at::Tensor& y) {
  const T* in = x.const_data_ptr<T>();
  T* out = y.mutable_data_ptr<T>();
  at::parallel_for(0, x.numel(), opgraft::GRAIN_ELEMENTS,
                   [=](int64_t begin, int64_t end) { opgraft::cpu::forward_loop(in, out, begin, end); });
}

at::Tensor gelu(const at::Tensor& given) {
  const at::Tensor x = given.contiguous();
  at::Tensor y = at::empty(x.sizes(), x.options());
  if (x.is_cuda()) {
#ifdef WITH_CUDA
    const c10::cuda::CUDAGuard guard(x.device());
    gelu_on_cuda(x.const_data_ptr(), y.mutable_data_ptr(), x.numel(), x.scalar_type(),
                 c10::cuda::getCurrentCUDAStream());
    return y;
#else
    throw std::runtime_error("raw_gelu was built without CUDA");
#endif
  }
  switch (x.scalar_type()) {
    case at::kFloat:
      gelu_on_cpu<float>(x, y);
      break;
    case at::kBFloat16:
      gelu_on_cpu<at::BFloat16>(x, y);
      break;
    default:
      throw std::runtime_error("raw_gelu takes float32 and bfloat16");
  }
  return y;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("gelu", &gelu); }
