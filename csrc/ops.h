// Every kernel behind its plain C++ signature. Schemas are in schemas.cpp; the kernels know nothing of registration.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

namespace opgraft {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
// Of u, delta, A, B, C, D, z, delta_bias and the initial state.
using SelectiveGradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

namespace cpu {
#include "signatures.inc"
}  // namespace cpu

namespace cuda {
#include "signatures.inc"
}  // namespace cuda

}  // namespace opgraft
