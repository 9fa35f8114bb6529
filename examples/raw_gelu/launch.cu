// The CUDA half of the control arm: the same kernel, launched from a plain function.
#include <c10/core/ScalarType.h>
#include <c10/cuda/CUDAException.h>

#include "cuda/gelu_kernel.cuh"

void gelu_on_cuda(const void* x, void* y, int64_t elements, c10::ScalarType type, cudaStream_t stream) {
  using namespace opgraft::cuda;
  if (type == c10::ScalarType::BFloat16) {
    launch<__nv_bfloat16>(elements, stream, Forward<true>{}, static_cast<__nv_bfloat16*>(y),
                          static_cast<const __nv_bfloat16*>(x));
  } else {
    launch<float>(elements, stream, Forward<false>{}, static_cast<float*>(y), static_cast<const float*>(x));
  }
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}
