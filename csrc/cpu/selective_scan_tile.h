// Mamba's selective scan on the CPU: the arithmetic of one tile, LANES channels side by side over STEPS steps, and
// where the tensors of a call lie. cpu/selective_scan.cpp walks the tiles.
#pragma once

#include <algorithm>
#include <cmath>

#include "cpu/silu.h"
#include "support/convert.h"
#include "support/exp.h"
#include "support/parallel.h"
#include "support/selective_call.h"

namespace opgraft::cpu {
namespace {

constexpr int64_t LANES = 16;
constexpr int64_t STEPS = 64;
constexpr int64_t TILE = LANES * STEPS;
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
    for (int64_t i = 0; i < steps * LANES; ++i) tile.y[i] *= silu_value(tile.gate[i]);
  }
}

template <typename A>
OPGRAFT_INLINE void gate_gradient(Tile<A>& tile, bool gated, int64_t steps) {
  for (int64_t i = 0; i < steps * LANES; ++i) tile.dy[i] = gated ? tile.up[i] * silu_value(tile.gate[i]) : tile.up[i];
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

}  // namespace
}  // namespace opgraft::cpu
