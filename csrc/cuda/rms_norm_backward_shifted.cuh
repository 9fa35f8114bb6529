// rms_norm and add_rms_norm backward of rows that do not lie on 16 bytes: as backward_registers, but a row's vectors
// are brought to shared memory as they lie, and its threads take their elements out of two neighbouring ones
// (rms_norm_shifted.cuh). The gradient leaves through the same place. So a vector may be another thread's work: a
// barrier of the row's threads when it has come, and one before it leaves.
#pragma once

#include "cuda/rms_norm_gradient.cuh"
#include "cuda/rms_norm_shifted.cuh"

namespace opgraft::cuda {
namespace {

constexpr int SHIFTED_STAGES = 2;

template <typename T, typename W, int VECTORS, int TENSORS>
__global__ void __launch_bounds__(BACKWARD_THREADS, VECTORS == 1 ? 2 : 1)
    backward_shifted(NormGradients<T, W> in, int threads, int shift, int vectors) {
  constexpr int WIDTH = VECTOR_WIDTH<T>;
  constexpr int SIZE = static_cast<int>(sizeof(T));
  extern __shared__ __align__(16) unsigned char shared[];  // [stage][tensor][group][vector]
  __shared__ float slots[2][2 * BACKWARD_THREADS / 32];
  const int group = threadIdx.x >> shift;
  const int groups = BACKWARD_THREADS >> shift;
  const int thread = threadIdx.x & (threads - 1);
  const int end = static_cast<int>(in.length);
  const int bytes = end * SIZE;
  const int64_t teams = static_cast<int64_t>(gridDim.x) * groups;
  const auto place = [&](int stage, int tensor) {
    return reinterpret_cast<uint4*>(shared) + ((stage * TENSORS + tensor) * groups + group) * vectors;
  };
  const auto fetch = [&](int64_t row, int stage) {
    if (row < in.rows) {
      bring_row(ShiftedRow(in.x.row(row), bytes), place(stage, 0), thread, threads, in.x.end(in.rows, in.length));
      bring_row(ShiftedRow(in.grad.row(row), bytes), place(stage, 1), thread, threads, in.grad.end(in.rows, in.length));
      if constexpr (TENSORS == 3) {
        bring_row(ShiftedRow(in.grad_summed.row(row), bytes), place(stage, 2), thread, threads,
                  in.grad_summed.end(in.rows, in.length));
      }
    }
    commit_copies();
  };
  // The row's elements from `first` on, zero past its end.
  const auto elements = [&](const Rows<const T>& rows, int64_t row, int stage, int tensor, int first) {
    const int phase = static_cast<int>(reinterpret_cast<uintptr_t>(rows.row(row)) % VECTOR_BYTES);
    Words<T, WIDTH> words = load_shifted<T, WIDTH>(place(stage, tensor), phase + first * SIZE);
    if (first + WIDTH > end) {
      float lanes[WIDTH];
      unpack(words, lanes);
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) lanes[i] = first + i < end ? lanes[i] : 0.0f;
      words = pack<T>(lanes);
    }
    return words;
  };
  const bool whole_weights = reinterpret_cast<uintptr_t>(in.weight) % VECTOR_BYTES == 0;
  const float offset = in.weight ? in.offset : 0.0f;
  const auto load_factors = [&](int first, float (&factors)[WIDTH]) {
    if (in.weight && whole_weights && first + WIDTH <= end) {
      unpack(load_words<W, WIDTH>(in.weight + first), factors);
    } else {
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) factors[i] = in.weight && first + i < end ? widen(in.weight[first + i]) : 1.0f;
    }
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) factors[i] += offset;
  };

  float share[VECTORS][WIDTH] = {};
  int stage = 0, parity = 0;
  int64_t row = static_cast<int64_t>(blockIdx.x) * groups + group;
  fetch(row, 0);
  for (int64_t base = static_cast<int64_t>(blockIdx.x) * groups; base < in.rows; base += teams, row += teams) {
    // A group whose rows are out goes on with zeros in the last round: warps may hold several groups, and shuffles and
    // barriers take whole warps.
    const bool live = row < in.rows;
    wait_copies<0>();
    share_row(group, threads);
    // The other stage is free: its gradient left before the barrier.
    fetch(row + teams, stage ^ 1);
    Words<T, WIDTH> x[VECTORS], grad[VECTORS];
    float squares[WIDTH] = {}, products[WIDTH] = {};
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
      const int first = (k * threads + thread) * WIDTH;
      x[k] = grad[k] = Words<T, WIDTH>{};
      if (!live || first >= end) continue;
      x[k] = elements(in.x, row, stage, 0, first);
      grad[k] = elements(in.grad, row, stage, 1, first);
      float values[WIDTH], ups[WIDTH], factors[WIDTH];
      unpack(x[k], values);
      unpack(grad[k], ups);
      load_factors(first, factors);
      add_products(values, ups, factors, squares, products);
      forget(x[k]);
      forget(grad[k]);
    }
    float sums[2] = {sum_lanes(squares), sum_lanes(products)};
    reduce_row(sums, threads, group, thread, &slots[parity][2 * group * (threads / 32)], Add{});
    if (threads <= 32) __syncwarp();
    const RowPull row_pull(in, sums, live);
    Words<T, WIDTH> more[TENSORS == 3 ? VECTORS : 1];
    if constexpr (TENSORS == 3) {
#pragma unroll
      for (int k = 0; k < VECTORS; ++k) {
        const int first = (k * threads + thread) * WIDTH;
        if (live && first < end) more[k] = elements(in.grad_summed, row, stage, 2, first);
      }
    }
    uint4* const out = place(stage, 0);
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
      const int v = k * threads + thread;
      const int first = v * WIDTH;
      if (!live || first >= end) continue;
      float values[WIDTH], ups[WIDTH], factors[WIDTH];
      unpack(x[k], values);
      unpack(grad[k], ups);
      load_factors(first, factors);
      row_pull.apply(values, ups, factors, share[k]);
      if constexpr (TENSORS == 3) {
        unpack(more[k], ups);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) values[i] += ups[i];
      }
      const Words<T, WIDTH> result = pack<T>(values);
      out[v] = {result.word[0], result.word[1], result.word[2], result.word[3]};
    }
    share_row(group, threads);
    if (live) take_row<T>(ShiftedRow(in.grad_x + row * in.length, bytes), out, thread, threads);
    stage ^= 1;
    parity ^= 1;
  }
  wait_copies<0>();
  if (in.partial) store_shares(in, share, reinterpret_cast<float*>(shared), group, groups, thread, threads);
}

}  // namespace
}  // namespace opgraft::cuda
