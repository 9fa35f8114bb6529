// The forward kernel of selective_scan for many channels of 16-bit types, whose rows come and go as boxes: see
// selective_scan.cu for how it works and what it costs.
//
// Nothing but the walk costs much then. A thread walks its eight states one after the other in straight code, 16 steps
// of two channels each: a state's exponentials are taken four steps ahead, gates while the last state is walked. A box
// of 32 rows and two chunks is asked for a chunk before it is wanted, and so is the one of y stored.
//
// Of the two warps that a scheduler has, one has the exponential unit for itself while the other does what is done once
// a step, and so on in turns: a warp hands over after `handover` of its eight states.
#pragma once

#include "cuda/selective_scan.h"
#include "cuda/selective_scan_chunks.cuh"
#include "support/boxes.h"

namespace opgraft::cuda {

struct ScanBoxes {
  CUtensorMap u, delta, gate, y;
};

// Rows of a warp, two chunks long. y takes the place of the gate.
struct alignas(512) RowBoxes {
  static constexpr int STEPS = 2 * CHUNK_STEPS, VECTORS = STEPS * 2 / VECTOR_BYTES;
  static constexpr int BYTES = 32 * VECTORS * VECTOR_BYTES;
  RowWords u[2][32 * VECTORS], delta[2][32 * VECTORS], gate[2][32 * VECTORS];
};

// B and C of a span on their way into shared memory: copies of vectors, in which each thread finds again what it asked
// for, and makes floats of it when all are done with the span before.
template <typename T, typename C, int KINDS>
struct StagedMatrices {
  using M = ChunkMatrices<float, C>;
  static constexpr int ITEMS = VECTOR_WIDTH<T>;
  static constexpr int COUNT = CHUNK_STATES * C::SPAN / ITEMS / C::THREADS;  // vectors of a thread and kind
  static constexpr int ACROSS = C::SPAN / ITEMS, LINES = C::THREADS / ACROSS;
  static_assert(COUNT * C::THREADS * ITEMS == CHUNK_STATES * C::SPAN && LINES * ACROSS == C::THREADS);
  RowWords words[KINDS * COUNT * C::THREADS];

  struct Place {
    int state, step;
  };
  static __device__ __forceinline__ Place place(bool along_steps, int thread, int i) {
    constexpr int VECTORS = CHUNK_STATES / ITEMS;
    if (along_steps) return {thread / ACROSS + i * LINES, thread % ACROSS * ITEMS};
    const int at = thread + i * C::THREADS;
    return {at % VECTORS * ITEMS, at / VECTORS};
  }

  __device__ __forceinline__ void fetch(const ScanData<T>& d, const T* b, const T* c, int thread, int64_t span) {
    const bool along_steps = d.access == MatrixAccess::ALONG_STEPS;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const Place p = place(along_steps, thread, i);
      const bool there = p.state < d.states && span + p.step < d.length;
#pragma unroll
      for (int kind = 0; kind < KINDS; ++kind) {
        const MatrixStrides& s = kind ? d.c_strides : d.b_strides;
        copy_async<16>(&words[(i * KINDS + kind) * C::THREADS + thread],
                       (kind ? c : b) + p.state * s.state + (span + p.step) * s.step, there);
      }
    }
    commit_copies();
  }

  __device__ __forceinline__ void spread(const ScanData<T>& d, int thread, float* matrices) const {
    const bool along_steps = d.access == MatrixAccess::ALONG_STEPS;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const Place p = place(along_steps, thread, i);
#pragma unroll
      for (int kind = 0; kind < KINDS; ++kind) {
        float wide[ITEMS];
        unpack<T>(words[(i * KINDS + kind) * C::THREADS + thread], wide);
        float* to = matrices + kind * M::KIND + p.state * M::ROW + M::place(p.step);
        if (along_steps) {
          store_values(to, wide);
        } else {
#pragma unroll
          for (int k = 0; k < ITEMS; ++k) to[k * M::ROW] = wide[k];
        }
      }
    }
  }
};

// Kept states of a warp's 32 rows stand together: [mark][block][warp][state][row].
inline constexpr int MARKED_STATES = CHUNK_STATES * 32;

template <typename T, typename C, bool WALK>
struct BoxShared {
  using M = ChunkMatrices<float, C>;
  static constexpr int ENTRIES = C::WARP_ROWS + 8;  // of a state: two parts meet all banks
  RowBoxes rows[C::WARPS];
  float matrices[(WALK ? 1 : 2) * M::KIND];
  StagedMatrices<T, C, WALK ? 1 : 2> staged;
  StateEntry<float> entries[C::WARPS][CHUNK_STATES][ENTRIES];
  BoxBarrier barriers[C::WARPS][2];
};

// Named barriers of a block: 0 is __syncthreads'.
__device__ __forceinline__ void meet(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// WALK: states only, kept before every eighth step; else outputs are written. HALVES: 2 where a block does the work of
// two, whose warps take turns. There are CHUNK_STATES states or fewer, softplus, a gate, and whole vectors of steps.
template <typename T, typename C, bool WALK, int HALVES>
__global__ void __launch_bounds__(HALVES* C::THREADS, C::BLOCKS / HALVES)
    scan_boxes(ScanData<T> d, const __grid_constant__ ScanBoxes boxes, float* __restrict__ marks_out,
               float* __restrict__ final_state) {
  using A = float;
  using M = ChunkMatrices<A, C>;
  using Shared = BoxShared<T, C, WALK>;
  constexpr int S = CHUNK_STEPS, ITEMS = VECTOR_WIDTH<T>, VECTORS = S / ITEMS, PER_SPAN = C::SPAN / S;
  constexpr int PARTS = C::PARTS, STATES = CHUNK_STATES / PARTS;  // of a thread
  constexpr int AHEAD = 4, HANDOVER = WALK ? 4 : 5, MARK = 8;
  constexpr int NEXT = PARTS * Shared::ENTRIES;  // from a thread's state to its next one
  static_assert(sizeof(T) == 2 && C::LANES == 1 && C::ROWS == 2 && PARTS == 2 && C::WARP_ROWS == 32);
  extern __shared__ __align__(1024) unsigned char memory[];
  const int threads = thread_index(), half = HALVES > 1 ? uniform(threads / C::THREADS) : 0;
  const int thread = threads - half * C::THREADS, warp = uniform(thread / 32), lane = thread % 32, part = lane % PARTS;
  Shared& shared = reinterpret_cast<Shared*>(memory)[half];
  RowBoxes& rows = shared.rows[warp];
  A* matrices = shared.matrices;
  auto all_meet = [&]() { HALVES > 1 ? meet(1 + half, C::THREADS) : __syncthreads(); };
  // A warp's turn, and that of the one it takes turns with.
  const int own_turn = 1 + HALVES + half * C::WARPS + warp, other_turn = 1 + HALVES + (half ^ 1) * C::WARPS + warp;

  const int64_t index = int64_t{blockIdx.x} * HALVES + half;
  const BlockPlace place = block_place(d, C::CHANNELS, index);
  const int count = place.count - warp * C::WARP_ROWS;  // rows of this warp that are there
  const int64_t channel = place.channel + warp * C::WARP_ROWS;
  const int64_t first_row = place.batch * d.channels + channel;
  const int box_row = static_cast<int>(channel - place.group * d.per_group());
  const int box_set = static_cast<int>(place.batch * d.groups + place.group);
  const T* b = d.b + place.batch * d.b_strides.batch + place.group * d.b_strides.group;
  const T* c = d.c + place.batch * d.c_strides.batch + place.group * d.c_strides.group;

  for (int i = lane; i < C::WARP_ROWS * CHUNK_STATES; i += 32) {
    const int r = i % C::WARP_ROWS, n = i / C::WARP_ROWS;
    const bool real = r < count && n < d.states;
    shared.entries[warp][n][r] = {real ? d.a[(channel + r) * d.states + n] * A(LOG2_E) : A(0),
                                  real && d.initial ? d.initial[(first_row + r) * d.states + n] : A(0)};
  }
  // A thread walks the row that it reads and writes and, second, its neighbour's.
  const int own = lane, to_other = part ? -1 : 1;
  const A bias = d.bias && own < count ? d.bias[channel + own] : A(0);
  const A skip = d.skip && own < count ? d.skip[channel + own] : A(0);

  const bool leader = elected();
  if (leader) {
    shared.barriers[warp][0].init();
    shared.barriers[warp][1].init();
    BoxBarrier::publish();
  }
  __syncwarp();
  const int length = static_cast<int>(d.length), turns = (length + S - 1) / S;
  // A group of two chunks: its boxes and its barrier are those of its parity.
  auto fetch_rows = [&](int group) {
    if (!leader) return;
    const int which = group % 2, step = group * RowBoxes::STEPS;
    BoxBarrier& done = shared.barriers[warp][which];
    if (!WALK) wait_for_stored_boxes();
    done.expect((WALK ? 2 : 3) * RowBoxes::BYTES);
    load_box(rows.u[which], boxes.u, step, box_row, box_set, done);
    load_box(rows.delta[which], boxes.delta, step, box_row, box_set, done);
    if (!WALK) load_box(rows.gate[which], boxes.gate, step, box_row, box_set, done);
  };
  RowWords u[VECTORS], delta[VECTORS];
  auto load_rows = [&](int turn) {
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      delta[v] = rows.delta[turn / 2 % 2][swizzled(own, turn % 2 * VECTORS + v)];
      u[v] = rows.u[turn / 2 % 2][swizzled(own, turn % 2 * VECTORS + v)];
    }
  };

  fetch_rows(0);
  shared.staged.fetch(d, b, c, thread, 0);
  wait_for_copies<0>();
  shared.staged.spread(d, thread, matrices);
  all_meet();
  shared.barriers[warp][0].wait(0);
  load_rows(0);
  if (HALVES > 1 && half) arrive(other_turn, 64);
  A* marks = WALK ? marks_out + (index * C::WARPS + warp) * MARKED_STATES + part * 32 + lane - part : nullptr;
  const int64_t mark_stride = int64_t{gridDim.x} * HALVES * C::WARPS * MARKED_STATES;

#pragma unroll 1
  for (int turn = 0; turn < turns; ++turn) {
    const int group = turn / 2, which = group % 2;
    if (turn % 2 == 1) {
      __syncwarp();  // all have read what the group before this one brought
      if (turn + 1 < turns) fetch_rows(group + 1);
      if (turn % PER_SPAN == 1 && turn + PER_SPAN - 1 < turns) {
        shared.staged.fetch(d, b, c, thread, (turn / PER_SPAN + 1) * int64_t{C::SPAN});
      }
    }
    if (turn % PER_SPAN == 0 && turn > 0) {
      wait_for_copies<0>();
      all_meet();
      shared.staged.spread(d, thread, matrices);
      all_meet();
    }
    A step[2][S], input[2][S], y[2][S];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      unpack<T>(delta[v], step[0] + v * ITEMS);
      unpack<T>(u[v], input[0] + v * ITEMS);
    }
#pragma unroll
    for (int i = 0; i < S; ++i) step[0][i] = softplus<true>(step[0][i] + bias);
    // The end of time is that of a vector. No branch: what comes first is done while the first state is walked.
    const bool whole = length - turn * S >= S;
#pragma unroll
    for (int i = ITEMS; i < S; ++i) step[0][i] = whole ? step[0][i] : A(0);
    // The first state, and its B and C, are on their way while rows are exchanged.
    StateEntry<A>* entry = &shared.entries[warp][part][own];
    const A* from = matrices + turn % PER_SPAN * M::PITCH + part * M::ROW;
    StateEntry<A> next[2] = {entry[0], entry[to_other]};
    A wide_b[4], wide_c[4];  // of the steps that are walked next
    load_values(from, wide_b);
    if (!WALK) load_values(from + M::KIND, wide_c);
#pragma unroll
    for (int i = 0; i < S; ++i) {
      y[0][i] = skip * input[0][i];
      y[1][i] = A(0);
      input[0][i] *= step[0][i];
      step[1][i] = __shfl_xor_sync(WHOLE_WARP, step[0][i], 1);
      input[1][i] = __shfl_xor_sync(WHOLE_WARP, input[0][i], 1);
    }
    if (HALVES > 1) meet(own_turn, 64);

    A factor[2][S];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) factor[j][i] = exp2_fast(step[j][i] * next[j].decay);
    }
    A* mark = marks;
    auto walk_state = [&]<bool MORE>() {
      A state[2], decay[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        state[j] = next[j].state;
        decay[j] = next[j].decay;
        if (MORE) next[j] = entry[NEXT + j * to_other];
      }
#pragma unroll
      for (int i = 0; i < S; i += 4) {
        if (WALK && i % MARK == 0) {
          store_pair_if(turn * S + i < length, mark + i / MARK * mark_stride, part ? state[1] : state[0],
                        part ? state[0] : state[1]);
        }
        A now_b[4], now_c[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          now_b[k] = wide_b[k];
          now_c[k] = wide_c[k];
        }
        if (MORE || i + 4 < S) {
          const A* then = i + 4 < S ? from + i + 4 : from + PARTS * M::ROW;
          load_values(then, wide_b);
          if (!WALK) load_values(then + M::KIND, wide_c);
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          constexpr int LAST = S - AHEAD;
          const int now = i + k, later = now < LAST ? now + AHEAD : now - LAST;
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            state[j] = fma(factor[j][now], state[j], input[j][now] * now_b[k]);
            if (!WALK) y[j][now] = fma(state[j], now_c[k], y[j][now]);
            if (now < LAST) {
              factor[j][later] = exp2_fast(step[j][later] * decay[j]);
            } else if (MORE) {
              factor[j][later] = exp2_fast(step[j][later] * next[j].decay);
            }
          }
        }
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) entry[j * to_other].state = state[j];
      entry += NEXT;
      from += PARTS * M::ROW;
      mark += PARTS * 32;
    };
#pragma unroll
    for (int n = 1; n < STATES; ++n) {
      walk_state.template operator()<true>();
      if (HALVES > 1 && n == HANDOVER && (half == 0 || turn + 1 < turns)) arrive(other_turn, 64);
    }
    A gate[S];
    if (!WALK) {
#pragma unroll
      for (int v = 0; v < VECTORS; ++v) {
        unpack<T>(rows.gate[which][swizzled(own, turn % 2 * VECTORS + v)], gate + v * ITEMS);
      }
#pragma unroll
      for (int i = 0; i < S; ++i) gate[i] = silu<true>(gate[i]);
    }
    walk_state.template operator()<false>();
    if (WALK) marks += S / MARK * mark_stride;

    if constexpr (!WALK) {
#pragma unroll
      for (int i = 0; i < S; ++i) y[0][i] = (y[0][i] + __shfl_xor_sync(WHOLE_WARP, y[1][i], 1)) * gate[i];
#pragma unroll
      for (int v = 0; v < VECTORS; ++v) {
        rows.gate[which][swizzled(own, turn % 2 * VECTORS + v)] = pack<T, VECTOR_BYTES>(y[0] + v * ITEMS);
      }
      if (turn % 2 == 1 || turn + 1 == turns) {
        show_to_boxes();
        __syncwarp();
        if (leader) store_box(boxes.y, group * RowBoxes::STEPS, box_row, box_set, rows.gate[which]);
      }
    }
    if (turn % 2 == 1 && turn + 1 < turns) shared.barriers[warp][which ^ 1].wait((group + 1) / 2);
    load_rows(turn + 1);  // behind the end, of nothing that is used
  }

  if constexpr (!WALK) {
    if (leader) wait_for_stored_boxes();
    __syncwarp();
    for (int i = lane; i < C::WARP_ROWS * d.states; i += 32) {
      const int r = i / d.states, n = i % d.states;
      if (r < count) final_state[(first_row + r) * d.states + n] = shared.entries[warp][n][r].state;
    }
  }
}

}  // namespace opgraft::cuda
