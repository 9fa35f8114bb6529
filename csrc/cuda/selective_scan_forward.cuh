// The forward kernel of selective_scan: see selective_scan.cu for how it works and what it costs.
#pragma once

#include "cuda/selective_scan.h"
#include "cuda/selective_scan_chunks.cuh"

namespace opgraft::cuda {

template <typename T, typename C>
struct ChunkShared {
  using A = DeviceAccumulate<T>;
  using M = ChunkMatrices<A, C>;
  static constexpr int ENTRIES = C::WARP_ROWS + (C::PARTS > 1 ? 8 : 0);  // of a state: two parts meet all banks
  static int padded(int states) { return (states + C::PARTS - 1) / C::PARTS * C::PARTS; }
  static size_t bytes(int states) { return sizeof(A) * (2 * M::KIND + C::WARPS * 2 * ENTRIES * padded(states)); }
};

// WALK: states only (see selective_scan.h); else outputs are written. WIDE: see load_row.
template <typename T, typename C, bool WALK, bool WIDE>
__global__ void __launch_bounds__(C::THREADS, C::BLOCKS)
    scan_chunks(ScanData<T> d, SegmentPlan plan, StateWalk<T> walk, T* __restrict__ y_out,
                DeviceAccumulate<T>* __restrict__ final_state) {
  using A = DeviceAccumulate<T>;
  using M = ChunkMatrices<A, C>;
  using Shared = ChunkShared<T, C>;
  constexpr bool FAST = sizeof(T) == 2;
  constexpr int S = CHUNK_STEPS, LANES = C::LANES, ROWS = C::ROWS, PARTS = C::PARTS, WARP_ROWS = C::WARP_ROWS;
  constexpr int ENTRIES = Shared::ENTRIES;
  constexpr int OWN = ROWS / PARTS;  // rows that a thread reads and writes: its first ones
  constexpr int ITEMS = VECTOR_WIDTH<T>, VECTORS = S / ITEMS;
  constexpr int AHEAD = LANES == 1 ? 2 : S;  // steps between a decay's exponential and its use
  extern __shared__ __align__(16) unsigned char shared[];
  const int thread = thread_index(), warp = thread / 32, lane = thread % 32;
  const int part = lane % PARTS, slot = lane / PARTS % LANES, group = lane / (PARTS * LANES);
  const int padded = (d.states + PARTS - 1) / PARTS * PARTS;
  A* matrices = reinterpret_cast<A*>(shared);
  auto* entries = reinterpret_cast<StateEntry<A>*>(matrices + 2 * M::KIND) + warp * ENTRIES * padded;
  // Threads that share rows take them in different orders, each the one that it reads and writes first.
  auto row_of = [&](int j) { return group * ROWS + (j ^ part); };

  const BlockPlace place = block_place(d, C::CHANNELS);
  if (WALK && walk.from_zero && place.segment == plan.count - 1) return;  // nothing comes after it
  const int64_t begin = place.segment * plan.length;
  const int64_t end = min(begin + plan.length, d.length);
  const int count = place.count - warp * WARP_ROWS;  // rows of this warp that are there
  const int64_t channel = place.channel + warp * WARP_ROWS;
  const int64_t first_row = place.batch * d.channels + channel;
  const int64_t all_rows = d.batch * d.channels;

  for (int i = lane; i < WARP_ROWS * padded; i += 32) {
    const int r = i % WARP_ROWS, n = i / WARP_ROWS;
    const bool real = r < count && n < d.states;
    A decay = A(0), state = A(0);
    if (real) {
      decay = d.a[(channel + r) * d.states + n] * A(LOG2_E);
      if (!walk.from_zero && d.initial) state = d.initial[(first_row + r) * d.states + n];
#pragma unroll 1
      for (int64_t s = 0; s < (walk.from_zero ? 0 : place.segment); ++s) {
        const int64_t at = s * all_rows + first_row + r;
        state = fma(exp2_fast(decay * plan_sums<T>(plan)[at]), state, plan_ends<T>(plan)[at * d.states + n]);
      }
    }
    entries[n * ENTRIES + r] = {decay, state};
  }
  __syncwarp();

  A bias[OWN], skip[OWN];
  int64_t offset[OWN];
#pragma unroll
  for (int j = 0; j < OWN; ++j) {
    const bool there = row_of(j) < count;
    bias[j] = d.bias && there ? d.bias[channel + row_of(j)] : A(0);
    skip[j] = d.skip && there ? d.skip[channel + row_of(j)] : A(0);
    offset[j] = (first_row + (there ? row_of(j) : 0)) * d.length + slot * S;
  }
  const T* b = d.b + place.batch * d.b_strides.batch + place.group * d.b_strides.group;
  const T* c = d.c + place.batch * d.c_strides.batch + place.group * d.c_strides.group;
  auto left_of = [&](int64_t tile, int j) {
    return row_of(j) < count ? static_cast<int>(min(end - tile, int64_t{C::TILE})) - slot * S : 0;
  };
  A step_sum[OWN] = {};
  bool row_there[ROWS];
#pragma unroll
  for (int j = 0; j < ROWS; ++j) row_there[j] = row_of(j) < count;

  RowWords u[OWN][VECTORS], delta[OWN][VECTORS];
  auto fetch = [&](int64_t tile) {
#pragma unroll
    for (int j = 0; j < OWN; ++j) {
      const int left = left_of(tile, j);
#pragma unroll
      for (int v = 0; v < VECTORS; ++v) {
        load_row<WIDE>(d.u + offset[j] + tile + v * ITEMS, left - v * ITEMS, u[j][v]);
        load_row<WIDE>(d.delta + offset[j] + tile + v * ITEMS, left - v * ITEMS, delta[j][v]);
      }
    }
  };
  unsigned turn = 0;  // the number of the tile, of which the last bits are wanted
  for (int64_t tile = begin; tile < end; tile += C::TILE, ++turn) {
    fetch(tile);
    if (tile + C::TILE < end) {
#pragma unroll
      for (int j = 0; j < OWN; ++j) {
        if (left_of(tile + C::TILE, j) <= 0) continue;
        prefetch_row(d.u + offset[j] + tile + C::TILE);
        prefetch_row(d.delta + offset[j] + tile + C::TILE);
      }
    }
    A step[ROWS][S], input[ROWS][S], y[ROWS][S];
#pragma unroll
    for (int j = 0; j < OWN; ++j) {
      const int left = left_of(tile, j);
#pragma unroll
      for (int v = 0; v < VECTORS; ++v) {
        unpack<T>(delta[j][v], step[j] + v * ITEMS);
        unpack<T>(u[j][v], input[j] + v * ITEMS);
      }
#pragma unroll
      for (int i = 0; i < S; ++i) step[j][i] += bias[j];
      if (d.use_softplus) {
#pragma unroll
        for (int i = 0; i < S; ++i) step[j][i] = softplus<FAST>(step[j][i]);
      }
      if (left < S) {
#pragma unroll
        for (int i = 0; i < S; ++i) step[j][i] = i < left ? step[j][i] : A(0);
      }
#pragma unroll
      for (int i = 0; i < S; ++i) {
        y[j][i] = skip[j] * input[j][i];
        input[j][i] *= step[j][i];
      }
    }
    if constexpr (PARTS > 1) {
#pragma unroll
      for (int j = 1; j < ROWS; ++j) {
#pragma unroll
        for (int i = 0; i < S; ++i) {
          step[j][i] = __shfl_xor_sync(WHOLE_WARP, step[0][i], j);
          input[j][i] = __shfl_xor_sync(WHOLE_WARP, input[0][i], j);
          y[j][i] = A(0);
        }
      }
    }
    RowWords gate[OWN][VECTORS];
    auto fetch_gate = [&] {
#pragma unroll
      for (int j = 0; j < OWN; ++j) {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
          load_row<WIDE>(d.z + offset[j] + tile + v * ITEMS, left_of(tile, j) - v * ITEMS, gate[j][v]);
        }
      }
    };
    if (!WALK && d.z) {
#pragma unroll
      for (int j = 0; j < OWN; ++j) {
        if (left_of(tile, j) > 0) prefetch_row(d.z + offset[j] + tile);
      }
    }
    A chunk_sum[ROWS] = {};
    if (LANES > 1 || WALK) {
#pragma unroll
      for (int j = 0; j < ROWS; ++j) {
#pragma unroll
        for (int i = 0; i < S; ++i) chunk_sum[j] += step[j][i];
        if (WALK && j < OWN) step_sum[j] += chunk_sum[j];
      }
    }
    A* mark = nullptr;  // where the states before this chunk are to be kept, of this thread's first state and first row
    if (WALK && walk.states && tile + slot * S < end) {
      const int64_t at = tile + slot * S;
      if ((at & ((int64_t{1} << walk.every_log2) - 1)) == 0) {
        mark = walk.states + ((at >> walk.every_log2) * d.states + part) * all_rows + first_row + group * ROWS;
      }
    }
    // Also in the middle of a chunk, where it is the whole of a tile.
    const bool halves = WALK && LANES == 1 && mark && 1 << walk.every_log2 < S && tile + S / 2 < end;
    A* half_mark = mark + d.states * all_rows;
    const int in_span = turn % (C::SPAN / C::TILE) * C::TILE;
    const A* chunk = matrices + (in_span / S + slot) * M::PITCH;

    for (int first = 0; first < padded; first += CHUNK_STATES) {
      const int states = min(CHUNK_STATES, padded - first);
      if (in_span == 0) {
        __syncthreads();
        fill_matrices<T, C, WALK ? 1 : 2>(d, b, c, tile, static_cast<int>(min(end - tile, int64_t{C::SPAN})), first,
                                          states, matrices);
        __syncthreads();
      }
      // Decays are taken AHEAD steps before they are wanted, the first of a state while the one before it is walked.
      StateEntry<A> next[ROWS];
      A factor[ROWS][S], whole[ROWS];
      auto whole_of = [&](int j, A decay) { return slot == 0 ? A(0) : exp2_fast(chunk_sum[j] * decay); };
      StateEntry<A>* entry[ROWS];
#pragma unroll
      for (int j = 0; j < ROWS; ++j) {
        entry[j] = entries + (first + part) * ENTRIES + row_of(j);
        next[j] = *entry[j];
        if (LANES > 1) whole[j] = whole_of(j, next[j].decay);
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) factor[j][i] = exp2_fast(step[j][i] * next[j].decay);
      }
      const A* from = chunk + part * M::ROW;
      A wide_b[4], wide_c[4];  // of the steps that are walked next
      if constexpr (LANES == 1) {
        load_values(from, wide_b);
        if (!WALK) load_values(from + M::KIND, wide_c);
      }
      auto walk_state = [&]<bool MORE>(int n) {
        A state[ROWS], decay[ROWS], own_decay[ROWS], add[ROWS][S];
#pragma unroll
        for (int j = 0; j < ROWS; ++j) {
          state[j] = next[j].state;
          own_decay[j] = next[j].decay;
          if (MORE) next[j] = entry[j][PARTS * ENTRIES];
          if (MORE) decay[j] = next[j].decay;
        }
        if constexpr (LANES > 1) {
          A local[ROWS];
#pragma unroll
          for (int j = 0; j < ROWS; ++j) {
            local[j] = walk_chunk(from, factor[j], input[j], slot == 0 ? state[j] : A(0), add[j]);
          }
          carry_over<C, false>(local, whole);
#pragma unroll
          for (int j = 0; j < ROWS; ++j) {
            const A before = from_lane<C, false>(local[j], 1);
            state[j] = slot == 0 ? state[j] : before;
            if (MORE) whole[j] = whole_of(j, decay[j]);
          }
          if (WALK) {
#pragma unroll
            for (int j = 0; j < ROWS; ++j) {
              if (mark && row_of(j) < count) mark[j ^ part] = state[j];
              state[j] = local[j];
#pragma unroll
              for (int i = 0; MORE && i < S; ++i) factor[j][i] = exp2_fast(step[j][i] * decay[j]);
            }
          }
        } else if (WALK) {
          bool there[ROWS];
#pragma unroll
          for (int j = 0; j < ROWS; ++j) there[j] = row_there[j] && mark && first + n < d.states;
          keep_states<false>(mark, state, part, there);
        }
        if constexpr (LANES == 1 || !WALK) {
#pragma unroll
          for (int i = 0; i < S; i += 4) {
            if (WALK && LANES == 1 && i == S / 2) {
              bool there[ROWS];
#pragma unroll
              for (int j = 0; j < ROWS; ++j) there[j] = row_there[j] && halves && first + n < d.states;
              keep_states<false>(half_mark, state, part, there);
            }
            A now_b[4], now_c[4];
            if constexpr (LANES == 1) {
              const A* then = i + 4 < S ? from + i + 4 : from + PARTS * M::ROW;
#pragma unroll
              for (int k = 0; k < 4; ++k) {
                now_b[k] = wide_b[k];
                now_c[k] = wide_c[k];
              }
              if (MORE || i + 4 < S) {
                load_values(then, wide_b);
                if (!WALK) load_values(then + M::KIND, wide_c);
              }
            } else if (!WALK) {
              load_values(from + M::KIND + i, now_c);
            }
#pragma unroll
            for (int k = 0; k < 4; ++k) {
#pragma unroll
              for (int j = 0; j < ROWS; ++j) {
                const A more_state = LANES == 1 ? input[j][i + k] * now_b[k] : add[j][i + k];
                state[j] = fma(factor[j][i + k], state[j], more_state);
                if (!WALK) y[j][i + k] = fma(state[j], now_c[k], y[j][i + k]);
                constexpr int LAST = S - AHEAD;
                const int later = i + k < LAST ? i + k + AHEAD : i + k - LAST;
                if (i + k < LAST) {
                  factor[j][later] = exp2_fast(step[j][later] * own_decay[j]);
                } else if (MORE) {
                  factor[j][later] = exp2_fast(step[j][later] * decay[j]);
                }
              }
            }
          }
        }
        if (LANES > 1) __syncwarp();  // every lane has read it
        if (slot == LANES - 1) {
#pragma unroll
          for (int j = 0; j < ROWS; ++j) entry[j]->state = state[j];
        }
#pragma unroll
        for (int j = 0; j < ROWS; ++j) entry[j] += PARTS * ENTRIES;
        from += PARTS * M::ROW;
        if (WALK) mark += mark ? PARTS * all_rows : 0;
        if (WALK && LANES == 1) half_mark += PARTS * all_rows;
      };
      int n = part;
#pragma unroll 1
      for (; n + PARTS < states; n += PARTS) walk_state.template operator()<true>(n);
      walk_state.template operator()<false>(n);
    }
    __syncwarp();  // the states are there for the first lane

    if constexpr (!WALK) {
      if constexpr (PARTS > 1) {
#pragma unroll
        for (int j = 1; j < ROWS; ++j) {
#pragma unroll
          for (int i = 0; i < S; ++i) y[0][i] += __shfl_xor_sync(WHOLE_WARP, y[j][i], j);
        }
      }
      if (d.z) fetch_gate();
#pragma unroll
      for (int j = 0; j < OWN; ++j) {
        const int left = left_of(tile, j);
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
          A value[ITEMS];
#pragma unroll
          for (int i = 0; i < ITEMS; ++i) value[i] = y[j][v * ITEMS + i];
          if (d.z) {
            A gated[ITEMS];
            unpack<T>(gate[j][v], gated);
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) value[i] *= silu<FAST>(gated[i]);
          }
          store_row<WIDE>(y_out + offset[j] + tile + v * ITEMS, left - v * ITEMS, value);
        }
      }
    }
  }

  if (WALK && walk.from_zero) {
    const int64_t at = place.segment * all_rows + first_row;
#pragma unroll
    for (int j = 0; j < OWN; ++j) {
#pragma unroll
      for (int by = 1; by < LANES; by *= 2) step_sum[j] += __shfl_xor_sync(WHOLE_WARP, step_sum[j], by * PARTS);
      if (row_of(j) < count && slot == 0) plan_sums<T>(plan)[at + row_of(j)] = step_sum[j];
    }
  }
  if ((WALK && walk.from_zero) || (!WALK && end == d.length)) {
    A* to = WALK ? plan_ends<T>(plan) + place.segment * all_rows * d.states : final_state;
    for (int i = lane; i < WARP_ROWS * d.states; i += 32) {
      const int r = i / d.states, n = i % d.states;
      if (r < count) to[(first_row + r) * d.states + n] = entries[n * ENTRIES + r].state;
    }
  }
}

}  // namespace opgraft::cuda
