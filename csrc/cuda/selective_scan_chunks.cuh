// What the kernels of selective_scan share that have chunks of time in registers: how a warp is cut, B and C in shared
// memory, and scans over lanes.
#pragma once

#include "cuda/selective_scan.cuh"

namespace opgraft::cuda {

inline constexpr int CHUNK_STEPS = 16;   // of a thread at once
inline constexpr int CHUNK_STATES = 16;  // whose B and C are in shared memory at once

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

// A state of a channel, between chunks.
template <typename A>
struct alignas(2 * sizeof(A)) StateEntry {
  A decay;
  A state;
};

// Keeps a thread's states of rows that follow each other, its own one first. PAIRED: of two rows, together.
template <bool PAIRED, int ROWS, typename A>
__device__ __forceinline__ void keep_states(A* to, const A (&state)[ROWS], int part, const bool (&there)[ROWS]) {
  if constexpr (PAIRED) {
    store_pair_if(there[0], to, part ? state[1] : state[0], part ? state[0] : state[1]);
  } else {
#pragma unroll
    for (int j = 0; j < ROWS; ++j) {
      if (there[j]) to[j ^ part] = state[j];
    }
  }
}

// B and C of SPAN steps of CHUNK_STATES states, [kind][state][step]. A lane's chunk is 4 words more than it holds, so
// that lanes that read 16 bytes at the same place of their chunks touch every bank once.
template <typename A, typename C>
struct ChunkMatrices {
  static constexpr int PITCH = CHUNK_STEPS + 4;
  static constexpr int PACKED = C::SPAN / CHUNK_STEPS * PITCH;
  // Threads that share channels read two states at the same place: not of the same banks.
  static constexpr int ROW = PACKED + (PACKED % 32 == 0 ? 4 : 0);
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

// A state's updates in a chunk, and what it is at the chunk's end when it begins as `value`.
template <typename A>
__device__ __forceinline__ A walk_chunk(const A* matrix, const A (&factor)[CHUNK_STEPS], const A (&input)[CHUNK_STEPS],
                                        A value, A (&update)[CHUNK_STEPS]) {
#pragma unroll
  for (int i = 0; i < CHUNK_STEPS; i += 4) {
    A wide[4];
    load_values(matrix + i, wide);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      update[i + k] = input[i + k] * wide[k];
      value = fma(factor[i + k], value, update[i + k]);
    }
  }
  return value;
}

// The value of the lane that is `by` chunks earlier (BACK: later); its own where there is none.
template <typename C, bool BACK, typename A>
__device__ __forceinline__ A from_lane(A value, int by) {
  static_assert(C::PARTS == 1);
  return BACK ? __shfl_down_sync(WHOLE_WARP, value, by, C::LANES) : __shfl_up_sync(WHOLE_WARP, value, by, C::LANES);
}

// What leaves each lane's chunk, from what leaves it when it starts from zero and the decay of the whole chunk, for
// several rows at once. BACK: time runs backwards over the lanes. `whole` of the lane where time begins is zero: what
// is before it is in its value already. So is then the product of every lane that has all of its past, and no step
// needs to know how many lanes there are before a lane.
template <typename C, bool BACK, int COUNT, typename A>
__device__ __forceinline__ void carry_over(A (&value)[COUNT], const A (&whole)[COUNT]) {
  A decay[COUNT];
#pragma unroll
  for (int j = 0; j < COUNT; ++j) decay[j] = whole[j];
#pragma unroll
  for (int by = 1; by < C::LANES; by *= 2) {
#pragma unroll
    for (int j = 0; j < COUNT; ++j) {
      value[j] = fma(decay[j], from_lane<C, BACK>(value[j], by), value[j]);
      if (2 * by < C::LANES) decay[j] *= from_lane<C, BACK>(decay[j], by);
    }
  }
}

}  // namespace opgraft::cuda
