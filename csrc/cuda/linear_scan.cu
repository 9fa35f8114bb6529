// h[t] = decay[t] h[t-1] + update[t] along one dimension, forward and backward on CUDA. Two layouts, one plan each:
// linear_scan_rows.cu and linear_scan_columns.cu.
//
// Bytes: two reads and one write an element forward, three reads and two writes backward; every input is read once, so
// the copy rate is the limit.
#include <torch/csrc/stable/library.h>

#include "cuda/linear_scan.cuh"
#include "ops.h"

namespace opgraft::cuda {
namespace {

template <typename Data>
void run(const Tensor& like, ScanShape shape, const Data& data, bool reverse) {
  const Launch context(like);
  shape.inner == 1 ? scan_rows(context, like, shape, data, reverse) : scan_columns(context, like, shape, data, reverse);
}

}  // namespace

Tensor linear_scan(const Tensor& decay, const Tensor& update, const OptionalTensor& initial, int64_t dim,
                   bool reverse) {
  const ScanShape shape = check_linear_scan("linear_scan", decay, "update", update, initial, dim);
  const Tensor decays = as_contiguous(decay), updates = as_contiguous(update);
  const OptionalTensor start = as_contiguous(initial);
  Tensor output = new_contiguous_like(update);
  if (output.numel() == 0) return output;
  dispatch_floating("linear_scan", update, [&](auto tag) {
    using T = typename DeviceType<typename decltype(tag)::type>::type;
    run(update, shape,
        ScanForward<T>{static_cast<const T*>(decays.const_data_ptr()), static_cast<const T*>(updates.const_data_ptr()),
                       optional_data<T>(start), static_cast<T*>(output.mutable_data_ptr())},
        reverse);
  });
  return output;
}

std::tuple<Tensor, Tensor, Tensor> linear_scan_backward(const Tensor& grad, const Tensor& decay, const Tensor& output,
                                                        const OptionalTensor& initial, int64_t dim, bool reverse) {
  const ScanShape shape = check_linear_scan("linear_scan_backward", decay, "output", output, initial, dim);
  check_alike("linear_scan_backward", "grad", grad, "output", output);
  const Tensor grads = as_contiguous(grad), decays = as_contiguous(decay), outputs = as_contiguous(output);
  const OptionalTensor start = as_contiguous(initial);
  Tensor grad_decay = new_contiguous_like(decay), grad_update = new_contiguous_like(decay);
  Tensor grad_initial = new_contiguous(decay, sizes_without(decay, dim));
  if (decay.numel() == 0) {
    torch::stable::zero_(grad_initial);
    return {grad_decay, grad_update, grad_initial};
  }
  dispatch_floating("linear_scan_backward", decay, [&](auto tag) {
    using T = typename DeviceType<typename decltype(tag)::type>::type;
    run(decay, shape,
        ScanBackward<T>{static_cast<const T*>(grads.const_data_ptr()), static_cast<const T*>(decays.const_data_ptr()),
                        static_cast<const T*>(outputs.const_data_ptr()), optional_data<T>(start),
                        static_cast<T*>(grad_decay.mutable_data_ptr()), static_cast<T*>(grad_update.mutable_data_ptr()),
                        static_cast<T*>(grad_initial.mutable_data_ptr())},
        reverse);
  });
  return {grad_decay, grad_update, grad_initial};
}

}  // namespace opgraft::cuda

STABLE_TORCH_LIBRARY_IMPL(opgraft, CUDA, m) {
  m.impl("linear_scan", TORCH_BOX(&opgraft::cuda::linear_scan));
  m.impl("linear_scan_backward", TORCH_BOX(&opgraft::cuda::linear_scan_backward));
}
