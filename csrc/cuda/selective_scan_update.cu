// One decoding step of Mamba's selective scan on CUDA: bound by reading and writing the state once.
#include <torch/csrc/stable/library.h>

#include "cuda/selective_scan.cuh"
#include "cuda/selective_scan.h"
#include "ops.h"
#include "support/selective_call.h"

namespace opgraft::cuda {
namespace {

template <typename T>
__global__ void update_rows(ScanData<T> d, const DeviceAccumulate<T>* state, DeviceAccumulate<T>* next,
                            T* __restrict__ y, int lanes) {
  using A = DeviceAccumulate<T>;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t row = index / lanes;
  const int lane = static_cast<int>(index % lanes);
  const bool there = row < d.batch * d.channels;
  A sum = A(0);
  const int64_t channel = there ? row % d.channels : 0;
  const int64_t batch = there ? row / d.channels : 0;
  const A x = there ? A(widen(d.u[row])) : A(0);
  if (there) {
    const int64_t group = channel / d.per_group();
    A step = A(widen(d.delta[row])) + (d.bias ? d.bias[channel] : A(0));
    if (d.use_softplus) step = softplus<sizeof(T) == 2>(step);
    for (int n = lane; n < d.states; n += lanes) {
      const A b = widen(d.b[batch * d.b_strides.batch + group * d.b_strides.group + n * d.b_strides.state]);
      const A c = widen(d.c[batch * d.c_strides.batch + group * d.c_strides.group + n * d.c_strides.state]);
      const A h =
          fma(exp2_fast(step * d.a[channel * d.states + n] * A(LOG2_E)), state[row * d.states + n], step * x * b);
      next[row * d.states + n] = h;
      sum = fma(h, c, sum);
    }
  }
  for (int by = lanes / 2; by > 0; by /= 2) sum += __shfl_xor_sync(WHOLE_WARP, sum, by);
  if (there && lane == 0) {
    if (d.skip) sum = fma(d.skip[channel], x, sum);
    if (d.z) sum *= silu<sizeof(T) == 2>(A(widen(d.z[row])));
    y[row] = narrow<T>(sum);
  }
}

void update(const char* op, SelectiveStep& step) {
  const SelectiveShape& shape = step.shape;
  if (shape.batch * shape.channels == 0) return;
  dispatch_floating(op, step.in.u, [&](auto tag) {
    using T = typename DeviceType<typename decltype(tag)::type>::type;
    using W = DeviceAccumulate<T>;
    const ScanData<T> d = scan_data<T>(shape, step.in.arguments());
    Launch context(step.in.u);
    int lanes = 1;
    while (lanes < 32 && lanes * 4 < shape.states) lanes *= 2;
    const int64_t threads = shape.batch * shape.channels * lanes;
    update_rows<T><<<static_cast<unsigned>((threads + 127) / 128), 128, 0, context.stream()>>>(
        d, d.initial, static_cast<W*>(step.next.mutable_data_ptr()), static_cast<T*>(step.y.mutable_data_ptr()), lanes);
    Launch::check();
  });
}

}  // namespace

std::tuple<Tensor, Tensor> selective_scan_update(const Tensor& state, const Tensor& u, const Tensor& delta,
                                                 const Tensor& A, const Tensor& B, const Tensor& C,
                                                 const OptionalTensor& D, const OptionalTensor& z,
                                                 const OptionalTensor& delta_bias, bool delta_softplus) {
  const OptionalTensor none;
  constexpr const char* OP = "selective_scan_update";
  return step_selective(OP, state, {u, delta, A, B, C, D, z, delta_bias, delta_softplus, none},
                        [](SelectiveStep& step) { update(OP, step); });
}

Tensor selective_scan_update_(Tensor state, const Tensor& u, const Tensor& delta, const Tensor& A, const Tensor& B,
                              const Tensor& C, const OptionalTensor& D, const OptionalTensor& z,
                              const OptionalTensor& delta_bias, bool delta_softplus) {
  const OptionalTensor none;
  constexpr const char* OP = "selective_scan_update_";
  return step_selective_in_place(OP, state, {u, delta, A, B, C, D, z, delta_bias, delta_softplus, none},
                                 [](SelectiveStep& step) { update(OP, step); });
}

}  // namespace opgraft::cuda

STABLE_TORCH_LIBRARY_IMPL(opgraft, CUDA, m) {
  m.impl("selective_scan_update", TORCH_BOX(&opgraft::cuda::selective_scan_update));
  m.impl("selective_scan_update_", TORCH_BOX(&opgraft::cuda::selective_scan_update_));
}
