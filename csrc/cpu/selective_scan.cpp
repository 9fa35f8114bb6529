// Mamba's selective scan, forward and backward, on the CPU.
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
#include <vector>

#include "cpu/selective_scan_tile.h"
#include "ops.h"
#include "support/dispatch.h"

namespace opgraft::cpu {
namespace {

constexpr int64_t SPLITS = 4;

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

}  // namespace opgraft::cpu

STABLE_TORCH_LIBRARY_IMPL(opgraft, CPU, m) {
  m.impl("selective_scan", TORCH_BOX(&opgraft::cpu::selective_scan));
  m.impl("selective_scan_backward", TORCH_BOX(&opgraft::cpu::selective_scan_backward));
}
