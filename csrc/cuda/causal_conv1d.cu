// Depthwise causal convolution with an optional SiLU, forward, backward and one step, on CUDA: which plan takes a call.
// Memory-bound: one read and one write an element forward, two reads and one write backward, so the copy rate is the
// limit. The plans are in causal_conv1d_rows.cuh, causal_conv1d_columns.cuh and causal_conv1d_general.cu.
#include <torch/csrc/stable/library.h>

#include "cuda/causal_conv1d.cuh"
#include "ops.h"
#include "support/conv_call.h"

namespace opgraft::cuda {
namespace {

ConvSizes sizes_of(const ConvShape& shape) { return {shape.batch, shape.channels, shape.length, shape.width}; }

template <typename T>
const T* data(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

template <typename T>
T* mutable_data(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

template <typename T, typename Call>
ConvInputs<T> inputs_of(const Call& call) {
  return {data<T>(call.x),
          data<T>(call.weight),
          optional_data<T>(call.bias),
          optional_data<T>(call.initial),
          optional_data<int32_t>(call.seq_idx),
          call.silu};
}

// A view that begins off 16 bytes is copied: that takes less than half of what reading it in pieces costs.
void align(Tensor& tensor) {
  if (aligned(tensor.const_data_ptr())) return;
  Tensor copy = new_contiguous_like(tensor);
  torch::stable::copy_(copy, tensor);
  tensor = copy;
}

}  // namespace

std::tuple<Tensor, Tensor> causal_conv1d(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                                         const OptionalTensor& initial_state, const OptionalTensor& seq_idx, bool silu,
                                         bool channel_last) {
  ConvForward call = prepare_conv("causal_conv1d", x, weight, bias, initial_state, seq_idx, silu, channel_last);
  const ConvSizes s = sizes_of(call.shape);
  if (s.batch * s.channels == 0) return {call.out, call.final_state};
  align(call.x);
  align(call.weight);
  dispatch_floating("causal_conv1d", x, [&](auto tag) {
    using T = typename DeviceType<typename decltype(tag)::type>::type;
    const Launch context(x);
    const ConvInputs<T> in = inputs_of<T>(call);
    const ConvOutputs<T> to{mutable_data<T>(call.out), mutable_data<T>(call.final_state)};
    if (!in.seq_idx && channel_last && fits_columns<T>(s, {in.x, to.out})) {
      forward_columns<T>(context, s, in, to);
    } else if (!in.seq_idx && !channel_last && fits_rows<T>(s, {in.x, to.out})) {
      forward_rows<T>(context, s, in, to);
    } else {
      forward_general<T>(context, s, in, to, channel_last);
    }
  });
  return {call.out, call.final_state};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> causal_conv1d_backward(const Tensor& grad, const OptionalTensor& grad_final,
                                                                  const Tensor& x, const Tensor& weight,
                                                                  const OptionalTensor& bias,
                                                                  const OptionalTensor& initial_state,
                                                                  const OptionalTensor& seq_idx, bool silu,
                                                                  bool channel_last) {
  const char* op = "causal_conv1d_backward";
  ConvBackward call =
      prepare_conv_backward(op, grad, grad_final, x, weight, bias, initial_state, seq_idx, silu, channel_last);
  const ConvSizes s = sizes_of(call.shape);
  if (s.batch * s.channels * s.length == 0) {
    torch::stable::zero_(call.grad_weight);
    torch::stable::zero_(call.grad_bias);
    call.grad_final ? torch::stable::copy_(call.grad_initial, *call.grad_final)
                    : torch::stable::zero_(call.grad_initial);
    return call.gradients();
  }
  align(call.x);
  align(call.weight);
  align(call.grad);
  dispatch_floating(op, x, [&](auto tag) {
    using T = typename DeviceType<typename decltype(tag)::type>::type;
    const Launch context(x);
    const ConvInputs<T> in = inputs_of<T>(call);
    const ConvGradients<T> g{data<T>(call.grad),
                             optional_data<T>(call.grad_final),
                             mutable_data<T>(call.grad_x),
                             mutable_data<T>(call.grad_initial),
                             mutable_data<T>(call.grad_weight),
                             mutable_data<T>(call.grad_bias)};
    if (!in.seq_idx && channel_last && fits_columns<T>(s, {in.x, g.grad, g.x})) {
      backward_columns<T>(context, x, s, in, g);
    } else if (!in.seq_idx && !channel_last && fits_rows<T>(s, {in.x, g.grad, g.x})) {
      backward_rows<T>(context, x, s, in, g);
    } else {
      backward_general<T>(context, x, s, in, g, channel_last);
    }
  });
  return call.gradients();
}

namespace {

// One thread a (batch, channel). A row's new state may be the old one's memory: it is shifted left in order.
template <typename T>
__global__ void update_rows(const T* __restrict__ x, const T* state, const T* __restrict__ weight,
                            const T* __restrict__ bias, T* __restrict__ out, T* new_state, int64_t rows,
                            int64_t channels, int64_t kept, int width, bool silu) {
  using A = DeviceAccumulate<T>;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  const int64_t channel = row % channels;
  A sum = bias ? A(widen(bias[channel])) : A(0);
  for (int k = 0; k < width - 1; ++k) {
    sum = fma(A(widen(weight[channel * width + k])), A(widen(state[row * kept + kept - (width - 1) + k])), sum);
  }
  sum = fma(A(widen(weight[channel * width + width - 1])), A(widen(x[row])), sum);
  out[row] = narrow<T>(silu ? activate<sizeof(T) == 2>(sum) : sum);
  for (int64_t j = 0; j + 1 < kept; ++j) new_state[row * kept + j] = state[row * kept + j + 1];
  if (kept > 0) new_state[row * kept + kept - 1] = x[row];
}

void run_step(ConvStep& step) {
  const ConvShape& s = step.shape;
  const int64_t rows = s.batch * s.channels;
  if (rows == 0) return;
  dispatch_floating("causal_conv1d_update", step.x, [&](auto tag) {
    using T = typename DeviceType<typename decltype(tag)::type>::type;
    const Launch context(step.x);
    update_rows<T><<<blocks_for(rows, 128), 128, 0, context.stream()>>>(
        data<T>(step.x), data<T>(step.state), data<T>(step.weight), optional_data<T>(step.bias),
        mutable_data<T>(step.out), mutable_data<T>(step.new_state), rows, s.channels, s.length, s.width, step.silu);
    Launch::check();
  });
}

}  // namespace

std::tuple<Tensor, Tensor> causal_conv1d_update(const Tensor& x, const Tensor& state, const Tensor& weight,
                                                const OptionalTensor& bias, bool silu) {
  return step_conv("causal_conv1d_update", x, state, weight, bias, silu, run_step);
}

Tensor causal_conv1d_update_(const Tensor& x, Tensor state, const Tensor& weight, const OptionalTensor& bias,
                             bool silu) {
  return step_conv_in_place("causal_conv1d_update_", x, state, weight, bias, silu, run_step);
}

}  // namespace opgraft::cuda

STABLE_TORCH_LIBRARY_IMPL(opgraft, CUDA, m) {
  m.impl("causal_conv1d", TORCH_BOX(&opgraft::cuda::causal_conv1d));
  m.impl("causal_conv1d_backward", TORCH_BOX(&opgraft::cuda::causal_conv1d_backward));
  m.impl("causal_conv1d_update", TORCH_BOX(&opgraft::cuda::causal_conv1d_update));
  m.impl("causal_conv1d_update_", TORCH_BOX(&opgraft::cuda::causal_conv1d_update_));
}
