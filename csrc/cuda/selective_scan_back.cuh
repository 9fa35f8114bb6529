// What the backward kernels of selective_scan share: their results, and the end of a step's gradients.
#pragma once

#include "cuda/selective_scan.cuh"

namespace opgraft::cuda {

template <typename T>
struct ScanGradients {
  using W = DeviceAccumulate<T>;
  const T* up;
  const W* up_final;
  const W* states;  // [mark][state][batch][channel]
  T *u, *delta, *z;
  W *a, *skip, *bias;  // [segment][batch][channel]...
  W* matrices;         // [block of channels][B or C][batch][group][state][step]
  W* initial;
};

// What is left of a vector of steps when the walk has given the gradients of (step size * u) and of the step size by
// the decays, and y: gradients of u, delta and z, and what the steps add to those of D and delta_bias.
template <typename T, bool FAST, bool WIDE, int ITEMS, typename A>
__device__ __forceinline__ void finish_steps(const ScanData<T>& d, const ScanGradients<T>& g, int64_t at, int left,
                                             const RowWords& u, const RowWords& delta, const RowWords& up,
                                             const RowWords& gate, A bias, A skip, A (&to_input)[ITEMS],
                                             A (&to_step)[ITEMS], A (&y)[ITEMS], A& skip_sum, A& bias_sum) {
  A x[ITEMS], step[ITEMS], dy[ITEMS], slope_of[ITEMS];
  unpack<T>(u, x);
  unpack<T>(delta, step);
  unpack<T>(up, dy);
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    step[i] += bias;
    slope_of[i] = A(1);
  }
  if (d.use_softplus) {
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) slope_of[i] = softplus_slope<FAST>(step[i]);
  }
  if (d.z) {
    A gated[ITEMS];
    unpack<T>(gate, gated);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const A s = sigmoid<FAST>(gated[i]);
      const A curve = s * (A(1) - s);
      const A silu_slope = s + (curve == A(0) ? A(0) : gated[i] * curve);
      y[i] = dy[i] * fma(skip, x[i], y[i]) * silu_slope;
      dy[i] *= gated[i] * s;
    }
    store_row<WIDE>(g.z + at, left, y);
  }
  A skips = A(0), biases = A(0);
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    // decay carries the factor log2 e.
    const A to_raw = fma(to_input[i], x[i], to_step[i] * A(0.6931471805599453)) * slope_of[i];
    to_input[i] = fma(to_input[i], step[i], dy[i] * skip);
    to_step[i] = to_raw;
    if (WIDE ? left > 0 : i < left) {
      skips = fma(dy[i], x[i], skips);
      biases += to_raw;
    }
  }
  skip_sum += skips;
  bias_sum += biases;
  store_row<WIDE>(g.u + at, left, to_input);
  store_row<WIDE>(g.delta + at, left, to_step);
}

}  // namespace opgraft::cuda
