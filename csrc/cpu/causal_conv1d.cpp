// Depthwise causal convolution with an optional SiLU, forward, backward and one step, on the CPU.
//
// A row (one channel of one sequence) is widened into a buffer that begins with the width - 1 values before it; the
// taps are then shifted loads from L1 and the loop over time is a vector operation. Channels-last tensors are summed
// across channels forward, a step at a time; backward, and packed, they pass through the loops over time CHANNELS at a
// time, transposed on the way in and out, so that whole cache lines are used. Bytes: one read and one write an element
// forward, two reads and one write backward.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "cpu/causal_conv1d_loops.h"
#include "ops.h"
#include "support/check.h"
#include "support/conv_call.h"
#include "support/dispatch.h"
#include "support/parallel.h"
#include "support/tensor.h"

namespace opgraft::cpu {
namespace {

template <typename T>
struct Arguments {
  ConvShape shape;
  const T* x;
  const T* weight;
  const T* bias;
  const T* initial;
  const int32_t* seq_idx;
  bool silu;

  int64_t offset(int64_t b, int64_t c) const { return b * shape.batch_stride() + c * shape.channel_stride(); }
};

template <typename T>
void read_weights(const Arguments<T>& a, int64_t channel, Accumulate<T>* weight, Accumulate<T>* bias) {
  for (int k = 0; k < a.shape.width; ++k) weight[k] = widen(a.weight[channel * a.shape.width + k]);
  *bias = a.bias ? widen(a.bias[channel]) : Accumulate<T>(0);
}

// The width - 1 values before the row.
template <typename T>
void read_history(const Arguments<T>& a, int64_t b, int64_t channel, Accumulate<T>* row) {
  const int history = a.shape.width - 1;
  for (int j = 0; j < history; ++j) {
    row[j - history] = a.initial ? widen(a.initial[(b * a.shape.channels + channel) * history + j]) : Accumulate<T>(0);
  }
}

template <typename T>
void forward_rows(const Arguments<T>& a, int64_t b, int64_t first, int64_t rows, T* out, T* final_state) {
  using A = Accumulate<T>;
  const ConvShape& s = a.shape;
  constexpr int64_t PITCH = HISTORY + 1 + STEPS;
  // On the stack: at most 16 rows of 520 values, twice.
  A in_buffer[CHANNELS * PITCH];
  A out_buffer[CHANNELS * STEPS];
  A* const row0 = in_buffer + HISTORY + 1;
  const int history = s.width - 1;
  const int32_t* seq_idx = a.seq_idx ? a.seq_idx + b * s.length : nullptr;
  A weight[CHANNELS][MAX_CONV_WIDTH], bias[CHANNELS];
  for (int64_t r = 0; r < rows; ++r) {
    read_weights(a, first + r, weight[r], &bias[r]);
    read_history(a, b, first + r, row0 + r * PITCH);
  }
  for (int64_t t = 0; t < s.length; t += STEPS) {
    const int64_t steps = std::min(STEPS, s.length - t);
    const int64_t at = a.offset(b, first) + t * s.step_stride();
    read_rows(a.x + at, s.step_stride(), row0, PITCH, rows, steps);
    for (int64_t r = 0; r < rows; ++r) {
      A* row = row0 + r * PITCH;
      if (seq_idx) {
        convolve_packed(row, weight[r], bias[r], out_buffer + r * STEPS, t, steps, s.width, seq_idx);
        if (a.silu) activate_loop(out_buffer + r * STEPS, steps);
        for (int64_t i = 0; i < steps; ++i) {
          if (seq_idx[t + i] < 0) out_buffer[r * STEPS + i] = A(0);
        }
      } else {
        sum_taps(row, weight[r], bias[r], out_buffer + r * STEPS, steps, s.width, a.silu);
      }
      // What the next part, or the final state, needs of this one. Moves forward, so overlaps are safe.
      for (int j = -history; j < 0; ++j) row[j] = row[steps + j];
    }
    write_rows(out_buffer, STEPS, out + at, s.step_stride(), rows, steps);
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int j = 0; j < history; ++j) {
      const bool seen = !seq_idx || s.length == 0 || sees(seq_idx, s.length - 1, history - 1 - j);
      final_state[(b * s.channels + first + r) * history + j] = narrow<T>(seen ? row0[r * PITCH + j - history] : A(0));
    }
  }
}

// Steps begin to end of COLUMNS channels or fewer, channels last. 16-bit rows are widened once, into a ring.
template <typename T>
void forward_columns(const Arguments<T>& a, int64_t b, int64_t first, int64_t count, int64_t begin, int64_t end,
                     T* out) {
  using A = Accumulate<T>;
  constexpr int64_t SLOTS = HISTORY + 1;
  const ConvShape& s = a.shape;
  const int history = s.width - 1;
  A weight[SLOTS * COLUMNS], bias[COLUMNS], ring[SLOTS * COLUMNS];
  for (int64_t c = 0; c < count; ++c) {
    for (int k = 0; k < s.width; ++k) weight[k * COLUMNS + c] = widen(a.weight[(first + c) * s.width + k]);
    bias[c] = a.bias ? widen(a.bias[first + c]) : A(0);
  }
  auto row_at = [&](int64_t t) -> const A* {
    const T* row = a.x + a.offset(b, first) + t * s.step_stride();
    if constexpr (std::is_same_v<T, A>) {
      if (t >= 0) return row;
    }
    A* slot = ring + (t + SLOTS) % SLOTS * COLUMNS;
    if (t >= 0) {
      read_rows(row, 1, slot, COLUMNS, 1, count);
    } else {
      for (int64_t c = 0; c < count; ++c) {
        slot[c] = a.initial ? A(widen(a.initial[(b * s.channels + first + c) * history + t + history])) : A(0);
      }
    }
    return slot;
  };
  const A* rows[SLOTS];
  for (int k = 0; k < history; ++k) rows[k] = row_at(begin - history + k);
  for (int64_t t = begin; t < end; ++t) {
    rows[history] = row_at(t);
    step_columns(rows, weight, bias, out + a.offset(b, first) + t * s.step_stride(), count, s.width, a.silu);
    for (int k = 0; k < history; ++k) rows[k] = rows[k + 1];
  }
}

template <typename T>
void final_columns(const Arguments<T>& a, T* final_state) {
  const ConvShape& s = a.shape;
  const int history = s.width - 1;
  for (int64_t line = 0; line < s.batch * s.channels; ++line) {
    for (int j = 0; j < history; ++j) {
      const int64_t t = s.length - history + j;
      T value = narrow<T>(Accumulate<T>(0));
      if (t >= 0) {
        value = a.x[a.offset(line / s.channels, line % s.channels) + t * s.step_stride()];
      } else if (a.initial) {
        value = a.initial[line * history + t + history];
      }
      final_state[line * history + j] = value;
    }
  }
}

// The same for a packed row: every tap sees the gradients of those steps that see it. `seen` is a buffer of a row.
template <typename A>
void backward_packed(const A* row, const A* grad, const A* weight, A* grad_row, A* seen, double* grad_weight,
                     double* grad_bias, int64_t length, int width, const int32_t* seq_idx) {
  for (int64_t t = -(width - 1); t < length; ++t) grad_row[t] = A(0);
  *grad_bias += dot<A>(grad, nullptr, length);
  for (int k = 0; k < width; ++k) {
    const int64_t back = width - 1 - k;
    for (int64_t t = 0; t < length; ++t) {
      seen[t] = sees(seq_idx, t, back) ? grad[t] : A(0);
      grad_row[t - back] += weight[k] * seen[t];
    }
    grad_weight[k] += dot(seen, row - back, length);
  }
}

template <typename T>
struct Gradients {
  const T* grad;
  const T* grad_final;
  T* x;
  T* weight;
  T* bias;
  T* initial;
};

// All batches of `rows` channels, in order: the weights' gradients are sums over the batch.
template <typename T>
void backward_channels(const Arguments<T>& a, const Gradients<T>& g, int64_t first, int64_t rows) {
  using A = Accumulate<T>;
  const ConvShape& s = a.shape;
  const int history = s.width - 1;
  const int64_t pitch = HISTORY + 1 + s.length + HISTORY;
  std::vector<A> in(rows * pitch), up(rows * pitch), out(rows * pitch), sum(s.length);
  A weight[CHANNELS][MAX_CONV_WIDTH], bias[CHANNELS];
  double grad_weight[CHANNELS][MAX_CONV_WIDTH] = {}, grad_bias[CHANNELS] = {};
  for (int64_t r = 0; r < rows; ++r) read_weights(a, first + r, weight[r], &bias[r]);
  for (int64_t b = 0; b < s.batch; ++b) {
    const int64_t at = a.offset(b, first);
    const int32_t* seq_idx = a.seq_idx ? a.seq_idx + b * s.length : nullptr;
    read_rows(a.x + at, s.step_stride(), in.data() + HISTORY + 1, pitch, rows, s.length);
    read_rows(g.grad + at, s.step_stride(), up.data() + HISTORY + 1, pitch, rows, s.length);
    for (int64_t r = 0; r < rows; ++r) {
      A* row = in.data() + r * pitch + HISTORY + 1;
      A* grad = up.data() + r * pitch + HISTORY + 1;
      A* grad_row = out.data() + r * pitch + HISTORY + 1;
      read_history(a, b, first + r, row);
      if (a.silu) {
        if (seq_idx) {
          convolve_packed(row, weight[r], bias[r], sum.data(), 0, s.length, s.width, seq_idx);
        } else {
          sum_taps(row, weight[r], bias[r], sum.data(), s.length, s.width, false);
        }
        slope_loop(sum.data(), grad, s.length);
      }
      for (int j = 1; j <= history; ++j) grad[-j] = grad[s.length + j - 1] = A(0);
      if (seq_idx) {
        for (int64_t t = 0; t < s.length; ++t) grad[t] = seq_idx[t] < 0 ? A(0) : grad[t];
        backward_packed(row, grad, weight[r], grad_row, sum.data(), grad_weight[r], &grad_bias[r], s.length, s.width,
                        seq_idx);
      } else {
        spread_taps(grad - history, weight[r], grad_row - history, s.length + history, s.width);
        weight_loop(row, grad, grad_weight[r], &grad_bias[r], s.length, s.width);
      }
      const int64_t state = (b * s.channels + first + r) * history;
      for (int j = 0; g.grad_final && j < history; ++j) {
        if (!seq_idx || s.length == 0 || sees(seq_idx, s.length - 1, history - 1 - j)) {
          grad_row[s.length - history + j] += widen(g.grad_final[state + j]);
        }
      }
      for (int j = 0; j < history; ++j) g.initial[state + j] = narrow<T>(grad_row[j - history]);
    }
    write_rows(out.data() + HISTORY + 1, pitch, g.x + at, s.step_stride(), rows, s.length);
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int k = 0; k < s.width; ++k) {
      g.weight[(first + r) * s.width + k] = narrow<T>(static_cast<A>(grad_weight[r][k]));
    }
    g.bias[first + r] = narrow<T>(static_cast<A>(grad_bias[r]));
  }
}

// Calls body(first channel, channels) for groups that lie in whole cache lines where channels are last.
template <typename Body>
void for_channel_groups(const ConvShape& shape, int64_t begin, int64_t end, const Body& body) {
  const int64_t size = shape.channel_last ? CHANNELS : 1;
  for (int64_t group = begin; group < end; ++group) {
    body(group * size, std::min(size, shape.channels - group * size));
  }
}

int64_t channel_groups(const ConvShape& shape) {
  return shape.channel_last ? (shape.channels + CHANNELS - 1) / CHANNELS : shape.channels;
}

int64_t grain(int64_t elements_each) {
  return std::max<int64_t>(1, GRAIN_ELEMENTS / std::max<int64_t>(1, elements_each));
}

template <typename T>
void update_rows(const ConvShape& s, const T* x, const T* state, const T* weight, const T* bias, T* out, T* new_state,
                 bool silu, int64_t begin, int64_t end) {
  using A = Accumulate<T>;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t c = row % s.channels;
    const T* kept = state + row * s.length;
    const A current = widen(x[row]);
    A sum = bias ? widen(bias[c]) : A(0);
    for (int k = 0; k < s.width - 1; ++k) {
      sum += A(widen(weight[c * s.width + k])) * A(widen(kept[s.length - (s.width - 1) + k]));
    }
    sum += A(widen(weight[c * s.width + s.width - 1])) * current;
    out[row] = narrow<T>(silu ? silu_value(sum) : sum);
    for (int64_t j = 0; j + 1 < s.length; ++j) new_state[row * s.length + j] = kept[j + 1];
    if (s.length > 0) new_state[row * s.length + s.length - 1] = x[row];
  }
}

template <typename T, typename Call>
Arguments<T> arguments_of(const Call& call) {
  return {call.shape,
          call.x.template const_data_ptr<T>(),
          call.weight.template const_data_ptr<T>(),
          optional_data<T>(call.bias),
          optional_data<T>(call.initial),
          optional_data<int32_t>(call.seq_idx),
          call.silu};
}

}  // namespace

std::tuple<Tensor, Tensor> causal_conv1d(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                                         const OptionalTensor& initial_state, const OptionalTensor& seq_idx, bool silu,
                                         bool channel_last) {
  ConvForward call = prepare_conv("causal_conv1d", x, weight, bias, initial_state, seq_idx, silu, channel_last);
  dispatch_floating("causal_conv1d", x, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Arguments<T> arguments = arguments_of<T>(call);
    T *y = call.out.mutable_data_ptr<T>(), *last = call.final_state.mutable_data_ptr<T>();
    const ConvShape shape = call.shape;
    if (channel_last && !arguments.seq_idx) {
      // Blocks of channels and of steps, so that few rows still give every thread some.
      const int64_t blocks = (shape.channels + COLUMNS - 1) / COLUMNS, parts = (shape.length + STEPS - 1) / STEPS;
      parallel_for(0, shape.batch * parts * blocks, grain(STEPS * COLUMNS), [=](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const int64_t first = i % blocks * COLUMNS, part = i / blocks % parts;
          forward_columns(arguments, i / blocks / parts, first, std::min(COLUMNS, shape.channels - first), part * STEPS,
                          std::min((part + 1) * STEPS, shape.length), y);
        }
      });
      final_columns(arguments, last);
      return;
    }
    const int64_t groups = channel_groups(shape);
    const int64_t each = shape.length * (channel_last ? CHANNELS : 1);
    parallel_for(0, shape.batch * groups, grain(each), [=](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        for_channel_groups(shape, i % groups, i % groups + 1, [&](int64_t first, int64_t rows) {
          forward_rows(arguments, i / groups, first, rows, y, last);
        });
      }
    });
  });
  return {call.out, call.final_state};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> causal_conv1d_backward(const Tensor& grad, const OptionalTensor& grad_final,
                                                                  const Tensor& x, const Tensor& weight,
                                                                  const OptionalTensor& bias,
                                                                  const OptionalTensor& initial_state,
                                                                  const OptionalTensor& seq_idx, bool silu,
                                                                  bool channel_last) {
  const char* op = "causal_conv1d_backward";
  ConvBackward call =
      prepare_conv_backward(op, grad, grad_final, x, weight, bias, initial_state, seq_idx, silu, channel_last);
  dispatch_floating(op, x, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Arguments<T> arguments = arguments_of<T>(call);
    const Gradients<T> gradients{call.grad.const_data_ptr<T>(),        optional_data<T>(call.grad_final),
                                 call.grad_x.mutable_data_ptr<T>(),    call.grad_weight.mutable_data_ptr<T>(),
                                 call.grad_bias.mutable_data_ptr<T>(), call.grad_initial.mutable_data_ptr<T>()};
    const ConvShape shape = call.shape;
    const int64_t each = shape.length * shape.batch * (channel_last ? CHANNELS : 1);
    parallel_for(0, channel_groups(shape), grain(each), [=](int64_t begin, int64_t end) {
      for_channel_groups(shape, begin, end,
                         [&](int64_t first, int64_t rows) { backward_channels(arguments, gradients, first, rows); });
    });
  });
  return call.gradients();
}

namespace {

void run_step(ConvStep& step) {
  dispatch_floating("causal_conv1d_update", step.x, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T *current = step.x.const_data_ptr<T>(), *kept = step.state.const_data_ptr<T>();
    const T *weight = step.weight.const_data_ptr<T>(), *bias = optional_data<T>(step.bias);
    T *y = step.out.mutable_data_ptr<T>(), *next = step.new_state.mutable_data_ptr<T>();
    const ConvShape shape = step.shape;
    const bool silu = step.silu;
    parallel_for(0, shape.batch * shape.channels, grain(shape.length), [=](int64_t begin, int64_t end) {
      update_rows(shape, current, kept, weight, bias, y, next, silu, begin, end);
    });
  });
}

}  // namespace

std::tuple<Tensor, Tensor> causal_conv1d_update(const Tensor& x, const Tensor& state, const Tensor& weight,
                                                const OptionalTensor& bias, bool silu) {
  return step_conv("causal_conv1d_update", x, state, weight, bias, silu, run_step);
}

Tensor causal_conv1d_update_(const Tensor& x, Tensor state, const Tensor& weight, const OptionalTensor& bias,
                             bool silu) {
  return step_conv_in_place("causal_conv1d_update_", x, state, weight, bias, silu, run_step);
}

}  // namespace opgraft::cpu

STABLE_TORCH_LIBRARY_IMPL(opgraft, CPU, m) {
  m.impl("causal_conv1d", TORCH_BOX(&opgraft::cpu::causal_conv1d));
  m.impl("causal_conv1d_backward", TORCH_BOX(&opgraft::cpu::causal_conv1d_backward));
  m.impl("causal_conv1d_update", TORCH_BOX(&opgraft::cpu::causal_conv1d_update));
  m.impl("causal_conv1d_update_", TORCH_BOX(&opgraft::cpu::causal_conv1d_update_));
}
