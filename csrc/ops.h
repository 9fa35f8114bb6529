// Every kernel behind its plain C++ signature. Schemas are in schemas.cpp; the kernels know nothing of registration.
#pragma once

#include <torch/csrc/stable/tensor.h>

namespace opgraft {

using torch::stable::Tensor;

namespace cpu {
Tensor gelu(const Tensor& x);
Tensor gelu_backward(const Tensor& grad, const Tensor& x);
}  // namespace cpu

namespace cuda {
Tensor gelu(const Tensor& x);
Tensor gelu_backward(const Tensor& grad, const Tensor& x);
}  // namespace cuda

}  // namespace opgraft
