// silu_mul_fp8: the kernels and their launch, behind plain pointers.
//
// Threads a row from row_mapping. Two reads of 16 bytes a lane and one write of half of that; the products wait in
// float registers for their scale, of the row or of 128 of them, so nothing is read or computed twice. About 23
// instructions an element (support/silu_rule.h), two thirds of what the copy rate leaves for 16-bit inputs on Hopper:
// where rows are many, the next one is copied to shared memory while this one is computed.
#pragma once

#include <algorithm>

#include "cuda/fp8.cuh"
#include "support/silu_rule.h"

namespace opgraft::cuda {
namespace {

constexpr int SILU_BLOCK = 128;
constexpr int SILU_THREADS = 512;  // of a block that walks rows
constexpr int SILU_VECTORS = 4;    // at most, a thread
// Rows on their way beside the one that is computed. 128 KB a multiprocessor on their way are best: two blocks with one
// row each where the warps of a row wait for each other, one block with two where none does.
template <bool BLOCKS>
constexpr int SILU_STAGES = BLOCKS ? 2 : 1;
constexpr int PROCESSOR_THREADS = 2048;  // at a time

template <typename T>
struct SiluInputs {
  Rows<const T> gate;
  Rows<const T> up;
  Fp8Outputs fp8;
  int64_t rows = 0;
  int64_t length = 0;
};

template <typename T>
__device__ __forceinline__ float silu_value(T gate, T up) {
  if constexpr (std::is_same_v<T, double>) {
    const double a = gate < -700.0 ? -700.0 : gate;
    return static_cast<float>(a / (1.0 + exp(-a)) * up);
  } else {
    return silu_product(widen(gate), widen(up));
  }
}

template <typename T, int VECTORS, bool BLOCKS>
__global__ void __launch_bounds__(MAX_ROW_THREADS) silu_registers(SiluInputs<T> in, int threads, int shift) {
  constexpr int WIDTH = VECTOR_WIDTH<T>;
  __shared__ float slots[32];
  const int group = threadIdx.x >> shift;
  const int thread = threadIdx.x & (threads - 1);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (blockDim.x >> shift) + group;
  const int end = row < in.rows ? static_cast<int>(in.length / WIDTH) : 0;
  wait_for_the_kernel_before();
  const T* gates = in.gate.row(row);
  const T* ups = in.up.row(row);
  Words<T, WIDTH> gate[VECTORS], up[VECTORS];
#pragma unroll
  for (int k = 0; k < VECTORS; ++k) {
    const int v = k * threads + thread;
    gate[k] = v < end ? load_words<T, WIDTH>(gates + v * WIDTH) : Words<T, WIDTH>{};
    up[k] = v < end ? load_words<T, WIDTH>(ups + v * WIDTH) : Words<T, WIDTH>{};
  }
  let_the_next_kernel_start();
  float values[VECTORS][WIDTH];
#pragma unroll
  for (int k = 0; k < VECTORS; ++k) {
    float other[WIDTH];
    unpack(gate[k], values[k]);
    unpack(up[k], other);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) values[k][i] = silu_product(values[k][i], other[i]);
  }
  encode_row<WIDTH, VECTORS, BLOCKS>(in.fp8, row, in.length, end, threads, group, thread,
                                     slots + group * (threads / 32), [&](int k, float (&lanes)[WIDTH]) {
#pragma unroll
                                       for (int i = 0; i < WIDTH; ++i) lanes[i] = values[k][i];
                                     });
}

// Many rows: a persistent grid, so that the next STAGES rows are on their way while this one is computed. A thread
// copies its own vectors into its own slots of shared memory, takes them into registers and has later ones copied at
// once. Here nothing is added up over a row, so its threads are as many as it has work for, not a power of two.
template <typename T, int VECTORS, bool BLOCKS, int STAGES>
__global__ void __launch_bounds__(SILU_THREADS, 2) silu_stream(SiluInputs<T> in, int threads) {
  constexpr int WIDTH = VECTOR_WIDTH<T>;
  extern __shared__ uint4 ring[];  // [stage][tensor][vector][thread of the block]
  __shared__ float slots[2][SILU_THREADS / 32];
  const int block = static_cast<int>(blockDim.x);
  const int group = static_cast<int>(threadIdx.x) / threads;
  const int groups = block / threads;
  const int thread = static_cast<int>(threadIdx.x) % threads;
  const int end = static_cast<int>(in.length / WIDTH);
  const int64_t stride = static_cast<int64_t>(gridDim.x) * groups;
  const auto slot = [&](int stage, int tensor, int k) {
    return ring + ((stage * 2 + tensor) * VECTORS + k) * block + threadIdx.x;
  };
  const auto fetch = [&](int64_t row, int stage) {
    if (row < in.rows) {
      const T* gates = in.gate.row(row);
      const T* ups = in.up.row(row);
#pragma unroll
      for (int k = 0; k < VECTORS; ++k) {
        const int v = k * threads + thread;
        if (v < end) {
          copy_async(slot(stage, 0, k), gates + v * WIDTH);
          copy_async(slot(stage, 1, k), ups + v * WIDTH);
        }
      }
    }
    commit_copies();
  };
#pragma unroll
  for (int k = 0; k < VECTORS; ++k) {
    for (int stage = 0; stage < STAGES && k * threads + thread >= end; ++stage) {
      *slot(stage, 0, k) = *slot(stage, 1, k) = uint4{};
    }
  }
  wait_for_the_kernel_before();
  int64_t row = static_cast<int64_t>(blockIdx.x) * groups + group;
#pragma unroll
  for (int stage = 0; stage < STAGES; ++stage) fetch(row + stage * stride, stage);
  let_the_next_kernel_start();
  int stage = 0;
  for (int turn = 0; row < in.rows; row += stride, turn ^= 1) {
    wait_copies<STAGES - 1>();
    Words<T, WIDTH> gate[VECTORS], up[VECTORS];
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
      gate[k] = load_words<T, WIDTH>(reinterpret_cast<const T*>(slot(stage, 0, k)));
      up[k] = load_words<T, WIDTH>(reinterpret_cast<const T*>(slot(stage, 1, k)));
      forget(gate[k]);
      forget(up[k]);
    }
    fetch(row + STAGES * stride, stage);
    stage = STAGES == 1 || stage + 1 == STAGES ? 0 : stage + 1;
    float values[VECTORS][WIDTH];
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
      float other[WIDTH];
      unpack(gate[k], values[k]);
      unpack(up[k], other);
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) values[k][i] = silu_product(values[k][i], other[i]);
    }
    encode_held_row<WIDTH, VECTORS, BLOCKS>(in.fp8, row, in.length, end, threads, group, thread,
                                            slots[turn] + group * (threads / 32), values);
  }
}

// Any length and alignment: computed twice.
template <typename T, bool BLOCKS>
__global__ void __launch_bounds__(MAX_ROW_THREADS) silu_memory(SiluInputs<T> in, int threads, int shift) {
  __shared__ float slots[32];
  const int group = threadIdx.x >> shift;
  const int thread = threadIdx.x & (threads - 1);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (blockDim.x >> shift) + group;
  const bool live = row < in.rows;
  let_the_next_kernel_start();
  wait_for_the_kernel_before();
  const T* gates = in.gate.row(row);
  const T* ups = in.up.row(row);
  encode_row_from_memory(in.fp8, BLOCKS, row, in.length, live, threads, group, thread, slots + group * (threads / 32),
                         [&](int64_t i) { return silu_value(gates[i], ups[i]); });
}

template <bool BLOCKS, typename T>
void launch_silu(const SiluInputs<T>& in, RowMapping mapping, bool wide, int processors, cudaStream_t stream) {
  // Where a vector a thread does not fill the device, more threads see a row through sooner. Nothing is added up over a
  // row, so its bits stay.
  const int64_t vectors = (in.length + VECTOR_WIDTH<T> - 1) / VECTOR_WIDTH<T>;
  if (mapping.vectors > 1 && in.rows * vectors <= static_cast<int64_t>(processors) * PROCESSOR_THREADS) {
    const int64_t threads = power_of_two_from(vectors);
    mapping.threads = static_cast<int>(threads < MAX_ROW_THREADS ? threads : MAX_ROW_THREADS);
    mapping.vectors = (vectors + mapping.threads - 1) / mapping.threads;
  }
  int shift = 0;
  while ((1 << shift) < mapping.threads) ++shift;
  if constexpr (!std::is_same_v<T, double>) {
    // A row's threads in whole warps, and as many rows a block as it has room for.
    const int64_t threads = ((vectors + SILU_VECTORS - 1) / SILU_VECTORS + 31) / 32 * 32;
    if (wide && mapping.vectors > 1 && threads <= SILU_THREADS) {
      const int64_t groups = SILU_THREADS / threads;
      if (in.rows >= 4 * static_cast<int64_t>(processors) * groups) {
        const auto kernel = silu_stream<T, SILU_VECTORS, BLOCKS, SILU_STAGES<BLOCKS>>;
        const int block = static_cast<int>(groups * threads);
        const int bytes = SILU_STAGES<BLOCKS> * 2 * SILU_VECTORS * block * VECTOR_BYTES;
        STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
        int at_once = 0;
        STD_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&at_once, kernel, block, bytes));
        launch_overlapping_shared(kernel, static_cast<unsigned>(std::max(at_once, 1) * processors), block, bytes,
                                  stream, in, static_cast<int>(threads));
        return;
      }
    }
  }
  const int block = mapping.threads < SILU_BLOCK ? SILU_BLOCK : mapping.threads;
  const int64_t rows_a_block = block / mapping.threads;
  const unsigned grid = static_cast<unsigned>((in.rows + rows_a_block - 1) / rows_a_block);
  if constexpr (!std::is_same_v<T, double>) {
    if (wide && mapping.vectors <= SILU_VECTORS) {
      const auto run = [&](auto vectors) {
        launch_overlapping(silu_registers<T, vectors(), BLOCKS>, grid, block, stream, in, mapping.threads, shift);
      };
      if (mapping.vectors == 1) return run(std::integral_constant<int, 1>{});
      if (mapping.vectors == 2) return run(std::integral_constant<int, 2>{});
      return run(std::integral_constant<int, SILU_VECTORS>{});
    }
  }
  launch_overlapping(silu_memory<T, BLOCKS>, grid, block, stream, in, mapping.threads, shift);
}

}  // namespace
}  // namespace opgraft::cuda
