// causal_conv1d of widths 2 to 4, channels contiguous.
//
// Forward: a thread owns STEPS steps of a pack of channels and loads them and those before them at once; the block's
// next threads own the next steps, so what two of them read comes from L1. Nothing is walked: 19 loads of 8 bytes a
// thread are in flight together, 97 KB an SM at 640 threads. Bytes: one read and one write an element.
//
// Backward: a thread walks a stretch of time with the last width - 1 steps and gradients and the weights' gradients in
// registers. What is read travels through a ring in shared memory, one column of it a thread: copies in flight cost no
// registers, and since no thread reads what another one copied, nothing waits at a barrier. Walks are as long as one
// wave of blocks allows. Bytes: two reads and one write an element.
#pragma once

#include "cuda/causal_conv1d.cuh"
#include "support/pack.h"

namespace opgraft::cuda::conv_columns {

// A block is LANES packs wide and WALKS stretches of time deep.
struct Walks {
  int64_t packs;
  int64_t pack_blocks;
  int64_t groups;  // of WALKS stretches, a row
  int64_t steps;   // a stretch

  unsigned blocks(int64_t batch) const { return static_cast<unsigned>(batch * groups * pack_blocks); }
};

// Channels of the smallest pack: an asynchronous copy takes at least 4 bytes.
template <typename T>
inline constexpr int SMALL_PACK = sizeof(T) == 2 ? 2 : 1;
template <typename T>
inline constexpr int SMALL_BYTES = SMALL_PACK<T> * static_cast<int>(sizeof(T));

// Stretches so long that `blocks` blocks, what the device holds at once, do the whole; not shorter than MIN_STEPS.
inline Walks plan_walks(const ConvSizes& s, int pack, int lanes, int walks, int64_t blocks) {
  constexpr int64_t MIN_STEPS = 16;
  const int64_t packs = s.channels / pack;
  const int64_t pack_blocks = ceil_div(packs, lanes);
  const int64_t most = ceil_div(s.length, MIN_STEPS * walks);
  const int64_t wanted = blocks / (s.batch * pack_blocks);
  const int64_t cut = wanted < 1 ? 1 : wanted > most ? most : wanted;
  const int64_t steps = ceil_div(s.length, cut * walks);
  return {packs, pack_blocks, ceil_div(s.length, steps * walks), steps};
}

struct Place {
  int64_t batch;
  int64_t group;
  int64_t pack;
  int64_t begin;
  int64_t end;
};

template <int LANES, int WALKS>
__device__ __forceinline__ Place find_place(const Walks& walks, int64_t length) {
  Place place;
  int64_t index = blockIdx.x;
  place.pack = index % walks.pack_blocks * LANES + threadIdx.x;
  index /= walks.pack_blocks;
  place.group = index % walks.groups;
  place.batch = index / walks.groups;
  place.begin = (place.group * WALKS + threadIdx.y) * walks.steps;
  place.end = min(place.begin + walks.steps, length);
  return place;
}

// The weights and biases of a pack. Weights must be aligned as the pack is.
template <typename T, int PACK, int WIDTH, typename A>
__device__ __forceinline__ void load_pack_weights(const ConvInputs<T>& in, int64_t channel, A (&weight)[PACK][WIDTH],
                                                  A (&bias)[PACK]) {
  constexpr int BYTES = PACK * static_cast<int>(sizeof(T));
  A values[WIDTH * PACK];
#pragma unroll
  for (int v = 0; v < WIDTH; ++v) {
    unpack<T, BYTES>(load_words<BYTES>(in.weight + channel * WIDTH + v * PACK), values + v * PACK);
  }
#pragma unroll
  for (int c = 0; c < PACK; ++c) {
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) weight[c][k] = values[c * WIDTH + k];
    bias[c] = in.bias ? A(widen(in.bias[channel + c])) : A(0);
  }
}

// The steps before `t`, from the tensor or, before the row, from the initial state, whose layout is channels first.
template <typename T, int PACK, int WIDTH, typename A>
__device__ __forceinline__ void load_window(const ConvInputs<T>& in, const ConvSizes& s, int64_t b, int64_t channel,
                                            int64_t t, A (*window)[PACK]) {
  constexpr int BYTES = PACK * static_cast<int>(sizeof(T));
#pragma unroll
  for (int j = 0; j < WIDTH - 1; ++j) {
    const int64_t at = t - (WIDTH - 1) + j;
    if (at >= 0) {
      Words<BYTES> words{};
      if (at < s.length) words = load_words<BYTES>(in.x + (b * s.length + at) * s.channels + channel);
      unpack<T, BYTES>(words, window[j]);
    } else {
#pragma unroll
      for (int c = 0; c < PACK; ++c) {
        window[j][c] =
            in.initial ? A(widen(in.initial[(b * s.channels + channel + c) * (WIDTH - 1) + at + WIDTH - 1])) : A(0);
      }
    }
  }
}

template <typename T, int PACK, int WIDTH>
__device__ __forceinline__ void write_final(const ConvInputs<T>& in, const ConvSizes& s, int64_t b, int64_t channel,
                                            T* final_state) {
  for (int j = 0; j < WIDTH - 1; ++j) {
    const int64_t at = s.length - (WIDTH - 1) + j;
    for (int c = 0; c < PACK; ++c) {
      const int64_t state = (b * s.channels + channel + c) * (WIDTH - 1);
      T value = narrow<T>(DeviceAccumulate<T>(0));
      if (at >= 0) {
        value = in.x[(b * s.length + at) * s.channels + channel + c];
      } else if (in.initial) {
        value = in.initial[state + at + WIDTH - 1];
      }
      final_state[state + j] = value;
    }
  }
}

// The ring: 2 halves of STEPS steps; while one is computed the other is in flight.
template <int BYTES, int STEPS, int THREADS>
struct Ring {
  Words<BYTES> half[2][STEPS][THREADS];

  __device__ __forceinline__ void fetch(int which, int thread, const char*& from, int64_t stride, int64_t count) {
#pragma unroll
    for (int u = 0; u < STEPS; ++u) {
      copy_async<BYTES>(&half[which][u][thread], from, u < count);
      from += stride;
    }
  }
};

// Nothing is walked: a thread loads STEPS steps and those before them at once, which its neighbours in the block (the
// next stretches of time) have in L1.
template <typename T, int PACK, int WIDTH, int STEPS, int LANES, int LAYERS, int BLOCKS>
__global__ void __launch_bounds__(LANES* LAYERS, BLOCKS)
    forward(ConvInputs<T> in, ConvOutputs<T> to, ConvSizes s, Walks walks) {
  using A = DeviceAccumulate<T>;
  constexpr int BYTES = PACK * static_cast<int>(sizeof(T));
  const Place place = find_place<LANES, LAYERS>(walks, s.length);
  if (place.pack >= walks.packs || (place.begin >= s.length && place.begin > 0)) return;
  const int64_t channel = place.pack * PACK;
  const T* row = in.x + place.batch * s.length * s.channels + channel;
  const int count = static_cast<int>(place.end - place.begin);
  Words<BYTES> words[WIDTH - 1 + STEPS];
  // Where the stretch is no whole one, or the row's first: the nearest step that there is, mended or not written.
  const int before = place.begin > 0 ? WIDTH - 1 : 0;
  const T* first = row + place.begin * s.channels;
#pragma unroll
  for (int j = 0; j < WIDTH - 1 + STEPS; ++j) {
    const int64_t at = max(min(j - (WIDTH - 1), count - 1), -before);
    words[j] = load_words<BYTES>(first + at * s.channels);
  }
  A weight[PACK][WIDTH], bias[PACK], window[WIDTH - 1 + STEPS][PACK];
  load_pack_weights<T, PACK, WIDTH>(in, channel, weight, bias);
#pragma unroll
  for (int j = 0; j < WIDTH - 1; ++j) {
    unpack<T, BYTES>(words[j], window[j]);
    if (place.begin == 0) {
#pragma unroll
      for (int c = 0; c < PACK; ++c) {
        window[j][c] =
            in.initial ? A(widen(in.initial[(place.batch * s.channels + channel + c) * (WIDTH - 1) + j])) : A(0);
      }
    }
  }
  T* out = to.out + (place.batch * s.length + place.begin) * s.channels + channel;
#pragma unroll
  for (int u = 0; u < STEPS; ++u) {
    unpack<T, BYTES>(words[WIDTH - 1 + u], window[WIDTH - 1 + u]);
    A sum[PACK];
#pragma unroll
    for (int c = 0; c < PACK; ++c) {
      sum[c] = bias[c];
#pragma unroll
      for (int k = 0; k < WIDTH; ++k) sum[c] = fma(weight[c][k], window[u + k][c], sum[c]);
    }
    if (in.silu) {
#pragma unroll
      for (int c = 0; c < PACK; ++c) sum[c] = activate<sizeof(T) == 2>(sum[c]);
    }
    if (u < count) store_words(out, pack<T, BYTES>(sum));
    out += s.channels;
  }
  if (place.end == s.length) write_final<T, PACK, WIDTH>(in, s, place.batch, channel, to.final_state);
}

// Partial sums: [batch][group][WIDTH + 1][channel].
template <typename T, int PACK, int WIDTH, int STEPS, int LANES, int WALKS, int BLOCKS>
__global__ void __launch_bounds__(LANES* WALKS, BLOCKS)
    backward(ConvInputs<T> in, ConvGradients<T> g, DeviceAccumulate<T>* __restrict__ partial, ConvSizes s,
             Walks walks) {
  using A = DeviceAccumulate<T>;
  constexpr int BYTES = PACK * static_cast<int>(sizeof(T));
  constexpr int THREADS = LANES * WALKS;
  union Shared {
    struct {
      Ring<BYTES, STEPS, THREADS> x;
      Ring<BYTES, STEPS, THREADS> grad;
    } ring;
    A sums[WALKS][PACK * (WIDTH + 1)][LANES];
  };
  __shared__ Shared shared;
  const Place place = find_place<LANES, WALKS>(walks, s.length);
  const int thread = threadIdx.y * LANES + threadIdx.x;
  const int64_t channel = place.pack * PACK;
  A grad_weight[PACK][WIDTH] = {}, grad_bias[PACK] = {};

  if (place.pack < walks.packs && place.begin < s.length) {
    const int64_t start = (place.batch * s.length + place.begin) * s.channels + channel;
    const int64_t stride = s.channels * static_cast<int64_t>(sizeof(T));
    const int own = static_cast<int>(place.end - place.begin);
    // With the width - 1 steps behind the stretch, whose gradients it needs; behind the row there are none.
    const int steps = own + WIDTH - 1;
    const int count = static_cast<int>(min(static_cast<int64_t>(steps), s.length - place.begin));
    const char* from_x = reinterpret_cast<const char*>(in.x + start);
    const char* from_grad = reinterpret_cast<const char*>(g.grad + start);
    char* out = reinterpret_cast<char*>(g.x + start) - (WIDTH - 1) * stride;
    shared.ring.x.fetch(0, thread, from_x, stride, count);
    shared.ring.grad.fetch(0, thread, from_grad, stride, count);
    commit_copies();
    shared.ring.x.fetch(1, thread, from_x, stride, count - STEPS);
    shared.ring.grad.fetch(1, thread, from_grad, stride, count - STEPS);
    commit_copies();
    // window[j]: inputs, from WIDTH - 1 before step t; pending[j]: gradients of the sums, likewise.
    A weight[PACK][WIDTH], bias[PACK];
    A window[WIDTH - 1 + STEPS][PACK], pending[WIDTH - 1 + STEPS][PACK];
    load_window<T, PACK, WIDTH>(in, s, place.batch, channel, place.begin, window);
    load_pack_weights<T, PACK, WIDTH>(in, channel, weight, bias);
#pragma unroll
    for (int c = 0; c < PACK; ++c) {
#pragma unroll
      for (int j = 0; j < WIDTH - 1; ++j) pending[j][c] = A(0);
    }
    const int first_final = static_cast<int>(s.length - (WIDTH - 1) - place.begin);  // of the final state's gradient
    int which = 0;
    // Step t completes the gradient of the value WIDTH - 1 before it. Values before `begin` are another walk's.
#pragma unroll 1
    for (int t = 0; t < steps; t += STEPS) {
      wait_for_copies<1>();
#pragma unroll
      for (int u = 0; u < STEPS; ++u) {
        unpack<T, BYTES>(shared.ring.x.half[which][u][thread], window[WIDTH - 1 + u]);
        unpack<T, BYTES>(shared.ring.grad.half[which][u][thread], pending[WIDTH - 1 + u]);
        if (in.silu) {
#pragma unroll
          for (int c = 0; c < PACK; ++c) {
            A sum = bias[c];
#pragma unroll
            for (int k = 0; k < WIDTH; ++k) sum = fma(weight[c][k], window[u + k][c], sum);
            pending[WIDTH - 1 + u][c] *= activation_slope<sizeof(T) == 2>(sum);
          }
        }
        if (t + u < own) {
#pragma unroll
          for (int c = 0; c < PACK; ++c) {
            grad_bias[c] += pending[WIDTH - 1 + u][c];
#pragma unroll
            for (int k = 0; k < WIDTH; ++k) {
              grad_weight[c][k] = fma(pending[WIDTH - 1 + u][c], window[u + k][c], grad_weight[c][k]);
            }
          }
        }
        // The gradient of the value at `at`: tap k of the step WIDTH - 1 - k behind it.
        const int at = t + u - (WIDTH - 1);
        A result[PACK];
#pragma unroll
        for (int c = 0; c < PACK; ++c) {
          result[c] = weight[c][WIDTH - 1] * pending[u][c];
#pragma unroll
          for (int k = 0; k < WIDTH - 1; ++k) {
            result[c] = fma(weight[c][k], pending[u + WIDTH - 1 - k][c], result[c]);
          }
        }
        if (g.grad_final && at >= first_final) {
#pragma unroll
          for (int c = 0; c < PACK; ++c) {
            const T* up_final = g.grad_final + (place.batch * s.channels + channel + c) * (WIDTH - 1);
            result[c] += final_gradient(up_final, nullptr, WIDTH, place.begin + at, s.length);
          }
        }
        if (at >= 0 && at < own) {
          store_words(out, pack<T, BYTES>(result));
        } else if (at < 0 && place.begin == 0) {
#pragma unroll
          for (int c = 0; c < PACK; ++c) {
            g.initial[(place.batch * s.channels + channel + c) * (WIDTH - 1) + at + WIDTH - 1] = narrow<T>(result[c]);
          }
        }
        out += stride;
      }
      shared.ring.x.fetch(which, thread, from_x, stride, count - t - 2 * STEPS);
      shared.ring.grad.fetch(which, thread, from_grad, stride, count - t - 2 * STEPS);
      commit_copies();
      which ^= 1;
#pragma unroll
      for (int j = 0; j < WIDTH - 1; ++j) {
#pragma unroll
        for (int c = 0; c < PACK; ++c) {
          window[j][c] = window[STEPS + j][c];
          pending[j][c] = pending[STEPS + j][c];
        }
      }
    }
    wait_for_copies<0>();
  }
  __syncthreads();
#pragma unroll
  for (int c = 0; c < PACK; ++c) {
#pragma unroll
    for (int k = 0; k <= WIDTH; ++k) {
      shared.sums[threadIdx.y][c * (WIDTH + 1) + k][threadIdx.x] =
          k < WIDTH ? grad_weight[c][k < WIDTH ? k : 0] : grad_bias[c];
    }
  }
  __syncthreads();
  if (threadIdx.y == 0 && place.pack < walks.packs) {
#pragma unroll
    for (int k = 0; k <= WIDTH; ++k) {
#pragma unroll
      for (int c = 0; c < PACK; ++c) {
        A sum = A(0);
#pragma unroll
        for (int y = 0; y < WALKS; ++y) sum += shared.sums[y][c * (WIDTH + 1) + k][threadIdx.x];
        partial[((place.batch * walks.groups + place.group) * (WIDTH + 1) + k) * s.channels + channel + c] = sum;
      }
    }
  }
}

}  // namespace opgraft::cuda::conv_columns
