// Depthwise causal convolution with an optional SiLU, forward, backward and one step, on CUDA. Memory-bound: one read
// and one write an element forward, two reads and one write backward, so the copy rate is the limit.
//
// Length contiguous: a warp owns a tile of a row, a lane ITEMS consecutive steps in 16-byte loads, VECTORS of them at a
// time before the first is used. The width - 1 values before a lane's steps come from the lane before it by shuffles;
// lane 0 reads them, which hits a line that its neighbour loads anyway. Backward, the lane after gives the width - 1
// gradients behind a lane's steps; the last lane of a tile computes them and writes nothing, so tiles are 31 lanes long
// and no block-wide exchange is needed. A warp walks several tiles of its row with the weights' gradients in registers.
//
// Channels contiguous: a thread owns a pack of channels (16 bytes forward, 8 backward) and walks time with the last
// width - 1 steps in registers; UNROLL steps are loaded before the first is used. A walk re-reads the width - 1 steps
// before it, from L2.
//
// Gradients of the weights: every warp (block) writes its partial sums, and a second launch adds them in fixed order.
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "ops.h"
#include "support/check.h"
#include "support/conv_shape.h"
#include "support/cuda.h"
#include "support/tensor.h"
#include "support/twofold.h"

namespace opgraft::cuda {
namespace {

constexpr int ITEMS = 8;  // steps a lane: more than any width - 1, so one neighbour is enough
constexpr int ROW_WARPS = 4;
constexpr int COLUMN_THREADS = 128;
constexpr int COLUMN_UNROLL = 4;
constexpr int BACKWARD_LANES = 32;  // packs of channels a block, times BACKWARD_WALKS walks
constexpr int BACKWARD_WALKS = 4;

struct Sizes {
  int64_t batch;
  int64_t channels;
  int64_t length;
  int width;  // where the kernel's own WIDTH is a bound only
};

template <typename T>
struct Inputs {
  const T* x;
  const T* weight;
  const T* bias;
  const T* initial;
  const int32_t* seq_idx;
};

template <bool FAST, typename A>
__device__ __forceinline__ A logistic(A x) {
  if constexpr (std::is_same_v<A, double>) {
    return 1.0 / (1.0 + exp(-x));
  } else if constexpr (FAST) {
    return __fdividef(1.0f, 1.0f + __expf(-x));
  } else {
    return 1.0f / (1.0f + expf(-x));
  }
}

template <bool FAST, typename A>
__device__ __forceinline__ A activate(A x) {
  const A s = logistic<FAST>(x);
  return s == A(0) ? A(0) : x * s;
}

template <bool FAST, typename A>
__device__ __forceinline__ A activation_slope(A x) {
  const A s = logistic<FAST>(x);
  const A curve = s * (A(1) - s);
  return s + (curve == A(0) ? A(0) : x * curve);
}

// Does step t see the value `back` steps before it? Values before the row belong to the row's first sequence.
__device__ __forceinline__ bool sees(const int32_t* seq_idx, int64_t t, int back) {
  const int32_t own = seq_idx[t];
  return own >= 0 && seq_idx[t >= back ? t - back : 0] == own;
}

// Widths 2 to 4 have kernels of their own. The rest run in one of WIDTH 8, which skips the taps that are not there.
constexpr int ANY_WIDTH = 8;

template <int WIDTH>
__device__ __forceinline__ bool has_tap(int k, int width) {
  return WIDTH < ANY_WIDTH || k >= WIDTH - width;
}

// The taps at the end of an array of WIDTH.
template <typename T, int WIDTH, typename A>
__device__ __forceinline__ void load_weights(const T* weight, int64_t channel, int width, A (&out)[WIDTH]) {
#pragma unroll
  for (int k = 0; k < WIDTH; ++k) {
    const int tap = k - (WIDTH - width);
    out[k] = tap >= 0 ? A(widen(weight[channel * width + tap])) : A(0);
  }
}

// The value at step t of a row, which may lie before it.
template <typename T, typename A = DeviceAccumulate<T>>
__device__ __forceinline__ A value_at(const T* row, const T* initial, int width, int64_t t, int64_t length) {
  if (t >= length) return A(0);
  if (t >= 0) return widen(row[t]);
  return initial && t >= -(width - 1) ? A(widen(initial[t + width - 1])) : A(0);
}

template <typename T, bool WIDE, typename A>
__device__ __forceinline__ void load_items(const T* row, int64_t first, int64_t length, A (&out)[ITEMS]) {
  if constexpr (WIDE) {
    constexpr int LANES = VECTOR_WIDTH<T>;
    static_assert(ITEMS % LANES == 0);
#pragma unroll
    for (int v = 0; v < ITEMS / LANES; ++v) {
      if (first + v * LANES < length) {
        const auto pack = reinterpret_cast<const Vector<T, LANES>*>(row + first)[v];
#pragma unroll
        for (int i = 0; i < LANES; ++i) out[v * LANES + i] = widen(pack.lane[i]);
      } else {
#pragma unroll
        for (int i = 0; i < LANES; ++i) out[v * LANES + i] = A(0);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) out[i] = first + i < length ? A(widen(row[first + i])) : A(0);
  }
}

template <typename T, bool WIDE, typename A>
__device__ __forceinline__ void store_items(T* row, int64_t first, int64_t length, const A (&values)[ITEMS]) {
  if constexpr (WIDE) {
    constexpr int LANES = VECTOR_WIDTH<T>;
#pragma unroll
    for (int v = 0; v < ITEMS / LANES; ++v) {
      if (first + v * LANES < length) {
        Vector<T, LANES> pack;
#pragma unroll
        for (int i = 0; i < LANES; ++i) pack.lane[i] = narrow<T>(values[v * LANES + i]);
        reinterpret_cast<Vector<T, LANES>*>(row + first)[v] = pack;
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      if (first + i < length) row[first + i] = narrow<T>(values[i]);
    }
  }
}

// before[j] = the value WIDTH - 1 - j steps before the lane's first: from the lane before, or from memory in lane 0.
template <typename T, int WIDTH, typename A>
__device__ __forceinline__ void load_before(const T* row, const T* initial, int width, int64_t first, int64_t length,
                                            int lane, const A (&own)[ITEMS], A (&before)[WIDTH]) {
#pragma unroll
  for (int j = 0; j < WIDTH - 1; ++j) {
    before[j] = __shfl_up_sync(WHOLE_WARP, own[ITEMS - (WIDTH - 1) + j], 1);
    if (lane == 0) before[j] = value_at(row, initial, width, first - (WIDTH - 1) + j, length);
  }
}

// Sums of taps before the activation.
template <int WIDTH, bool PACKED, typename A>
__device__ __forceinline__ void sum_taps(const A (&before)[WIDTH], const A (&own)[ITEMS], const A (&weight)[WIDTH],
                                         A bias, int width, const int32_t* seq_idx, int64_t first, int64_t length,
                                         A (&out)[ITEMS]) {
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    A sum = bias;
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) {
      const int at = i - (WIDTH - 1) + k;
      const A value = at >= 0 ? own[at >= 0 ? at : 0] : before[at < 0 ? WIDTH - 1 + at : 0];
      if constexpr (PACKED) {
        const bool counts = has_tap<WIDTH>(k, width) && first + i < length && sees(seq_idx, first + i, WIDTH - 1 - k);
        if (counts) sum = fma(weight[k], value, sum);
      } else if (has_tap<WIDTH>(k, width)) {
        sum = fma(weight[k], value, sum);
      }
    }
    out[i] = sum;
  }
}

// The inputs that a continuation of the row needs, by lanes 0 to width - 2 of one warp.
template <typename T>
__device__ __forceinline__ void write_final_state(const T* row, const T* initial, const int32_t* seq_idx, int width,
                                                  int64_t length, int j, T* final_state) {
  if (j < width - 1) {
    const bool seen = !seq_idx || length == 0 || sees(seq_idx, length - 1, width - 2 - j);
    final_state[j] =
        narrow<T>(seen ? value_at(row, initial, width, length - (width - 1) + j, length) : DeviceAccumulate<T>(0));
  }
}

template <typename T, int WIDTH, bool WIDE, bool PACKED, int VECTORS>
__global__ void __launch_bounds__(ROW_WARPS * 32)
    forward_rows(Inputs<T> in, T* __restrict__ out, T* __restrict__ final_state, Sizes s, bool silu, int64_t tiles) {
  using A = DeviceAccumulate<T>;
  constexpr int TILE = 32 * ITEMS * VECTORS;
  const int lane = threadIdx.x % 32;
  const int64_t task = static_cast<int64_t>(blockIdx.x) * ROW_WARPS + threadIdx.x / 32;
  if (task >= s.batch * s.channels * tiles) return;
  const int64_t line = task / tiles;
  const int64_t tile = task % tiles;
  const int64_t channel = line % s.channels;
  const T* row = in.x + line * s.length;
  const T* initial = in.initial ? in.initial + line * (s.width - 1) : nullptr;
  const int32_t* seq_idx = PACKED ? in.seq_idx + line / s.channels * s.length : nullptr;

  A own[VECTORS][ITEMS];
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    load_items<T, WIDE>(row, tile * TILE + (v * 32 + lane) * ITEMS, s.length, own[v]);
  }
  A weight[WIDTH];
  load_weights(in.weight, channel, s.width, weight);
  const A bias = in.bias ? A(widen(in.bias[channel])) : A(0);
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    const int64_t first = tile * TILE + (v * 32 + lane) * ITEMS;
    A before[WIDTH], sum[ITEMS];
    load_before(row, initial, s.width, first, s.length, lane, own[v], before);
    sum_taps<WIDTH, PACKED>(before, own[v], weight, bias, s.width, seq_idx, first, s.length, sum);
    if (silu) {
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) sum[i] = activate<sizeof(T) == 2>(sum[i]);
    }
    if constexpr (PACKED) {
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
        if (first + i < s.length && seq_idx[first + i] < 0) sum[i] = A(0);
      }
    }
    store_items<T, WIDE>(out + line * s.length, first, s.length, sum);
  }
  if (tile == tiles - 1) {
    write_final_state(row, initial, seq_idx, s.width, s.length, lane, final_state + line * (s.width - 1));
  }
}

template <typename T>
struct Gradients {
  const T* grad;
  const T* grad_final;
  T* x;
  T* initial;
  DeviceAccumulate<T>* partial;  // of weights and bias
};

// What the final state's gradient adds to the value at step t (which may be before the row).
template <typename T>
__device__ __forceinline__ DeviceAccumulate<T> final_gradient(const T* grad_final, const int32_t* seq_idx, int width,
                                                              int64_t t, int64_t length) {
  const int64_t j = t - (length - (width - 1));
  if (!grad_final || j < 0 || j >= width - 1) return 0;
  if (seq_idx && length > 0 && !sees(seq_idx, length - 1, width - 2 - static_cast<int>(j))) return 0;
  return widen(grad_final[j]);
}

// One warp a (row, segment of tiles). Partial sums: [row][segment][WIDTH + 1].
template <typename T, int WIDTH, bool WIDE, bool PACKED>
__global__ void __launch_bounds__(ROW_WARPS * 32)
    backward_rows(Inputs<T> in, Gradients<T> g, Sizes s, bool silu, int64_t segments, int64_t tiles_each) {
  using A = DeviceAccumulate<T>;
  constexpr int TILE = 31 * ITEMS;
  const int lane = threadIdx.x % 32;
  const int64_t task = static_cast<int64_t>(blockIdx.x) * ROW_WARPS + threadIdx.x / 32;
  if (task >= s.batch * s.channels * segments) return;
  const int64_t line = task / segments;
  const int64_t segment = task % segments;
  const int64_t channel = line % s.channels;
  const T* row = in.x + line * s.length;
  const T* up = g.grad + line * s.length;
  const T* initial = in.initial ? in.initial + line * (s.width - 1) : nullptr;
  const T* up_final = g.grad_final ? g.grad_final + line * (s.width - 1) : nullptr;
  const int32_t* seq_idx = PACKED ? in.seq_idx + line / s.channels * s.length : nullptr;

  A weight[WIDTH], grad_weight[WIDTH] = {}, grad_bias = A(0);
  load_weights(in.weight, channel, s.width, weight);
  const A bias = in.bias ? A(widen(in.bias[channel])) : A(0);

  const int64_t end = min((segment + 1) * tiles_each * TILE, s.length);
  int64_t first = segment * tiles_each * TILE + lane * ITEMS;
  A own[ITEMS], grad[ITEMS], next_own[ITEMS], next_grad[ITEMS];
  load_items<T, WIDE>(row, first, s.length, own);
  load_items<T, WIDE>(up, first, s.length, grad);
  for (int64_t tile = segment * tiles_each * TILE; tile < end; tile += TILE) {
    load_items<T, WIDE>(row, first + TILE, s.length, next_own);
    load_items<T, WIDE>(up, first + TILE, s.length, next_grad);
    A before[WIDTH], after[WIDTH];
    load_before(row, initial, s.width, first, s.length, lane, own, before);
    if (silu) {
      A sum[ITEMS];
      sum_taps<WIDTH, PACKED>(before, own, weight, bias, s.width, seq_idx, first, s.length, sum);
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) grad[i] *= activation_slope<sizeof(T) == 2>(sum[i]);
    }
    if constexpr (PACKED) {
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
        if (first + i < s.length && seq_idx[first + i] < 0) grad[i] = A(0);
      }
    }
#pragma unroll
    for (int j = 0; j < WIDTH - 1; ++j) after[j] = __shfl_down_sync(WHOLE_WARP, grad[j], 1);
    if (lane < 31) {
      A out[ITEMS] = {};
      if (up_final && first + ITEMS > s.length - (WIDTH - 1)) {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) out[i] = final_gradient(up_final, seq_idx, s.width, first + i, s.length);
      }
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
        grad_bias += grad[i];
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) {
          const int back = WIDTH - 1 - k;
          const int later = i + back;
          const A from = later < ITEMS ? grad[later < ITEMS ? later : 0] : after[later >= ITEMS ? later - ITEMS : 0];
          const int at = i - back;
          const A value = at >= 0 ? own[at >= 0 ? at : 0] : before[at < 0 ? WIDTH - 1 + at : 0];
          if constexpr (PACKED) {
            if (!has_tap<WIDTH>(k, s.width)) continue;
            if (first + later < s.length && sees(seq_idx, first + later, back)) out[i] = fma(weight[k], from, out[i]);
            if (first + i < s.length && sees(seq_idx, first + i, back)) {
              grad_weight[k] = fma(grad[i], value, grad_weight[k]);
            }
          } else if (has_tap<WIDTH>(k, s.width)) {
            out[i] = fma(weight[k], from, out[i]);
            grad_weight[k] = fma(grad[i], value, grad_weight[k]);
          }
        }
      }
      store_items<T, WIDE>(g.x + line * s.length, first, s.length, out);
    }
    if (first == 0) {  // lane 0 of the row's first tile: the gradients of the values before the row
#pragma unroll
      for (int j = 0; j < WIDTH - 1; ++j) {
        const int64_t t = j - (WIDTH - 1);
        A sum = final_gradient(up_final, seq_idx, s.width, t, s.length);
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) {
          const int later = j - k;
          if (later >= 0 && has_tap<WIDTH>(k, s.width) &&
              (!PACKED || (later < s.length && sees(seq_idx, later, WIDTH - 1 - k)))) {
            sum = fma(weight[k], grad[later >= 0 ? later : 0], sum);
          }
        }
        const int place = j - (WIDTH - s.width);
        if (place >= 0) g.initial[line * (s.width - 1) + place] = narrow<T>(sum);
      }
    }
    first += TILE;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      own[i] = next_own[i];
      grad[i] = next_grad[i];
    }
  }
#pragma unroll
  for (int k = 0; k <= WIDTH; ++k) {
    A sum = k < WIDTH ? grad_weight[k < WIDTH ? k : 0] : grad_bias;
#pragma unroll
    for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(WHOLE_WARP, sum, by);
    if (lane == 0) g.partial[task * (WIDTH + 1) + k] = sum;
  }
}

// Adds partial sums in order: `outer` groups of `inner` each, WIDTH + 1 values a channel, at
// (o * outer_stride + c * channel_stride + i * inner_stride + k * tap_stride). Sums in double.
template <typename T>
__global__ void add_partials(const DeviceAccumulate<T>* __restrict__ partial, T* __restrict__ grad_weight,
                             T* __restrict__ grad_bias, int64_t channels, int width, int bound, int64_t outer,
                             int64_t inner, int64_t outer_stride, int64_t channel_stride, int64_t inner_stride,
                             int64_t tap_stride) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (index >= channels * (width + 1)) return;
  const int64_t channel = index / (width + 1);
  const int tap = static_cast<int>(index % (width + 1));
  const int64_t base = channel * channel_stride + (tap + bound - width) * tap_stride;
  double sum = 0;
  for (int64_t i = lane; i < outer * inner; i += 32) {
    sum += static_cast<double>(partial[base + i / inner * outer_stride + i % inner * inner_stride]);
  }
#pragma unroll
  for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(WHOLE_WARP, sum, by);
  if (lane == 0) {
    const auto value = narrow<T>(static_cast<DeviceAccumulate<T>>(sum));
    if (tap < width) {
      grad_weight[channel * width + tap] = value;
    } else {
      grad_bias[channel] = value;
    }
  }
}

// --- channels contiguous -------------------------------------------------------------------------------------------

template <typename T, int PACK>
__device__ __forceinline__ Vector<T, PACK> load_pack(const T* at, bool there) {
  Vector<T, PACK> pack;
  if (there) {
    pack = *reinterpret_cast<const Vector<T, PACK>*>(at);
  } else {
#pragma unroll
    for (int c = 0; c < PACK; ++c) pack.lane[c] = T(0.0f);
  }
  return pack;
}

// The steps before `t`, from the tensor or, before the row, from the initial state, whose layout is channels first.
template <typename T, int PACK, int WIDTH, typename A>
__device__ __forceinline__ void load_window(const Inputs<T>& in, const Sizes& s, int64_t b, int64_t channel, int64_t t,
                                            A (*window)[PACK]) {
#pragma unroll
  for (int j = 0; j < WIDTH - 1; ++j) {
    const int64_t at = t - (WIDTH - 1) + j;
    if (at >= 0) {
      const auto pack = load_pack<T, PACK>(in.x + (b * s.length + at) * s.channels + channel, at < s.length);
#pragma unroll
      for (int c = 0; c < PACK; ++c) window[j][c] = widen(pack.lane[c]);
    } else {
#pragma unroll
      for (int c = 0; c < PACK; ++c) {
        window[j][c] = in.initial && at >= -(s.width - 1)
                           ? A(widen(in.initial[(b * s.channels + channel + c) * (s.width - 1) + at + s.width - 1]))
                           : A(0);
      }
    }
  }
}

template <typename T, int PACK, int WIDTH, bool PACKED>
__global__ void __launch_bounds__(COLUMN_THREADS, sizeof(T) == 8 ? 2 : 3)
    forward_columns(Inputs<T> in, T* __restrict__ out, T* __restrict__ final_state, Sizes s, bool silu, int64_t walks,
                    int64_t steps) {
  using A = DeviceAccumulate<T>;
  const int64_t packs = s.channels / PACK;
  int64_t index = static_cast<int64_t>(blockIdx.x) * COLUMN_THREADS + threadIdx.x;
  if (index >= packs * walks * s.batch) return;
  const int64_t channel = index % packs * PACK;
  index /= packs;
  const int64_t walk = index % walks;
  const int64_t b = index / walks;
  const int64_t begin = walk * steps;
  const int64_t end = min(begin + steps, s.length);
  const int32_t* seq_idx = PACKED ? in.seq_idx + b * s.length : nullptr;
  const T* base = in.x + b * s.length * s.channels + channel;
  T* to = out + b * s.length * s.channels + channel;

  A weight[PACK][WIDTH], bias[PACK], window[WIDTH - 1 + COLUMN_UNROLL][PACK];
  Vector<T, PACK> next[COLUMN_UNROLL];
#pragma unroll
  for (int u = 0; u < COLUMN_UNROLL; ++u)
    next[u] = load_pack<T, PACK>(base + (begin + u) * s.channels, begin + u < end);
#pragma unroll
  for (int c = 0; c < PACK; ++c) {
    load_weights(in.weight, channel + c, s.width, weight[c]);
    bias[c] = in.bias ? A(widen(in.bias[channel + c])) : A(0);
  }
  load_window<T, PACK, WIDTH>(in, s, b, channel, begin, window);
  for (int64_t t = begin; t < end; t += COLUMN_UNROLL) {
#pragma unroll
    for (int u = 0; u < COLUMN_UNROLL; ++u) {
#pragma unroll
      for (int c = 0; c < PACK; ++c) window[WIDTH - 1 + u][c] = widen(next[u].lane[c]);
    }
#pragma unroll
    for (int u = 0; u < COLUMN_UNROLL; ++u) {
      next[u] = load_pack<T, PACK>(base + (t + COLUMN_UNROLL + u) * s.channels, t + COLUMN_UNROLL + u < end);
    }
#pragma unroll
    for (int u = 0; u < COLUMN_UNROLL; ++u) {
      if (t + u < end) {
        Vector<T, PACK> result;
        bool see[WIDTH];
        bool padding = false;
        if constexpr (PACKED) {
          padding = seq_idx[t + u] < 0;
#pragma unroll
          for (int k = 0; k < WIDTH; ++k) see[k] = sees(seq_idx, t + u, WIDTH - 1 - k);
        }
#pragma unroll
        for (int c = 0; c < PACK; ++c) {
          A sum = bias[c];
#pragma unroll
          for (int k = 0; k < WIDTH; ++k) {
            if (has_tap<WIDTH>(k, s.width) && (!PACKED || see[k])) sum = fma(weight[c][k], window[u + k][c], sum);
          }
          if (silu) sum = activate<sizeof(T) == 2>(sum);
          result.lane[c] = narrow<T>(padding ? A(0) : sum);
        }
        *reinterpret_cast<Vector<T, PACK>*>(to + (t + u) * s.channels) = result;
      }
    }
#pragma unroll
    for (int j = 0; j < WIDTH - 1; ++j) {
#pragma unroll
      for (int c = 0; c < PACK; ++c) window[j][c] = window[COLUMN_UNROLL + j][c];
    }
  }
  if (walk == walks - 1) {
    for (int j = 0; j < s.width - 1; ++j) {
      const int64_t at = s.length - (s.width - 1) + j;
      const bool seen = !PACKED || s.length == 0 || sees(seq_idx, s.length - 1, s.width - 2 - j);
#pragma unroll
      for (int c = 0; c < PACK; ++c) {
        const int64_t state = (b * s.channels + channel + c) * (s.width - 1);
        A value = A(0);
        if (at >= 0) {
          value = widen(base[at * s.channels + c]);
        } else if (in.initial) {
          value = widen(in.initial[state + at + s.width - 1]);
        }
        final_state[state + j] = narrow<T>(seen ? value : A(0));
      }
    }
  }
}

// Block (BACKWARD_LANES, BACKWARD_WALKS): neighbours in x own neighbouring packs, each y walks its own steps and the
// width - 1 behind them, whose gradients it needs. Partial sums: [batch][walk group][WIDTH + 1][channel].
template <typename T, int PACK, int WIDTH, bool PACKED>
__global__ void __launch_bounds__(BACKWARD_LANES* BACKWARD_WALKS, sizeof(T) == 8 ? 2 : 3)
    backward_columns(Inputs<T> in, Gradients<T> g, Sizes s, bool silu, int64_t groups, int64_t steps) {
  using A = DeviceAccumulate<T>;
  constexpr int UNROLL = 2;
  __shared__ A shared[BACKWARD_WALKS][PACK * (WIDTH + 1)][BACKWARD_LANES];
  const int64_t packs = s.channels / PACK;
  const int64_t pack_blocks = (packs + BACKWARD_LANES - 1) / BACKWARD_LANES;
  int64_t index = blockIdx.x;
  const int64_t pack = index % pack_blocks * BACKWARD_LANES + threadIdx.x;
  index /= pack_blocks;
  const int64_t group = index % groups;
  const int64_t b = index / groups;
  const int64_t channel = pack * PACK;
  const int64_t begin = (group * BACKWARD_WALKS + threadIdx.y) * steps;
  const int64_t end = min(begin + steps, s.length);
  const int32_t* seq_idx = PACKED ? in.seq_idx + b * s.length : nullptr;
  A grad_weight[PACK][WIDTH] = {}, grad_bias[PACK] = {};

  // The first walk also runs where the row is empty, for the initial state's gradient.
  if (pack < packs && (begin < s.length || begin == 0)) {
    const int64_t row = b * s.length * s.channels + channel;
    A weight[PACK][WIDTH], bias[PACK];
#pragma unroll
    for (int c = 0; c < PACK; ++c) {
      load_weights(in.weight, channel + c, s.width, weight[c]);
      bias[c] = in.bias ? A(widen(in.bias[channel + c])) : A(0);
    }
    // window[j]: inputs, from WIDTH - 1 before step t; pending[j]: gradients of the sums, likewise.
    A window[WIDTH - 1 + UNROLL][PACK], pending[WIDTH - 1 + UNROLL][PACK];
    load_window<T, PACK, WIDTH>(in, s, b, channel, begin, window);
#pragma unroll
    for (int j = 0; j < WIDTH - 1; ++j) {
#pragma unroll
      for (int c = 0; c < PACK; ++c) pending[j][c] = A(0);
    }
    Vector<T, PACK> next_x[UNROLL], next_g[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const int64_t at = row + (begin + u) * s.channels;
      next_x[u] = load_pack<T, PACK>(in.x + at, begin + u < s.length);
      next_g[u] = load_pack<T, PACK>(g.grad + at, begin + u < s.length);
    }
    // Step t completes the gradient of the value WIDTH - 1 before it. Values before `begin` are another walk's.
    for (int64_t t = begin; t < end + WIDTH - 1; t += UNROLL) {
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
#pragma unroll
        for (int c = 0; c < PACK; ++c) {
          window[WIDTH - 1 + u][c] = widen(next_x[u].lane[c]);
          pending[WIDTH - 1 + u][c] = widen(next_g[u].lane[c]);
        }
      }
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        const int64_t step = t + UNROLL + u;
        const bool there = step < s.length && step < end + WIDTH - 1;
        next_x[u] = load_pack<T, PACK>(in.x + row + step * s.channels, there);
        next_g[u] = load_pack<T, PACK>(g.grad + row + step * s.channels, there);
      }
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        const int64_t now = t + u;
        bool see[WIDTH];
        bool padding = false;
        if constexpr (PACKED) {
          padding = now < s.length && seq_idx[now] < 0;
#pragma unroll
          for (int k = 0; k < WIDTH; ++k) see[k] = now < s.length && sees(seq_idx, now, WIDTH - 1 - k);
        }
#pragma unroll
        for (int c = 0; c < PACK; ++c) {
          A grad = padding ? A(0) : pending[WIDTH - 1 + u][c];
          if (silu) {
            A sum = bias[c];
#pragma unroll
            for (int k = 0; k < WIDTH; ++k) {
              if (has_tap<WIDTH>(k, s.width) && (!PACKED || see[k])) sum = fma(weight[c][k], window[u + k][c], sum);
            }
            grad *= activation_slope<sizeof(T) == 2>(sum);
          }
          pending[WIDTH - 1 + u][c] = grad;
          if (now < end) {
            grad_bias[c] += grad;
#pragma unroll
            for (int k = 0; k < WIDTH; ++k) {
              if (has_tap<WIDTH>(k, s.width) && (!PACKED || see[k]))
                grad_weight[c][k] = fma(grad, window[u + k][c], grad_weight[c][k]);
            }
          }
        }
        // The gradient of the value at `at`: tap k of the step WIDTH - 1 - k behind it.
        const int64_t at = now - (WIDTH - 1);
        const bool own = at >= begin && at < end;
        if (own || (begin == 0 && at < 0 && at >= -(s.width - 1))) {
          Vector<T, PACK> result;
#pragma unroll
          for (int c = 0; c < PACK; ++c) {
            A sum = A(0);
            if (g.grad_final && at >= s.length - (WIDTH - 1)) {
              const T* up_final = g.grad_final + (b * s.channels + channel + c) * (s.width - 1);
              sum = final_gradient(up_final, seq_idx, s.width, at, s.length);
            }
#pragma unroll
            for (int k = 0; k < WIDTH; ++k) {
              const int back = WIDTH - 1 - k;
              bool counts = has_tap<WIDTH>(k, s.width);
              if constexpr (PACKED) {
                counts = counts && at + back >= 0 && at + back < s.length && sees(seq_idx, at + back, back);
              }
              if (counts) sum = fma(weight[c][k], pending[u + back][c], sum);
            }
            result.lane[c] = narrow<T>(sum);
            if (at < 0) {
              g.initial[(b * s.channels + channel + c) * (s.width - 1) + at + s.width - 1] = result.lane[c];
            }
          }
          if (at >= 0) *reinterpret_cast<Vector<T, PACK>*>(g.x + row + at * s.channels) = result;
        }
      }
#pragma unroll
      for (int j = 0; j < WIDTH - 1; ++j) {
#pragma unroll
        for (int c = 0; c < PACK; ++c) {
          window[j][c] = window[UNROLL + j][c];
          pending[j][c] = pending[UNROLL + j][c];
        }
      }
    }
  }
#pragma unroll
  for (int c = 0; c < PACK; ++c) {
#pragma unroll
    for (int k = 0; k <= WIDTH; ++k) {
      shared[threadIdx.y][c * (WIDTH + 1) + k][threadIdx.x] =
          k < WIDTH ? grad_weight[c][k < WIDTH ? k : 0] : grad_bias[c];
    }
  }
  __syncthreads();
  if (threadIdx.y == 0 && pack < packs) {
#pragma unroll
    for (int c = 0; c < PACK; ++c) {
#pragma unroll
      for (int k = 0; k <= WIDTH; ++k) {
        A sum = A(0);
#pragma unroll
        for (int y = 0; y < BACKWARD_WALKS; ++y) sum += shared[y][c * (WIDTH + 1) + k][threadIdx.x];
        g.partial[((b * groups + group) * (WIDTH + 1) + k) * s.channels + channel + c] = sum;
      }
    }
  }
}

// --- one step ------------------------------------------------------------------------------------------------------

// One thread a (batch, channel). A row's new state may be the old one's memory: it is shifted left in order.
template <typename T>
__global__ void update_rows(const T* __restrict__ x, const T* state, const T* __restrict__ weight,
                            const T* __restrict__ bias, T* __restrict__ out, T* new_state, int64_t rows,
                            int64_t channels, int64_t kept, int width, bool silu) {
  using A = DeviceAccumulate<T>;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  const int64_t channel = row % channels;
  A sum = bias ? A(widen(bias[channel])) : A(0);
  for (int k = 0; k < width - 1; ++k) {
    sum = fma(A(widen(weight[channel * width + k])), A(widen(state[row * kept + kept - (width - 1) + k])), sum);
  }
  sum = fma(A(widen(weight[channel * width + width - 1])), A(widen(x[row])), sum);
  out[row] = narrow<T>(silu ? activate<sizeof(T) == 2>(sum) : sum);
  for (int64_t j = 0; j + 1 < kept; ++j) new_state[row * kept + j] = state[row * kept + j + 1];
  if (kept > 0) new_state[row * kept + kept - 1] = x[row];
}

// --- launches ------------------------------------------------------------------------------------------------------

template <int N>
using Int = std::integral_constant<int, N>;

// Packed rows take the kernel of any width, element by element.
template <typename Body>
void dispatch_width(int width, bool packed, const Body& body) {
  if (packed) return body(Int<ANY_WIDTH>{}, std::true_type{});
  if (width == 2) return body(Int<2>{}, std::false_type{});
  if (width == 3) return body(Int<3>{}, std::false_type{});
  if (width == 4) return body(Int<4>{}, std::false_type{});
  return body(Int<ANY_WIDTH>{}, std::false_type{});
}

template <typename Body>
void dispatch_bool(bool value, const Body& body) {
  value ? body(std::true_type{}) : body(std::false_type{});
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

unsigned grid(int64_t tasks, int64_t per_block) { return static_cast<unsigned>(ceil_div(tasks, per_block)); }

template <typename T>
void forward(const Tensor& like, const ConvShape& shape, Inputs<T> in, T* out, T* final_state, bool silu) {
  Launch context(like);
  const int sms = context.multiprocessors();
  const Sizes s{shape.batch, shape.channels, shape.length, shape.width};
  auto rows = [&](auto width, auto packed, auto wide, auto vectors) {
    const int64_t tiles = std::max<int64_t>(1, ceil_div(s.length, 32 * ITEMS * vectors));
    forward_rows<T, width, wide, packed, vectors>
        <<<grid(s.batch * s.channels * tiles, ROW_WARPS), ROW_WARPS * 32, 0, context.stream()>>>(in, out, final_state,
                                                                                                 s, silu, tiles);
  };
  auto columns = [&](auto width, auto packed, auto pack) {
    const int64_t threads = s.batch * (s.channels / pack);
    int64_t steps = 64;
    while (steps > COLUMN_UNROLL && threads * ceil_div(s.length, steps) < sms * 1024) steps /= 2;
    const int64_t walks = std::max<int64_t>(1, ceil_div(s.length, steps));
    forward_columns<T, pack, width, packed>
        <<<grid(threads * walks, COLUMN_THREADS), COLUMN_THREADS, 0, context.stream()>>>(in, out, final_state, s, silu,
                                                                                         walks, steps);
  };
  dispatch_width(s.width, in.seq_idx != nullptr, [&](auto width, auto packed) {
    constexpr bool GENERAL = width == ANY_WIDTH;  // right at any width and packing, fast for none
    const bool dense = aligned(in.x) && aligned(out);
    if constexpr (GENERAL) {
      shape.channel_last ? columns(width, packed, Int<1>{}) : rows(width, packed, std::false_type{}, Int<1>{});
    } else if (!shape.channel_last) {
      const bool many = s.batch * s.channels * ceil_div(s.length, 1024) >= 16 * sms;
      if (!dense || s.length % VECTOR_WIDTH<T>) {
        rows(width, packed, std::false_type{}, Int<1>{});
      } else if (s.length >= 1024 && many) {
        rows(width, packed, std::true_type{}, Int<4>{});
      } else {
        rows(width, packed, std::true_type{}, Int<1>{});
      }
    } else {
      constexpr int PACK = 16 / sizeof(T);
      dense&& s.channels % PACK == 0 ? columns(width, packed, Int<PACK>{}) : columns(width, packed, Int<1>{});
    }
  });
  Launch::check();
}

template <typename T>
void backward(const Tensor& like, const ConvShape& shape, Inputs<T> in, Gradients<T> g, T* grad_weight, T* grad_bias,
              bool silu) {
  using A = DeviceAccumulate<T>;
  Launch context(like);
  const int sms = context.multiprocessors();
  const Sizes s{shape.batch, shape.channels, shape.length, shape.width};
  constexpr auto KIND = std::is_same_v<A, double> ? ScalarType::Double : ScalarType::Float;
  auto sum_up = [&](int bound, int64_t outer, int64_t inner, int64_t outer_stride, int64_t channel_stride,
                    int64_t inner_stride, int64_t tap_stride) {
    Launch::check();
    add_partials<T><<<grid(s.channels * (s.width + 1), 8), 256, 0, context.stream()>>>(
        g.partial, grad_weight, grad_bias, s.channels, s.width, bound, outer, inner, outer_stride, channel_stride,
        inner_stride, tap_stride);
    Launch::check();
  };
  auto rows = [&](auto width, auto packed, auto wide) {
    constexpr int64_t TILE = 31 * ITEMS;
    const int64_t count = s.batch * s.channels;
    const int64_t tiles = ceil_div(s.length, TILE);
    // About 24 warps an SM; whole rows where there are that many.
    const int64_t wanted = std::clamp<int64_t>(ceil_div(24 * sms, count), 1, tiles);
    const int64_t tiles_each = ceil_div(tiles, wanted);
    const int64_t segments = ceil_div(tiles, tiles_each);
    Tensor partial = new_contiguous(like, std::vector<int64_t>{count * segments * (width + 1)}, KIND);
    g.partial = static_cast<A*>(partial.mutable_data_ptr());
    backward_rows<T, width, wide, packed><<<grid(count * segments, ROW_WARPS), ROW_WARPS * 32, 0, context.stream()>>>(
        in, g, s, silu, segments, tiles_each);
    const int64_t row = segments * (width + 1);
    sum_up(width, s.batch, segments, s.channels * row, row, width + 1, 1);
  };
  auto columns = [&](auto width, auto packed, auto pack) {
    const int64_t pack_blocks = ceil_div(s.channels / pack, BACKWARD_LANES);
    int64_t steps = 64;
    while (steps > 8 && s.batch * pack_blocks * ceil_div(s.length, steps * BACKWARD_WALKS) < 4 * sms) steps /= 2;
    const int64_t groups = std::max<int64_t>(1, ceil_div(s.length, steps * BACKWARD_WALKS));
    Tensor partial = new_contiguous(like, std::vector<int64_t>{s.batch * groups * (width + 1) * s.channels}, KIND);
    g.partial = static_cast<A*>(partial.mutable_data_ptr());
    backward_columns<T, pack, width, packed>
        <<<static_cast<unsigned>(s.batch * groups * pack_blocks), dim3(BACKWARD_LANES, BACKWARD_WALKS), 0,
           context.stream()>>>(in, g, s, silu, groups, steps);
    sum_up(width, s.batch, groups, groups * (width + 1) * s.channels, 1, (width + 1) * s.channels, s.channels);
  };
  dispatch_width(s.width, in.seq_idx != nullptr, [&](auto width, auto packed) {
    constexpr bool GENERAL = width == ANY_WIDTH;
    const bool dense = aligned(in.x) && aligned(g.grad) && aligned(g.x);
    if constexpr (GENERAL) {
      shape.channel_last ? columns(width, packed, Int<1>{}) : rows(width, packed, std::false_type{});
    } else if (!shape.channel_last) {
      dense&& s.length % VECTOR_WIDTH<T> == 0 ? rows(width, packed, std::true_type{})
                                              : rows(width, packed, std::false_type{});
    } else {
      constexpr int PACK = 8 / sizeof(T);
      dense&& s.channels % PACK == 0 ? columns(width, packed, Int<PACK>{}) : columns(width, packed, Int<1>{});
    }
  });
}

template <typename T>
void update(const Tensor& like, const ConvShape& s, const T* x, const T* state, const T* weight, const T* bias, T* out,
            T* new_state, bool silu) {
  const int64_t rows = s.batch * s.channels;
  if (rows == 0) return;
  Launch context(like);
  update_rows<T><<<grid(rows, 128), 128, 0, context.stream()>>>(x, state, weight, bias, out, new_state, rows,
                                                                s.channels, s.length, s.width, silu);
  Launch::check();
}

template <typename T>
T* mutable_data(Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

template <typename T>
const T* data(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

}  // namespace

std::tuple<Tensor, Tensor> causal_conv1d(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                                         const OptionalTensor& initial_state, const OptionalTensor& seq_idx, bool silu,
                                         bool channel_last) {
  const ConvShape shape = check_conv("causal_conv1d", x, weight, bias, initial_state, seq_idx, channel_last);
  const Tensor in = as_contiguous(x), weights = as_contiguous(weight);
  const OptionalTensor biases = as_contiguous(bias), start = as_contiguous(initial_state);
  const OptionalTensor sequences = as_contiguous(seq_idx);
  Tensor out = new_contiguous_like(x);
  Tensor final_state = new_contiguous(x, std::vector<int64_t>{shape.batch, shape.channels, shape.width - 1});
  if (shape.batch * shape.channels == 0) return {out, final_state};
  dispatch_floating("causal_conv1d", x, [&](auto tag) {
    using T = typename DeviceType<typename decltype(tag)::type>::type;
    const Inputs<T> inputs{data<T>(in), data<T>(weights), optional_data<T>(biases), optional_data<T>(start),
                           optional_data<int32_t>(sequences)};
    forward<T>(x, shape, inputs, mutable_data<T>(out), mutable_data<T>(final_state), silu);
  });
  return {out, final_state};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> causal_conv1d_backward(const Tensor& grad, const OptionalTensor& grad_final,
                                                                  const Tensor& x, const Tensor& weight,
                                                                  const OptionalTensor& bias,
                                                                  const OptionalTensor& initial_state,
                                                                  const OptionalTensor& seq_idx, bool silu,
                                                                  bool channel_last) {
  const char* op = "causal_conv1d_backward";
  const ConvShape shape =
      check_conv_backward(op, grad, grad_final, x, weight, bias, initial_state, seq_idx, channel_last);
  const Tensor in = as_contiguous(x), weights = as_contiguous(weight), up = as_contiguous(grad);
  const OptionalTensor biases = as_contiguous(bias), start = as_contiguous(initial_state);
  const OptionalTensor sequences = as_contiguous(seq_idx), up_final = as_contiguous(grad_final);
  Tensor grad_x = new_contiguous_like(x), grad_weight = new_contiguous_like(weight);
  Tensor grad_bias = new_contiguous(x, std::vector<int64_t>{shape.channels});
  Tensor grad_initial = new_contiguous(x, std::vector<int64_t>{shape.batch, shape.channels, shape.width - 1});
  if (shape.batch * shape.channels * shape.length == 0) {
    torch::stable::zero_(grad_weight);
    torch::stable::zero_(grad_bias);
    up_final ? torch::stable::copy_(grad_initial, *up_final) : torch::stable::zero_(grad_initial);
    return {grad_x, grad_weight, grad_bias, grad_initial};
  }
  dispatch_floating(op, x, [&](auto tag) {
    using T = typename DeviceType<typename decltype(tag)::type>::type;
    const Inputs<T> inputs{data<T>(in), data<T>(weights), optional_data<T>(biases), optional_data<T>(start),
                           optional_data<int32_t>(sequences)};
    const Gradients<T> gradients{data<T>(up), optional_data<T>(up_final), mutable_data<T>(grad_x),
                                 mutable_data<T>(grad_initial), nullptr};
    backward<T>(x, shape, inputs, gradients, mutable_data<T>(grad_weight), mutable_data<T>(grad_bias), silu);
  });
  return {grad_x, grad_weight, grad_bias, grad_initial};
}

namespace {

void update_into(const ConvShape& shape, const Tensor& x, const Tensor& state, const Tensor& weight,
                 const OptionalTensor& bias, bool silu, Tensor& out, Tensor& new_state) {
  const Tensor in = as_contiguous(x), weights = as_contiguous(weight);
  const OptionalTensor biases = as_contiguous(bias);
  dispatch_floating("causal_conv1d_update", x, [&](auto tag) {
    using T = typename DeviceType<typename decltype(tag)::type>::type;
    update<T>(x, shape, data<T>(in), data<T>(state), data<T>(weights), optional_data<T>(biases), mutable_data<T>(out),
              mutable_data<T>(new_state), silu);
  });
}

}  // namespace

std::tuple<Tensor, Tensor> causal_conv1d_update(const Tensor& x, const Tensor& state, const Tensor& weight,
                                                const OptionalTensor& bias, bool silu) {
  const ConvShape shape = check_conv_update("causal_conv1d_update", x, state, weight, bias);
  const Tensor kept = as_contiguous(state);
  Tensor out = new_contiguous_like(x), new_state = new_contiguous_like(state);
  update_into(shape, x, kept, weight, bias, silu, out, new_state);
  return {out, new_state};
}

Tensor causal_conv1d_update_(const Tensor& x, Tensor state, const Tensor& weight, const OptionalTensor& bias,
                             bool silu) {
  const ConvShape shape = check_conv_update("causal_conv1d_update_", x, state, weight, bias);
  Tensor out = new_contiguous_like(x);
  if (state.is_contiguous()) {
    update_into(shape, x, state, weight, bias, silu, out, state);
  } else {
    Tensor kept = torch::stable::contiguous(state);
    update_into(shape, x, kept, weight, bias, silu, out, kept);
    torch::stable::copy_(state, kept);
  }
  return out;
}

}  // namespace opgraft::cuda

STABLE_TORCH_LIBRARY_IMPL(opgraft, CUDA, m) {
  m.impl("causal_conv1d", TORCH_BOX(&opgraft::cuda::causal_conv1d));
  m.impl("causal_conv1d_backward", TORCH_BOX(&opgraft::cuda::causal_conv1d_backward));
  m.impl("causal_conv1d_update", TORCH_BOX(&opgraft::cuda::causal_conv1d_update));
  m.impl("causal_conv1d_update_", TORCH_BOX(&opgraft::cuda::causal_conv1d_update_));
}
