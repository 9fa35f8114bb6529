// What the CPU kernels over rows share: pointers to rows, and weight + offset as they compute with it.
#pragma once

#include <algorithm>
#include <vector>

#include "support/norm_shape.h"
#include "support/parallel.h"

namespace opgraft::cpu {

// Rows a thread should get at least.
inline int64_t row_grain(int64_t length) { return std::max<int64_t>(1, GRAIN_ELEMENTS / std::max<int64_t>(1, length)); }

template <typename T>
const T* row_of(const RowView& view, int64_t row) {
  return view.tensor.const_data_ptr<T>() + row * view.stride;
}

// Ones where there is no weight, and then no offset either.
template <typename A>
std::vector<A> row_factors(const std::optional<Tensor>& weight, int64_t length, double offset) {
  std::vector<A> factors(length, A(1));
  if (!weight) return factors;
  const ScalarType wide = std::is_same_v<A, double> ? ScalarType::Double : ScalarType::Float;
  const Tensor values = as_contiguous(weight->scalar_type() == wide ? *weight : torch::stable::to(*weight, wide));
  const A* own = values.const_data_ptr<A>();
  for (int64_t i = 0; i < length; ++i) factors[i] = own[i] + static_cast<A>(offset);
  return factors;
}

}  // namespace opgraft::cpu
