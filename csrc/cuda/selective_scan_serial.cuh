// The forward kernel of selective_scan for many channels of 16-bit types, where time is walked serially: see
// selective_scan.cu for how it works and what it costs.
#pragma once

#include "cuda/selective_scan.h"
#include "cuda/selective_scan_chunks.cuh"

namespace opgraft::cuda {

// Rows of a warp, two chunks long, on their way in (they arrive while the two chunks before are walked) and out: four
// lanes read or write a row together. Eight rows at the same place meet all banks.
struct RowStage {
  static constexpr int VECTORS = 4;
  RowWords u[2][32][VECTORS + 1], delta[2][32][VECTORS + 1], gate[2][32][VECTORS + 1], y[32][VECTORS + 1];
};

template <typename C>
struct SerialWalk {
  using M = ChunkMatrices<float, C>;
  static constexpr int TOGETHER = 2;                 // states that a thread walks at once
  static constexpr int AHEAD = 2;                    // steps between a decay's exponential and its use
  static constexpr int ROUND = TOGETHER * C::PARTS;  // states that its two threads walk at once
  static constexpr int ENTRIES = C::WARP_ROWS + 8;   // of a state: two parts meet all banks
  static __host__ __device__ int padded(int states) { return (states + ROUND - 1) / ROUND * ROUND; }
  static size_t bytes(int states) {
    return sizeof(float) * 2 * M::KIND +
           C::WARPS * (sizeof(RowStage) + sizeof(StateEntry<float>) * ENTRIES * padded(states));
  }
  static_assert(C::LANES == 1 && C::ROWS == 2 && C::PARTS == 2 && C::WARP_ROWS == 32);
};

// B and C of a span between memory and shared memory: what a thread brings of them, in registers.
template <typename T, typename C, int KINDS>
struct SpanMatrices {
  static constexpr int ITEMS = VECTOR_WIDTH<T>;
  static constexpr int COUNT = KINDS * CHUNK_STATES * C::SPAN / ITEMS / C::THREADS;
  static constexpr int ACROSS = C::SPAN / ITEMS, LINES = C::THREADS / ACROSS;
  using M = ChunkMatrices<float, C>;
  RowWords words[COUNT];

  // Where the i-th vector of a thread is.
  struct Place {
    int kind, state, step;
  };
  static __device__ __forceinline__ Place along_steps(int thread, int i) {
    return {i % KINDS, thread / ACROSS + i / KINDS * LINES, thread % ACROSS * ITEMS};
  }
  static __device__ __forceinline__ Place along_states(int thread, int i) {
    constexpr int VECTORS = CHUNK_STATES / ITEMS;
    const int at = thread + i * C::THREADS;
    return {at / VECTORS / C::SPAN, at % VECTORS * ITEMS, at / VECTORS % C::SPAN};
  }

  __device__ __forceinline__ void fetch(const ScanData<T>& d, const T* b, const T* c, int thread, int64_t tile,
                                        int steps) {
    if (d.access == MatrixAccess::SINGLE) return;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const bool by_step = d.access == MatrixAccess::ALONG_STEPS;
      const Place p = by_step ? along_steps(thread, i) : along_states(thread, i);
      const MatrixStrides& s = p.kind ? d.c_strides : d.b_strides;
      load_row<true>((p.kind ? c : b) + p.state * s.state + (tile + p.step) * s.step,
                     p.state < d.states && p.step < steps, words[i]);
    }
  }

  __device__ __forceinline__ void store(const ScanData<T>& d, const T* b, const T* c, int thread, int64_t tile,
                                        int steps, int padded, float* out) const {
    if (d.access == MatrixAccess::SINGLE) {
      fill_matrices<T, C, KINDS>(d, b, c, tile, steps, 0, padded, out);
      return;
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      float wide[ITEMS];
      unpack<T>(words[i], wide);
      if (d.access == MatrixAccess::ALONG_STEPS) {
        const Place p = along_steps(thread, i);
        store_values(out + p.kind * M::KIND + p.state * M::ROW + M::place(p.step), wide);
      } else {
        const Place p = along_states(thread, i);
        float* to = out + p.kind * M::KIND + p.state * M::ROW + M::place(p.step);
#pragma unroll
        for (int k = 0; k < ITEMS; ++k) to[k * M::ROW] = wide[k];
      }
    }
  }
};

// WALK: states only, kept before every eighth step or less often (see selective_scan.h); else outputs are written. Rows
// are aligned and whole vectors long, and there are CHUNK_STATES states at most.
template <typename T, typename C, bool WALK>
__global__ void __launch_bounds__(C::THREADS, C::BLOCKS)
    scan_serial(ScanData<T> d, StateWalk<T> walk, T* __restrict__ y_out, float* __restrict__ final_state) {
  using A = float;
  using M = ChunkMatrices<A, C>;
  using W = SerialWalk<C>;
  static_assert(sizeof(T) == 2);
  constexpr int S = CHUNK_STEPS, ITEMS = VECTOR_WIDTH<T>, VECTORS = S / ITEMS, GROUP = 2 * S;
  constexpr int MARK = 8;  // marks are no closer
  constexpr int K = W::TOGETHER, AHEAD = W::AHEAD, ENTRIES = W::ENTRIES, PARTS = C::PARTS;
  constexpr int NEXT = PARTS * ENTRIES;  // from a thread's state to its next one
  extern __shared__ __align__(16) unsigned char shared[];
  const int thread = thread_index(), warp = thread / 32, lane = thread % 32, part = lane % PARTS;
  const int padded = W::padded(d.states), length = static_cast<int>(d.length);
  A* matrices = reinterpret_cast<A*>(shared);
  auto* stages = reinterpret_cast<RowStage*>(matrices + 2 * M::KIND);
  auto* entries = reinterpret_cast<StateEntry<A>*>(stages + C::WARPS) + warp * ENTRIES * padded;
  RowStage& stage = stages[warp];

  const BlockPlace place = block_place(d, C::CHANNELS);
  const int count = place.count - warp * C::WARP_ROWS;  // rows of this warp that are there
  const int64_t channel = place.channel + warp * C::WARP_ROWS;
  const int64_t first_row = place.batch * d.channels + channel, all_rows = d.batch * d.channels;
  const T* b = d.b + place.batch * d.b_strides.batch + place.group * d.b_strides.group;
  const T* c = d.c + place.batch * d.c_strides.batch + place.group * d.c_strides.group;

  for (int i = lane; i < C::WARP_ROWS * padded; i += 32) {
    const int r = i % C::WARP_ROWS, n = i / C::WARP_ROWS;
    const bool real = r < count && n < d.states;
    entries[n * ENTRIES + r] = {real ? d.a[(channel + r) * d.states + n] * A(LOG2_E) : A(0),
                                real && d.initial ? d.initial[(first_row + r) * d.states + n] : A(0)};
  }
  __syncwarp();

  // A thread walks the row that it reads and writes and, second, its neighbour's.
  const int own = lane, to_other = part ? -1 : 1;
  const bool there = own < count;
  const A bias = d.bias && there ? d.bias[channel + own] : A(0);
  const A skip = d.skip && there ? d.skip[channel + own] : A(0);

  const int stage_row = lane / 4, stage_vector = lane % 4;
  const int64_t stage_at = (first_row + stage_row) * d.length + stage_vector * ITEMS;
  auto each_vector = [&](int first, auto body) {
    const bool in_time = first + stage_vector * ITEMS < length;
    int64_t at = stage_at + first;
#pragma unroll
    for (int r = 0; r < C::WARP_ROWS; r += 8) {
      body(stage_row + r, at, in_time && stage_row + r < count);
      at += 8 * d.length;
    }
  };
  auto fetch_stage = [&](int first, int which) {
    each_vector(first, [&](int r, int64_t at, bool real) {
      copy_async<16>(&stage.u[which][r][stage_vector], d.u + at, real);
      copy_async<16>(&stage.delta[which][r][stage_vector], d.delta + at, real);
      if (!WALK && d.z) copy_async<16>(&stage.gate[which][r][stage_vector], d.z + at, real);
    });
    commit_copies();
  };
  RowWords u[VECTORS], delta[VECTORS];
  auto load_rows = [&](unsigned turn) {
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      delta[v] = load_words<16>(&stage.delta[turn / 2 % 2][own][turn % 2 * VECTORS + v]);
      u[v] = load_words<16>(&stage.u[turn / 2 % 2][own][turn % 2 * VECTORS + v]);
    }
  };

  const int every = 1 << walk.every_log2;
  SpanMatrices<T, C, WALK ? 1 : 2> span;
  fetch_stage(0, 0);
  span.fetch(d, b, c, thread, 0, min(length, int{C::SPAN}));
  span.store(d, b, c, thread, 0, min(length, int{C::SPAN}), padded, matrices);
  wait_for_copies<0>();
  __syncthreads();
  if (GROUP < length) fetch_stage(GROUP, 1);
  load_rows(0);

  unsigned turn = 0;  // the number of the chunk, of which the last bits are wanted
  for (int tile = 0; tile < length; tile += S, ++turn) {
    A step[2][S], input[2][S], y[2][S];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      unpack<T>(delta[v], step[0] + v * ITEMS);
      unpack<T>(u[v], input[0] + v * ITEMS);
    }
#pragma unroll
    for (int i = 0; i < S; ++i) step[0][i] += bias;
    if (d.use_softplus) {
#pragma unroll
      for (int i = 0; i < S; ++i) step[0][i] = softplus<true>(step[0][i]);
    }
    const int left = there ? length - tile : 0;
    if (left < S) {
#pragma unroll
      for (int i = 0; i < S; ++i) step[0][i] = i < left ? step[0][i] : A(0);
    }
    // The first states, and their B and C, are on their way while rows are exchanged.
    StateEntry<A>* entry = entries + part * ENTRIES + own;
    const A* from = matrices + turn % (C::SPAN / S) * M::PITCH + part * M::ROW;
    StateEntry<A> next[K][2];
    A wide_b[K][4], wide_c[K][4];  // of the steps that are walked next
#pragma unroll
    for (int q = 0; q < K; ++q) {
      next[q][0] = entry[q * NEXT];
      next[q][1] = entry[q * NEXT + to_other];
      load_values(from + q * PARTS * M::ROW, wide_b[q]);
      if (!WALK) load_values(from + q * PARTS * M::ROW + M::KIND, wide_c[q]);
    }
#pragma unroll
    for (int i = 0; i < S; ++i) {
      y[0][i] = skip * input[0][i];
      input[0][i] *= step[0][i];
    }
#pragma unroll
    for (int i = 0; i < S; ++i) {
      step[1][i] = __shfl_xor_sync(WHOLE_WARP, step[0][i], 1);
      input[1][i] = __shfl_xor_sync(WHOLE_WARP, input[0][i], 1);
      y[1][i] = A(0);
    }

    // Decays are taken AHEAD steps before they are wanted, the first of a state while the one before it is walked.
    A factor[K][2][S];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
#pragma unroll
      for (int q = 0; q < K; ++q) {
#pragma unroll
        for (int j = 0; j < 2; ++j) factor[q][j][i] = exp2_fast(step[j][i] * next[q][j].decay);
      }
    }
    // Of this thread's first state and the first row of its two.
    A* mark =
        WALK ? walk.states + ((int64_t{tile} >> walk.every_log2) * d.states + part) * all_rows + first_row + lane - part
             : nullptr;
    bool due[S / MARK];
#pragma unroll
    for (int half = 0; half < S / MARK; ++half) {
      const int at = tile + half * MARK;
      due[half] = at < length && at % every == 0;
    }
    auto walk_states = [&]<bool MORE, bool PAIRED>(int n) {
      A state[K][2], own_decay[K][2], decay[K][2];
#pragma unroll
      for (int q = 0; q < K; ++q) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          state[q][j] = next[q][j].state;
          own_decay[q][j] = next[q][j].decay;
          if (MORE) next[q][j] = entry[(K + q) * NEXT + j * to_other];
          if (MORE) decay[q][j] = next[q][j].decay;
        }
      }
      auto keep = [&](int half) {
#pragma unroll
        for (int q = 0; q < K; ++q) {
          const bool real = due[half] && (PAIRED || n + q * PARTS < d.states);
          const bool rows[2] = {there && real, own + to_other < count && real};
          keep_states<PAIRED>(mark + half * d.states * all_rows + q * PARTS * all_rows, state[q], part, rows);
        }
      };
#pragma unroll
      for (int i = 0; i < S; i += 4) {
        if (WALK && i % MARK == 0) keep(i / MARK);
        A now_b[K][4], now_c[K][4];
#pragma unroll
        for (int q = 0; q < K; ++q) {
          const A* at = from + q * PARTS * M::ROW;
          const A* then = i + 4 < S ? at + i + 4 : at + K * PARTS * M::ROW;
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            now_b[q][k] = wide_b[q][k];
            now_c[q][k] = wide_c[q][k];
          }
          if (MORE || i + 4 < S) {
            load_values(then, wide_b[q]);
            if (!WALK) load_values(then + M::KIND, wide_c[q]);
          }
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          constexpr int LAST = S - AHEAD;
          const int now = i + k, later = now < LAST ? now + AHEAD : now - LAST;
#pragma unroll
          for (int q = 0; q < K; ++q) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              state[q][j] = fma(factor[q][j][now], state[q][j], input[j][now] * now_b[q][k]);
              if (!WALK) y[j][now] = fma(state[q][j], now_c[q][k], y[j][now]);
              if (now < LAST) {
                factor[q][j][later] = exp2_fast(step[j][later] * own_decay[q][j]);
              } else if (MORE) {
                factor[q][j][later] = exp2_fast(step[j][later] * decay[q][j]);
              }
            }
          }
        }
      }
#pragma unroll
      for (int q = 0; q < K; ++q) {
#pragma unroll
        for (int j = 0; j < 2; ++j) entry[q * NEXT + j * to_other].state = state[q][j];
      }
      entry += K * NEXT;
      from += K * PARTS * M::ROW;
      if (WALK) mark += K * PARTS * all_rows;
    };
    auto walk_all = [&]<bool PAIRED>() {
      int n = part;
#pragma unroll 1
      for (; n + W::ROUND < padded; n += W::ROUND) walk_states.template operator()<true, PAIRED>(n);
      walk_states.template operator()<false, PAIRED>(n);
    };
    if (WALK && !(all_rows % 2 == 0 && first_row % 2 == 0 && count % 2 == 0 && d.states == padded)) {
      walk_all.template operator()<false>();
    } else {
      walk_all.template operator()<true>();
    }

    // What the next chunk reads is asked for before this one's gate and stores.
    const bool more = tile + S < length, new_span = more && (turn + 1) % (C::SPAN / S) == 0;
    RowWords gate[VECTORS];
    if (!WALK && d.z) {
#pragma unroll
      for (int v = 0; v < VECTORS; ++v) {
        gate[v] = load_words<16>(&stage.gate[turn / 2 % 2][own][turn % 2 * VECTORS + v]);
      }
    }
    if (turn % 2 == 1 && more) {
      wait_for_copies<0>();
      __syncwarp();
      if (tile + S + GROUP < length) fetch_stage(tile + S + GROUP, turn / 2 % 2);
    }
    if (more) load_rows(turn + 1);
    const int span_steps = min(length - tile - S, int{C::SPAN});
    if (new_span) span.fetch(d, b, c, thread, tile + S, span_steps);
    if constexpr (!WALK) {
#pragma unroll
      for (int i = 0; i < S; ++i) y[0][i] += __shfl_xor_sync(WHOLE_WARP, y[1][i], 1);
#pragma unroll
      for (int v = 0; v < VECTORS; ++v) {
        if (d.z) {
          A gated[ITEMS];
          unpack<T>(gate[v], gated);
#pragma unroll
          for (int i = 0; i < ITEMS; ++i) y[0][v * ITEMS + i] *= silu<true>(gated[i]);
        }
        store_words(&stage.y[own][turn % 2 * VECTORS + v], pack<T, VECTOR_BYTES>(y[0] + v * ITEMS));
      }
      if (turn % 2 == 1 || !more) {
        __syncwarp();
        each_vector(tile - static_cast<int>(turn % 2) * S, [&](int r, int64_t at, bool real) {
          store_vector_if(real, y_out + at, load_words<16>(&stage.y[r][stage_vector]));
        });
        __syncwarp();  // before y is written again
      }
    }
    if (new_span) {
      __syncthreads();
      span.store(d, b, c, thread, tile + S, span_steps, padded, matrices);
      __syncthreads();
    }
  }

  if constexpr (!WALK) {
    __syncwarp();
    for (int i = lane; i < C::WARP_ROWS * d.states; i += 32) {
      const int r = i / d.states, n = i % d.states;
      if (r < count) final_state[(first_row + r) * d.states + n] = entries[n * ENTRIES + r].state;
    }
  }
}

}  // namespace opgraft::cuda
