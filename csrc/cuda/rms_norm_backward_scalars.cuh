// rms_norm and add_rms_norm backward of float64, and of rows that no other kernel takes: element by element.
#pragma once

#include "cuda/rms_norm_gradient.cuh"

namespace opgraft::cuda {
namespace {

constexpr int SCALARS = 16;  // elements a thread, in registers

// A group of threads a row, SCALARS elements a thread.
template <typename T, typename W>
__global__ void __launch_bounds__(BACKWARD_THREADS) backward_scalars(NormGradients<T, W> in, int threads, int shift) {
  using A = DeviceAccumulate<T>;
  __shared__ A slots[2][2 * BACKWARD_THREADS / 32];
  const int group = threadIdx.x >> shift;
  const int groups = BACKWARD_THREADS >> shift;
  const int thread = threadIdx.x & (threads - 1);
  const int64_t team = static_cast<int64_t>(blockIdx.x) * groups + group;
  const int64_t teams = static_cast<int64_t>(gridDim.x) * groups;
  const int length = static_cast<int>(in.length);
  const A offset = in.weight ? A(in.offset) : A(0);
  A share[SCALARS] = {};
  int parity = 0;
  for (int64_t base = team - group; base < in.rows; base += teams) {
    const int64_t row = base + group;
    const int end = row < in.rows ? length : 0;
    const T* x = in.x.row(row);
    const T* grad = in.grad.row(row);
    const T* more = in.grad_summed.data ? in.grad_summed.row(row) : nullptr;
    T own[SCALARS], up[SCALARS];
#pragma unroll
    for (int k = 0; k < SCALARS; ++k) {
      const int i = k * threads + thread;
      own[k] = i < end ? x[i] : narrow<T>(A(0));
      up[k] = i < end ? grad[i] : narrow<T>(A(0));
    }
    A sums[2] = {};
#pragma unroll
    for (int k = 0; k < SCALARS; ++k) {
      const int i = k * threads + thread;
      const A factor = (in.weight && i < end ? A(widen(in.weight[i])) : A(1)) + offset;
      const A value = widen(own[k]);
      sums[0] = fma(value, value, sums[0]);
      sums[1] = fma(value, A(widen(up[k])) * factor, sums[1]);
    }
    reduce_row(sums, threads, group, thread, &slots[parity][2 * group * (threads / 32)], Add{});
    const A scale = inverse_root<A>(sums[0], in.length, A(in.eps));
    const A pull = scale * scale * scale * sums[1] / static_cast<A>(in.length);
#pragma unroll
    for (int k = 0; k < SCALARS; ++k) {
      const int i = k * threads + thread;
      if (i < end) {
        const A factor = (in.weight ? A(widen(in.weight[i])) : A(1)) + offset;
        const A value = widen(own[k]);
        A result = fma(A(widen(up[k])) * factor, scale, -value * pull);
        if (more) result += A(widen(more[i]));
        in.grad_x[row * in.length + i] = narrow<T>(result);
        share[k] = fma(A(widen(up[k])), value * scale, share[k]);
      }
    }
    parity ^= 1;
  }
  if (!in.partial) return;
#pragma unroll
  for (int k = 0; k < SCALARS; ++k) {
    const int i = k * threads + thread;
    if (i < length) in.partial[team * in.length + i] = share[k];
  }
}

// Such rows where registers do not hold them: a block a row, which is read twice; its share of dw lives in memory.
template <typename T, typename W>
__global__ void __launch_bounds__(BACKWARD_THREADS) backward_memory(NormGradients<T, W> in) {
  using A = DeviceAccumulate<T>;
  __shared__ A slots[2][2 * BACKWARD_THREADS / 32];
  A* share = in.partial ? in.partial + blockIdx.x * in.length : nullptr;
  int parity = 0;
  for (int64_t row = blockIdx.x; row < in.rows; row += gridDim.x) {
    const T* x = in.x.row(row);
    const T* grad = in.grad.row(row);
    const T* more = in.grad_summed.data ? in.grad_summed.row(row) : nullptr;
    A sums[2] = {};
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < in.length; i += BACKWARD_THREADS) {
      const A value = widen(x[i]);
      const A scaled = A(widen(grad[i])) * (in.weight ? A(widen(in.weight[i])) + A(in.offset) : A(1));
      sums[0] = fma(value, value, sums[0]);
      sums[1] = fma(value, scaled, sums[1]);
    }
    reduce_row(sums, BACKWARD_THREADS, 0, threadIdx.x, slots[parity], Add{});
    const A scale = inverse_root<A>(sums[0], in.length, A(in.eps));
    const A pull = scale * scale * scale * sums[1] / static_cast<A>(in.length);
    const bool begin = row == blockIdx.x;
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < in.length; i += BACKWARD_THREADS) {
      const A value = widen(x[i]);
      const A up = widen(grad[i]);
      const A scaled = up * (in.weight ? A(widen(in.weight[i])) + A(in.offset) : A(1));
      A result = fma(scaled, scale, -value * pull);
      if (more) result += A(widen(more[i]));
      in.grad_x[row * in.length + i] = narrow<T>(result);
      if (share) share[i] = fma(up, value * scale, begin ? A(0) : share[i]);
    }
    parity ^= 1;
  }
}

}  // namespace
}  // namespace opgraft::cuda
