// Allocation and layout: what the kernels need of torch's tensors beyond reading them.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

namespace opgraft {

using torch::stable::Tensor;

// A fresh, contiguous tensor of like's dtype and device. (empty_like would keep a permuted layout.)
inline Tensor new_contiguous(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes) {
  return torch::stable::new_empty(like, sizes);
}

inline Tensor new_contiguous_like(const Tensor& like) { return new_contiguous(like, like.sizes()); }

// The tensor itself where it is contiguous already, without a trip through the dispatcher.
inline Tensor as_contiguous(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

}  // namespace opgraft
