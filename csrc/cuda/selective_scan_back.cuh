// The backward kernel of selective_scan: see selective_scan_backward.cu for how it works and what it costs.
#pragma once

#include "cuda/selective_scan.cuh"
#include "cuda/selective_scan.h"
#include "cuda/selective_scan_back_layout.cuh"
#include "cuda/selective_scan_tiles.cuh"

namespace opgraft::cuda {

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
  constexpr int PACK = 16 / sizeof(A);
  constexpr int ITEMS = VECTOR_WIDTH<T>;
  using Tasks = RowTasks<C, STEPS, ITEMS>;
  extern __shared__ __align__(32) unsigned char shared[];
  const int warp = threadIdx.x / 32, thread = threadIdx.x % 32;
  const int lane = thread % LANES, group = thread / LANES;
  A* tiles = reinterpret_cast<A*>(shared);
  A* all_sums = tiles + Shared::TILES;
  A* planes = all_sums + 2 * C::WARPS * Shared::WARP_SUMS + warp * Shared::WARP;
  A* starts = planes + PLANES * Shared::PLANE;

  // A lane takes its group's rows, and a group takes a lane's states, in an order of its own: sums over lanes and over
  // groups then need no choice of what to send.
  constexpr int ORDERS = Shared::ORDERS;
  const int turn_rows = lane % ROWS, turn_states = group % ORDERS;
  auto row_of = [&](int j) { return group * ROWS + (j ^ turn_rows); };
  auto state_of = [&](int i) { return lane * NS + (i ^ turn_states); };

  const BlockPlace place = block_place(d, C::CHANNELS);
  if (REDUCE && place.segment == 0) return;  // nothing comes before it
  const int64_t begin = place.segment * plan.length;
  const int64_t end = min(begin + plan.length, d.length);
  const int count = place.count - warp * C::WARP_ROWS;  // rows of this warp that are there
  const int64_t channel = place.channel + warp * C::WARP_ROWS;
  const int64_t first_row = place.batch * d.channels + channel;
  const int64_t all_rows = d.batch * d.channels;

  A decay[ROWS][NS], carry[ROWS][NS], slope[ROWS][NS] = {}, step_sum[ROWS] = {};
#pragma unroll
  for (int j = 0; j < ROWS; ++j) {
    const int r = row_of(j);
    const int64_t row = first_row + r;
#pragma unroll
    for (int i = 0; i < NS; ++i) {
      const int n = state_of(i);
      const bool real = r < count && n < d.states;
      decay[j][i] = real ? d.a[(channel + r) * d.states + n] * A(LOG2_E) : A(0);
      carry[j][i] = real && !REDUCE && g.up_final ? g.up_final[row * d.states + n] : A(0);
    }
  }
  // The segments behind, all rows and states at once: only segments wait for one another.
  for (int64_t s = plan.count - 1; s > (REDUCE ? plan.count : place.segment); --s) {
#pragma unroll
    for (int j = 0; j < ROWS; ++j) {
      if (row_of(j) >= count) continue;
      const int64_t row = s * all_rows + first_row + row_of(j);
      const A sum = plan_sums<T>(plan)[row];
#pragma unroll
      for (int i = 0; i < NS; ++i) {
        const A end_state = state_of(i) < d.states ? plan_ends<T>(plan)[row * d.states + state_of(i)] : A(0);
        carry[j][i] = fma(exp2_fast(decay[j][i] * sum), carry[j][i], end_state);
      }
    }
  }

  MatrixTiles<T, STEPS, PADDED, MATRIX, ORDERS, C::THREADS, !REDUCE, true> matrices(d, place, threadIdx.x);
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
  // Over groups: what stays is at multiples of ORDERS.
  auto add_groups = [&](A(&values)[NS]) {
#pragma unroll
    for (int by = ORDERS / 2; by >= 1; by /= 2) {
#pragma unroll
      for (int i = 0; i < NS; ++i) {
        if (i % ORDERS < by) values[i] += __shfl_xor_sync(WHOLE_WARP, values[i + by], by * LANES);
      }
    }
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
        const int r = row_of(j);
        const A* from = g.states + (tile / STEPS * all_rows + first_row + r) * d.states + lane * NS;
        const bool there = r < count && lane * NS < d.states;
        A kept[NS] = {};
        if (d.states % NS == 0) {
          if (there) load_streamed(from, kept);
        } else {
#pragma unroll
          for (int i = 0; i < NS; ++i) kept[i] = there && lane * NS + i < d.states ? from[i] : A(0);
        }
        if (there && tile > begin) prefetch_row(from - all_rows * d.states);
        turn_order<ORDERS>(kept, turn_states);
#pragma unroll
        for (int i = 0; i < NS; ++i) h[j][i] = kept[i];
      }
    }
    {
      RowWords u[Tasks::COUNT], delta[Tasks::COUNT], up[Tasks::COUNT], gate[Tasks::COUNT];
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
        unpack<T>(delta[k], step);
        unpack<T>(up[k], dy);
        if (!REDUCE) unpack<T>(u[k], input);
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) step[i] += bias;
        if (d.use_softplus) {
#pragma unroll
          for (int i = 0; i < ITEMS; ++i) step[i] = softplus<FAST>(step[i]);
        }
        if (d.z) {
          A gated[ITEMS];
          unpack<T>(gate[k], gated);
#pragma unroll
          for (int i = 0; i < ITEMS; ++i) dy[i] *= silu<FAST>(gated[i]);
        }
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
          if (i >= left(k, steps)) step[i] = dy[i] = A(0);
          if (!REDUCE) input[i] *= step[i];
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
          const A* from = planes + row_of(j) * PITCH + t;
          load_values(from + STEP * Shared::PLANE, step[j]);
          load_values(from + OUTPUT * Shared::PLANE, dy[j]);
        }
#pragma unroll
        for (int k = K - 1; k >= 0; --k) {
          A c[NS];
          load_values(tile_of + (t + k) * MATRIX + Shared::KIND + turn_states * PADDED + lane * NS, c);
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
        const A* flat = &h[0][0];
#pragma unroll
        for (int v = 0; v < C::VALUES / PACK; ++v) {
          A pack[PACK];
#pragma unroll
          for (int i = 0; i < PACK; ++i) pack[i] = flat[v * PACK + i];
          store_values(starts + ((t / K * (C::VALUES / PACK) + v) * 32 + thread) * PACK, pack);
        }
        if (t == STEPS - K) break;
        A step[ROWS][K], input[ROWS][K];
#pragma unroll
        for (int j = 0; j < ROWS; ++j) {
          const A* from = planes + row_of(j) * PITCH + t;
          load_values(from + STEP * Shared::PLANE, step[j]);
          load_values(from + INPUT * Shared::PLANE, input[j]);
        }
#pragma unroll
        for (int k = 0; k < K; ++k) {
          A b[NS];
          load_values(tile_of + (t + k) * MATRIX + turn_states * PADDED + lane * NS, b);
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
        A start[ROWS][NS], state[K][ROWS][NS], factor[K][ROWS][NS];
        A* flat = &start[0][0];
#pragma unroll
        for (int v = 0; v < C::VALUES / PACK; ++v) {
          A pack[PACK];
          load_values(starts + ((t / K * (C::VALUES / PACK) + v) * 32 + thread) * PACK, pack);
#pragma unroll
          for (int i = 0; i < PACK; ++i) flat[v * PACK + i] = pack[i];
        }
        A step[ROWS][K], input[ROWS][K], dy[ROWS][K];
#pragma unroll
        for (int j = 0; j < ROWS; ++j) {
          const A* from = planes + row_of(j) * PITCH + t;
          load_values(from + STEP * Shared::PLANE, step[j]);
          load_values(from + INPUT * Shared::PLANE, input[j]);
          load_values(from + OUTPUT * Shared::PLANE, dy[j]);
        }
#pragma unroll
        for (int k = 0; k < K; ++k) {
          A b[NS];
          load_values(tile_of + (t + k) * MATRIX + turn_states * PADDED + lane * NS, b);
#pragma unroll
          for (int j = 0; j < ROWS; ++j) {
#pragma unroll
            for (int i = 0; i < NS; ++i) {
              factor[k][j][i] = exp2_fast(step[j][k] * decay[j][i]);
              state[k][j][i] = fma(factor[k][j][i], k ? state[k ? k - 1 : 0][j][i] : start[j][i], input[j][k] * b[i]);
            }
          }
        }
        A to_input[ROWS][K], to_step[ROWS][K], y[ROWS][K];
#pragma unroll
        for (int k = K - 1; k >= 0; --k) {
          A b[NS], c[NS], to_b[NS] = {}, to_c[NS] = {};
          load_values(tile_of + (t + k) * MATRIX + turn_states * PADDED + lane * NS, b);
          load_values(tile_of + (t + k) * MATRIX + Shared::KIND + turn_states * PADDED + lane * NS, c);
#pragma unroll
          for (int j = 0; j < ROWS; ++j) {
            A by_input = A(0), by_step = A(0), by_state = A(0);
#pragma unroll
            for (int i = 0; i < NS; ++i) {
              const A before = k ? state[k ? k - 1 : 0][j][i] : start[j][i];
              const A total = fma(dy[j][k], c[i], carry[j][i]);
              by_state = fma(state[k][j][i], c[i], by_state);
              to_b[i] = fma(total, input[j][k], to_b[i]);
              to_c[i] = fma(dy[j][k], state[k][j][i], to_c[i]);
              by_input = fma(total, b[i], by_input);
              carry[j][i] = factor[k][j][i] * total;
              const A to_exponent = carry[j][i] * before;
              by_step = fma(to_exponent, decay[j][i], by_step);
              slope[j][i] = fma(to_exponent, step[j][k], slope[j][i]);
            }
            to_input[j][k] = by_input;
            to_step[j][k] = by_step;
            y[j][k] = by_state;
          }
          add_groups(to_b);
          add_groups(to_c);
          constexpr int KEPT = NS / ORDERS, LEFT = 2 * NS / C::GROUPS > 1 ? 2 * NS / C::GROUPS : 1;
          A parts[2 * KEPT];
#pragma unroll
          for (int i = 0; i < KEPT; ++i) {
            parts[i] = to_b[i * ORDERS];
            parts[KEPT + i] = to_c[i * ORDERS];
          }
          int base = 0;
          scatter_sums<2 * KEPT, LANES * ORDERS, 32>(parts, thread, base);
#pragma unroll
          for (int i = 0; i < LEFT; ++i) {
            const int which = base + i;
            sums[(t + k) * Shared::SUMS + which / KEPT * PADDED + state_of(which % KEPT * ORDERS)] = parts[i];
          }
        }
        constexpr int LEFT = ROWS * K / LANES > 1 ? ROWS * K / LANES : 1;
        __syncwarp();  // all lanes have read the planes' K steps
        auto put = [&](A(&values)[ROWS][K], Plane plane) {
          add_rows(values);
          int base = 0;
          scatter_sums<K, ROWS, LANES>(values[0], thread, base);
          A mine[LEFT];
#pragma unroll
          for (int i = 0; i < LEFT; ++i) mine[i] = values[0][i];
          store_values(planes + plane * Shared::PLANE + row_of(0) * PITCH + t + base, mine);
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
        RowWords u, delta, up, gate;
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
        unpack<T>(u, x);
        unpack<T>(delta, step);
        unpack<T>(up, dy);
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
          step[i] += bias;
          slope_of[i] = A(1);
        }
        if (d.use_softplus) {
#pragma unroll
          for (int i = 0; i < ITEMS; ++i) slope_of[i] = softplus_slope<FAST>(step[i]);
        }
        if (d.z) {
          A gated[ITEMS];
          unpack<T>(gate, gated);
#pragma unroll
          for (int i = 0; i < ITEMS; ++i) {
            const A s = sigmoid<FAST>(gated[i]);
            const A curve = s * (A(1) - s);
            const A silu_slope = s + (curve == A(0) ? A(0) : gated[i] * curve);
            y[i] = dy[i] * fma(skip, x[i], y[i]) * silu_slope;
            dy[i] *= gated[i] * s;
          }
          store_row<WIDE>(g.z + at, there, y);
        }
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
          // decay carries the factor log2 e.
          const A to_raw = fma(to_input[i], x[i], to_step[i] * A(0.6931471805599453)) * slope_of[i];
          to_input[i] = fma(to_input[i], step[i], dy[i] * skip);
          to_step[i] = to_raw;
          if (WIDE || i < there) {
            skip_sum[k] = fma(dy[i], x[i], skip_sum[k]);
            bias_sum[k] += to_raw;
          }
        }
        store_row<WIDE>(g.u + at, there, to_input);
        store_row<WIDE>(g.delta + at, there, to_step);
      }
    }
    __syncwarp();  // the planes are read before the next tile's are written
    buffer ^= 1;
  }

  if constexpr (REDUCE) {
#pragma unroll
    for (int j = 0; j < ROWS; ++j) {
      const int r = row_of(j);
      if (r >= count) continue;
      const int64_t at = place.segment * all_rows + first_row + r;
      if (lane == 0) plan_sums<T>(plan)[at] = step_sum[j];
#pragma unroll
      for (int i = 0; i < NS; ++i) {
        if (state_of(i) < d.states) plan_ends<T>(plan)[at * d.states + state_of(i)] = carry[j][i];
      }
    }
  } else {
    __syncthreads();
    write_matrices(begin, all_sums + (buffer ^ 1) * C::WARPS * Shared::WARP_SUMS);
    const int64_t part = place.segment * all_rows;
#pragma unroll
    for (int j = 0; j < ROWS; ++j) {
      const int r = row_of(j);
      if (r >= count) continue;
#pragma unroll
      for (int i = 0; i < NS; ++i) {
        const int64_t at = (first_row + r) * d.states + state_of(i);
        if (state_of(i) >= d.states) continue;
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

}  // namespace opgraft::cuda
