// The checks and sizes that the CPU and the CUDA kernels of selective_scan share.
#pragma once

#include <cstdint>
#include <optional>

#include "support/check.h"
#include "support/conv_shape.h"

namespace opgraft {

constexpr int64_t MAX_STATES = 256;

struct SelectiveShape {
  int64_t batch = 0;
  int64_t channels = 0;
  int64_t length = 0;
  int64_t groups = 1;
  int states = 0;

  constexpr int64_t per_group() const { return channels / groups; }
};

// B and C are walked with their strides: they come as transposed views as often as not, and constant ones expanded.
struct MatrixStrides {
  int64_t batch = 0;
  int64_t group = 0;
  int64_t state = 0;
  int64_t step = 0;

  static MatrixStrides of(const Tensor& m) {
    return {m.stride(0), m.stride(1), m.stride(2), m.dim() > 3 ? m.stride(3) : 0};
  }
};

// The arguments of the scan, in the schema's order.
struct SelectiveArguments {
  const Tensor& u;
  const Tensor& delta;
  const Tensor& A;
  const Tensor& B;
  const Tensor& C;
  const std::optional<Tensor>& D;
  const std::optional<Tensor>& z;
  const std::optional<Tensor>& delta_bias;
  bool delta_softplus;
  const std::optional<Tensor>& initial_state;
};

inline ScalarType state_type(const Tensor& u) {
  return u.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

inline void check_kind(const char* op, const char* argument, const Tensor& tensor, const Tensor& u, ScalarType type) {
  check(tensor.scalar_type() == type, op, argument, " has dtype ", torch::headeronly::toString(tensor.scalar_type()),
        ", expected ", torch::headeronly::toString(type));
  check_same_device(op, argument, tensor, "u", u);
}

inline void check_channel_values(const char* op, const char* argument, const std::optional<Tensor>& tensor,
                                 const Tensor& u, int64_t channels) {
  if (!tensor) return;
  check_kind(op, argument, *tensor, u, state_type(u));
  check_sizes(op, argument, *tensor, "one value a channel", {channels});
}

inline void check_decays(const char* op, const Tensor& A, const Tensor& u, int64_t channels) {
  check_kind(op, "A", A, u, state_type(u));
  check(A.dim() == 2 && A.size(0) == channels && A.size(1) >= 1 && A.size(1) <= MAX_STATES, op, "A has shape ",
        shape_text(A), ", expected (", channels, ", states) with 1 to ", MAX_STATES, " states");
}

inline SelectiveShape check_selective(const char* op, const SelectiveArguments& a) {
  check_floating(op, "u", a.u);
  check(a.u.dim() == 3, op, "u has shape ", shape_text(a.u), ", expected (batch, channels, length)");
  check_alike(op, "delta", a.delta, "u", a.u);
  SelectiveShape shape;
  shape.batch = a.u.size(0);
  shape.channels = a.u.size(1);
  shape.length = a.u.size(2);
  check_decays(op, a.A, a.u, shape.channels);
  shape.states = static_cast<int>(a.A.size(1));
  check_kind(op, "B", a.B, a.u, a.u.scalar_type());
  check_kind(op, "C", a.C, a.u, a.u.scalar_type());
  check(a.B.dim() == 4 && a.B.size(1) >= 1 && shape.channels % a.B.size(1) == 0, op, "B has shape ", shape_text(a.B),
        ", expected (batch, groups, states, length) with groups that divide the ", shape.channels, " channels");
  shape.groups = a.B.size(1);
  check_sizes(op, "B", a.B, "(batch, groups, states, length)", {shape.batch, shape.groups, shape.states, shape.length});
  check_sizes(op, "C", a.C, "(batch, groups, states, length)", {shape.batch, shape.groups, shape.states, shape.length});
  check_channel_values(op, "D", a.D, a.u, shape.channels);
  check_channel_values(op, "delta_bias", a.delta_bias, a.u, shape.channels);
  if (a.z) check_alike(op, "z", *a.z, "u", a.u);
  if (a.initial_state) {
    check_kind(op, "initial_state", *a.initial_state, a.u, state_type(a.u));
    check_sizes(op, "initial_state", *a.initial_state, "(batch, channels, states)",
                {shape.batch, shape.channels, shape.states});
  }
  return shape;
}

inline SelectiveShape check_selective_backward(const char* op, const SelectiveArguments& a, const Tensor& grad,
                                               const std::optional<Tensor>& grad_final) {
  const SelectiveShape shape = check_selective(op, a);
  check_alike(op, "grad", grad, "u", a.u);
  if (grad_final) {
    check_kind(op, "grad_final", *grad_final, a.u, state_type(a.u));
    check_sizes(op, "grad_final", *grad_final, "(batch, channels, states)",
                {shape.batch, shape.channels, shape.states});
  }
  return shape;
}

// One step: x and delta (batch, channels), B and C (batch, groups, states).
inline SelectiveShape check_selective_update(const char* op, const Tensor& state, const SelectiveArguments& a) {
  check_floating(op, "u", a.u);
  check(a.u.dim() == 2, op, "u has shape ", shape_text(a.u), ", expected (batch, channels)");
  check_alike(op, "delta", a.delta, "u", a.u);
  SelectiveShape shape;
  shape.batch = a.u.size(0);
  shape.channels = a.u.size(1);
  shape.length = 1;
  check_decays(op, a.A, a.u, shape.channels);
  shape.states = static_cast<int>(a.A.size(1));
  check_kind(op, "B", a.B, a.u, a.u.scalar_type());
  check_kind(op, "C", a.C, a.u, a.u.scalar_type());
  check(a.B.dim() == 3 && a.B.size(1) >= 1 && shape.channels % a.B.size(1) == 0, op, "B has shape ", shape_text(a.B),
        ", expected (batch, groups, states) with groups that divide the ", shape.channels, " channels");
  shape.groups = a.B.size(1);
  check_sizes(op, "B", a.B, "(batch, groups, states)", {shape.batch, shape.groups, shape.states});
  check_sizes(op, "C", a.C, "(batch, groups, states)", {shape.batch, shape.groups, shape.states});
  check_channel_values(op, "D", a.D, a.u, shape.channels);
  check_channel_values(op, "delta_bias", a.delta_bias, a.u, shape.channels);
  if (a.z) check_alike(op, "z", *a.z, "u", a.u);
  check_kind(op, "state", state, a.u, state_type(a.u));
  check_sizes(op, "state", state, "(batch, channels, states)", {shape.batch, shape.channels, shape.states});
  return shape;
}

}  // namespace opgraft
