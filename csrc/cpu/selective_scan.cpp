// Mamba's selective scan, forward, backward and one step, on the CPU.
//
// LANES channels side by side in vectors, STEPS steps at a time: u and delta are transposed into [step][lane] buffers
// that stay in L1, then every state is taken along the steps with its LANES values in registers. The exponentials of a
// tile are a loop of their own, which vectorises; the recurrence behind it is one multiply-add deep. Backward keeps the
// state at the start of every tile and computes the rest again. Cost: one exponential a (step, channel, state)
// forward, two backward; that, not memory, is the limit.
//
// Sums over channels (gradients of B and C) are kept apart in SPLITS fixed parts and added in order, sums over the
// batch likewise, so results do not depend on the number of threads.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "ops.h"
#include "support/check.h"
#include "support/convert.h"
#include "support/dispatch.h"
#include "support/exp.h"
#include "support/parallel.h"
#include "support/selective_call.h"
#include "support/tensor.h"

namespace opgraft::cpu {
namespace {

constexpr int64_t LANES = 16;
constexpr int64_t STEPS = 64;
constexpr int64_t TILE = LANES * STEPS;
constexpr int64_t SPLITS = 4;
constexpr int SUMMED_STATES = 16;
constexpr double SOFTPLUS_THRESHOLD = 20;  // torch's: above it softplus is the identity

template <typename A>
OPGRAFT_INLINE A softplus(A x) {
  if constexpr (std::is_same_v<A, double>) {
    return x > SOFTPLUS_THRESHOLD ? x : std::log1p(std::exp(x));
  } else {
    // max(x, 0) + log(1 + e^-|x|); log(1 + y) = 2 atanh(y / (2 + y)), whose series to s^15 is exact to 2e-9 at s = 1/3.
    const A y = exponential(x > A(0) ? -x : x);
    const A s = y / (A(2) + y);
    const A q = s * s;
    A series = A(1) / A(15);
    series = series * q + A(1) / A(13);
    series = series * q + A(1) / A(11);
    series = series * q + A(1) / A(9);
    series = series * q + A(1) / A(7);
    series = series * q + A(1) / A(5);
    series = series * q + A(1) / A(3);
    series = series * q + A(1);
    const A value = (x > A(0) ? x : A(0)) + A(2) * s * series;
    return x > A(SOFTPLUS_THRESHOLD) ? x : value;
  }
}

template <typename A>
OPGRAFT_INLINE A softplus_slope(A x) {
  return x > A(SOFTPLUS_THRESHOLD) ? A(1) : A(1) / (A(1) + exponential(-x));
}

template <typename A>
OPGRAFT_INLINE A logistic(A x) {
  return A(1) / (A(1) + exponential(-x));
}

template <typename A>
OPGRAFT_INLINE A silu(A x) {
  const A s = logistic(x);
  return s == A(0) ? A(0) : x * s;
}

template <typename A>
OPGRAFT_INLINE A silu_slope(A x) {
  const A s = logistic(x);
  const A curve = s * (A(1) - s);
  return s + (curve == A(0) ? A(0) : x * curve);
}

// The buffers of one group of LANES channels over one tile: [step][lane] unless said otherwise.
template <typename A>
struct Tile {
  A u[TILE];
  A raw[TILE];    // delta + delta_bias
  A step[TILE];   // the step size: raw, or its softplus
  A input[TILE];  // step * u
  A y[TILE];      // sum over states of C h
  A decay[TILE];
  A gate[TILE];  // z
  A up[TILE];    // incoming gradient
  A dy[TILE];    // of y before the gate
  A d_input[TILE];
  A d_step[TILE];
  A part_y[TILE];  // of SUMMED_STATES states: sums over many states stay as exact as over few
  A part_input[TILE];
  A part_step[TILE];
  A skip[LANES];
  A bias[LANES];
};

template <typename A>
OPGRAFT_INLINE void prepare(Tile<A>& tile, bool use_softplus, int64_t steps) {
  for (int64_t i = 0; i < steps * LANES; ++i) tile.step[i] = use_softplus ? softplus(tile.raw[i]) : tile.raw[i];
  for (int64_t i = 0; i < steps * LANES; ++i) {
    tile.input[i] = tile.step[i] * tile.u[i];
    tile.y[i] = tile.part_y[i] = A(0);
  }
}

template <typename A>
OPGRAFT_INLINE void fill_decay(Tile<A>& tile, const A* a, int64_t steps) {
  for (int64_t t = 0; t < steps; ++t) {
    for (int64_t l = 0; l < LANES; ++l) tile.decay[t * LANES + l] = exponential(tile.step[t * LANES + l] * a[l]);
  }
}

inline bool part_is_full(int n, int states) { return n + 1 == states || n % SUMMED_STATES == SUMMED_STATES - 1; }

template <typename A>
OPGRAFT_INLINE void flush(A* part, A* total, int64_t steps) {
  for (int64_t i = 0; i < steps * LANES; ++i) {
    total[i] += part[i];
    part[i] = A(0);
  }
}

// One tile of all states. a and h are [state][lane]; b and c are [state][STEPS]. c may be null: states only.
template <typename A>
OPGRAFT_INLINE void forward_tile(Tile<A>& tile, const A* a, A* h, const A* b, const A* c, int64_t steps, int states) {
  for (int n = 0; n < states; ++n) {
    fill_decay(tile, a + n * LANES, steps);
    A state[LANES];
    for (int64_t l = 0; l < LANES; ++l) state[l] = h[n * LANES + l];
    for (int64_t t = 0; t < steps; ++t) {
      const A bt = b[n * STEPS + t];
      for (int64_t l = 0; l < LANES; ++l) {
        state[l] = tile.decay[t * LANES + l] * state[l] + tile.input[t * LANES + l] * bt;
      }
      if (c) {
        const A ct = c[n * STEPS + t];
        for (int64_t l = 0; l < LANES; ++l) tile.part_y[t * LANES + l] += state[l] * ct;
      }
    }
    for (int64_t l = 0; l < LANES; ++l) h[n * LANES + l] = state[l];
    if (c && part_is_full(n, states)) flush(tile.part_y, tile.y, steps);
  }
}

template <typename A>
OPGRAFT_INLINE A sum_lanes(const A* values) {
  A part[LANES];
  for (int64_t l = 0; l < LANES; ++l) part[l] = values[l];
  for (int64_t half = LANES / 2; half > 0; half /= 2) {
    for (int64_t l = 0; l < half; ++l) part[l] += part[l + half];
  }
  return part[0];
}

// The same tile backwards. h: the states that enter it; carry: the gradient of the states that leave it, replaced by
// that of those that enter. states_of is [STEPS + 1][lane] scratch. d_b, d_c: [state][STEPS], added to.
template <typename A>
OPGRAFT_INLINE void backward_tile(Tile<A>& tile, const A* a, const A* h, A* carry, const A* b, const A* c, A* d_a,
                                  A* d_b, A* d_c, A* states_of, int64_t steps, int states) {
  for (int64_t i = 0; i < steps * LANES; ++i) {
    tile.d_input[i] = tile.d_step[i] = tile.part_input[i] = tile.part_step[i] = A(0);
  }
  for (int n = 0; n < states; ++n) {
    fill_decay(tile, a + n * LANES, steps);
    for (int64_t l = 0; l < LANES; ++l) states_of[l] = h[n * LANES + l];
    for (int64_t t = 0; t < steps; ++t) {
      const A bt = b[n * STEPS + t];
      const A ct = c[n * STEPS + t];
      for (int64_t l = 0; l < LANES; ++l) {
        const int64_t i = t * LANES + l;
        states_of[i + LANES] = tile.decay[i] * states_of[i] + tile.input[i] * bt;
        tile.part_y[i] += states_of[i + LANES] * ct;
      }
    }
    A later[LANES], slope[LANES];
    for (int64_t l = 0; l < LANES; ++l) {
      later[l] = carry[n * LANES + l];
      slope[l] = A(0);
    }
    for (int64_t t = steps - 1; t >= 0; --t) {
      const A bt = b[n * STEPS + t];
      const A ct = c[n * STEPS + t];
      A to_b[LANES], to_c[LANES];
      for (int64_t l = 0; l < LANES; ++l) {
        const int64_t i = t * LANES + l;
        const A total = tile.dy[i] * ct + later[l];
        to_c[l] = tile.dy[i] * states_of[i + LANES];
        to_b[l] = total * tile.input[i];
        tile.part_input[i] += total * bt;
        later[l] = tile.decay[i] * total;
        const A to_exponent = later[l] * states_of[i];
        tile.part_step[i] += to_exponent * a[n * LANES + l];
        slope[l] += to_exponent * tile.step[i];
      }
      d_b[n * STEPS + t] += sum_lanes(to_b);
      d_c[n * STEPS + t] += sum_lanes(to_c);
    }
    for (int64_t l = 0; l < LANES; ++l) {
      carry[n * LANES + l] = later[l];
      d_a[n * LANES + l] += slope[l];
    }
    if (part_is_full(n, states)) {
      flush(tile.part_y, tile.y, steps);
      flush(tile.part_input, tile.d_input, steps);
      flush(tile.part_step, tile.d_step, steps);
    }
  }
}

// y becomes the output, in place.
template <typename A>
OPGRAFT_INLINE void finish(Tile<A>& tile, bool gated, int64_t steps) {
  for (int64_t t = 0; t < steps; ++t) {
    for (int64_t l = 0; l < LANES; ++l) tile.y[t * LANES + l] += tile.skip[l] * tile.u[t * LANES + l];
  }
  if (gated) {
    for (int64_t i = 0; i < steps * LANES; ++i) tile.y[i] *= silu(tile.gate[i]);
  }
}

template <typename A>
OPGRAFT_INLINE void gate_gradient(Tile<A>& tile, bool gated, int64_t steps) {
  for (int64_t i = 0; i < steps * LANES; ++i) tile.dy[i] = gated ? tile.up[i] * silu(tile.gate[i]) : tile.up[i];
}

// After backward_tile: up becomes d_z, d_input becomes d_u, d_step becomes d_delta. Adds to d_skip and d_bias.
template <typename A>
OPGRAFT_INLINE void finish_backward(Tile<A>& tile, bool use_softplus, A* d_skip, A* d_bias, int64_t steps) {
  for (int64_t t = 0; t < steps; ++t) {
    for (int64_t l = 0; l < LANES; ++l) {
      const int64_t i = t * LANES + l;
      const A y = tile.y[i] + tile.skip[l] * tile.u[i];
      tile.up[i] = tile.up[i] * y * silu_slope(tile.gate[i]);
      d_skip[l] += tile.dy[i] * tile.u[i];
      const A slope = use_softplus ? softplus_slope(tile.raw[i]) : A(1);
      const A d_raw = (tile.d_step[i] + tile.d_input[i] * tile.u[i]) * slope;
      tile.d_input[i] = tile.d_input[i] * tile.step[i] + tile.dy[i] * tile.skip[l];
      tile.d_step[i] = d_raw;
      d_bias[l] += d_raw;
    }
  }
}

// target_clones does not take templates: one plain function a type.
#define OPGRAFT_SELECTIVE_TILES(A)                                                                                    \
  OPGRAFT_CLONES void run_forward(Tile<A>& tile, const A* a, A* h, const A* b, const A* c, int64_t steps, int states, \
                                  bool use_softplus, bool gated) {                                                    \
    prepare(tile, use_softplus, steps);                                                                               \
    forward_tile(tile, a, h, b, c, steps, states);                                                                    \
    if (c) finish(tile, gated, steps);                                                                                \
  }                                                                                                                   \
  OPGRAFT_CLONES void run_backward(Tile<A>& tile, const A* a, const A* h, A* carry, const A* b, const A* c, A* d_a,   \
                                   A* d_b, A* d_c, A* d_skip, A* d_bias, A* states_of, int64_t steps, int states,     \
                                   bool use_softplus, bool gated) {                                                   \
    prepare(tile, use_softplus, steps);                                                                               \
    gate_gradient(tile, gated, steps);                                                                                \
    backward_tile(tile, a, h, carry, b, c, d_a, d_b, d_c, states_of, steps, states);                                  \
    finish_backward(tile, use_softplus, d_skip, d_bias, steps);                                                       \
  }
OPGRAFT_SELECTIVE_TILES(float)
OPGRAFT_SELECTIVE_TILES(double)

template <typename T>
struct Data {
  using A = Accumulate<T>;
  SelectiveShape shape;
  const T *u, *delta, *b, *c, *z;
  const A *a, *d, *bias, *initial;
  MatrixStrides b_strides, c_strides;
  bool use_softplus;

  int64_t row(int64_t batch, int64_t channel) const { return (batch * shape.channels + channel) * shape.length; }
  int64_t state(int64_t batch, int64_t channel) const { return (batch * shape.channels + channel) * shape.states; }
};

// LANES channels from `first` (fewer at a group's end: the rest are zeros) into [step][lane].
template <typename A, typename T>
OPGRAFT_INLINE void read_lanes(const T* rows, int64_t pitch, A* out, int64_t lanes, int64_t steps) {
  for (int64_t l = 0; l < lanes; ++l) {
    for (int64_t t = 0; t < steps; ++t) out[t * LANES + l] = widen(rows[l * pitch + t]);
  }
  for (int64_t l = lanes; l < LANES; ++l) {
    for (int64_t t = 0; t < steps; ++t) out[t * LANES + l] = A(0);
  }
}

template <typename A, typename T>
OPGRAFT_INLINE void write_lanes(const A* in, T* rows, int64_t pitch, int64_t lanes, int64_t steps) {
  for (int64_t l = 0; l < lanes; ++l) {
    for (int64_t t = 0; t < steps; ++t) rows[l * pitch + t] = narrow<T>(in[t * LANES + l]);
  }
}

template <typename T>
void read_matrix(const T* matrix, const MatrixStrides& s, int64_t batch, int64_t group, int64_t first, int64_t steps,
                 int states, Accumulate<T>* out) {
  const T* base = matrix + batch * s.batch + group * s.group + first * s.step;
  for (int n = 0; n < states; ++n) {
    for (int64_t t = 0; t < steps; ++t) out[n * STEPS + t] = widen(base[n * s.state + t * s.step]);
  }
}

// What one group of LANES channels needs from start to end.
template <typename T>
struct Channels {
  using A = Accumulate<T>;
  const Data<T>& d;
  int64_t batch, group, first, lanes;
  std::vector<A> a, h, b, c;
  Tile<A> tile;

  Channels(const Data<T>& data, int64_t batch, int64_t group, int64_t first, int64_t lanes)
      : d(data), batch(batch), group(group), first(first), lanes(lanes) {
    const int states = d.shape.states;
    a.assign(states * LANES, A(0));
    h.assign(states * LANES, A(0));
    b.resize(states * STEPS);
    c.resize(states * STEPS);
    for (int64_t l = 0; l < LANES; ++l) {
      const bool there = l < lanes;
      tile.skip[l] = there && d.d ? d.d[first + l] : A(0);
      tile.bias[l] = there && d.bias ? d.bias[first + l] : A(0);
      for (int n = 0; there && n < states; ++n) {
        a[n * LANES + l] = d.a[(first + l) * states + n];
        if (d.initial) h[n * LANES + l] = d.initial[d.state(batch, first + l) + n];
      }
    }
  }

  void read(int64_t t, int64_t steps, bool with_c) {
    const int64_t pitch = d.shape.length;
    const int64_t at = d.row(batch, first) + t;
    read_lanes(d.u + at, pitch, tile.u, lanes, steps);
    read_lanes(d.delta + at, pitch, tile.raw, lanes, steps);
    for (int64_t s = 0; s < steps; ++s) {
      for (int64_t l = 0; l < LANES; ++l) tile.raw[s * LANES + l] += tile.bias[l];
    }
    read_matrix(d.b, d.b_strides, batch, group, t, steps, d.shape.states, b.data());
    if (!with_c) return;
    read_matrix(d.c, d.c_strides, batch, group, t, steps, d.shape.states, c.data());
    if (d.z) read_lanes(d.z + at, pitch, tile.gate, lanes, steps);
  }
};

template <typename T>
void forward_channels(const Data<T>& d, int64_t batch, int64_t group, int64_t first, int64_t lanes, T* y,
                      Accumulate<T>* final_state) {
  Channels<T> own(d, batch, group, first, lanes);
  for (int64_t t = 0; t < d.shape.length; t += STEPS) {
    const int64_t steps = std::min(STEPS, d.shape.length - t);
    own.read(t, steps, true);
    run_forward(own.tile, own.a.data(), own.h.data(), own.b.data(), own.c.data(), steps, d.shape.states, d.use_softplus,
                d.z != nullptr);
    write_lanes(own.tile.y, y + d.row(batch, first) + t, d.shape.length, lanes, steps);
  }
  for (int64_t l = 0; l < lanes; ++l) {
    for (int n = 0; n < d.shape.states; ++n) {
      final_state[d.state(batch, first + l) + n] = own.h[n * LANES + l];
    }
  }
}

template <typename T>
struct Gradients {
  using A = Accumulate<T>;
  const T* up;
  const A* up_final;
  T *u, *delta, *z;
  A *a, *skip, *bias;  // [batch][channel]..., summed over the batch afterwards
  A *b, *c;            // [split][batch][group][state][length], summed over splits afterwards
  A* initial;
};

template <typename T>
void backward_channels(const Data<T>& d, const Gradients<T>& g, int64_t batch, int64_t group, int64_t first,
                       int64_t lanes, Accumulate<T>* d_b, Accumulate<T>* d_c) {
  using A = Accumulate<T>;
  const SelectiveShape& s = d.shape;
  Channels<T> own(d, batch, group, first, lanes);
  const int64_t tiles = (s.length + STEPS - 1) / STEPS;
  const int64_t size = s.states * LANES;
  std::vector<A> starts(std::max<int64_t>(tiles, 1) * size), carry(size, A(0)), d_a(size, A(0));
  std::vector<A> states_of(TILE + LANES), tile_b(s.states * STEPS), tile_c(s.states * STEPS);
  A d_skip[LANES] = {}, d_bias[LANES] = {};
  for (int64_t i = 0; i < tiles; ++i) {
    std::copy(own.h.begin(), own.h.end(), starts.begin() + i * size);
    if (i + 1 == tiles) break;
    own.read(i * STEPS, STEPS, false);
    run_forward(own.tile, own.a.data(), own.h.data(), own.b.data(), nullptr, STEPS, s.states, d.use_softplus, false);
  }
  for (int64_t l = 0; g.up_final && l < lanes; ++l) {
    for (int n = 0; n < s.states; ++n) carry[n * LANES + l] = g.up_final[d.state(batch, first + l) + n];
  }
  for (int64_t i = tiles - 1; i >= 0; --i) {
    const int64_t t = i * STEPS;
    const int64_t steps = std::min(STEPS, s.length - t);
    const int64_t at = d.row(batch, first) + t;
    own.read(t, steps, true);
    if (!d.z) std::fill(own.tile.gate, own.tile.gate + TILE, A(0));
    read_lanes(g.up + at, s.length, own.tile.up, lanes, steps);
    std::fill(tile_b.begin(), tile_b.end(), A(0));
    std::fill(tile_c.begin(), tile_c.end(), A(0));
    run_backward(own.tile, own.a.data(), starts.data() + i * size, carry.data(), own.b.data(), own.c.data(), d_a.data(),
                 tile_b.data(), tile_c.data(), d_skip, d_bias, states_of.data(), steps, s.states, d.use_softplus,
                 d.z != nullptr);
    for (int n = 0; n < s.states; ++n) {
      for (int64_t j = 0; j < steps; ++j) {
        d_b[n * s.length + t + j] += tile_b[n * STEPS + j];
        d_c[n * s.length + t + j] += tile_c[n * STEPS + j];
      }
    }
    write_lanes(own.tile.d_input, g.u + at, s.length, lanes, steps);
    write_lanes(own.tile.d_step, g.delta + at, s.length, lanes, steps);
    if (d.z) write_lanes(own.tile.up, g.z + at, s.length, lanes, steps);
  }
  for (int64_t l = 0; l < lanes; ++l) {
    g.skip[batch * s.channels + first + l] = d_skip[l];
    g.bias[batch * s.channels + first + l] = d_bias[l];
    for (int n = 0; n < s.states; ++n) {
      g.a[d.state(batch, first + l) + n] = d_a[n * LANES + l];
      g.initial[d.state(batch, first + l) + n] = carry[n * LANES + l];
    }
  }
}

// out[i] = sum over parts of in[part][i], in order.
template <typename A, typename T>
void add_parts(const A* in, T* out, int64_t parts, int64_t size) {
  parallel_for(0, size, GRAIN_ELEMENTS, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      A sum = A(0);
      for (int64_t p = 0; p < parts; ++p) sum += in[p * size + i];
      out[i] = narrow<T>(sum);
    }
  });
}

// One plain function a dtype around the templates, so that transposes are vectorised as well.
template <typename T>
Data<T> data_of(const SelectiveShape& shape, const SelectiveArguments& a) {
  using A = Accumulate<T>;
  return {shape,
          a.u.const_data_ptr<T>(),
          a.delta.const_data_ptr<T>(),
          a.B.const_data_ptr<T>(),
          a.C.const_data_ptr<T>(),
          optional_data<T>(a.z),
          a.A.const_data_ptr<A>(),
          optional_data<A>(a.D),
          optional_data<A>(a.delta_bias),
          optional_data<A>(a.initial_state),
          MatrixStrides::of(a.B),
          MatrixStrides::of(a.C),
          a.delta_softplus};
}

template <typename A>
void update_row(A* h, const A* a, A step, A input, A& y, int states, const A* b, const A* c) {
  A sum = A(0);
  for (int n = 0; n < states; ++n) {
    h[n] = exponential(step * a[n]) * h[n] + input * b[n];
    sum += h[n] * c[n];
  }
  y = sum;
}

}  // namespace

std::tuple<Tensor, Tensor> selective_scan(const Tensor& u, const Tensor& delta, const Tensor& A, const Tensor& B,
                                          const Tensor& C, const OptionalTensor& D, const OptionalTensor& z,
                                          const OptionalTensor& delta_bias, bool delta_softplus,
                                          const OptionalTensor& initial_state) {
  SelectiveForward call =
      prepare_selective("selective_scan", {u, delta, A, B, C, D, z, delta_bias, delta_softplus, initial_state});
  const SelectiveShape shape = call.shape;
  dispatch_floating("selective_scan", u, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Data<T> data = data_of<T>(shape, call.in.arguments());
    T* out = call.y.mutable_data_ptr<T>();
    auto* last = call.final_state.mutable_data_ptr<Accumulate<T>>();
    const int64_t blocks = (shape.per_group() + LANES - 1) / LANES;
    parallel_for(0, shape.batch * shape.groups * blocks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t block = i % blocks, group = i / blocks % shape.groups, batch = i / blocks / shape.groups;
        const int64_t first = block * LANES;
        forward_channels(data, batch, group, group * shape.per_group() + first,
                         std::min(LANES, shape.per_group() - first), out, last);
      }
    });
  });
  return {call.y, call.final_state};
}

SelectiveGradients selective_scan_backward(const Tensor& grad, const OptionalTensor& grad_final, const Tensor& u,
                                           const Tensor& delta, const Tensor& A, const Tensor& B, const Tensor& C,
                                           const OptionalTensor& D, const OptionalTensor& z,
                                           const OptionalTensor& delta_bias, bool delta_softplus,
                                           const OptionalTensor& initial_state) {
  SelectiveBackward call = prepare_selective_backward(
      "selective_scan_backward", {u, delta, A, B, C, D, z, delta_bias, delta_softplus, initial_state}, grad,
      grad_final);
  const SelectiveShape shape = call.shape;
  dispatch_floating("selective_scan_backward", u, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using S = Accumulate<T>;
    const Data<T> data = data_of<T>(shape, call.in.arguments());
    const int64_t blocks = (shape.per_group() + LANES - 1) / LANES;
    const int64_t splits = std::clamp<int64_t>(blocks, 1, SPLITS);
    const int64_t per_batch = shape.channels * shape.states, matrix = shape.states * shape.length;
    const int64_t matrices = shape.batch * shape.groups * matrix;
    std::vector<S> part_a(shape.batch * per_batch), part_d(shape.batch * shape.channels);
    std::vector<S> part_bias(shape.batch * shape.channels), part_b(splits * matrices), part_c(splits * matrices);
    const Gradients<T> g{call.grad.const_data_ptr<T>(),
                         optional_data<S>(call.grad_final),
                         call.u.mutable_data_ptr<T>(),
                         call.delta.mutable_data_ptr<T>(),
                         call.z.mutable_data_ptr<T>(),
                         part_a.data(),
                         part_d.data(),
                         part_bias.data(),
                         part_b.data(),
                         part_c.data(),
                         call.initial.mutable_data_ptr<S>()};
    parallel_for(0, shape.batch * shape.groups * splits, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t split = i % splits, place = i / splits, group = place % shape.groups;
        const int64_t at = split * matrices + place * matrix;
        for (int64_t block = split * blocks / splits; block < (split + 1) * blocks / splits; ++block) {
          const int64_t first = block * LANES;
          backward_channels(data, g, place / shape.groups, group, group * shape.per_group() + first,
                            std::min(LANES, shape.per_group() - first), g.b + at, g.c + at);
        }
      }
    });
    add_parts(part_a.data(), call.A.mutable_data_ptr<S>(), shape.batch, per_batch);
    add_parts(part_d.data(), call.D.mutable_data_ptr<S>(), shape.batch, shape.channels);
    add_parts(part_bias.data(), call.delta_bias.mutable_data_ptr<S>(), shape.batch, shape.channels);
    add_parts(part_b.data(), call.B.mutable_data_ptr<T>(), splits, matrices);
    add_parts(part_c.data(), call.C.mutable_data_ptr<T>(), splits, matrices);
  });
  return call.gradients();
}

namespace {

void run_step(SelectiveStep& step) {
  const SelectiveShape shape = step.shape;
  dispatch_floating("selective_scan_update", step.in.u, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using S = Accumulate<T>;
    const Data<T> d = data_of<T>(shape, step.in.arguments());
    T* out = step.y.mutable_data_ptr<T>();
    S* to = step.next.mutable_data_ptr<S>();
    const int64_t grain = std::max<int64_t>(1, GRAIN_ELEMENTS / shape.states / 8);
    parallel_for(0, shape.batch * shape.channels, grain, [=](int64_t begin, int64_t end) {
      S b[MAX_STATES], c[MAX_STATES];
      int64_t held = -1;
      for (int64_t row = begin; row < end; ++row) {
        const int64_t channel = row % shape.channels, batch = row / shape.channels;
        const int64_t group = channel / shape.per_group();
        if (held != batch * shape.groups + group) {
          held = batch * shape.groups + group;
          for (int n = 0; n < shape.states; ++n) {
            b[n] = widen(d.b[batch * d.b_strides.batch + group * d.b_strides.group + n * d.b_strides.state]);
            c[n] = widen(d.c[batch * d.c_strides.batch + group * d.c_strides.group + n * d.c_strides.state]);
          }
        }
        S* h = to + row * shape.states;
        std::copy(d.initial + row * shape.states, d.initial + (row + 1) * shape.states, h);
        const S raw = widen(d.delta[row]) + (d.bias ? d.bias[channel] : S(0));
        const S dt = d.use_softplus ? softplus(raw) : raw;
        const S x = widen(d.u[row]);
        S sum;
        update_row<S>(h, d.a + channel * shape.states, dt, dt * x, sum, shape.states, b, c);
        if (d.d) sum += d.d[channel] * x;
        if (d.z) sum *= silu(S(widen(d.z[row])));
        out[row] = narrow<T>(sum);
      }
    });
  });
}

}  // namespace

std::tuple<Tensor, Tensor> selective_scan_update(const Tensor& state, const Tensor& u, const Tensor& delta,
                                                 const Tensor& A, const Tensor& B, const Tensor& C,
                                                 const OptionalTensor& D, const OptionalTensor& z,
                                                 const OptionalTensor& delta_bias, bool delta_softplus) {
  return step_selective("selective_scan_update", state,
                        {u, delta, A, B, C, D, z, delta_bias, delta_softplus, std::nullopt}, run_step);
}

Tensor selective_scan_update_(Tensor state, const Tensor& u, const Tensor& delta, const Tensor& A, const Tensor& B,
                              const Tensor& C, const OptionalTensor& D, const OptionalTensor& z,
                              const OptionalTensor& delta_bias, bool delta_softplus) {
  return step_selective_in_place("selective_scan_update_", state,
                                 {u, delta, A, B, C, D, z, delta_bias, delta_softplus, std::nullopt}, run_step);
}

}  // namespace opgraft::cpu

STABLE_TORCH_LIBRARY_IMPL(opgraft, CPU, m) {
  m.impl("selective_scan", TORCH_BOX(&opgraft::cpu::selective_scan));
  m.impl("selective_scan_backward", TORCH_BOX(&opgraft::cpu::selective_scan_backward));
  m.impl("selective_scan_update", TORCH_BOX(&opgraft::cpu::selective_scan_update));
  m.impl("selective_scan_update_", TORCH_BOX(&opgraft::cpu::selective_scan_update_));
}
