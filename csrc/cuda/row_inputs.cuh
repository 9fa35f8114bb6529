// From tensors to the arguments of the kernels over rows.
#pragma once

#include <initializer_list>

#include "cuda/rms_norm_kernel.cuh"
#include "cuda/row.cuh"
#include "support/norm_shape.h"

namespace opgraft::cuda {

template <typename D>
Rows<const D> device_rows(const RowView& view) {
  return {static_cast<const D*>(view.tensor.const_data_ptr()), view.stride};
}

// Do the rows suit vectors of 16 bytes? Null pointers do.
template <typename D>
bool wide_rows(int64_t length, std::initializer_list<int64_t> strides, std::initializer_list<const void*> pointers) {
  constexpr int64_t WIDTH = VECTOR_WIDTH<D>;
  bool wide = length % WIDTH == 0;
  for (const int64_t stride : strides) wide = wide && stride % WIDTH == 0;
  for (const void* pointer : pointers) wide = wide && aligned(pointer);
  return wide;
}

template <typename D, typename W>
NormInputs<D, W> norm_inputs(RowShape shape, const std::optional<Tensor>& weight, double eps, double offset,
                             bool round_first) {
  NormInputs<D, W> in;
  in.weight = optional_data<W>(weight);
  in.rows = shape.rows;
  in.length = shape.length;
  in.eps = static_cast<DeviceAccumulate<D>>(eps);
  in.offset = static_cast<DeviceAccumulate<D>>(offset);
  in.round_first = round_first;
  return in;
}

}  // namespace opgraft::cuda
