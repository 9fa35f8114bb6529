// Allocation and layout: what the kernels need of torch's tensors beyond reading them.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "support/planned.h"

namespace opgraft {

using torch::stable::Tensor;

// A fresh, contiguous tensor of like's device, in like's dtype or another, such as the float32 of a state; the one that
// the caller planned for it, where there is one. (empty_like would keep a permuted layout.)
inline Tensor new_contiguous(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes,
                             torch::headeronly::ScalarType dtype) {
  if (const Tensor* planned = Planned::take(like, sizes, dtype)) return *planned;
  return torch::stable::new_empty(like, sizes, dtype);
}

inline Tensor new_contiguous(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes) {
  if (const Tensor* planned = Planned::take(like, sizes, like.scalar_type())) return *planned;
  return torch::stable::new_empty(like, sizes);
}

inline Tensor new_contiguous_like(const Tensor& like) { return new_contiguous(like, like.sizes()); }

// The tensor itself where it is contiguous already, without a trip through the dispatcher.
inline Tensor as_contiguous(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

inline std::optional<Tensor> as_contiguous(const std::optional<Tensor>& tensor) {
  return tensor ? std::optional<Tensor>(as_contiguous(*tensor)) : std::nullopt;
}

// A null pointer where the tensor was not given.
template <typename T>
inline const T* optional_data(const std::optional<Tensor>& tensor) {
  return tensor ? static_cast<const T*>(tensor->const_data_ptr()) : nullptr;
}

// The sizes of `tensor` without dimension `dim`.
inline std::vector<int64_t> sizes_without(const Tensor& tensor, int64_t dim) {
  const int64_t left_out = dim < 0 ? dim + tensor.dim() : dim;
  std::vector<int64_t> sizes;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (d != left_out) sizes.push_back(tensor.size(d));
  }
  return sizes;
}

}  // namespace opgraft
