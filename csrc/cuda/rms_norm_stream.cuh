// rms_norm and add_rms_norm forward of many rows: a persistent grid, so that the next rows are on their way to shared
// memory while this one waits for its sums. The same sums in the same order as norm_registers, so the same bits.
//
// A thread copies its own vectors into its own slots and takes them into registers, so nothing waits for other threads
// but the sums; its weights stay in registers from row to row.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "cuda/rms_norm_kernel.cuh"

namespace opgraft::cuda {
namespace {

constexpr int STREAM_THREADS = 512;  // of a block, at most

template <typename T, typename W, int VECTORS, bool ADD, Result RESULT, int STAGES>
__global__ void __launch_bounds__(STREAM_THREADS, 2) norm_stream(NormInputs<T, W> in, int threads, int shift) {
  constexpr int WIDTH = VECTOR_WIDTH<T>;
  constexpr int TENSORS = ADD ? 2 : 1;
  extern __shared__ uint4 ring[];  // [stage][tensor][vector][thread of the block]
  __shared__ float slots[2][2][STREAM_THREADS / 32];
  const int block = static_cast<int>(blockDim.x);
  const int group = threadIdx.x >> shift;
  const int groups = block >> shift;
  const int thread = threadIdx.x & (threads - 1);
  const int end = static_cast<int>(in.length / WIDTH);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * groups;
  const auto slot = [&](int stage, int tensor, int k) {
    return ring + ((stage * TENSORS + tensor) * VECTORS + k) * block + threadIdx.x;
  };
  const auto fetch = [&](int64_t row, int stage) {
    if (row < in.rows) {
      const T* from = in.x.row(row);
      [[maybe_unused]] const T* other = ADD ? in.residual.row(row) : nullptr;
#pragma unroll
      for (int k = 0; k < VECTORS; ++k) {
        const int v = k * threads + thread;
        if (v < end) {
          copy_async(slot(stage, 0, k), from + v * WIDTH);
          if constexpr (ADD) copy_async(slot(stage, 1, k), other + v * WIDTH);
        }
      }
    }
    commit_copies();
  };
#pragma unroll
  for (int k = 0; k < VECTORS; ++k) {
    for (int stage = 0; stage < STAGES && k * threads + thread >= end; ++stage) {
      *slot(stage, 0, k) = uint4{};
      if constexpr (ADD) *slot(stage, 1, k) = uint4{};
    }
  }
  wait_for_the_kernel_before();
  int64_t row = static_cast<int64_t>(blockIdx.x) * groups + group;
#pragma unroll
  for (int stage = 0; stage < STAGES; ++stage) fetch(row + stage * stride, stage);
  Words<W, WIDTH> weights[VECTORS];
#pragma unroll
  for (int k = 0; k < VECTORS; ++k) {
    const int v = k * threads + thread;
    weights[k] = in.weight && v < end ? load_words<W, WIDTH>(in.weight + v * WIDTH) : constant_words<W, WIDTH>(1.0f);
  }
  const float offset = in.weight ? in.offset : 0.0f;
  let_the_next_kernel_start();
  int stage = 0;
  for (int turn = 0; row < in.rows; row += stride, turn ^= 1) {
    wait_copies<STAGES - 1>();
    Words<T, WIDTH> x[VECTORS], residual[ADD ? VECTORS : 1];
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
      x[k] = load_words<T, WIDTH>(reinterpret_cast<const T*>(slot(stage, 0, k)));
      forget(x[k]);
      if constexpr (ADD) {
        residual[k] = load_words<T, WIDTH>(reinterpret_cast<const T*>(slot(stage, 1, k)));
        forget(residual[k]);
      }
    }
    fetch(row + STAGES * stride, stage);
    stage = STAGES == 1 || stage + 1 == STAGES ? 0 : stage + 1;
    float lanes[WIDTH] = {};
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
      const int v = k * threads + thread;
      float values[WIDTH];
      unpack(x[k], values);
      if constexpr (ADD) {
        float others[WIDTH];
        unpack(residual[k], others);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) values[i] += others[i];
        x[k] = pack<T>(values);
        if (v < end) store_words(in.summed + row * in.length + v * WIDTH, x[k]);
        unpack(x[k], values);
      }
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
      const int v = k * threads + thread;
      float factors[WIDTH];
      unpack(x[k], values[k]);
      unpack(weights[k], factors);
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) values[k][i] = product(values[k][i], scale);
      if (in.round_first) unpack(pack<T>(values[k]), values[k]);
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) values[k][i] = product(values[k][i], factors[i] + offset);
      forget(weights[k]);
      if constexpr (RESULT == Result::PLAIN) {
        if (v < end) store_words(in.y + row * in.length + v * WIDTH, pack<T>(values[k]));
      }
    }
    if constexpr (RESULT != Result::PLAIN) {
      encode_held_row<WIDTH, VECTORS, RESULT == Result::FP8_BLOCKS>(
          in.fp8, row, in.length, end, threads, group, thread, slots[1][turn] + group * (threads / 32), values);
    }
  }
}

// Whether it did: rows of whole vectors that are many enough, and short enough for registers.
template <bool ADD, Result RESULT, typename T, typename W>
bool launch_stream(const NormInputs<T, W>& in, RowMapping mapping, int processors, cudaStream_t stream) {
  if constexpr (!std::is_same_v<T, __nv_bfloat16> || !std::is_same_v<W, __nv_bfloat16>) {
    return false;
  } else {
    const char* stages = getenv("NS");
    if (!stages || mapping.threads < 32 || mapping.threads > STREAM_THREADS || mapping.vectors > 4 || mapping.vectors < 2) return false;
    const char* bl = getenv("NB");
    const int block = std::max(mapping.threads, bl ? atoi(bl) : 256);
    const int64_t groups = block / mapping.threads;
    if (in.rows < 8 * groups * processors) return false;
    const auto run = [&](auto vectors, auto depth) {
      const auto kernel = norm_stream<T, W, vectors(), ADD, RESULT, depth()>;
      const size_t bytes = size_t(depth()) * (ADD ? 2 : 1) * vectors() * block * VECTOR_BYTES;
      STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
      int at_once = 0;
      STD_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&at_once, kernel, block, bytes));
      if (getenv("SAY")) printf("norm stream threads %d vectors %d block %d stages %d at once %d\n", mapping.threads, int(vectors()), block, int(depth()), at_once);
      const char* most = getenv("NM");
      if (most) at_once = std::min(at_once, atoi(most));
      launch_overlapping_shared(kernel, static_cast<unsigned>(at_once * processors), block, bytes, stream, in,
                                mapping.threads, log2_of(mapping.threads));
    };
    using std::integral_constant;
    if (mapping.vectors == 2) {
      atoi(stages) == 1 ? run(integral_constant<int, 2>{}, integral_constant<int, 1>{}) : run(integral_constant<int, 2>{}, integral_constant<int, 2>{});
    } else {
      atoi(stages) == 1 ? run(integral_constant<int, 4>{}, integral_constant<int, 1>{}) : run(integral_constant<int, 4>{}, integral_constant<int, 2>{});
    }
    return true;
  }
}

}  // namespace
}  // namespace opgraft::cuda
