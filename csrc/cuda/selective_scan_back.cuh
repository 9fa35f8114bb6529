// What the backward kernels of selective_scan share: their results, and the end of a step's gradients.
#pragma once

#include "cuda/selective_scan.cuh"

namespace opgraft::cuda {

// Sums over a row's steps, for D and delta_bias: those of float are as exact as their addends.
template <typename T>
using RowSum = std::conditional_t<(sizeof(T) < 4), float, double>;

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

// What is left of a vector of steps of the sizes `step` when the walk has given the gradients of (step size * u) and of
// the step size by the decays, and y: gradients of u, delta and z, and what the steps add to those of D and delta_bias.
template <typename T, bool FAST, bool WIDE, int ITEMS, typename A>
__device__ __forceinline__ void finish_steps(const ScanData<T>& d, const ScanGradients<T>& g, int64_t at, int left,
                                             const RowWords& u, const RowWords& delta, const RowWords& up,
                                             const RowWords& gate, A bias, A skip, const A* step, A (&to_input)[ITEMS],
                                             A (&to_step)[ITEMS], A (&y)[ITEMS], RowSum<T>& skip_sum,
                                             RowSum<T>& bias_sum) {
  A x[ITEMS], dy[ITEMS], slope_of[ITEMS];
  unpack<T>(u, x);
  unpack<T>(up, dy);
  if (d.use_softplus) {
    unpack<T>(delta, slope_of);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) slope_of[i] = softplus_slope<FAST>(slope_of[i] + bias);
  } else {
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) slope_of[i] = A(1);
  }
  if (d.z) {
    A gated[ITEMS];
    unpack<T>(gate, gated);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const A s = sigmoid<FAST>(gated[i]);
      const A silu_slope = s * fma(gated[i], A(1) - s, A(1));
      y[i] = dy[i] * fma(skip, x[i], y[i]) * silu_slope;
      dy[i] *= FAST ? gated[i] * s : silu<FAST>(gated[i]);
    }
    store_row<WIDE>(g.z + at, left, y);
  }
  RowSum<T> skips = 0, biases = 0;
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    // decay carries the factor log2 e.
    const A to_raw = fma(to_input[i], x[i], to_step[i] * A(0.6931471805599453)) * slope_of[i];
    to_input[i] = fma(to_input[i], step[i], dy[i] * skip);
    to_step[i] = to_raw;
    if (WIDE ? left > 0 : i < left) {
      skips = fma(RowSum<T>(dy[i]), RowSum<T>(x[i]), skips);
      biases += to_raw;
    }
  }
  skip_sum += skips;
  bias_sum += biases;
  store_row<WIDE>(g.u + at, left, to_input);
  store_row<WIDE>(g.delta + at, left, to_step);
}

}  // namespace opgraft::cuda
