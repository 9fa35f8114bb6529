// One step of Mamba's selective scan on the CPU, for decoding: a row is a (batch, channel) with its states.
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "cpu/selective_scan_tile.h"
#include "ops.h"
#include "support/dispatch.h"

namespace opgraft::cpu {
namespace {

template <typename A>
void update_row(A* h, const A* a, A step, A input, A& y, int states, const A* b, const A* c) {
  A sum = A(0);
  for (int n = 0; n < states; ++n) {
    h[n] = exponential(step * a[n]) * h[n] + input * b[n];
    sum += h[n] * c[n];
  }
  y = sum;
}

void run_step(SelectiveStep& step) {
  const SelectiveShape shape = step.shape;
  dispatch_floating("selective_scan_update", step.in.u, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using S = Accumulate<T>;
    const Data<T> d = data_of<T>(shape, step.in.arguments());
    T* out = step.y.mutable_data_ptr<T>();
    S* to = step.next.mutable_data_ptr<S>();
    const int64_t grain = std::max<int64_t>(1, GRAIN_ELEMENTS / shape.states / 8);
    parallel_for(0, shape.batch * shape.channels, grain, [=](int64_t begin, int64_t end) {
      S b[MAX_STATES], c[MAX_STATES];
      int64_t held = -1;
      for (int64_t row = begin; row < end; ++row) {
        const int64_t channel = row % shape.channels, batch = row / shape.channels;
        const int64_t group = channel / shape.per_group();
        if (held != batch * shape.groups + group) {
          held = batch * shape.groups + group;
          for (int n = 0; n < shape.states; ++n) {
            b[n] = widen(d.b[batch * d.b_strides.batch + group * d.b_strides.group + n * d.b_strides.state]);
            c[n] = widen(d.c[batch * d.c_strides.batch + group * d.c_strides.group + n * d.c_strides.state]);
          }
        }
        S* h = to + row * shape.states;
        std::copy(d.initial + row * shape.states, d.initial + (row + 1) * shape.states, h);
        const S raw = widen(d.delta[row]) + (d.bias ? d.bias[channel] : S(0));
        const S dt = d.use_softplus ? softplus(raw) : raw;
        const S x = widen(d.u[row]);
        S sum;
        update_row<S>(h, d.a + channel * shape.states, dt, dt * x, sum, shape.states, b, c);
        if (d.d) sum += d.d[channel] * x;
        if (d.z) sum *= silu_value(S(widen(d.z[row])));
        out[row] = narrow<T>(sum);
      }
    });
  });
}

}  // namespace

std::tuple<Tensor, Tensor> selective_scan_update(const Tensor& state, const Tensor& u, const Tensor& delta,
                                                 const Tensor& A, const Tensor& B, const Tensor& C,
                                                 const OptionalTensor& D, const OptionalTensor& z,
                                                 const OptionalTensor& delta_bias, bool delta_softplus) {
  return step_selective("selective_scan_update", state,
                        {u, delta, A, B, C, D, z, delta_bias, delta_softplus, std::nullopt}, run_step);
}

Tensor selective_scan_update_(Tensor state, const Tensor& u, const Tensor& delta, const Tensor& A, const Tensor& B,
                              const Tensor& C, const OptionalTensor& D, const OptionalTensor& z,
                              const OptionalTensor& delta_bias, bool delta_softplus) {
  return step_selective_in_place("selective_scan_update_", state,
                                 {u, delta, A, B, C, D, z, delta_bias, delta_softplus, std::nullopt}, run_step);
}

}  // namespace opgraft::cpu

STABLE_TORCH_LIBRARY_IMPL(opgraft, CPU, m) {
  m.impl("selective_scan_update", TORCH_BOX(&opgraft::cpu::selective_scan_update));
  m.impl("selective_scan_update_", TORCH_BOX(&opgraft::cpu::selective_scan_update_));
}
