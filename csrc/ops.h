// Every kernel behind its plain C++ signature. Schemas are in schemas.cpp; the kernels know nothing of registration.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>

namespace opgraft {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

namespace detail {
template <typename Indices>
struct TensorTuple;
template <size_t... I>
struct TensorTuple<std::index_sequence<I...>> {
  template <size_t>
  using Each = Tensor;
  using type = std::tuple<Each<I>...>;
};
}  // namespace detail

// Several results of one op.
template <size_t COUNT>
using Tensors = typename detail::TensorTuple<std::make_index_sequence<COUNT>>::type;

namespace cpu {
Tensor gelu(const Tensor& x);
Tensor gelu_backward(const Tensor& grad, const Tensor& x);
Tensor linear_scan(const Tensor& decay, const Tensor& update, const OptionalTensor& initial, int64_t dim, bool reverse);
Tensors<3> linear_scan_backward(const Tensor& grad, const Tensor& decay, const Tensor& output,
                                const OptionalTensor& initial, int64_t dim, bool reverse);
}  // namespace cpu

namespace cuda {
Tensor gelu(const Tensor& x);
Tensor gelu_backward(const Tensor& grad, const Tensor& x);
Tensor linear_scan(const Tensor& decay, const Tensor& update, const OptionalTensor& initial, int64_t dim, bool reverse);
Tensors<3> linear_scan_backward(const Tensor& grad, const Tensor& decay, const Tensor& output,
                                const OptionalTensor& initial, int64_t dim, bool reverse);
}  // namespace cuda

}  // namespace opgraft
