// Cross entropy where the ring does not serve: short rows, devices before Hopper, and the backward from kept
// statistics.
//
// rows: a group of threads (a warp for short rows, a block for long ones) reads its row twice, the second time from L1
// or L2. backward: no sums are needed, so tiles of rows are independent; one read and one write of an element.
#pragma once

#include "cuda/cross_entropy_gradient.cuh"
#include "support/overlap.h"

namespace opgraft::cuda {
namespace {

constexpr int ROWS_BLOCK = 256;

template <typename A, bool GENERAL, int GROUP>
__device__ __forceinline__ RowSum<A, GENERAL> group_merge(RowSum<A, GENERAL> own) {
  own = warp_merge(own);
  if constexpr (GROUP > 32) {
    constexpr int WARPS = GROUP / 32;
    __shared__ A shared[4][WARPS];
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    __syncthreads();
    if (lane == 0) {
      shared[0][warp] = own.maximum;
      shared[1][warp] = own.sum;
      if constexpr (GENERAL) {
        shared[2][warp] = own.weighted;
        shared[3][warp] = own.weights;
      }
    }
    __syncthreads();
    own = RowSum<A, GENERAL>();
    if (lane < WARPS) {
      own.maximum = shared[0][lane];
      own.sum = shared[1][lane];
      if constexpr (GENERAL) {
        own.weighted = shared[2][lane];
        own.weights = shared[3][lane];
      }
    }
    own = warp_merge(own);
  }
  return own;
}

template <typename T, bool GRADIENT, bool GENERAL, int GROUP>
__global__ void __launch_bounds__(ROWS_BLOCK) cross_entropy_rows(const __grid_constant__ CrossEntropyCall<T> call) {
  using A = DeviceAccumulate<T>;
  constexpr int WIDTH = VECTOR_WIDTH<T>;
  const int thread = threadIdx.x % GROUP;
  const int64_t classes = call.layout.classes;
  const int64_t step = static_cast<int64_t>(gridDim.x) * (ROWS_BLOCK / GROUP);
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * (ROWS_BLOCK / GROUP) + threadIdx.x / GROUP;
       row < call.layout.rows; row += step) {
    const T* const begin = call.logits + call.layout.begin(row);
    const int64_t target = call.target_of(row);
    A picked = A(0);
    if (thread == 0) picked = picked_of<GENERAL>(call, begin, target);

    RowSum<A, GENERAL> sum;
    const int phase = static_cast<int>(reinterpret_cast<uintptr_t>(begin) % VECTOR_BYTES / sizeof(T));
    const T* const boundary = begin - phase;
    const int64_t vectors = (classes + phase + WIDTH - 1) / WIDTH;
    for (int64_t v = thread; v < vectors; v += GROUP) {
      const int64_t column = v * WIDTH - phase;
      Vector<T, WIDTH> packs[1];
      if (column >= 0 && column + WIDTH <= classes) {
        packs[0] = *reinterpret_cast<const Vector<T, WIDTH>*>(boundary + v * WIDTH);
      } else {
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
          const bool inside = column + i >= 0 && column + i < classes;
          packs[0].lane[i] = inside ? begin[column + i] : narrow<T>(-INFINITY);
        }
      }
      take<GENERAL>(call, sum, packs, column, 0);
    }
    sum = group_merge<A, GENERAL, GROUP>(sum);
    const A log_sum = log_of(sum.sum);
    if (thread == 0) store_row(call, row, target, sum, log_sum, picked);
    if constexpr (GRADIENT) {
      const RowGradient<A> gradient = row_gradient<GENERAL>(call, target, sum.maximum, log_sum, A(1), A(0));
      write_gradient<GENERAL, GROUP>(call, gradient, call.gradient + row * classes, begin, 0, static_cast<int>(classes),
                                     thread);
    }
  }
}

constexpr int TILE_ELEMENTS = 8192;

template <typename T, bool GENERAL>
__global__ void __launch_bounds__(ROWS_BLOCK) cross_entropy_backward(const __grid_constant__ CrossEntropyCall<T> call) {
  using A = DeviceAccumulate<T>;
  wait_for_the_kernel_before();
  if (call.skip_if_one && *call.grad_loss == A(1)) return;
  const int64_t classes = call.layout.classes;
  const int64_t parts = (classes + TILE_ELEMENTS - 1) / TILE_ELEMENTS;
  for (int64_t tile = blockIdx.x; tile < call.layout.rows * parts; tile += gridDim.x) {
    const int64_t row = tile / parts;
    const int64_t first = tile % parts * TILE_ELEMENTS;
    const A grad_loss = call.grad_loss == nullptr ? A(0) : call.grad_loss[call.grad_per_row ? row : 0];
    const A grad_lse = call.grad_lse == nullptr ? A(0) : call.grad_lse[row];
    const RowGradient<A> gradient = row_gradient<GENERAL>(call, call.target_of(row), call.statistics[row],
                                                          call.statistics[call.layout.rows + row], grad_loss, grad_lse);
    const int64_t elements = min(classes - first, static_cast<int64_t>(TILE_ELEMENTS));
    write_gradient<GENERAL, ROWS_BLOCK>(call, gradient, call.gradient + row * classes,
                                        call.logits + call.layout.begin(row) + first, first, static_cast<int>(elements),
                                        static_cast<int>(threadIdx.x));
  }
}

constexpr int SUM_BLOCK = 1024;

template <int BLOCK>
__device__ __forceinline__ double block_sum(double own) {
  own = warp_total(own);
  if constexpr (BLOCK > 32) {
    __shared__ double shared[BLOCK / 32];
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = own;
    __syncthreads();
    own = warp_total(threadIdx.x % 32 < BLOCK / 32 ? shared[threadIdx.x % 32] : 0.0);
  }
  return own;
}

// One block. The mean's denominators, from the targets; and the mean class weight, for smoothing. In double, always in
// the same order.
template <typename T>
__global__ void __launch_bounds__(SUM_BLOCK)
    measure_targets(const CrossEntropyCall<T> call, DeviceAccumulate<T>* scales) {
  using A = DeviceAccumulate<T>;
  wait_for_the_kernel_before();
  // Only now: the next kernel reads logits before it waits for this one.
  let_the_next_kernel_start();
  if (call.skip_if_one && *call.grad_loss == A(1)) return;
  Counted own;
  double all = 0;
  if (call.mean) {
#pragma unroll 8
    for (int64_t row = threadIdx.x; row < call.layout.rows; row += SUM_BLOCK) own.add(call, row);
    own.kept = block_sum<SUM_BLOCK>(own.kept);
    if (call.weight != nullptr) own.weights = block_sum<SUM_BLOCK>(own.weights);
  }
  if (call.weight != nullptr && call.smoothing != A(0)) {
#pragma unroll 8
    for (int64_t c = threadIdx.x; c < call.layout.classes; c += SUM_BLOCK) all += call.weight[c];
    all = block_sum<SUM_BLOCK>(all);
  }
  if (threadIdx.x == 0) {
    own.store(call.mean, call.weight != nullptr, scales);
    scales[MEAN_WEIGHT] = static_cast<A>(all / static_cast<double>(call.layout.classes));
    *reinterpret_cast<unsigned long long*>(scales + TAKEN_AT) = 0;
  }
}

// One block. The mean of no rows is NaN, as torch has it.
template <typename A, int BLOCK>
__global__ void __launch_bounds__(BLOCK) sum_losses(const A* losses, int64_t rows, bool mean, A* out) {
  let_the_next_kernel_start();
  wait_for_the_kernel_before();
  double own = 0;
#pragma unroll 8
  for (int64_t row = threadIdx.x; row < rows; row += BLOCK) own += losses[row];
  own = block_sum<BLOCK>(own);
  if (threadIdx.x == 0) *out = mean && rows == 0 ? A(NAN) : static_cast<A>(own);
}

}  // namespace
}  // namespace opgraft::cuda
