// rms_norm_fp8 of many rows: a persistent grid, so that the next row is on its way to shared memory while this one
// waits for its sums and its scale. The same sums in the same order as norm_registers, so the same bits. (Where as much
// is written as is read, blocks that come and go one a row are as fast.)
//
// A thread copies its own vectors into its own slots and takes them into registers, so nothing waits for other threads
// but the sums; its weights stay in registers from row to row.
#pragma once

#include <algorithm>

#include "cuda/rms_norm_kernel.cuh"

namespace opgraft::cuda {
namespace {

constexpr int STREAM_THREADS = 512;  // of a block

template <typename T, typename W, int VECTORS, Result RESULT>
__global__ void __launch_bounds__(STREAM_THREADS) norm_stream(NormInputs<T, W> in, int threads, int shift) {
  constexpr int WIDTH = VECTOR_WIDTH<T>;
  constexpr bool BLOCKS = RESULT == Result::FP8_BLOCKS;
  extern __shared__ uint4 ring[];  // [vector][thread of the block]
  __shared__ float slots[2][2][STREAM_THREADS / 32];
  const int block = static_cast<int>(blockDim.x);
  const int group = threadIdx.x >> shift;
  const int groups = block >> shift;
  const int thread = threadIdx.x & (threads - 1);
  const int end = static_cast<int>(in.length / WIDTH);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * groups;
  const auto slot = [&](int k) { return ring + k * block + threadIdx.x; };
  const auto fetch = [&](int64_t row) {
    if (row < in.rows) {
      const T* from = in.x.row(row);
#pragma unroll
      for (int k = 0; k < VECTORS; ++k) {
        const int v = k * threads + thread;
        if (v < end) copy_async(slot(k), from + v * WIDTH);
      }
    }
    commit_copies();
  };
#pragma unroll
  for (int k = 0; k < VECTORS; ++k) {
    if (k * threads + thread >= end) *slot(k) = uint4{};
  }
  wait_for_the_kernel_before();
  int64_t row = static_cast<int64_t>(blockIdx.x) * groups + group;
  fetch(row);
  Words<W, WIDTH> weights[VECTORS];
#pragma unroll
  for (int k = 0; k < VECTORS; ++k) {
    const int v = k * threads + thread;
    weights[k] = in.weight && v < end ? load_words<W, WIDTH>(in.weight + v * WIDTH) : constant_words<W, WIDTH>(1.0f);
  }
  const float offset = in.weight ? in.offset : 0.0f;
  let_the_next_kernel_start();
  for (int turn = 0; row < in.rows; row += stride, turn ^= 1) {
    wait_copies<0>();
    Words<T, WIDTH> x[VECTORS];
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
      x[k] = load_words<T, WIDTH>(reinterpret_cast<const T*>(slot(k)));
      forget(x[k]);
    }
    fetch(row + stride);
    float lanes[WIDTH] = {};
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
      float values[WIDTH];
      unpack(x[k], values);
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) lanes[i] = fmaf(values[i], values[i], lanes[i]);
      forget(x[k]);
      forget(weights[k]);
    }
    float total[1] = {sum_lanes(lanes)};
    reduce_row(total, threads, group, thread, slots[0][turn] + group * (threads / 32), Add{});
    const float scale = inverse_root<float>(total[0], in.length, in.eps);
    float values[VECTORS][WIDTH];
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
      float factors[WIDTH];
      unpack(x[k], values[k]);
      unpack(weights[k], factors);
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) values[k][i] = product(values[k][i], scale);
      if (in.round_first) unpack(pack<T>(values[k]), values[k]);
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) values[k][i] = product(values[k][i], factors[i] + offset);
      forget(weights[k]);
    }
    encode_held_row<WIDTH, VECTORS, BLOCKS>(in.fp8, row, in.length, end, threads, group, thread,
                                            slots[1][turn] + group * (threads / 32), values);
  }
}

// Whether it did: rows of whole vectors that are many enough, and short enough for registers.
template <Result RESULT, typename T, typename W>
bool launch_stream(const NormInputs<T, W>& in, RowMapping mapping, int processors, cudaStream_t stream) {
  if constexpr (std::is_same_v<T, double>) {
    return false;
  } else {
    const int64_t groups = STREAM_THREADS / mapping.threads;
    if (mapping.threads > STREAM_THREADS || mapping.vectors < 2 || mapping.vectors > 4) return false;
    if (in.rows < 4 * groups * processors) return false;
    const auto run = [&](auto vectors) {
      const auto kernel = norm_stream<T, W, vectors(), RESULT>;
      constexpr int BYTES = vectors() * STREAM_THREADS * VECTOR_BYTES;
      STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES));
      int at_once = 0;
      STD_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&at_once, kernel, STREAM_THREADS, BYTES));
      launch_overlapping_shared(kernel, static_cast<unsigned>(std::max(at_once, 1) * processors), STREAM_THREADS, BYTES,
                                stream, in, mapping.threads, log2_of(mapping.threads));
    };
    mapping.vectors == 2 ? run(std::integral_constant<int, 2>{}) : run(std::integral_constant<int, 4>{});
    return true;
  }
}

}  // namespace
}  // namespace opgraft::cuda
