// The forward kernel of selective_scan with time dealt over lanes: see selective_scan.cu for how it works and what it
// costs.
#pragma once

#include "cuda/selective_scan.cuh"
#include "cuda/selective_scan.h"

namespace opgraft::cuda {

inline constexpr int CHUNK_STEPS = 16;  // of a thread at once
#ifndef STATES_AT_ONCE
#define STATES_AT_ONCE 16
#endif
inline constexpr int CHUNK_STATES = STATES_AT_ONCE;  // whose B and C are in shared memory at once

// How a warp is cut: LANES threads have consecutive chunks of a channel's time; a thread has a chunk of ROWS channels,
// and PARTS threads (1 or ROWS) share their states.
template <int LANES_, int ROWS_, int PARTS_, int WARPS_, int BLOCKS_>
struct ChunkCut {
  static constexpr int LANES = LANES_;
  static constexpr int ROWS = ROWS_;
  static constexpr int PARTS = PARTS_;
  static constexpr int WARPS = WARPS_;
  static constexpr int BLOCKS = BLOCKS_;  // an SM
  static constexpr int THREADS = 32 * WARPS;
  static constexpr int WARP_ROWS = 32 / (LANES * PARTS) * ROWS;
  static constexpr int CHANNELS = WARP_ROWS * WARPS;
  static constexpr int TILE = LANES * CHUNK_STEPS;
  static constexpr int SPAN = TILE < 128 ? 128 : TILE;  // steps of B and C in shared memory
  static_assert(PARTS == 1 || (PARTS == ROWS && LANES == 1));
};

template <typename A>
struct alignas(2 * sizeof(A)) StateEntry {
  A decay;
  A state;
};

// B and C of SPAN steps of CHUNK_STATES states, [kind][state][step]. A lane's chunk is 4 words more than it holds, so
// that lanes that read 16 bytes at the same place of their chunks touch every bank once.
template <typename A, typename C>
struct ChunkMatrices {
  static constexpr int PITCH = CHUNK_STEPS + 4;
  static constexpr int ROW = C::SPAN / CHUNK_STEPS * PITCH;
  static constexpr int KIND = CHUNK_STATES * ROW;

  static __device__ __forceinline__ int place(int step) { return step / CHUNK_STEPS * PITCH + step % CHUNK_STEPS; }
};

// Fills B and C of `steps` steps from `tile` and `states` states from `first`; what is not there becomes zero.
template <typename T, typename C, int KINDS>
__device__ __forceinline__ void fill_matrices(const ScanData<T>& d, const T* b, const T* c, int64_t tile, int steps,
                                              int first, int padded, DeviceAccumulate<T>* out) {
  using A = DeviceAccumulate<T>;
  using M = ChunkMatrices<A, C>;
  constexpr int ITEMS = VECTOR_WIDTH<T>;
  const bool along_steps = d.access == MatrixAccess::ALONG_STEPS, single = d.access == MatrixAccess::SINGLE;
  if (single) {
    for (int i = threadIdx.x; i < KINDS * padded * C::SPAN; i += C::THREADS) {
      const int kind = i / (padded * C::SPAN), rest = i % (padded * C::SPAN);
      const MatrixStrides& s = kind ? d.c_strides : d.b_strides;
      const bool by_state = s.state <= s.step;
      const int n = by_state ? rest % padded : rest / C::SPAN, t = by_state ? rest / padded : rest % C::SPAN;
      const bool there = first + n < d.states && t < steps;
      const T* from = (kind ? c : b) + (first + n) * s.state + (tile + t) * s.step;
      out[kind * M::KIND + n * M::ROW + M::place(t)] = there ? A(widen(*from)) : A(0);
    }
  } else if (along_steps) {
    constexpr int VECTORS = C::SPAN / ITEMS;
    constexpr int ACROSS = C::THREADS < VECTORS ? C::THREADS : VECTORS, ROWS = C::THREADS / ACROSS;
    static_assert(VECTORS % ACROSS == 0 && C::THREADS % ACROSS == 0);
#pragma unroll 1
    for (int t = threadIdx.x % ACROSS * ITEMS; t < C::SPAN; t += ACROSS * ITEMS) {
      const T* from_b = b + first * d.b_strides.state + tile + t;
      const T* from_c = c + first * d.c_strides.state + tile + t;
#pragma unroll 4
      for (int n = threadIdx.x / ACROSS; n < padded; n += ROWS) {
        const bool there = first + n < d.states && t < steps;
        RowWords words[KINDS];
        load_row<true>(from_b + n * d.b_strides.state, there, words[0]);
        if (KINDS > 1) load_row<true>(from_c + n * d.c_strides.state, there, words[KINDS - 1]);
#pragma unroll
        for (int kind = 0; kind < KINDS; ++kind) {
          A wide[ITEMS];
          unpack<T>(words[kind], wide);
          store_values(out + kind * M::KIND + n * M::ROW + M::place(t), wide);
        }
      }
    }
  } else {
    constexpr int VECTORS = CHUNK_STATES / ITEMS;
#pragma unroll 2
    for (int i = threadIdx.x; i < KINDS * VECTORS * C::SPAN; i += C::THREADS) {
      const int n = i % VECTORS * ITEMS, which = i / VECTORS, t = which % C::SPAN, kind = which / C::SPAN;
      const MatrixStrides& s = kind ? d.c_strides : d.b_strides;
      RowWords words;
      load_row<true>((kind ? c : b) + first + n + (tile + t) * s.step, first + n < d.states && t < steps, words);
      A wide[ITEMS];
      unpack<T>(words, wide);
      A* to = out + kind * M::KIND + n * M::ROW + M::place(t);
#pragma unroll
      for (int k = 0; k < ITEMS; ++k) to[k * M::ROW] = wide[k];
    }
  }
}

// What leaves each lane's chunk, from what leaves it when it starts from zero and the decay of the whole chunk, for
// several rows at once. BACK: time runs backwards over the lanes.
template <typename C, bool BACK, int COUNT, typename A>
__device__ __forceinline__ void carry_over(A (&value)[COUNT], const A (&whole)[COUNT], int slot) {
  A decay[COUNT];
#pragma unroll
  for (int j = 0; j < COUNT; ++j) decay[j] = whole[j];
#pragma unroll
  for (int by = 1; by < C::LANES; by *= 2) {
    const int lanes = by * C::PARTS;
    const bool there = BACK ? slot + by < C::LANES : slot >= by;
#pragma unroll
    for (int j = 0; j < COUNT; ++j) {
      const A from = BACK ? __shfl_down_sync(WHOLE_WARP, value[j], lanes) : __shfl_up_sync(WHOLE_WARP, value[j], lanes);
      if (there) value[j] = fma(decay[j], from, value[j]);
      if (2 * by < C::LANES) {
        const A over =
            BACK ? __shfl_down_sync(WHOLE_WARP, decay[j], lanes) : __shfl_up_sync(WHOLE_WARP, decay[j], lanes);
        if (there) decay[j] *= over;
      }
    }
  }
}

template <typename C, bool BACK, typename A>
__device__ __forceinline__ A neighbour(A value) {
  return BACK ? __shfl_down_sync(WHOLE_WARP, value, C::PARTS) : __shfl_up_sync(WHOLE_WARP, value, C::PARTS);
}

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
  extern __shared__ __align__(16) unsigned char shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
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
  constexpr bool AHEAD = LANES == 1 && sizeof(T) == 2;  // rows of the next tile wait in registers
  if (AHEAD) fetch(begin);

  for (int64_t tile = begin; tile < end; tile += C::TILE) {
    if (!AHEAD) fetch(tile);
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
    if constexpr (AHEAD) {
      if (tile + C::TILE < end) fetch(tile + C::TILE);
      if (!WALK && d.z) fetch_gate();
    } else if (!WALK && d.z) {
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
    A* mark = nullptr;  // where the states before this chunk are to be kept, of row 0
    if (WALK && walk.states && tile + slot * S < end) {
      const int64_t at = tile + slot * S;
      if ((at & ((int64_t{1} << walk.every_log2) - 1)) == 0) {
        mark = walk.states + (at >> walk.every_log2) * d.states * all_rows + first_row;
      }
    }
    // Also in the middle of a chunk, where it is the whole of a tile.
    const bool halves = WALK && LANES == 1 && mark && 1 << walk.every_log2 < S && tile + S / 2 < end;
    const int in_span = static_cast<int>((tile - begin) % C::SPAN);
    const A* chunk = matrices + (in_span / S + slot) * M::PITCH;

    for (int first = 0; first < padded; first += CHUNK_STATES) {
      const int states = min(CHUNK_STATES, padded - first);
      if (in_span == 0) {
        __syncthreads();
        fill_matrices<T, C, WALK ? 1 : 2>(d, b, c, tile, static_cast<int>(min(end - tile, int64_t{C::SPAN})), first,
                                          states, matrices);
        __syncthreads();
      }
      // The decays of a state are taken while the state before it is walked: nothing waits for the exponential unit.
      StateEntry<A> next[ROWS];
      A factor[ROWS][S], whole[ROWS];
      auto entry_of = [&](int n, int j) -> StateEntry<A>& { return entries[(first + n) * ENTRIES + row_of(j)]; };
#pragma unroll
      for (int j = 0; j < ROWS; ++j) {
        next[j] = entry_of(part, j);
        if (LANES > 1) whole[j] = exp2_fast(chunk_sum[j] * next[j].decay);
#pragma unroll
        for (int i = 0; i < S; ++i) factor[j][i] = exp2_fast(step[j][i] * next[j].decay);
      }
      auto walk_state = [&](int n, auto more) {
        constexpr bool MORE = decltype(more)::value;
        const A* from = chunk + n * M::ROW;
        A state[ROWS], decay[ROWS], add[ROWS][S];
#pragma unroll
        for (int j = 0; j < ROWS; ++j) {
          state[j] = next[j].state;
          if (MORE) next[j] = entry_of(n + PARTS, j);
          if (MORE) decay[j] = next[j].decay;
        }
        if constexpr (LANES > 1) {
          A local[ROWS];
#pragma unroll
          for (int j = 0; j < ROWS; ++j) local[j] = slot == 0 ? state[j] : A(0);
#pragma unroll
          for (int i = 0; i < S; i += 4) {
            A wide[4];
            load_values(from + i, wide);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
#pragma unroll
              for (int j = 0; j < ROWS; ++j) {
                add[j][i + k] = input[j][i + k] * wide[k];
                local[j] = fma(factor[j][i + k], local[j], add[j][i + k]);
              }
            }
          }
          carry_over<C, false>(local, whole, slot);
#pragma unroll
          for (int j = 0; j < ROWS; ++j) {
            const A before = neighbour<C, false>(local[j]);
            state[j] = slot == 0 ? state[j] : before;
            if (MORE) whole[j] = exp2_fast(chunk_sum[j] * decay[j]);
          }
          if (WALK) {
#pragma unroll
            for (int j = 0; j < ROWS; ++j) {
              if (mark && row_of(j) < count) mark[(first + n) * all_rows + row_of(j)] = state[j];
              state[j] = local[j];
#pragma unroll
              for (int i = 0; MORE && i < S; ++i) factor[j][i] = exp2_fast(step[j][i] * decay[j]);
            }
          }
        } else if (WALK && mark && first + n < d.states) {
#pragma unroll
          for (int j = 0; j < ROWS; ++j) {
            if (row_of(j) < count) mark[(first + n) * all_rows + row_of(j)] = state[j];
          }
        }
        if constexpr (LANES == 1 || !WALK) {
#pragma unroll
          for (int i = 0; i < S; i += 4) {
            if (WALK && i == S / 2 && halves && first + n < d.states) {
#pragma unroll
              for (int j = 0; j < ROWS; ++j) {
                if (row_of(j) < count) mark[(d.states + first + n) * all_rows + row_of(j)] = state[j];
              }
            }
            A wide_b[4], wide_c[4];
            if (LANES == 1) load_values(from + i, wide_b);
            if (!WALK) load_values(from + M::KIND + i, wide_c);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
#pragma unroll
              for (int j = 0; j < ROWS; ++j) {
                const A more_state = LANES == 1 ? input[j][i + k] * wide_b[k] : add[j][i + k];
                state[j] = fma(factor[j][i + k], state[j], more_state);
                if (!WALK) y[j][i + k] = fma(state[j], wide_c[k], y[j][i + k]);
                if (MORE) factor[j][i + k] = exp2_fast(step[j][i + k] * decay[j]);
              }
            }
          }
        }
        if (slot == LANES - 1) {
#pragma unroll
          for (int j = 0; j < ROWS; ++j) entry_of(n, j).state = state[j];
        }
      };
      int n = part;
#pragma unroll 1
      for (; n + PARTS < states; n += PARTS) walk_state(n, std::true_type{});
      walk_state(n, std::false_type{});
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
      if (!AHEAD && d.z) fetch_gate();
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
