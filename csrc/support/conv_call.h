// causal_conv1d around its kernels, the same on every device: arguments checked and made dense, results allocated.
#pragma once

#include <tuple>

#include "support/conv_shape.h"
#include "support/tensor.h"

namespace opgraft {

struct ConvForward {
  ConvShape shape;
  Tensor x;
  Tensor weight;
  std::optional<Tensor> bias;
  std::optional<Tensor> initial;
  std::optional<Tensor> seq_idx;
  bool silu;
  Tensor out;
  Tensor final_state;
};

struct ConvBackward {
  ConvShape shape;
  Tensor grad;
  std::optional<Tensor> grad_final;
  Tensor x;
  Tensor weight;
  std::optional<Tensor> bias;
  std::optional<Tensor> initial;
  std::optional<Tensor> seq_idx;
  bool silu;
  Tensor grad_x;
  Tensor grad_weight;
  Tensor grad_bias;
  Tensor grad_initial;

  std::tuple<Tensor, Tensor, Tensor, Tensor> gradients() const {
    return {grad_x, grad_weight, grad_bias, grad_initial};
  }
};

// One decoding step. `state` and `new_state` may be the same memory.
struct ConvStep {
  ConvShape shape;
  Tensor x;
  Tensor state;
  Tensor weight;
  std::optional<Tensor> bias;
  bool silu;
  Tensor out;
  Tensor new_state;
};

inline Tensor new_conv_state(const Tensor& x, const ConvShape& shape) {
  return new_contiguous(x, std::vector<int64_t>{shape.batch, shape.channels, shape.width - 1});
}

inline ConvForward prepare_conv(const char* op, const Tensor& x, const Tensor& weight,
                                const std::optional<Tensor>& bias, const std::optional<Tensor>& initial_state,
                                const std::optional<Tensor>& seq_idx, bool silu, bool channel_last) {
  const ConvShape shape = check_conv(op, x, weight, bias, initial_state, seq_idx, channel_last);
  return {shape,
          as_contiguous(x),
          as_contiguous(weight),
          as_contiguous(bias),
          as_contiguous(initial_state),
          as_contiguous(seq_idx),
          silu,
          new_contiguous_like(x),
          new_conv_state(x, shape)};
}

inline ConvBackward prepare_conv_backward(const char* op, const Tensor& grad, const std::optional<Tensor>& grad_final,
                                          const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                                          const std::optional<Tensor>& initial_state,
                                          const std::optional<Tensor>& seq_idx, bool silu, bool channel_last) {
  const ConvShape shape =
      check_conv_backward(op, grad, grad_final, x, weight, bias, initial_state, seq_idx, channel_last);
  return {shape,
          as_contiguous(grad),
          as_contiguous(grad_final),
          as_contiguous(x),
          as_contiguous(weight),
          as_contiguous(bias),
          as_contiguous(initial_state),
          as_contiguous(seq_idx),
          silu,
          new_contiguous_like(x),
          new_contiguous_like(weight),
          new_contiguous(x, std::vector<int64_t>{shape.channels}),
          new_conv_state(x, shape)};
}

// run(ConvStep&) computes; the state is fresh.
template <typename Run>
inline std::tuple<Tensor, Tensor> step_conv(const char* op, const Tensor& x, const Tensor& state, const Tensor& weight,
                                            const std::optional<Tensor>& bias, bool silu, const Run& run) {
  const ConvShape shape = check_conv_update(op, x, state, weight, bias);
  ConvStep step{shape, as_contiguous(x),       as_contiguous(state),      as_contiguous(weight), as_contiguous(bias),
                silu,  new_contiguous_like(x), new_contiguous_like(state)};
  run(step);
  return {step.out, step.new_state};
}

// The same in the state's own memory: a row's shift reads ahead of what it writes.
template <typename Run>
inline Tensor step_conv_in_place(const char* op, const Tensor& x, Tensor& state, const Tensor& weight,
                                 const std::optional<Tensor>& bias, bool silu, const Run& run) {
  const ConvShape shape = check_conv_update(op, x, state, weight, bias);
  const Tensor kept = as_contiguous(state);
  ConvStep step{shape, as_contiguous(x),       kept, as_contiguous(weight), as_contiguous(bias),
                silu,  new_contiguous_like(x), kept};
  run(step);
  if (!state.is_contiguous()) torch::stable::copy_(state, step.new_state);
  return step.out;
}

}  // namespace opgraft
