// causal_conv1d for what the fast plans leave out: widths 1 and 5 to 8, packed rows, odd channels of 16 bits. A thread
// owns an element, in either layout; its taps come from L1. Backward in three passes: the gradient of the sum before
// the activation into memory, then x's gradient, then the weights'. Right at any size, two to four times the fast
// plans' time.
#include <algorithm>
#include <vector>

#include "cuda/causal_conv1d.cuh"
#include "support/conv_shape.h"
#include "support/tensor.h"

namespace opgraft::cuda {
namespace {

constexpr int THREADS = 256;
constexpr int LANES = 32;
constexpr int LAYERS = 8;
constexpr int MAX_WIDTH = static_cast<int>(MAX_CONV_WIDTH);

// Where the elements of x lie.
struct Layout {
  int64_t step;
  int64_t channel;
  int64_t batch;
};

struct Element {
  int64_t batch;
  int64_t channel;
  int64_t step;
};

__device__ __forceinline__ Element element_at(int64_t index, const ConvSizes& s, bool channel_last) {
  const int64_t inner = channel_last ? s.channels : s.length;
  const int64_t row = index / inner;
  const int64_t outer = channel_last ? s.length : s.channels;
  Element e{row / outer, row % outer, index % inner};
  if (channel_last) {
    const int64_t step = e.channel;
    e.channel = e.step;
    e.step = step;
  }
  return e;
}

// The value `back` steps before a step of a row that begins at `row`; zero where the step does not see it.
template <typename T>
__device__ __forceinline__ DeviceAccumulate<T> value_before(const ConvInputs<T>& in, const ConvSizes& s, const T* row,
                                                            const Layout& layout, const Element& e, int back) {
  using A = DeviceAccumulate<T>;
  if (in.seq_idx && !sees(in.seq_idx + e.batch * s.length, e.step, back)) return A(0);
  const int64_t at = e.step - back;
  if (at >= 0) return widen(row[at * layout.step]);
  if (!in.initial) return A(0);
  return widen(in.initial[(e.batch * s.channels + e.channel) * (s.width - 1) + at + s.width - 1]);
}

template <typename T>
__device__ __forceinline__ DeviceAccumulate<T> sum_taps(const ConvInputs<T>& in, const ConvSizes& s,
                                                        const Layout& layout, const Element& e) {
  using A = DeviceAccumulate<T>;
  const T* row = in.x + e.batch * layout.batch + e.channel * layout.channel;
  A sum = in.bias ? A(widen(in.bias[e.channel])) : A(0);
  for (int k = 0; k < s.width; ++k) {
    const A weight = widen(in.weight[e.channel * s.width + k]);
    sum = fma(weight, value_before(in, s, row, layout, e, s.width - 1 - k), sum);
  }
  return sum;
}

__device__ __forceinline__ bool is_padding(const int32_t* seq_idx, const ConvSizes& s, const Element& e) {
  return seq_idx && seq_idx[e.batch * s.length + e.step] < 0;
}

template <typename T>
__global__ void __launch_bounds__(THREADS)
    forward(ConvInputs<T> in, T* __restrict__ out, ConvSizes s, Layout layout, bool channel_last) {
  using A = DeviceAccumulate<T>;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  if (index >= s.batch * s.channels * s.length) return;
  const Element e = element_at(index, s, channel_last);
  A sum = sum_taps(in, s, layout, e);
  if (in.silu) sum = activate<sizeof(T) == 2>(sum);
  out[index] = narrow<T>(is_padding(in.seq_idx, s, e) ? A(0) : sum);
}

// One thread a value of the final state.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    write_final(ConvInputs<T> in, T* __restrict__ final_state, ConvSizes s, Layout layout) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  const int history = s.width - 1;
  if (index >= s.batch * s.channels * history) return;
  const int64_t line = index / history;
  const Element e{line / s.channels, line % s.channels, s.length};  // the step after the last
  const int back = history - static_cast<int>(index % history);
  const int32_t* seq_idx = in.seq_idx ? in.seq_idx + e.batch * s.length : nullptr;
  T value = narrow<T>(DeviceAccumulate<T>(0));
  if (!seq_idx || s.length == 0 || sees(seq_idx, s.length - 1, back - 1)) {
    const int64_t at = s.length - back;
    if (at >= 0) {
      value = in.x[e.batch * layout.batch + e.channel * layout.channel + at * layout.step];
    } else if (in.initial) {
      value = in.initial[line * history + at + history];
    }
  }
  final_state[index] = value;
}

template <typename T>
__global__ void __launch_bounds__(THREADS)
    sum_gradients(ConvInputs<T> in, const T* __restrict__ grad, DeviceAccumulate<T>* __restrict__ out, ConvSizes s,
                  Layout layout, bool channel_last) {
  using A = DeviceAccumulate<T>;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  if (index >= s.batch * s.channels * s.length) return;
  const Element e = element_at(index, s, channel_last);
  A value = A(0);
  if (!is_padding(in.seq_idx, s, e)) {
    value = widen(grad[index]);
    if (in.silu) value *= activation_slope<sizeof(T) == 2>(sum_taps(in, s, layout, e));
  }
  out[index] = value;
}

// The gradient of the value at step `at` (before the row: of the initial state), from those of the sums.
template <typename T>
__device__ __forceinline__ DeviceAccumulate<T> value_gradient(const ConvInputs<T>& in, const T* grad_final,
                                                              const DeviceAccumulate<T>* sums, const ConvSizes& s,
                                                              const Layout& layout, const Element& e) {
  using A = DeviceAccumulate<T>;
  const int32_t* seq_idx = in.seq_idx ? in.seq_idx + e.batch * s.length : nullptr;
  const A* row = sums + e.batch * layout.batch + e.channel * layout.channel;
  const T* last = grad_final ? grad_final + (e.batch * s.channels + e.channel) * (s.width - 1) : nullptr;
  A sum = final_gradient(last, seq_idx, s.width, e.step, s.length);
  for (int back = 0; back < s.width; ++back) {
    const int64_t later = e.step + back;
    if (later >= 0 && later < s.length && (!seq_idx || sees(seq_idx, later, back))) {
      sum = fma(A(widen(in.weight[e.channel * s.width + s.width - 1 - back])), row[later * layout.step], sum);
    }
  }
  return sum;
}

template <typename T>
__global__ void __launch_bounds__(THREADS)
    input_gradients(ConvInputs<T> in, const T* __restrict__ grad_final, const DeviceAccumulate<T>* __restrict__ sums,
                    T* __restrict__ out, ConvSizes s, Layout layout, bool channel_last) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  if (index >= s.batch * s.channels * s.length) return;
  const Element e = element_at(index, s, channel_last);
  out[index] = narrow<T>(value_gradient(in, grad_final, sums, s, layout, e));
}

template <typename T>
__global__ void __launch_bounds__(THREADS)
    initial_gradients(ConvInputs<T> in, const T* __restrict__ grad_final, const DeviceAccumulate<T>* __restrict__ sums,
                      T* __restrict__ out, ConvSizes s, Layout layout) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  const int history = s.width - 1;
  if (index >= s.batch * s.channels * history) return;
  const int64_t line = index / history;
  const Element e{line / s.channels, line % s.channels, index % history - history};
  out[index] = narrow<T>(value_gradient(in, grad_final, sums, s, layout, e));
}

// A warp sums over the steps of a chunk that its lanes share (length contiguous) or over those of LAYERS warps, each
// lane for a channel of its own (channels contiguous). Partial sums: see Partials, with MAX_WIDTH as bound.
template <typename T>
__global__ void __launch_bounds__(LANES* LAYERS)
    weight_gradients(ConvInputs<T> in, const DeviceAccumulate<T>* __restrict__ sums,
                     DeviceAccumulate<T>* __restrict__ partial, ConvSizes s, Layout layout, bool channel_last,
                     int64_t chunks, int64_t chunk) {
  using A = DeviceAccumulate<T>;
  __shared__ A shared[LAYERS][MAX_WIDTH + 1][LANES];
  const int64_t channel_blocks = channel_last ? (s.channels + LANES - 1) / LANES : s.channels;
  int64_t index = blockIdx.x;
  const int64_t channel = channel_last ? index % channel_blocks * LANES + threadIdx.x : index % channel_blocks;
  index /= channel_blocks;
  const int64_t part = index % chunks;
  Element e{index / chunks, channel, 0};
  const int64_t first = part * chunk + (channel_last ? threadIdx.y : threadIdx.y * LANES + threadIdx.x);
  const int64_t end = min((part + 1) * chunk, s.length);
  const int64_t stride = channel_last ? LAYERS : LAYERS * LANES;
  A total[MAX_WIDTH + 1] = {};
  if (channel < s.channels) {
    const int64_t at = e.batch * layout.batch + e.channel * layout.channel;
    for (e.step = first; e.step < end; e.step += stride) {
      const A grad = sums[at + e.step * layout.step];
      total[MAX_WIDTH] += grad;
#pragma unroll
      for (int back = 0; back < MAX_WIDTH; ++back) {
        if (back < s.width) {
          const int k = MAX_WIDTH - 1 - back;
          total[k] = fma(grad, value_before(in, s, in.x + at, layout, e, back), total[k]);
        }
      }
    }
  }
#pragma unroll
  for (int k = 0; k <= MAX_WIDTH; ++k) shared[threadIdx.y][k][threadIdx.x] = total[k];
  __syncthreads();
  // Threads of the first warps: a value each, or (length contiguous) the lanes' sum of one.
  for (int k = threadIdx.y; k <= MAX_WIDTH; k += LAYERS) {
    A sum = A(0);
    for (int layer = 0; layer < LAYERS; ++layer) sum += shared[layer][k][threadIdx.x];
    if (channel_last) {
      if (channel < s.channels) {
        partial[((e.batch * chunks + part) * (MAX_WIDTH + 1) + k) * s.channels + channel] = sum;
      }
    } else {
#pragma unroll
      for (int by = LANES / 2; by > 0; by /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, by);
      if (threadIdx.x == 0) {
        partial[((e.batch * s.channels + channel) * chunks + part) * (MAX_WIDTH + 1) + k] = sum;
      }
    }
  }
}

Layout layout_of(const ConvSizes& s, bool channel_last) {
  return channel_last ? Layout{s.channels, 1, s.length * s.channels} : Layout{1, s.length, s.length * s.channels};
}

}  // namespace

template <typename T>
void forward_general(const Launch& context, const ConvSizes& s, const ConvInputs<T>& in, const ConvOutputs<T>& to,
                     bool channel_last) {
  const Layout layout = layout_of(s, channel_last);
  const int64_t elements = s.batch * s.channels * s.length, states = s.batch * s.channels * (s.width - 1);
  if (elements > 0) {
    forward<T><<<blocks_for(elements, THREADS), THREADS, 0, context.stream()>>>(in, to.out, s, layout, channel_last);
    Launch::check();
  }
  if (states > 0) {
    write_final<T><<<blocks_for(states, THREADS), THREADS, 0, context.stream()>>>(in, to.final_state, s, layout);
    Launch::check();
  }
}

template <typename T>
void backward_general(const Launch& context, const Tensor& like, const ConvSizes& s, const ConvInputs<T>& in,
                      const ConvGradients<T>& g, bool channel_last) {
  using A = DeviceAccumulate<T>;
  const Layout layout = layout_of(s, channel_last);
  const int64_t elements = s.batch * s.channels * s.length, states = s.batch * s.channels * (s.width - 1);
  // Chunks of time so that few rows still fill the machine.
  const int64_t channel_blocks = channel_last ? ceil_div(s.channels, LANES) : s.channels;
  const int64_t smallest = channel_last ? 64 : 1024;
  const int64_t wanted = ceil_div(int64_t{8} * context.multiprocessors(), s.batch * channel_blocks);
  const int64_t chunk = std::max(smallest, ceil_div(s.length, wanted));
  const int64_t chunks = ceil_div(s.length, chunk);
  const int64_t sums = s.batch * chunks * s.channels * (MAX_WIDTH + 1);
  const Tensor gradients = new_contiguous(like, std::vector<int64_t>{elements}, ACCUMULATE_TYPE<T>);
  const Tensor space = new_contiguous(like, std::vector<int64_t>{sums}, ACCUMULATE_TYPE<T>);
  A* of_sums = static_cast<A*>(gradients.mutable_data_ptr());
  A* partial = static_cast<A*>(space.mutable_data_ptr());
  const unsigned blocks = blocks_for(elements, THREADS);
  sum_gradients<T><<<blocks, THREADS, 0, context.stream()>>>(in, g.grad, of_sums, s, layout, channel_last);
  Launch::check();
  input_gradients<T><<<blocks, THREADS, 0, context.stream()>>>(in, g.grad_final, of_sums, g.x, s, layout, channel_last);
  Launch::check();
  if (states > 0) {
    initial_gradients<T><<<blocks_for(states, THREADS), THREADS, 0, context.stream()>>>(in, g.grad_final, of_sums,
                                                                                        g.initial, s, layout);
    Launch::check();
  }
  weight_gradients<T>
      <<<static_cast<unsigned>(s.batch * chunks * channel_blocks), dim3(LANES, LAYERS), 0, context.stream()>>>(
          in, of_sums, partial, s, layout, channel_last, chunks, chunk);
  Launch::check();
  add_partials<T>(context, s, {partial, MAX_WIDTH, s.batch, chunks, channel_last}, g);
}

template void forward_general(const Launch&, const ConvSizes&, const ConvInputs<float>&, const ConvOutputs<float>&,
                              bool);
template void backward_general(const Launch&, const Tensor&, const ConvSizes&, const ConvInputs<float>&,
                               const ConvGradients<float>&, bool);
template void forward_general(const Launch&, const ConvSizes&, const ConvInputs<double>&, const ConvOutputs<double>&,
                              bool);
template void backward_general(const Launch&, const Tensor&, const ConvSizes&, const ConvInputs<double>&,
                               const ConvGradients<double>&, bool);
template void forward_general(const Launch&, const ConvSizes&, const ConvInputs<__half>&, const ConvOutputs<__half>&,
                              bool);
template void backward_general(const Launch&, const Tensor&, const ConvSizes&, const ConvInputs<__half>&,
                               const ConvGradients<__half>&, bool);
template void forward_general(const Launch&, const ConvSizes&, const ConvInputs<__nv_bfloat16>&,
                              const ConvOutputs<__nv_bfloat16>&, bool);
template void backward_general(const Launch&, const Tensor&, const ConvSizes&, const ConvInputs<__nv_bfloat16>&,
                               const ConvGradients<__nv_bfloat16>&, bool);

}  // namespace opgraft::cuda
