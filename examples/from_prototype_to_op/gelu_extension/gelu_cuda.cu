// One element a thread: one read and one write an element forward, two reads and one write backward.
//
// Each launch has the four things that the pitfalls of step 6 leave out: a device guard, the current stream, a check
// of the launch, and dispatch on the dtype. An empty tensor launches nothing: a grid of 0 blocks is an error.
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "gelu.h"

namespace {

constexpr int THREADS = 256;

unsigned blocks_for(int64_t elements) { return static_cast<unsigned>((elements + THREADS - 1) / THREADS); }

template <typename T>
__global__ void forward(const T* in, T* out, int64_t elements) {
  using A = at::opmath_type<T>;
  const int64_t i = int64_t(blockIdx.x) * THREADS + threadIdx.x;
  if (i < elements) out[i] = static_cast<T>(gelu_value(static_cast<A>(in[i])));
}

template <typename T>
__global__ void backward(const T* up, const T* in, T* out, int64_t elements) {
  using A = at::opmath_type<T>;
  const int64_t i = int64_t(blockIdx.x) * THREADS + threadIdx.x;
  if (i < elements) out[i] = static_cast<T>(static_cast<A>(up[i]) * gelu_slope(static_cast<A>(in[i])));
}

}  // namespace

void gelu_forward_cuda(const at::Tensor& x, const at::Tensor& y) {
  if (x.numel() == 0) return;
  const c10::cuda::CUDAGuard guard(x.device());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "gelu", [&] {
    forward<<<blocks_for(x.numel()), THREADS, 0, c10::cuda::getCurrentCUDAStream()>>>(
        x.const_data_ptr<scalar_t>(), y.mutable_data_ptr<scalar_t>(), x.numel());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

void gelu_backward_cuda(const at::Tensor& grad, const at::Tensor& x, const at::Tensor& out) {
  if (x.numel() == 0) return;
  const c10::cuda::CUDAGuard guard(x.device());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "gelu_backward", [&] {
    backward<<<blocks_for(x.numel()), THREADS, 0, c10::cuda::getCurrentCUDAStream()>>>(
        grad.const_data_ptr<scalar_t>(), x.const_data_ptr<scalar_t>(), out.mutable_data_ptr<scalar_t>(), x.numel());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}
