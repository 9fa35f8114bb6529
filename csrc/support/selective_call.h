// selective_scan around its kernels, the same on every device: arguments checked and made dense (B and C are walked
// with their strides), results allocated.
#pragma once

#include <tuple>

#include "support/selective_shape.h"
#include "support/tensor.h"

namespace opgraft {

// The arguments of a scan or of one step, dense but for B and C. For a step `initial` is the state before it.
struct SelectiveInputs {
  Tensor u;
  Tensor delta;
  Tensor A;
  Tensor B;
  Tensor C;
  std::optional<Tensor> D;
  std::optional<Tensor> z;
  std::optional<Tensor> delta_bias;
  bool delta_softplus;
  std::optional<Tensor> initial;

  static SelectiveInputs of(const SelectiveArguments& a) {
    return {as_contiguous(a.u),
            as_contiguous(a.delta),
            as_contiguous(a.A),
            a.B,
            a.C,
            as_contiguous(a.D),
            as_contiguous(a.z),
            as_contiguous(a.delta_bias),
            a.delta_softplus,
            as_contiguous(a.initial_state)};
  }

  SelectiveArguments arguments() const { return {u, delta, A, B, C, D, z, delta_bias, delta_softplus, initial}; }
};

struct SelectiveForward {
  SelectiveShape shape;
  SelectiveInputs in;
  Tensor y;
  Tensor final_state;
};

struct SelectiveBackward {
  SelectiveShape shape;
  SelectiveInputs in;
  Tensor grad;
  std::optional<Tensor> grad_final;
  Tensor u;
  Tensor delta;
  Tensor A;
  Tensor B;
  Tensor C;
  Tensor D;
  Tensor z;
  Tensor delta_bias;
  Tensor initial;

  // Of u, delta, A, B, C, D, z, delta_bias and the initial state.
  std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> gradients() const {
    return {u, delta, A, B, C, D, z, delta_bias, initial};
  }
};

struct SelectiveStep {
  SelectiveShape shape;
  SelectiveInputs in;
  Tensor y;
  Tensor next;  // may be the state before the step
};

inline SelectiveForward prepare_selective(const char* op, const SelectiveArguments& a) {
  const SelectiveShape shape = check_selective(op, a);
  return {shape, SelectiveInputs::of(a), new_contiguous_like(a.u),
          new_contiguous(a.u, std::vector<int64_t>{shape.batch, shape.channels, shape.states}, state_type(a.u))};
}

// The gradient of z is zero already where there is no z.
inline SelectiveBackward prepare_selective_backward(const char* op, const SelectiveArguments& a, const Tensor& grad,
                                                    const std::optional<Tensor>& grad_final) {
  const SelectiveShape shape = check_selective_backward(op, a, grad, grad_final);
  const std::vector<int64_t> channels{shape.channels};
  SelectiveBackward call{shape,
                         SelectiveInputs::of(a),
                         as_contiguous(grad),
                         as_contiguous(grad_final),
                         new_contiguous_like(a.u),
                         new_contiguous_like(a.u),
                         new_contiguous_like(a.A),
                         new_contiguous_like(a.B),
                         new_contiguous_like(a.C),
                         new_contiguous(a.A, channels),
                         new_contiguous_like(a.u),
                         new_contiguous(a.A, channels),
                         new_contiguous(a.A, std::vector<int64_t>{shape.batch, shape.channels, shape.states})};
  if (!a.z) torch::stable::zero_(call.z);
  return call;
}

// run(SelectiveStep&) computes; the state is fresh.
template <typename Run>
inline std::tuple<Tensor, Tensor> step_selective(const char* op, const Tensor& state, const SelectiveArguments& a,
                                                 const Run& run) {
  const SelectiveShape shape = check_selective_update(op, state, a);
  SelectiveStep step{shape, SelectiveInputs::of(a), new_contiguous_like(a.u), new_contiguous_like(state)};
  step.in.initial = as_contiguous(state);
  run(step);
  return {step.y, step.next};
}

// The same in the state's own memory, which a row reads before it writes.
template <typename Run>
inline Tensor step_selective_in_place(const char* op, Tensor& state, const SelectiveArguments& a, const Run& run) {
  const SelectiveShape shape = check_selective_update(op, state, a);
  const Tensor kept = as_contiguous(state);
  SelectiveStep step{shape, SelectiveInputs::of(a), new_contiguous_like(a.u), kept};
  step.in.initial = kept;
  run(step);
  if (!state.is_contiguous()) torch::stable::copy_(state, step.next);
  return step.y;
}

}  // namespace opgraft
