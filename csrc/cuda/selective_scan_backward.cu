// Mamba's selective scan on CUDA, backward.
//
// A first launch walks the forward scan again and keeps the state before every STEPS-th step (4 bytes * states / STEPS
// a step and channel, in memory of this call only). Then a warp owns 16 channels (2 rows a thread, 4 lanes with 4
// states each; more lanes where there are more states) and goes backwards through tiles of STEPS steps. In a tile it
// puts step sizes, inputs and the gradient of y before the gate into its own shared memory, walks forward from the kept
// state and notes the state before every K-th step there, and then takes K steps at a time: states and decays forward
// into registers, and back over them.
//
// Sums over a channel's states (for du, d delta and dz) go over its lanes, sums over channels (for dB and dC) over the
// rows of a warp, both by exchanges that halve what is left at every shuffle; warps add up in shared memory (in two
// buffers, so a tile has one barrier) and blocks in a later launch, always in the same order. Sums over time (dA, dD,
// d delta_bias) stay in registers.
//
// Cost a (step, channel, state): three exponentials (one in the first launch), 25 issue slots in the walks, 6 of them
// in the sums, and about 7 around them; 8 in the first launch: 8x4096x4096 with 16 states is 2.7 ms of issue slots on
// 132 SMs at 1.93 GHz. States and decays of K steps are 64 registers: two warps a scheduler with 255 registers each
// were faster than four that spill.
//
// Few channels: time is cut into segments; a launch walks each backwards from a zero gradient of the state, and the
// main launch folds those of the segments behind its own, in order, as the forward scan does.
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "cuda/selective_scan.cuh"
#include "cuda/selective_scan.h"
#include "ops.h"
#include "support/check.h"

namespace opgraft::cuda {
namespace {

template <typename C, int STEPS_, int BLOCKS_>
struct BackCut : C {
  static constexpr int STEPS = STEPS_;
  static constexpr int BLOCKS = BLOCKS_;  // an SM
};

// Three planes of a warp's rows: going in, the step size, the step size times u, and the gradient of y before the gate;
// coming out, the gradient of (step size * u), the gradient of the step size by the decays, and y.
enum Plane { STEP, INPUT, OUTPUT, PLANES };

template <typename A, typename C>
struct BackShared {
  static constexpr int K = sizeof(A) == 8 ? 2 : 4;  // steps whose states are in registers at once
  static constexpr int MATRIX = 2 * C::PADDED + 4;  // B, then C, of one step
  static constexpr int PITCH = C::STEPS + 4;        // of a plane's row: 4 words modulo 16
  static constexpr int SUMS = 2 * C::PADDED + 1;    // of one step, dB then dC; odd, since it is read along time
  static constexpr int TILES = 2 * C::STEPS * MATRIX;
  static constexpr int WARP_SUMS = (C::STEPS * SUMS + 3) / 4 * 4;
  static constexpr int PLANE = C::WARP_ROWS * PITCH;
  static constexpr int STARTS = C::STEPS / K * C::VALUES * 32;
  static constexpr int WARP = PLANES * PLANE + STARTS;
  static constexpr size_t BYTES = sizeof(A) * (TILES + 2 * C::WARPS * WARP_SUMS + C::WARPS * WARP);
  static_assert(C::STEPS % K == 0);
};

template <typename T>
struct ScanGradients {
  using W = DeviceAccumulate<T>;
  const T* up;
  const W* up_final;
  const W* states;  // [mark][batch][channel][state]
  int64_t marks;
  T *u, *delta, *z;
  W *a, *skip, *bias;  // [segment][batch][channel]...
  W* matrices;         // [block of channels][B or C][batch][group][state][step]
  W* initial;
};

// REDUCE: only the gradient of the state that leaves each segment, from zero, into the plan.
// WIDE: see load_row.
template <typename T, typename C, bool REDUCE, bool WIDE>
__global__ void __launch_bounds__(C::THREADS, C::BLOCKS)
    scan_back(ScanData<T> d, SegmentPlan plan, ScanGradients<T> g) {
  using A = DeviceAccumulate<T>;
  using Shared = BackShared<A, C>;
  constexpr bool FAST = sizeof(T) == 2;
  constexpr int NS = C::NS, ROWS = C::ROWS, LANES = C::LANES, PADDED = C::PADDED, STEPS = C::STEPS, K = Shared::K;
  constexpr int MATRIX = Shared::MATRIX, PITCH = Shared::PITCH;
  constexpr int ITEMS = VECTOR_WIDTH<T>;
  using Tasks = RowTasks<C, STEPS, ITEMS>;
  extern __shared__ __align__(32) unsigned char shared[];
  const int warp = threadIdx.x / 32, thread = threadIdx.x % 32;
  const int lane = thread % LANES, group = thread / LANES;
  A* tiles = reinterpret_cast<A*>(shared);
  A* all_sums = tiles + Shared::TILES;
  A* planes = all_sums + 2 * C::WARPS * Shared::WARP_SUMS + warp * Shared::WARP;
  A* starts = planes + PLANES * Shared::PLANE;

  const BlockPlace place = block_place(d, C::CHANNELS);
  const int64_t begin = place.segment * plan.length;
  const int64_t end = min(begin + plan.length, d.length);
  const int count = place.count - warp * C::WARP_ROWS;  // rows of this warp that are there
  const int64_t channel = place.channel + warp * C::WARP_ROWS;
  const int64_t first_row = place.batch * d.channels + channel;
  const int64_t all_rows = d.batch * d.channels;

  A decay[ROWS][NS], carry[ROWS][NS], slope[ROWS][NS] = {}, step_sum[ROWS] = {};
#pragma unroll
  for (int j = 0; j < ROWS; ++j) {
    const int r = group + j * C::GROUPS;
    const int64_t row = first_row + r;
#pragma unroll
    for (int i = 0; i < NS; ++i) {
      const int n = lane * NS + i;
      const bool real = r < count && n < d.states;
      decay[j][i] = real ? d.a[(channel + r) * d.states + n] * A(LOG2_E) : A(0);
      carry[j][i] = A(0);
      if (!real || REDUCE) continue;
      A state = g.up_final ? g.up_final[row * d.states + n] : A(0);
      for (int64_t s = plan.count - 1; s > place.segment; --s) {
        const int64_t at = s * all_rows + row;
        state = exp2_fast(decay[j][i] * plan_sums<T>(plan)[at]) * state + plan_ends<T>(plan)[at * d.states + n];
      }
      carry[j][i] = state;
    }
  }

  MatrixTiles<T, STEPS, PADDED, MATRIX, C::THREADS, !REDUCE, true> matrices(d, place, threadIdx.x);
  int64_t offset[Tasks::COUNT];
  A skip_sum[Tasks::COUNT] = {}, bias_sum[Tasks::COUNT] = {};
#pragma unroll
  for (int k = 0; k < Tasks::COUNT; ++k) {
    const int r = Tasks::row(thread + k * 32);
    const bool there = Tasks::real(thread + k * 32) && r < count;
    offset[k] = (first_row + (there ? r : 0)) * d.length + Tasks::step(thread + k * 32);
  }
  auto steps_left = [&](int64_t tile) { return static_cast<int>(min(d.length - tile, int64_t{STEPS})); };
  // How much of the k-th task is there, given the tile's steps.
  auto left = [&](int k, int steps) {
    const int task = thread + k * 32;
    return Tasks::real(task) && Tasks::row(task) < count ? steps - Tasks::step(task) : 0;
  };
  // This block's parts of dB and dC: [block of channels][B or C][batch][group][state][step].
  const int64_t kind_stride = d.batch * d.groups * d.states * d.length;
  A* own_matrices = g.matrices + 2 * (place.channel % d.per_group() / C::CHANNELS) * kind_stride +
                    (place.batch * d.groups + place.group) * d.states * d.length;
  // The warps' sums of the tile before, every (kind, state, step) once, in order. Steps are neighbours in memory.
  auto write_matrices = [&](int64_t tile, const A* sums) {
    const int steps = steps_left(tile);
    for (int i = threadIdx.x; i < 2 * PADDED * STEPS; i += C::THREADS) {
      const int t = i % STEPS;
      const int n = i / STEPS % PADDED;
      const int kind = i / STEPS / PADDED;
      if (t >= steps || n >= d.states) continue;
      A sum = A(0);
#pragma unroll
      for (int w = 0; w < C::WARPS; ++w) sum += sums[w * Shared::WARP_SUMS + t * Shared::SUMS + kind * PADDED + n];
      own_matrices[(kind ? kind_stride : 0) + n * d.length + tile + t] = sum;
    }
  };

  const int64_t last_tile = begin + (end - begin - 1) / STEPS * STEPS;
  matrices.fetch(last_tile, steps_left(last_tile));
  int buffer = 0;
  for (int64_t tile = last_tile; tile >= begin; tile -= STEPS) {
    const int steps = steps_left(tile);
    A* tile_of = tiles + buffer * STEPS * MATRIX;
    A* sums = all_sums + (buffer * C::WARPS + warp) * Shared::WARP_SUMS;
    alignas(16) A h[ROWS][NS];
    if constexpr (!REDUCE) {
#pragma unroll
      for (int j = 0; j < ROWS; ++j) {
        const int r = group + j * C::GROUPS;
        const A* from = g.states + (tile / STEPS * all_rows + first_row + r) * d.states + lane * NS;
        const bool there = r < count && lane * NS < d.states;
        if (d.states % NS == 0) {
#pragma unroll
          for (int i = 0; i < NS; ++i) h[j][i] = A(0);
          if (there) load_streamed(from, h[j]);
          if (there && tile > begin) prefetch_row(from - all_rows * d.states);
        } else {
#pragma unroll
          for (int i = 0; i < NS; ++i) h[j][i] = there && lane * NS + i < d.states ? from[i] : A(0);
        }
      }
    }
    {
      Vector<T, ITEMS> u[Tasks::COUNT], delta[Tasks::COUNT], up[Tasks::COUNT], gate[Tasks::COUNT];
#pragma unroll
      for (int k = 0; k < Tasks::COUNT; ++k) {
        if (!REDUCE) load_row<WIDE>(d.u + offset[k] + tile, left(k, steps), u[k]);
        load_row<WIDE>(d.delta + offset[k] + tile, left(k, steps), delta[k]);
        load_row<WIDE>(g.up + offset[k] + tile, left(k, steps), up[k]);
        if (d.z) load_row<WIDE>(d.z + offset[k] + tile, left(k, steps), gate[k]);
      }
#pragma unroll
      for (int k = 0; k < Tasks::COUNT; ++k) {
        const int task = thread + k * 32;
        if (!Tasks::real(task)) continue;
        const A bias = d.bias && left(k, steps) > 0 ? d.bias[channel + Tasks::row(task)] : A(0);
        // Loops of their own: the chains of exponentials run side by side.
        A step[ITEMS], input[ITEMS], dy[ITEMS];
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
          step[i] = A(widen(delta[k].lane[i])) + bias;
          dy[i] = widen(up[k].lane[i]);
        }
        if (d.use_softplus) {
#pragma unroll
          for (int i = 0; i < ITEMS; ++i) step[i] = softplus<FAST>(step[i]);
        }
        if (d.z) {
#pragma unroll
          for (int i = 0; i < ITEMS; ++i) dy[i] *= silu<FAST>(A(widen(gate[k].lane[i])));
        }
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
          if (i >= left(k, steps)) step[i] = dy[i] = A(0);
          if (!REDUCE) input[i] = step[i] * A(widen(u[k].lane[i]));
        }
        A* to = planes + Tasks::row(task) * PITCH + Tasks::step(task);
        store_values(to + STEP * Shared::PLANE, step);
        if (!REDUCE) store_values(to + INPUT * Shared::PLANE, input);
        store_values(to + OUTPUT * Shared::PLANE, dy);
      }
    }
    matrices.store(tile_of, tile, steps);
    __syncthreads();
    if (!REDUCE && tile != last_tile) {
      write_matrices(tile + STEPS, all_sums + (buffer ^ 1) * C::WARPS * Shared::WARP_SUMS);
    }
    if (tile > begin) {
      matrices.fetch(tile - STEPS, STEPS);
#pragma unroll
      for (int k = 0; k < Tasks::COUNT; ++k) {
        if (Tasks::step(thread + k * 32) % (2 * ITEMS)) continue;  // one lane a sector of 32 bytes
        const int64_t next = offset[k] + tile - STEPS;
        if (!REDUCE) prefetch_row(d.u + next);
        prefetch_row(d.delta + next);
        prefetch_row(g.up + next);
        if (d.z) prefetch_row(d.z + next);
      }
    }

    if constexpr (REDUCE) {
#pragma unroll 1
      for (int t = STEPS - K; t >= 0; t -= K) {
        A step[ROWS][K], dy[ROWS][K];
#pragma unroll
        for (int j = 0; j < ROWS; ++j) {
          const A* from = planes + (group + j * C::GROUPS) * PITCH + t;
          load_values(from + STEP * Shared::PLANE, step[j]);
          load_values(from + OUTPUT * Shared::PLANE, dy[j]);
        }
#pragma unroll
        for (int k = K - 1; k >= 0; --k) {
          A c[NS];
          load_values(tile_of + (t + k) * MATRIX + PADDED + lane * NS, c);
#pragma unroll
          for (int j = 0; j < ROWS; ++j) {
            step_sum[j] += step[j][k];
#pragma unroll
            for (int i = 0; i < NS; ++i) {
              carry[j][i] = exp2_fast(step[j][k] * decay[j][i]) * fma(dy[j][k], c[i], carry[j][i]);
            }
          }
        }
      }
    } else {
      // The state before every K-th step.
#pragma unroll 1
      for (int t = 0;; t += K) {
        constexpr int WIDE = 16 / sizeof(A);
        const A* flat = &h[0][0];
#pragma unroll
        for (int v = 0; v < C::VALUES / WIDE; ++v) {
          A pack[WIDE];
#pragma unroll
          for (int i = 0; i < WIDE; ++i) pack[i] = flat[v * WIDE + i];
          store_values(starts + ((t / K * (C::VALUES / WIDE) + v) * 32 + thread) * WIDE, pack);
        }
        if (t == STEPS - K) break;
        A step[ROWS][K], input[ROWS][K];
#pragma unroll
        for (int j = 0; j < ROWS; ++j) {
          const A* from = planes + (group + j * C::GROUPS) * PITCH + t;
          load_values(from + STEP * Shared::PLANE, step[j]);
          load_values(from + INPUT * Shared::PLANE, input[j]);
        }
#pragma unroll
        for (int k = 0; k < K; ++k) {
          A b[NS];
          load_values(tile_of + (t + k) * MATRIX + lane * NS, b);
#pragma unroll
          for (int j = 0; j < ROWS; ++j) {
#pragma unroll
            for (int i = 0; i < NS; ++i) {
              h[j][i] = fma(exp2_fast(step[j][k] * decay[j][i]), h[j][i], input[j][k] * b[i]);
            }
          }
        }
      }

#pragma unroll 1
      for (int t = STEPS - K; t >= 0; t -= K) {
        constexpr int WIDE = 16 / sizeof(A);
        A start[ROWS][NS], state[K][ROWS][NS], factor[K][ROWS][NS];
        A* flat = &start[0][0];
#pragma unroll
        for (int v = 0; v < C::VALUES / WIDE; ++v) {
          A pack[WIDE];
          load_values(starts + ((t / K * (C::VALUES / WIDE) + v) * 32 + thread) * WIDE, pack);
#pragma unroll
          for (int i = 0; i < WIDE; ++i) flat[v * WIDE + i] = pack[i];
        }
        A step[ROWS][K], input[ROWS][K], dy[ROWS][K];
#pragma unroll
        for (int j = 0; j < ROWS; ++j) {
          const A* from = planes + (group + j * C::GROUPS) * PITCH + t;
          load_values(from + STEP * Shared::PLANE, step[j]);
          load_values(from + INPUT * Shared::PLANE, input[j]);
          load_values(from + OUTPUT * Shared::PLANE, dy[j]);
        }
#pragma unroll
        for (int k = 0; k < K; ++k) {
          A b[NS];
          load_values(tile_of + (t + k) * MATRIX + lane * NS, b);
#pragma unroll
          for (int j = 0; j < ROWS; ++j) {
#pragma unroll
            for (int i = 0; i < NS; ++i) {
              factor[k][j][i] = exp2_fast(step[j][k] * decay[j][i]);
              state[k][j][i] = fma(factor[k][j][i], k ? state[k ? k - 1 : 0][j][i] : start[j][i], input[j][k] * b[i]);
            }
          }
        }
        A to_input[ROWS * K], to_step[ROWS * K], y[ROWS * K];
#pragma unroll
        for (int k = K - 1; k >= 0; --k) {
          A b[NS], c[NS], to_matrix[2 * NS] = {};
          load_values(tile_of + (t + k) * MATRIX + lane * NS, b);
          load_values(tile_of + (t + k) * MATRIX + PADDED + lane * NS, c);
#pragma unroll
          for (int j = 0; j < ROWS; ++j) {
            A by_input = A(0), by_step = A(0), by_state = A(0);
#pragma unroll
            for (int i = 0; i < NS; ++i) {
              const A before = k ? state[k ? k - 1 : 0][j][i] : start[j][i];
              const A total = fma(dy[j][k], c[i], carry[j][i]);
              by_state = fma(state[k][j][i], c[i], by_state);
              to_matrix[i] = fma(total, input[j][k], to_matrix[i]);
              to_matrix[NS + i] = fma(dy[j][k], state[k][j][i], to_matrix[NS + i]);
              by_input = fma(total, b[i], by_input);
              carry[j][i] = factor[k][j][i] * total;
              const A to_exponent = carry[j][i] * before;
              by_step = fma(to_exponent, decay[j][i], by_step);
              slope[j][i] = fma(to_exponent, step[j][k], slope[j][i]);
            }
            to_input[j * K + k] = by_input;
            to_step[j * K + k] = by_step;
            y[j * K + k] = by_state;
          }
          constexpr int LEFT = 2 * NS / C::GROUPS > 1 ? 2 * NS / C::GROUPS : 1;
          int base = 0;
          scatter_sums<2 * NS, LANES, 32>(to_matrix, thread, base);
#pragma unroll
          for (int i = 0; i < LEFT; ++i) {
            const int which = base + i;
            sums[(t + k) * Shared::SUMS + which / NS * PADDED + lane * NS + which % NS] = to_matrix[i];
          }
        }
        constexpr int LEFT = ROWS * K / LANES > 1 ? ROWS * K / LANES : 1;
        __syncwarp();  // all lanes have read the planes' K steps
        auto put = [&](A(&values)[ROWS* K], Plane plane) {
          int base = 0;
          scatter_sums<ROWS * K, 1, LANES>(values, thread, base);
          A mine[LEFT];
#pragma unroll
          for (int i = 0; i < LEFT; ++i) mine[i] = values[i];
          store_values(planes + plane * Shared::PLANE + (group + base / K * C::GROUPS) * PITCH + t + base % K, mine);
        };
        put(to_input, STEP);
        put(to_step, INPUT);
        put(y, OUTPUT);
      }
      __syncwarp();

#pragma unroll
      for (int k = 0; k < Tasks::COUNT; ++k) {
        const int task = thread + k * 32;
        const int there = left(k, steps);
        if (there <= 0) continue;
        const int64_t at = offset[k] + tile;
        Vector<T, ITEMS> u, delta, up, gate, d_u, d_delta, d_z;
        load_row<WIDE>(d.u + at, there, u);
        load_row<WIDE>(d.delta + at, there, delta);
        load_row<WIDE>(g.up + at, there, up);
        if (d.z) load_row<WIDE>(d.z + at, there, gate);
        const A* from = planes + Tasks::row(task) * PITCH + Tasks::step(task);
        A to_input[ITEMS], to_step[ITEMS], y[ITEMS];
        load_values(from + STEP * Shared::PLANE, to_input);
        load_values(from + INPUT * Shared::PLANE, to_step);
        load_values(from + OUTPUT * Shared::PLANE, y);
        const A bias = d.bias ? d.bias[channel + Tasks::row(task)] : A(0);
        const A skip = d.skip ? d.skip[channel + Tasks::row(task)] : A(0);
        A x[ITEMS], step[ITEMS], dy[ITEMS], slope_of[ITEMS];
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
          x[i] = widen(u.lane[i]);
          step[i] = A(widen(delta.lane[i])) + bias;
          slope_of[i] = A(1);
          dy[i] = widen(up.lane[i]);
        }
        if (d.use_softplus) {
#pragma unroll
          for (int i = 0; i < ITEMS; ++i) {
            slope_of[i] = step[i] > A(SOFTPLUS_THRESHOLD) ? A(1) : sigmoid<FAST>(step[i]);
            step[i] = softplus<FAST>(step[i]);
          }
        }
        if (d.z) {
#pragma unroll
          for (int i = 0; i < ITEMS; ++i) {
            const A gated = widen(gate.lane[i]);
            const A s = sigmoid<FAST>(gated);
            const A curve = s * (A(1) - s);
            const A silu_slope = s + (curve == A(0) ? A(0) : gated * curve);
            d_z.lane[i] = narrow<T>(dy[i] * fma(skip, x[i], y[i]) * silu_slope);
            dy[i] *= gated * s;
          }
        }
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
          // decay carries the factor log2 e.
          const A to_raw = fma(to_input[i], x[i], to_step[i] * A(0.6931471805599453)) * slope_of[i];
          d_u.lane[i] = narrow<T>(fma(to_input[i], step[i], dy[i] * skip));
          d_delta.lane[i] = narrow<T>(to_raw);
          if (WIDE || i < there) {
            skip_sum[k] = fma(dy[i], x[i], skip_sum[k]);
            bias_sum[k] += to_raw;
          }
        }
        store_row<WIDE>(g.u + at, there, d_u);
        store_row<WIDE>(g.delta + at, there, d_delta);
        if (d.z) store_row<WIDE>(g.z + at, there, d_z);
      }
    }
    __syncwarp();  // the planes are read before the next tile's are written
    buffer ^= 1;
  }

  if constexpr (REDUCE) {
#pragma unroll
    for (int j = 0; j < ROWS; ++j) {
      const int r = group + j * C::GROUPS;
      if (r >= count) continue;
      const int64_t at = place.segment * all_rows + first_row + r;
      if (lane == 0) plan_sums<T>(plan)[at] = step_sum[j];
#pragma unroll
      for (int i = 0; i < NS; ++i) {
        if (lane * NS + i < d.states) plan_ends<T>(plan)[at * d.states + lane * NS + i] = carry[j][i];
      }
    }
  } else {
    __syncthreads();
    write_matrices(begin, all_sums + (buffer ^ 1) * C::WARPS * Shared::WARP_SUMS);
    const int64_t part = place.segment * all_rows;
#pragma unroll
    for (int j = 0; j < ROWS; ++j) {
      const int r = group + j * C::GROUPS;
      if (r >= count) continue;
#pragma unroll
      for (int i = 0; i < NS; ++i) {
        const int64_t at = (first_row + r) * d.states + lane * NS + i;
        if (lane * NS + i >= d.states) continue;
        g.a[part * d.states + at] = slope[j][i];
        if (begin == 0) g.initial[at] = carry[j][i];
      }
    }
    // A row's vectors are on several lanes: through the planes.
#pragma unroll
    for (int k = 0; k < Tasks::COUNT; ++k) {
      const int task = thread + k * 32;
      if (!Tasks::real(task)) continue;
      A* to = planes + Tasks::row(task) * PITCH + Tasks::step(task) / ITEMS;
      to[STEP * Shared::PLANE] = skip_sum[k];
      to[INPUT * Shared::PLANE] = bias_sum[k];
    }
    __syncwarp();
    for (int r = thread; r < min(count, C::WARP_ROWS); r += 32) {
      A skip = A(0), bias = A(0);
#pragma unroll
      for (int v = 0; v < Tasks::VECTORS; ++v) {
        skip += planes[STEP * Shared::PLANE + r * PITCH + v];
        bias += planes[INPUT * Shared::PLANE + r * PITCH + v];
      }
      g.skip[part + first_row + r] = skip;
      g.bias[part + first_row + r] = bias;
    }
  }
}

// out[i] = sum over parts of in[part * stride + i], in order.
template <typename A, typename T>
__global__ void add_parts(const A* __restrict__ in, T* __restrict__ out, int64_t parts, int64_t stride, int64_t size) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= size) return;
  A sum = A(0);
  for (int64_t p = 0; p < parts; ++p) sum += in[p * stride + i];
  out[i] = narrow<T>(sum);
}

template <typename A, typename T>
void launch_add(const Launch& context, const A* in, T* out, int64_t parts, int64_t stride, int64_t size) {
  if (size == 0) return;
  add_parts<<<static_cast<unsigned>((size + 255) / 256), 256, 0, context.stream()>>>(in, out, parts, stride, size);
  Launch::check();
}

template <typename T, typename Body>
void dispatch_cut(int states, const Body& body) {
  // double is for checks: one kernel serves it.
  if constexpr (std::is_same_v<T, double>) {
    body(BackCut<WarpCut<32, 8, 1, 2>, 8, 1>{});
  } else if (states <= 16) {
    body(BackCut<WarpCut<4, 4, 2, 8>, 16, 1>{});
  } else if (states <= 64) {
    body(BackCut<WarpCut<16, 4, 2, 4>, 16, 2>{});
  } else {
    body(BackCut<WarpCut<32, 8, 1, 4>, 8, 1>{});
  }
}

template <typename T, typename C, bool REDUCE>
void launch_back(const Launch& context, const ScanData<T>& d, const SegmentPlan& plan, const ScanGradients<T>& g,
                 int64_t channel_blocks) {
  constexpr size_t BYTES = BackShared<DeviceAccumulate<T>, C>::BYTES;
  const bool wide = d.length % VECTOR_WIDTH<T> == 0 && aligned(d.u) && aligned(d.delta) && aligned(d.z) &&
                    aligned(g.up) && aligned(g.u) && aligned(g.delta) && aligned(g.z);
  const int64_t blocks = d.batch * d.groups * channel_blocks * plan.count;
  auto launch = [&](auto kernel) {
    STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(BYTES)));
    kernel<<<static_cast<unsigned>(blocks), C::THREADS, BYTES, context.stream()>>>(d, plan, g);
    Launch::check();
  };
  wide ? launch(scan_back<T, C, REDUCE, true>) : launch(scan_back<T, C, REDUCE, false>);
}

template <typename T>
T* data(Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

}  // namespace

SelectiveGradients selective_scan_backward(const Tensor& grad, const OptionalTensor& grad_final, const Tensor& u,
                                           const Tensor& delta, const Tensor& A, const Tensor& B, const Tensor& C,
                                           const OptionalTensor& D, const OptionalTensor& z,
                                           const OptionalTensor& delta_bias, bool delta_softplus,
                                           const OptionalTensor& initial_state) {
  const SelectiveShape shape =
      check_selective_backward("selective_scan_backward",
                               {u, delta, A, B, C, D, z, delta_bias, delta_softplus, initial_state}, grad, grad_final);
  const Tensor rows = as_contiguous(u), steps = as_contiguous(delta), decays = as_contiguous(A);
  const Tensor up = as_contiguous(grad);
  const OptionalTensor skip = as_contiguous(D), gate = as_contiguous(z), bias = as_contiguous(delta_bias);
  const OptionalTensor start = as_contiguous(initial_state), up_final = as_contiguous(grad_final);
  Tensor d_u = new_contiguous_like(u), d_delta = new_contiguous_like(u), d_z = new_contiguous_like(u);
  Tensor d_A = new_contiguous_like(A), d_B = new_contiguous_like(B), d_C = new_contiguous_like(C);
  Tensor d_D = new_contiguous(A, std::vector<int64_t>{shape.channels});
  Tensor d_bias = new_contiguous(A, std::vector<int64_t>{shape.channels});
  Tensor d_initial = new_contiguous(A, std::vector<int64_t>{shape.batch, shape.channels, shape.states});
  const SelectiveGradients result{d_u, d_delta, d_A, d_B, d_C, d_D, d_z, d_bias, d_initial};
  if (!z) torch::stable::zero_(d_z);
  if (u.numel() == 0) {
    for (Tensor* sum : {&d_A, &d_B, &d_C, &d_D, &d_bias}) torch::stable::zero_(*sum);
    up_final ? torch::stable::copy_(d_initial, *up_final) : torch::stable::zero_(d_initial);
    return result;
  }
  dispatch_floating("selective_scan_backward", u, [&](auto tag) {
    using T = typename DeviceType<typename decltype(tag)::type>::type;
    using W = DeviceAccumulate<T>;
    const ScanData<T> d = scan_data<T>(shape, {rows, steps, decays, B, C, skip, gate, bias, delta_softplus, start});
    Launch context(u);
    const int sms = context.multiprocessors();

    dispatch_cut<T>(shape.states, [&](auto cut) {
      using Used = decltype(cut);
      // The states before every STEPS-th step, by the forward walk.
      const int64_t marks = (shape.length + Used::STEPS - 1) / Used::STEPS;
      Tensor states = new_contiguous(A, std::vector<int64_t>{shape.batch * shape.channels * marks * shape.states});
      {
        SegmentPlan forward = plan_scan<T>(shape, sms);
        const Tensor space = segment_space(u, forward, shape);
        if (forward.count > 1) walk_segments<T>(context, d, forward, StateWalk<T>::from_nothing());
        StateWalk<T> walk;
        walk.states = data<W>(states);
        walk.every_log2 = Used::STEPS == 16 ? 4 : 3;
        static_assert(Used::STEPS == 16 || Used::STEPS == 8);
        walk.marks = marks;
        walk_segments<T>(context, d, forward, walk);
      }
      const int64_t channel_blocks = (shape.per_group() + Used::CHANNELS - 1) / Used::CHANNELS;
      SegmentPlan plan = plan_segments(shape, shape.batch * shape.groups * channel_blocks,
                                       int64_t{sms} * Used::BLOCKS, Used::STEPS);
      const Tensor space = segment_space(u, plan, shape);
      const int64_t rows_all = shape.batch * shape.channels;
      const int64_t parts = plan.count * shape.batch;
      const int64_t matrix = shape.batch * shape.groups * shape.states * shape.length;
      Tensor part_a = new_contiguous(A, std::vector<int64_t>{plan.count * rows_all * shape.states});
      Tensor part_skip = new_contiguous(A, std::vector<int64_t>{plan.count * rows_all});
      Tensor part_bias = new_contiguous(A, std::vector<int64_t>{plan.count * rows_all});
      Tensor part_matrices = new_contiguous(A, std::vector<int64_t>{channel_blocks * 2 * matrix});
      const ScanGradients<T> g{static_cast<const T*>(up.const_data_ptr()),
                               optional_data<W>(up_final),
                               data<W>(states),
                               marks,
                               data<T>(d_u),
                               data<T>(d_delta),
                               data<T>(d_z),
                               data<W>(part_a),
                               data<W>(part_skip),
                               data<W>(part_bias),
                               data<W>(part_matrices),
                               data<W>(d_initial)};
      if (plan.count > 1) launch_back<T, Used, true>(context, d, plan, g, channel_blocks);
      launch_back<T, Used, false>(context, d, plan, g, channel_blocks);
      const int64_t per_batch = shape.channels * shape.states;
      launch_add(context, data<W>(part_a), data<W>(d_A), parts, per_batch, per_batch);
      launch_add(context, data<W>(part_skip), data<W>(d_D), parts, shape.channels, shape.channels);
      launch_add(context, data<W>(part_bias), data<W>(d_bias), parts, shape.channels, shape.channels);
      launch_add(context, data<W>(part_matrices), data<T>(d_B), channel_blocks, 2 * matrix, matrix);
      launch_add(context, data<W>(part_matrices) + matrix, data<T>(d_C), channel_blocks, 2 * matrix, matrix);
    });
  });
  return result;
}

}  // namespace opgraft::cuda

STABLE_TORCH_LIBRARY_IMPL(opgraft, CUDA, m) {
  m.impl("selective_scan_backward", TORCH_BOX(&opgraft::cuda::selective_scan_backward));
}
