// rms_norm and add_rms_norm forward of rows that do not lie on 16 bytes: odd lengths, and views that begin anywhere.
//
// The row goes through shared memory, into it and out of it in whole aligned vectors; what lies beside the row in its
// first and last vector is not written. A thread takes its elements out of two neighbouring vectors and has the same
// ones as in norm_registers: the same bits, whatever the alignment.
#pragma once

#include "cuda/rms_norm_kernel.cuh"

namespace opgraft::cuda {
namespace {

constexpr int SHIFTED_BYTES = 49152;  // of a block's rows in shared memory

// 16 bytes from any even address, out of the two aligned vectors around it.
template <typename T, int WIDTH>
__device__ __forceinline__ Words<T, WIDTH> load_shifted(const uint4* vectors, int byte) {
  const uint4 low = vectors[byte / VECTOR_BYTES], high = vectors[byte / VECTOR_BYTES + 1];
  uint32_t word[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  if (byte & 8) {
#pragma unroll
    for (int i = 0; i < 6; ++i) word[i] = word[i + 2];
  }
  if (byte & 4) {
#pragma unroll
    for (int i = 0; i < 5; ++i) word[i] = word[i + 1];
  }
  Words<T, WIDTH> found;
#pragma unroll
  for (int i = 0; i < 4; ++i) found.word[i] = byte & 2 ? __funnelshift_r(word[i], word[i + 1], 16) : word[i];
  return found;
}

// Where a row's bytes lie among aligned vectors: `phase` bytes into the first of `count`.
struct ShiftedRow {
  char* boundary;
  int phase;
  int end;  // byte behind the row's last
  int count;

  __device__ __forceinline__ ShiftedRow(const void* row, int bytes) {
    phase = static_cast<int>(reinterpret_cast<uintptr_t>(row) % VECTOR_BYTES);
    boundary = static_cast<char*>(const_cast<void*>(row)) - phase;
    end = phase + bytes;
    count = (end + VECTOR_BYTES - 1) / VECTOR_BYTES;
  }

  __device__ __forceinline__ bool whole(int vector) const {
    return vector * VECTOR_BYTES >= phase && (vector + 1) * VECTOR_BYTES <= end;
  }
};

// Of a vector that is not wholly the row's, the row's elements. All loads before the first store: one waiting time.
template <typename T>
__device__ __forceinline__ void copy_part(const ShiftedRow& row, int vector, char* to, const char* from) {
  constexpr int WIDTH = VECTOR_WIDTH<T>;
  const int first = vector * VECTOR_BYTES;
  T kept[WIDTH];
#pragma unroll
  for (int i = 0; i < WIDTH; ++i) {
    const int at = first + i * static_cast<int>(sizeof(T));
    if (at >= row.phase && at < row.end) kept[i] = reinterpret_cast<const T*>(from)[i];
  }
#pragma unroll
  for (int i = 0; i < WIDTH; ++i) {
    const int at = first + i * static_cast<int>(sizeof(T));
    if (at >= row.phase && at < row.end) reinterpret_cast<T*>(to)[i] = kept[i];
  }
}

// A row's threads bring it into shared memory as it lies, with what lies before it in its first vector: memory is
// allocated from 16 bytes on, so that is there. What lies behind its end need not be: `limit` is the end of the last
// row.
__device__ __forceinline__ void bring_row(const ShiftedRow& row, uint4* staged, int thread, int threads,
                                          const void* limit) {
  for (int v = thread; v < row.count; v += threads) {
    const char* from = row.boundary + static_cast<int64_t>(v) * VECTOR_BYTES;
    const int bytes = min(VECTOR_BYTES, row.end - v * VECTOR_BYTES);
    if (from + VECTOR_BYTES <= limit) {
      copy_async(staged + v, from, bytes);
    } else {
      // Elements have two bytes or four.
      constexpr int HALVES = VECTOR_BYTES / 2;
      uint16_t part[HALVES];
#pragma unroll
      for (int i = 0; i < HALVES; ++i) part[i] = 2 * i < bytes ? reinterpret_cast<const uint16_t*>(from)[i] : 0;
#pragma unroll
      for (int i = 0; i < HALVES; ++i) reinterpret_cast<uint16_t*>(staged + v)[i] = part[i];
    }
  }
}

// `staged` holds the row from its first byte on.
template <typename T>
__device__ __forceinline__ void take_row(const ShiftedRow& row, const uint4* staged, int thread, int threads) {
  constexpr int WIDTH = VECTOR_WIDTH<T>;
  for (int v = thread; v < row.count; v += threads) {
    char* to = row.boundary + static_cast<int64_t>(v) * VECTOR_BYTES;
    if (row.whole(v)) {
      store_words(reinterpret_cast<T*>(to), load_shifted<T, WIDTH>(staged, v * VECTOR_BYTES - row.phase));
    } else {
      copy_part<T>(row, v, to, reinterpret_cast<const char*>(staged) + v * VECTOR_BYTES - row.phase);
    }
  }
}

// A row's threads see what they have written to shared memory.
__device__ __forceinline__ void share_row(int group, int threads) {
  if (threads > 32) {
    row_barrier(group, threads);
  } else {
    __syncwarp();
  }
}

// `vectors`: of shared memory a row and tensor.
template <typename T, typename W, int VECTORS, bool ADD>
__global__ void __launch_bounds__(MAX_ROW_THREADS)
    norm_shifted(NormInputs<T, W> in, int threads, int shift, int vectors) {
  constexpr int WIDTH = VECTOR_WIDTH<T>;
  extern __shared__ uint4 staged[];  // [row of the block][tensor][vector]
  __shared__ float slots[32];
  const int group = threadIdx.x >> shift;
  const int thread = threadIdx.x & (threads - 1);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (blockDim.x >> shift) + group;
  const bool live = row < in.rows;
  const int length = static_cast<int>(in.length);
  const int bytes = length * static_cast<int>(sizeof(T));
  const int end = live ? length : 0;
  uint4* const own = staged + group * (ADD ? 2 : 1) * vectors;
  uint4* const other = own + vectors;

  wait_for_the_kernel_before();
  const ShiftedRow from(in.x.row(row), bytes);
  const ShiftedRow beside(ADD ? in.residual.row(row) : in.x.row(row), bytes);
  if (live) {
    bring_row(from, own, thread, threads, in.x.end(in.rows, in.length));
    if constexpr (ADD) bring_row(beside, other, thread, threads, in.residual.end(in.rows, in.length));
  }
  commit_copies();
  let_the_next_kernel_start();
  wait_copies<0>();
  share_row(group, threads);

  Words<T, WIDTH> x[VECTORS];
  float lanes[WIDTH] = {};
#pragma unroll
  for (int k = 0; k < VECTORS; ++k) {
    const int first = (k * threads + thread) * WIDTH;
    float values[WIDTH] = {};
    if (first < end) {
      unpack(load_shifted<T, WIDTH>(own, from.phase + first * static_cast<int>(sizeof(T))), values);
      if constexpr (ADD) {
        float others[WIDTH];
        unpack(load_shifted<T, WIDTH>(other, beside.phase + first * static_cast<int>(sizeof(T))), others);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) values[i] += others[i];
      }
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) values[i] = first + i < end ? values[i] : 0.0f;
    }
    x[k] = pack<T>(values);
    if constexpr (ADD) unpack(x[k], values);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) lanes[i] = fmaf(values[i], values[i], lanes[i]);
    forget(x[k]);
  }
  float total[1] = {sum_lanes(lanes)};
  reduce_row(total, threads, group, thread, slots + group * (threads / 32), Add{});
  if (threads <= 32) __syncwarp();
  const float scale = inverse_root<float>(total[0], in.length, in.eps);
  const float offset = in.weight ? in.offset : 0.0f;
  const bool whole_weights = reinterpret_cast<uintptr_t>(in.weight) % VECTOR_BYTES == 0;
  // From here on nobody reads what was brought: the results take its place, each row from its first byte on.
#pragma unroll
  for (int k = 0; k < VECTORS; ++k) {
    const int v = k * threads + thread;
    const int first = v * WIDTH;
    if (first >= end) continue;
    if constexpr (ADD) other[v] = {x[k].word[0], x[k].word[1], x[k].word[2], x[k].word[3]};
    float values[WIDTH], factors[WIDTH];
    unpack(x[k], values);
    if (in.weight == nullptr) {
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) factors[i] = 1.0f;
    } else if (whole_weights && first + WIDTH <= end) {
      unpack(load_words<W, WIDTH>(in.weight + first), factors);
    } else {
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) factors[i] = first + i < end ? widen(in.weight[first + i]) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) values[i] = product(values[i], scale);
    if (in.round_first) unpack(pack<T>(values), values);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) values[i] = product(values[i], factors[i] + offset);
    const Words<T, WIDTH> result = pack<T>(values);
    own[v] = {result.word[0], result.word[1], result.word[2], result.word[3]};
  }
  share_row(group, threads);
  if (live) {
    take_row<T>(ShiftedRow(in.y + row * in.length, bytes), own, thread, threads);
    if constexpr (ADD) take_row<T>(ShiftedRow(in.summed + row * in.length, bytes), other, thread, threads);
  }
}

// False where the row is too long for shared memory or for registers.
template <bool ADD, typename T, typename W>
bool launch_shifted(const NormInputs<T, W>& in, RowMapping mapping, cudaStream_t stream) {
  if constexpr (std::is_same_v<T, double>) {
    return false;
  } else {
    const int block = norm_block(in.rows, mapping);
    const int64_t rows_a_block = block / mapping.threads;
    // A row touches one vector more than it fills, and the last thread looks at one more.
    const int64_t vectors = (in.length * static_cast<int64_t>(sizeof(T)) + VECTOR_BYTES - 1) / VECTOR_BYTES + 2;
    const int64_t bytes = rows_a_block * (ADD ? 2 : 1) * vectors * VECTOR_BYTES;
    if (mapping.vectors > 8 || bytes > SHIFTED_BYTES) return false;
    const unsigned grid = static_cast<unsigned>((in.rows + rows_a_block - 1) / rows_a_block);
    const auto run = [&](auto count) {
      launch_overlapping_shared(norm_shifted<T, W, count(), ADD>, grid, block, static_cast<size_t>(bytes), stream, in,
                                mapping.threads, log2_of(mapping.threads), static_cast<int>(vectors));
      return true;
    };
    if (mapping.vectors == 1) return run(std::integral_constant<int, 1>{});
    if (mapping.vectors == 2) return run(std::integral_constant<int, 2>{});
    if (mapping.vectors <= 4) return run(std::integral_constant<int, 4>{});
    return run(std::integral_constant<int, 8>{});
  }
}

}  // namespace
}  // namespace opgraft::cuda
