// The checks and sizes that the CPU and the CUDA kernels of causal_conv1d share.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "support/check.h"

namespace opgraft {

constexpr int64_t MAX_CONV_WIDTH = 8;

struct ConvShape {
  int64_t batch = 0;
  int64_t channels = 0;
  int64_t length = 0;
  int width = 0;
  bool channel_last = false;

  // Strides of x, dense in either layout.
  int64_t step_stride() const { return channel_last ? channels : 1; }
  int64_t channel_stride() const { return channel_last ? 1 : length; }
  int64_t batch_stride() const { return channels * length; }
};

inline void check_sizes(const char* op, const char* argument, const Tensor& tensor, const char* meaning,
                        std::initializer_list<int64_t> wanted) {
  bool same = tensor.dim() == static_cast<int64_t>(wanted.size());
  int64_t dim = 0;
  for (int64_t size : wanted) {
    same = same && tensor.size(dim) == size;
    ++dim;
  }
  check(same, op, argument, " has shape ", shape_text(tensor), ", expected ", meaning, ", ", SizesText{wanted});
}

inline void check_weight(const char* op, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                         int64_t channels) {
  check_floating(op, "x", x);
  check_same_dtype(op, "weight", weight, "x", x);
  check_same_device(op, "weight", weight, "x", x);
  check(weight.dim() == 2 && weight.size(0) == channels && weight.size(1) >= 1 && weight.size(1) <= MAX_CONV_WIDTH, op,
        "weight has shape ", shape_text(weight), ", expected (", channels, ", width) with width from 1 to ",
        MAX_CONV_WIDTH);
  if (bias) {
    check_same_dtype(op, "bias", *bias, "x", x);
    check_same_device(op, "bias", *bias, "x", x);
    check_sizes(op, "bias", *bias, "one value a channel", {channels});
  }
}

inline ConvShape check_conv(const char* op, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                            const std::optional<Tensor>& initial_state, const std::optional<Tensor>& seq_idx,
                            bool channel_last) {
  check(x.dim() == 3, op, "x has shape ", shape_text(x), ", expected ",
        channel_last ? "(batch, length, channels)" : "(batch, channels, length)");
  ConvShape shape;
  shape.batch = x.size(0);
  shape.channels = x.size(channel_last ? 2 : 1);
  shape.length = x.size(channel_last ? 1 : 2);
  shape.channel_last = channel_last;
  check_weight(op, x, weight, bias, shape.channels);
  shape.width = static_cast<int>(weight.size(1));
  if (initial_state) {
    check_same_dtype(op, "initial_state", *initial_state, "x", x);
    check_same_device(op, "initial_state", *initial_state, "x", x);
    check_sizes(op, "initial_state", *initial_state, "(batch, channels, width - 1)",
                {shape.batch, shape.channels, shape.width - 1});
  }
  if (seq_idx) {
    check(seq_idx->scalar_type() == ScalarType::Int, op, "seq_idx has dtype ",
          torch::headeronly::toString(seq_idx->scalar_type()), ", expected Int");
    check_same_device(op, "seq_idx", *seq_idx, "x", x);
    check_sizes(op, "seq_idx", *seq_idx, "(batch, length)", {shape.batch, shape.length});
  }
  return shape;
}

inline ConvShape check_conv_backward(const char* op, const Tensor& grad, const std::optional<Tensor>& grad_final,
                                     const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                                     const std::optional<Tensor>& initial_state, const std::optional<Tensor>& seq_idx,
                                     bool channel_last) {
  const ConvShape shape = check_conv(op, x, weight, bias, initial_state, seq_idx, channel_last);
  check_alike(op, "grad", grad, "x", x);
  if (grad_final) {
    check_same_dtype(op, "grad_final", *grad_final, "x", x);
    check_same_device(op, "grad_final", *grad_final, "x", x);
    check_sizes(op, "grad_final", *grad_final, "(batch, channels, width - 1)",
                {shape.batch, shape.channels, shape.width - 1});
  }
  return shape;
}

inline ConvShape check_conv_update(const char* op, const Tensor& x, const Tensor& state, const Tensor& weight,
                                   const std::optional<Tensor>& bias) {
  check(x.dim() == 2, op, "x has shape ", shape_text(x), ", expected (batch, channels)");
  check_weight(op, x, weight, bias, x.size(1));
  check_same_dtype(op, "state", state, "x", x);
  check_same_device(op, "state", state, "x", x);
  check(state.dim() == 3 && state.size(0) == x.size(0) && state.size(1) == x.size(1) &&
            state.size(2) >= weight.size(1) - 1,
        op, "state has shape ", shape_text(state), ", expected (", x.size(0), ", ", x.size(1),
        ", steps) with at least ", weight.size(1) - 1, " steps");
  ConvShape shape;
  shape.batch = x.size(0);
  shape.channels = x.size(1);
  shape.length = state.size(2);
  shape.width = static_cast<int>(weight.size(1));
  return shape;
}

}  // namespace opgraft
