// causal_conv1d of widths 2 to 4, length contiguous. A lane owns ITEMS consecutive steps and reads the HALO before them
// once more, which hits the line that its neighbour loads: cheaper than shuffles, and no lane waits for another.
//
// Rows need not begin at 16 bytes nor be whole numbers of lanes long. RAGGED ones have their lanes at aligned
// addresses, so the first may begin before the row and the last end behind it; such lanes (a branch that few take) mend
// what they read and write single elements. All tensors of a call must share their offset from 16 bytes.
//
// Forward: a lane loads VECTORS of its vectors, then computes; nothing is walked, so the loads of all warps that an SM
// holds are in flight together: 32 bytes a lane. Bytes: one read, one write an element.
//
// Backward: a warp walks a segment of its row in tiles of 31 lanes; the gradients behind a lane's steps come from the
// next lane, for which the last lane computes and writes nothing. The next tile is in flight meanwhile, packed as it
// was read. The weights' gradients stay in registers for the whole walk. Bytes: two reads, one write an element.
#pragma once

#include "cuda/causal_conv1d.cuh"
#include "support/pack.h"

namespace opgraft::cuda::conv_rows {

constexpr int ITEMS = 8;
constexpr int HALO = 4;
constexpr unsigned EVERY_LANE = 0xffffffffu;

// What a lane reads of x: its own steps and those before them.
template <typename T>
struct Piece {
  static constexpr int OWN = ITEMS * static_cast<int>(sizeof(T)) / VECTOR_BYTES;
  static constexpr int HALO_BYTES = sizeof(T) == 2 ? 8 : VECTOR_BYTES;
  static constexpr int BEFORE = HALO * static_cast<int>(sizeof(T)) / HALO_BYTES;
  Words<HALO_BYTES> before[BEFORE];
  Words<VECTOR_BYTES> own[OWN];
};

template <typename T>
inline constexpr int OWN = Piece<T>::OWN;

// `at` is at 16 bytes, `left` the steps from there to the row's end, of which the last may be some of a vector's. What
// is behind the row is left as it was.
template <typename T>
__device__ __forceinline__ void load_own(const T* at, int left, Words<VECTOR_BYTES> (&own)[OWN<T>]) {
#pragma unroll
  for (int v = 0; v < OWN<T>; ++v) {
    own[v] = {};
    if (v * VECTOR_WIDTH<T> < left) own[v] = load_words<VECTOR_BYTES>(at + v * VECTOR_WIDTH<T>);
  }
}

template <typename T>
__device__ __forceinline__ void load_before(const T* at, bool there, Piece<T>& piece) {
  constexpr int BYTES = Piece<T>::HALO_BYTES;
#pragma unroll
  for (int v = 0; v < Piece<T>::BEFORE; ++v) {
    piece.before[v] = {};
    if (there) piece.before[v] = load_words<BYTES>(at - HALO + v * (BYTES / static_cast<int>(sizeof(T))));
  }
}

// values[i] = the value at step first - HALO + i.
template <typename T, typename A>
__device__ __forceinline__ void widen_piece(const Piece<T>& piece, A (&values)[HALO + ITEMS]) {
  constexpr int BYTES = Piece<T>::HALO_BYTES;
#pragma unroll
  for (int v = 0; v < Piece<T>::BEFORE; ++v) {
    unpack<T, BYTES>(piece.before[v], values + v * (BYTES / static_cast<int>(sizeof(T))));
  }
#pragma unroll
  for (int v = 0; v < OWN<T>; ++v) unpack<T, VECTOR_BYTES>(piece.own[v], values + HALO + v * VECTOR_WIDTH<T>);
}

template <typename T, typename A>
__device__ __forceinline__ void store_items(T* to, const A (&values)[ITEMS]) {
  constexpr int LANES = VECTOR_WIDTH<T>;
#pragma unroll
  for (int v = 0; v < OWN<T>; ++v) store_words(to + v * LANES, pack<T, VECTOR_BYTES>(values + v * LANES));
}

// Those of the steps first ... first + ITEMS - 1 that the row has.
template <typename T, typename A>
__device__ __forceinline__ void store_some(T* row, int first, int length, const A (&values)[ITEMS]) {
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    if (first + i >= 0 && first + i < length) row[first + i] = narrow<T>(values[i]);
  }
}

// `to` is at the step `first`.
template <typename T, bool RAGGED, typename A>
__device__ __forceinline__ void store_tile(T* to, int first, int length, const A (&values)[ITEMS]) {
  if (!RAGGED ? first < length : first >= 0 && first + ITEMS <= length) {
    store_items(to, values);
  } else if (RAGGED) {
    store_some(to - first, first, length, values);
  }
}

// Puts the initial state before a row that is not ragged.
template <typename T, int WIDTH>
__device__ __forceinline__ void enter_row(const T* initial, Piece<T>& piece) {
  constexpr int BYTES = Piece<T>::HALO_BYTES;
  DeviceAccumulate<T> values[HALO] = {};
#pragma unroll
  for (int j = 0; j < WIDTH - 1; ++j) values[HALO - (WIDTH - 1) + j] = widen(initial[j]);
#pragma unroll
  for (int v = 0; v < Piece<T>::BEFORE; ++v) {
    piece.before[v] = pack<T, BYTES>(values + v * (BYTES / static_cast<int>(sizeof(T))));
  }
}

// Puts the initial state before a ragged row, and zeros where another row was read.
template <typename T, int WIDTH, typename A>
__device__ __forceinline__ void mend_values(const T* row, const T* initial, int first, int length,
                                            A (&values)[HALO + ITEMS]) {
  if (first < WIDTH - 1 || first + ITEMS > length) {
#pragma unroll
    for (int i = HALO - (WIDTH - 1); i < HALO + ITEMS; ++i) {
      const int t = first - HALO + i;
      if (t < 0 || t >= length) values[i] = value_at(row, initial, WIDTH, t, length);
    }
  }
}

template <int WIDTH, typename A>
__device__ __forceinline__ A sum_taps(const A* last, const A (&weight)[WIDTH], A bias) {
  A sum = bias;
#pragma unroll
  for (int k = 0; k < WIDTH; ++k) sum = fma(weight[k], last[k - (WIDTH - 1)], sum);
  return sum;
}

// Where a warp stands.
struct Place {
  int64_t line;
  int64_t channel;
  uint32_t part;  // tile or segment of the row
};

struct Grid {
  uint32_t warps;
  Divider parts;     // a row
  Divider channels;  // rows a batch
};

__device__ __forceinline__ bool find_place(const Grid& grid, int warps_a_block, Place& place) {
  const uint32_t task = blockIdx.x * warps_a_block + threadIdx.x / 32;
  if (task >= grid.warps) return false;
  const uint32_t line = grid.parts.quotient(task);
  place.part = task - line * grid.parts.divisor;
  place.line = line;
  place.channel = line - grid.channels.quotient(line) * grid.channels.divisor;
  return true;
}

template <typename T>
__device__ __forceinline__ int skew_of(const T* row) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(row) % VECTOR_BYTES / sizeof(T));
}

template <typename T, int WIDTH, bool RAGGED, int VECTORS, int WARPS, int BLOCKS>
__global__ void __launch_bounds__(WARPS * 32, BLOCKS)
    forward(ConvInputs<T> in, ConvOutputs<T> to, ConvSizes s, Grid grid) {
  using A = DeviceAccumulate<T>;
  constexpr int TILE = 32 * ITEMS * VECTORS;
  Place place;
  if (!find_place(grid, WARPS, place)) return;
  const int lane = threadIdx.x % 32;
  const T* row = in.x + place.line * s.length;
  const T* initial = in.initial ? in.initial + place.line * (WIDTH - 1) : nullptr;
  const int length = static_cast<int>(s.length);
  const int first = static_cast<int>(place.part) * TILE + lane * ITEMS - (RAGGED ? skew_of(row) : 0);

  Piece<T> piece[VECTORS] = {};
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    const int own = first + v * 32 * ITEMS;
    load_own(row + own, length - own, piece[v].own);
    load_before(row + own, own > 0 && own < length, piece[v]);
  }
  if (!RAGGED && initial && first == 0) enter_row<T, WIDTH>(initial, piece[0]);
  A weight[WIDTH];
  load_weights(in.weight, place.channel, WIDTH, weight);
  const A bias = in.bias ? A(widen(in.bias[place.channel])) : A(0);
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    const int own = first + v * 32 * ITEMS;
    A values[HALO + ITEMS], sum[ITEMS];
    widen_piece(piece[v], values);
    if (RAGGED) mend_values<T, WIDTH>(row, initial, own, length, values);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) sum[i] = sum_taps(values + HALO + i, weight, bias);
    if (in.silu) {
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) sum[i] = activate<sizeof(T) == 2>(sum[i]);
    }
    store_tile<T, RAGGED>(to.out + place.line * s.length + own, own, length, sum);
  }
  if (place.part == grid.parts.divisor - 1) {
    write_final_state(row, initial, nullptr, WIDTH, s.length, lane, to.final_state + place.line * (WIDTH - 1));
  }
}

// One warp a (row, segment of `tiles_each` tiles). Partial sums: [row][segment][WIDTH + 1].
template <typename T, int WIDTH, bool RAGGED, int WARPS, int BLOCKS>
__global__ void __launch_bounds__(WARPS * 32, BLOCKS)
    backward(ConvInputs<T> in, ConvGradients<T> g, DeviceAccumulate<T>* __restrict__ partial, ConvSizes s, Grid grid,
             int tiles_each) {
  using A = DeviceAccumulate<T>;
  constexpr int TILE = 31 * ITEMS;
  Place place;
  if (!find_place(grid, WARPS, place)) return;
  const int lane = threadIdx.x % 32;
  const T* row = in.x + place.line * s.length;
  const T* up = g.grad + place.line * s.length;
  const T* initial = in.initial ? in.initial + place.line * (WIDTH - 1) : nullptr;
  const T* up_final = g.grad_final ? g.grad_final + place.line * (WIDTH - 1) : nullptr;

  const int length = static_cast<int>(s.length);
  const int begin = static_cast<int>(place.part) * tiles_each * TILE - (RAGGED ? skew_of(row) : 0);
  int tiles = (min(tiles_each * TILE, length - begin) + TILE - 1) / TILE;
  int first = begin + lane * ITEMS;
  const T* at_x = row + first;
  const T* at_grad = up + first;
  T* to = g.x + place.line * s.length + first;
  Piece<T> next_x{};
  Words<VECTOR_BYTES> next_grad[OWN<T>] = {};
  load_own(at_x, length - first, next_x.own);
  load_before(at_x, first > 0 && first < length, next_x);
  if (!RAGGED && initial && first == 0) enter_row<T, WIDTH>(initial, next_x);
  load_own(at_grad, length - first, next_grad);
  A weight[WIDTH], grad_weight[WIDTH] = {}, grad_bias = A(0);
  load_weights(in.weight, place.channel, WIDTH, weight);
  A bias = in.bias ? A(widen(in.bias[place.channel])) : A(0);
  // In 16 bits sums are taken times -log2(e), as the exponential unit wants them, and gradients over it.
  constexpr bool FAST = sizeof(T) == 2;
  const A scale = FAST && in.silu ? A(-LOG2_E) : A(1);
  bias *= scale;
#pragma unroll
  for (int k = 0; k < WIDTH; ++k) weight[k] *= scale;
#pragma unroll 1
  for (; tiles > 0; --tiles, first += TILE, to += TILE) {
    A values[HALO + ITEMS], grad[ITEMS + WIDTH - 1];
    widen_piece(next_x, values);
#pragma unroll
    for (int v = 0; v < OWN<T>; ++v) unpack<T, VECTOR_BYTES>(next_grad[v], grad + v * VECTOR_WIDTH<T>);
    at_x += TILE;
    at_grad += TILE;
    load_own(at_x, length - TILE - first, next_x.own);
    load_before(at_x, length - TILE - first > 0, next_x);
    load_own(at_grad, length - TILE - first, next_grad);
    if (RAGGED) mend_values<T, WIDTH>(row, initial, first, length, values);
    if (RAGGED && (first < 0 || first + ITEMS > length)) {
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
        if (first + i < 0 || first + i >= length) grad[i] = A(0);
      }
    }
    if (in.silu) {
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
        const A sum = sum_taps(values + HALO + i, weight, bias);
        if constexpr (FAST) {
          grad[i] *= scaled_slope(sum);
        } else {
          grad[i] *= activation_slope<false>(sum);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < WIDTH - 1; ++j) grad[ITEMS + j] = __shfl_down_sync(EVERY_LANE, grad[j], 1);
    if (lane < 31) {
      A out[ITEMS];
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
        out[i] = weight[WIDTH - 1] * grad[i];
#pragma unroll
        for (int k = 0; k < WIDTH - 1; ++k) out[i] = fma(weight[k], grad[i + WIDTH - 1 - k], out[i]);
        grad_bias += grad[i];
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) {
          grad_weight[k] = fma(grad[i], values[HALO + i - (WIDTH - 1) + k], grad_weight[k]);
        }
      }
      if (up_final && first + ITEMS + WIDTH - 1 > length) {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) out[i] += final_gradient(up_final, nullptr, WIDTH, first + i, s.length);
      }
      store_tile<T, RAGGED>(to, first, length, out);
    }
  }
  if (place.part == 0 && lane < WIDTH - 1) {
    // The gradient of the value at step lane - (WIDTH - 1), from the row's first steps.
    const int t = lane - (WIDTH - 1);
    A sum = final_gradient(up_final, nullptr, WIDTH, t, length);
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) weight[k] = widen(in.weight[place.channel * WIDTH + k]);
    bias = in.bias ? A(widen(in.bias[place.channel])) : A(0);
    for (int later = 0; later <= t + WIDTH - 1 && later < length; ++later) {
      A grad = widen(up[later]), before = bias, tap = A(0);
#pragma unroll
      for (int k = 0; k < WIDTH; ++k) {
        before = fma(weight[k], value_at(row, initial, WIDTH, later - (WIDTH - 1) + k, length), before);
        if (later - t == WIDTH - 1 - k) tap = weight[k];
      }
      if (in.silu) grad *= activation_slope<sizeof(T) == 2>(before);
      sum = fma(tap, grad, sum);
    }
    g.initial[place.line * (WIDTH - 1) + lane] = narrow<T>(sum);
  }
#pragma unroll
  for (int k = 0; k <= WIDTH; ++k) {
    A sum = scale * (k < WIDTH ? grad_weight[k < WIDTH ? k : 0] : grad_bias);
#pragma unroll
    for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(EVERY_LANE, sum, by);
    if (lane == 0) partial[(place.line * grid.parts.divisor + place.part) * (WIDTH + 1) + k] = sum;
  }
}

}  // namespace opgraft::cuda::conv_rows
