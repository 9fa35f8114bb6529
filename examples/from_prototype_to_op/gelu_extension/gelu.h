// The formula, for the host and the device alike, and the CUDA launchers.
#pragma once
#include <ATen/core/Tensor.h>

#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define BOTH __host__ __device__ __forceinline__
#else
#define BOTH inline
#endif

// logistic(2u) = (1 + tanh u) / 2 with u = sqrt(2/pi) (x + 0.044715 x^3).
template <typename A>
BOTH A logistic_of_twice_inner(A x) {
  return A(1) / (A(1) + std::exp(-A(1.5957691216057308) * (x + A(0.044715) * x * x * x)));
}

template <typename A>
BOTH A gelu_value(A x) {
  return x * logistic_of_twice_inner(x);
}

// d/dx x s(v) = s + x s (1 - s) v' with v' = 2 sqrt(2/pi) (1 + 3 * 0.044715 x^2).
template <typename A>
BOTH A gelu_slope(A x) {
  const A s = logistic_of_twice_inner(x);
  return s + x * s * (A(1) - s) * A(1.5957691216057308) * (A(1) + A(3) * A(0.044715) * x * x);
}

void gelu_forward_cuda(const at::Tensor& x, const at::Tensor& y);
void gelu_backward_cuda(const at::Tensor& grad, const at::Tensor& x, const at::Tensor& out);
