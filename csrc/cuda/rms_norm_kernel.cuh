// rms_norm and add_rms_norm forward: the kernel and its launch, behind plain pointers.
//
// Threads a row from a mapping: part of a warp to a whole block; a block of at least MANY_ROWS_BLOCK threads takes
// several rows. The row stays in registers between its sum and its result, so it is read once and written once
// (add_rms_norm: two reads, two writes): the copy bound. Loads of x and of the weight are issued together, before the
// reduction. Rows that registers do not hold, and rows that are not aligned to 16 bytes, are read a second time, from
// L2.
#pragma once

#include "cuda/fp8.cuh"
#include "cuda/row.cuh"

namespace opgraft::cuda {
namespace {

constexpr int MANY_ROWS_BLOCK = 256;  // smaller ones do not start fast enough to fill the memory's queue
constexpr int FEW_ROWS_BLOCK = 128;
constexpr int64_t FEW_ROWS = 512;

template <typename T, typename W>
struct NormInputs {
  Rows<const T> x;
  Rows<const T> residual;  // add_rms_norm alone
  const W* weight = nullptr;
  T* y = nullptr;  // or codes and scales
  Fp8Outputs fp8;
  T* summed = nullptr;  // x + residual, add_rms_norm alone
  int64_t rows = 0;
  int64_t length = 0;
  DeviceAccumulate<T> eps = 0;
  DeviceAccumulate<T> offset = 0;
  bool round_first = false;  // the normalised x is rounded to T before the weight
};

// 1 / sqrt(mean of squares + eps), every operation correctly rounded: the CPU's kernels give the same bits.
template <typename A>
__device__ __forceinline__ A inverse_root(A squares, int64_t length, A eps) {
  if constexpr (std::is_same_v<A, double>) {
    return 1.0 / sqrt(__dadd_rn(squares / static_cast<double>(length), eps));
  } else {
    return __frcp_rn(__fsqrt_rn(__fadd_rn(__fdiv_rn(squares, static_cast<float>(length)), eps)));
  }
}

template <typename A>
__device__ __forceinline__ A product(A one, A other) {
  if constexpr (std::is_same_v<A, double>) {
    return __dmul_rn(one, other);
  } else {
    return __fmul_rn(one, other);
  }
}

// What the normalised value becomes: rounded to T before the weight, where that is asked for, and weighed.
template <typename T, typename A>
__device__ __forceinline__ A weigh(A normal, A weight, bool round_first) {
  if (round_first) normal = widen(narrow<T>(normal));
  return product(normal, weight);
}

template <typename T>
__device__ __forceinline__ T rounded_sum_of(T one, T other) {
  return narrow<T>(widen(one) + widen(other));
}

enum class Result { PLAIN, FP8_ROWS, FP8_BLOCKS };

template <typename T, typename W, int VECTORS, bool ADD, Result RESULT, Keep KEEP>
__global__ void __launch_bounds__(MAX_ROW_THREADS) norm_registers(NormInputs<T, W> in, int threads, int shift) {
  constexpr int WIDTH = VECTOR_WIDTH<T>;
  constexpr bool EARLY = VECTORS * sizeof(W) <= 8;  // weights wait in registers where there are enough of them
  __shared__ float slots[2][32];
  const int group = threadIdx.x >> shift;
  const int thread = threadIdx.x & (threads - 1);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (blockDim.x >> shift) + group;
  // In elements: where this thread's vector k begins, and what is before the row's end.
  const int first = thread * WIDTH, step = threads * WIDTH;
  const int all = static_cast<int>(in.length);
  const int end = row < in.rows ? all : 0;
  const auto inside = [&](int k, int of) { return first + k * step < of; };

  wait_for_the_kernel_before();
  Words<T, WIDTH> x[VECTORS], residual[ADD ? VECTORS : 1];
  Words<W, WIDTH> weights[VECTORS];
  const T* const from = in.x.row(row) + first;
#pragma unroll
  for (int k = 0; k < VECTORS; ++k) {
    x[k] = inside(k, end) ? load_marked<KEEP, T, WIDTH>(from + k * step) : Words<T, WIDTH>{};
  }
  [[maybe_unused]] const T* const other = ADD ? in.residual.row(row) + first : nullptr;
  const auto load_residual = [&](int k) {
    residual[k] = inside(k, end) ? load_marked<KEEP, T, WIDTH>(other + k * step) : Words<T, WIDTH>{};
  };
  if constexpr (ADD && EARLY) {
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) load_residual(k);
  }
  const float offset = in.weight ? in.offset : 0.0f;
  const W* const weight = in.weight + first;
  const auto load_weights = [&](int k) {
    weights[k] = inside(k, all) ? load_marked<KEEP, W, WIDTH>(weight + k * step) : Words<W, WIDTH>{};
  };
  if (!in.weight) {
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) weights[k] = constant_words<W, WIDTH>(1.0f);
  } else if constexpr (EARLY) {
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) load_weights(k);
  }
  // Only now: the blocks of the next kernel would be in the way of these loads.
  let_the_next_kernel_start();
  float lanes[WIDTH] = {};
  [[maybe_unused]] T* const summed = ADD ? in.summed + row * in.length + first : nullptr;
#pragma unroll
  for (int k = 0; k < VECTORS; ++k) {
    float values[WIDTH];
    unpack(x[k], values);
    if constexpr (ADD) {
      // Registers do not hold all of a long row's residual: two vectors of it at a time.
      if constexpr (!EARLY) {
        if (k % 2 == 0) {
          asm volatile("" ::: "memory");
          load_residual(k);
          if (k + 1 < VECTORS) load_residual(k + 1);
        }
      }
      float others[WIDTH];
      unpack(residual[k], others);
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) values[i] += others[i];
      x[k] = pack<T>(values);
      if (inside(k, end)) store_words(summed + k * step, x[k]);
      unpack(x[k], values);
    }
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) lanes[i] = fmaf(values[i], values[i], lanes[i]);
    forget(x[k]);
    if constexpr (EARLY) forget(weights[k]);
  }
  float total[1] = {sum_lanes(lanes)};
  reduce_row<(VECTORS > 1)>(total, threads, group, thread, slots[0] + group * (threads / 32), Add{});
  // The hardware's approximate root would do for 16-bit results, but then ptxas unpacks the row before the sum is
  // there, and spills: the exact one has a rare branch, which holds it back.
  const float scale = inverse_root<float>(total[0], in.length, in.eps);
  // `round_first` and `shifted` are known to the compiler where that saves instructions.
  const auto result = [&](int k, float (&values)[WIDTH], bool round_first, bool shifted) {
    if constexpr (!EARLY) {
      if (in.weight) load_weights(k);
    }
    float factors[WIDTH];
    unpack(x[k], values);
    unpack(weights[k], factors);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) values[i] = product(values[i], scale);
    if (round_first) unpack(pack<T>(values), values);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) values[i] = product(values[i], shifted ? factors[i] + offset : factors[i]);
    forget(x[k]);
    forget(weights[k]);
  };
  if constexpr (RESULT == Result::PLAIN) {
    T* const to = in.y + row * in.length + first;
    const auto store_row = [&](bool round_first, bool shifted) {
#pragma unroll
      for (int k = 0; k < VECTORS; ++k) {
        if (!inside(k, end)) continue;
        float values[WIDTH];
        result(k, values, round_first, shifted);
        store_words(to + k * step, pack<T>(values));
      }
    };
    if (offset != 0.0f) {
      store_row(in.round_first, true);
    } else if (in.round_first) {
      store_row(true, false);
    } else {
      store_row(false, false);
    }
  } else {
    const auto values_of = [&](int k, float (&values)[WIDTH]) { result(k, values, in.round_first, true); };
    const int vectors = end / WIDTH;
    if constexpr (VECTORS == 2 || VECTORS == 4) {
      // Registers hold the results where they held the row; with more than one vector a row has whole warps.
      float values[VECTORS][WIDTH];
#pragma unroll
      for (int k = 0; k < VECTORS; ++k) values_of(k, values[k]);
      encode_held_row<WIDTH, VECTORS, RESULT == Result::FP8_BLOCKS>(in.fp8, row, in.length, vectors, threads, group,
                                                                    thread, slots[1] + group * (threads / 32), values);
    } else {
      encode_row<WIDTH, VECTORS, RESULT == Result::FP8_BLOCKS>(in.fp8, row, in.length, vectors, threads, group, thread,
                                                               slots[1] + group * (threads / 32), values_of);
    }
  }
}

// Any length and alignment: x, or the sum that was just written, is read twice.
template <typename T, typename W, bool ADD, Result RESULT>
__global__ void __launch_bounds__(MAX_ROW_THREADS) norm_memory(NormInputs<T, W> in, int threads, int shift) {
  using A = DeviceAccumulate<T>;
  constexpr int WIDTH = VECTOR_WIDTH<T>;
  __shared__ A slots[32];
  __shared__ float fp8_slots[32];
  let_the_next_kernel_start();
  wait_for_the_kernel_before();
  const int group = threadIdx.x >> shift;
  const int thread = threadIdx.x & (threads - 1);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (blockDim.x >> shift) + group;
  const bool live = row < in.rows;
  const T* from = in.x.row(row);
  const T* other = ADD ? in.residual.row(row) : nullptr;
  T* kept = ADD ? in.summed + row * in.length : nullptr;
  const int64_t end = live ? in.length : 0;
  A lanes[WIDTH] = {};
  for (int64_t first = static_cast<int64_t>(thread) * WIDTH; first < end;
       first += static_cast<int64_t>(threads) * WIDTH) {
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
      if (first + i < end) {
        T own = from[first + i];
        if constexpr (ADD) {
          own = rounded_sum_of(own, other[first + i]);
          kept[first + i] = own;
        }
        const A value = widen(own);
        lanes[i] = fma(value, value, lanes[i]);
      }
    }
  }
  A total[1] = {sum_lanes(lanes)};
  reduce_row(total, threads, group, thread, slots + group * (threads / 32), Add{});
  const A scale = inverse_root<A>(total[0], in.length, A(in.eps));
  const A offset = in.weight ? A(in.offset) : A(0);
  const T* again = ADD ? kept : from;
  const auto result = [&](int64_t i) {
    const A normal = product(A(widen(again[i])), scale);
    const W own = in.weight ? in.weight[i] : narrow<W>(A(1));
    return weigh<T>(normal, A(widen(own)) + offset, in.round_first);
  };
  // Other threads' elements of the sum are read from here on.
  if constexpr (ADD) __syncthreads();
  if constexpr (RESULT == Result::PLAIN) {
    for (int64_t i = thread; i < end; i += threads) in.y[row * in.length + i] = narrow<T>(result(i));
  } else {
    encode_row_from_memory(in.fp8, RESULT == Result::FP8_BLOCKS, row, in.length, live, threads, group, thread,
                           fp8_slots + group * (threads / 32),
                           [&](int64_t i) { return static_cast<float>(result(i)); });
  }
}

inline int log2_of(int power) {
  int shift = 0;
  while ((1 << shift) < power) ++shift;
  return shift;
}

// Without codes nobody has to repeat the sum's order, so the threads may be chosen to have as few of them idle as can
// be: 5 vectors for each of 128 where 3 would be for 256 with a sixth of the slots empty.
inline RowMapping plain_mapping(int64_t length, int element_bytes) {
  RowMapping mapping = row_mapping(length, element_bytes);
  const int64_t all = (length * element_bytes + ROW_VECTOR_BYTES - 1) / ROW_VECTOR_BYTES;
  const int64_t slots = mapping.threads * mapping.vectors;
  const int64_t half = mapping.threads / 2;
  const int64_t halved = half > 0 ? (all + half - 1) / half : 0;
  if (mapping.threads > 32 && mapping.vectors <= 4 && halved > 4 && halved <= 8 && half * halved * 8 <= slots * 7) {
    mapping.threads = static_cast<int>(half);
    mapping.vectors = halved;
  }
  return mapping;
}

// With a residual a thread has twice the loads of a vector under way: two vectors are enough, and more threads see a
// short row through sooner.
inline RowMapping sum_mapping(int64_t length, int element_bytes) {
  RowMapping mapping = row_mapping(length, element_bytes);
  const int64_t all = (length * element_bytes + ROW_VECTOR_BYTES - 1) / ROW_VECTOR_BYTES;
  if (all <= 32) return mapping;
  const int64_t threads = power_of_two_from((all + 1) / 2);
  mapping.threads = static_cast<int>(threads < 32 ? 32 : threads > MAX_ROW_THREADS ? MAX_ROW_THREADS : threads);
  mapping.vectors = (all + mapping.threads - 1) / mapping.threads;
  return mapping;
}

// Threads of a block: of one row or several.
inline int norm_block(int64_t rows, RowMapping mapping) {
  const int least = rows > FEW_ROWS ? MANY_ROWS_BLOCK : FEW_ROWS_BLOCK;
  return mapping.threads < least ? least : mapping.threads;
}

// `wide`: length, rows and pointers suit vectors of 16 bytes.
template <bool ADD, Result RESULT, typename T, typename W>
void launch_norm(const NormInputs<T, W>& in, RowMapping mapping, bool wide, cudaStream_t stream) {
  const int block = norm_block(in.rows, mapping);
  const int64_t rows_a_block = block / mapping.threads;
  const unsigned grid = static_cast<unsigned>((in.rows + rows_a_block - 1) / rows_a_block);
  const int shift = log2_of(mapping.threads);
  if constexpr (!std::is_same_v<T, double>) {
    if (wide && mapping.vectors <= 8) {
      const auto run = [&](auto vectors, auto keep) {
        launch_overlapping(norm_registers<T, W, vectors(), ADD, RESULT, keep()>, grid, block, stream, in,
                           mapping.threads, shift);
      };
      constexpr std::integral_constant<Keep, Keep::NORMAL> NORMAL;
      // A row a warp gains nothing, and one of over four vectors a thread takes a quarter longer.
      const auto run_marked = [&](auto vectors) {
        if constexpr (ADD || RESULT == Result::PLAIN) {
          constexpr std::integral_constant<Keep, Keep::LAST> LAST;
          if (keep_of(in.rows * in.length * static_cast<int64_t>(sizeof(T))) == LAST) return run(vectors, LAST);
        }
        run(vectors, NORMAL);
      };
      if (mapping.vectors == 1) return run(std::integral_constant<int, 1>{}, NORMAL);
      if (mapping.vectors == 2) return run_marked(std::integral_constant<int, 2>{});
      if (mapping.vectors <= 4) return run_marked(std::integral_constant<int, 4>{});
      return run(std::integral_constant<int, 8>{}, NORMAL);
    }
  }
  launch_overlapping(norm_memory<T, W, ADD, RESULT>, grid, block, stream, in, mapping.threads, shift);
}

}  // namespace
}  // namespace opgraft::cuda
