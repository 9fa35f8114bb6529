// Cross entropy of long rows on Hopper and newer: every logit is read from memory once, its gradient is written once.
//
// A cluster of 1 to 8 blocks owns a row, each block a slice of it. A producer warp streams the slice through a ring of
// shared memory by bulk copies and runs ahead into the next rows, so that memory is busy while the row is summed up.
// The other warps take two turns over the slice: maximum and sum as the chunks arrive; then, when the cluster has
// agreed on the row, the gradient, from the chunks that are still there. Bytes: 2 * classes * sizeof(T) a row, the
// copy bound; classes * sizeof(T) where no gradient is wanted. Arithmetic an element: two exponentials and about 14
// other instructions, under half of what the copy rate leaves for 16-bit types. A slice that does not fit into the ring
// is streamed a second time, backwards, so that its end is found in L2.
#pragma once

#include "cuda/cross_entropy.cuh"
#include "support/hopper.h"

namespace opgraft::cuda {
namespace {

constexpr int MAX_CLUSTER = 8;
constexpr int MAX_SLOTS = 32;
constexpr int RING_THREADS = 256;
constexpr int RING_WARPS = RING_THREADS / 32;
// Vectors that a thread takes at once: their loads and exponentials overlap.
constexpr int BATCH = 4;

// How a launch cuts rows: vectors of 16 bytes a slice and a chunk, and the ring.
struct RingShape {
  int slice_vectors = 0;
  int chunk_vectors = 0;
  int chunks = 0;  // of a slice
  int slots = 0;
  int cluster = 1;
  bool held = true;  // the whole slice stays in the ring until its gradient is written
};

// What a block keeps beside the ring. `parts`: maximum, sum and the two sums for smoothing of every warp of the cluster,
// two sets in turn.
template <typename A>
struct RingState {
  uint64_t full[MAX_SLOTS];
  uint64_t empty[MAX_SLOTS];
  uint64_t gathered;
  A parts[2][4][RING_WARPS * MAX_CLUSTER];
};

constexpr int RING_STATE_BYTES = 5376;

#ifdef OPGRAFT_HOPPER

// Where a block's slice lies in a row. Vectors are counted from the 16-byte boundary at or before the row's first
// element, which is `phase` elements into the first vector.
template <typename T>
struct RowPlace {
  static constexpr int WIDTH = VECTOR_WIDTH<T>;

  const T* boundary;
  int phase;
  int vectors;  // of the row
  int begin;    // of the slice
  int count;

  __device__ __forceinline__ RowPlace(const T* row, int classes, const RingShape& shape, int rank) {
    phase = static_cast<int>(reinterpret_cast<uintptr_t>(row) % VECTOR_BYTES / sizeof(T));
    boundary = row - phase;
    vectors = (classes + phase + WIDTH - 1) / WIDTH;
    begin = rank * shape.slice_vectors;
    count = max(min(shape.slice_vectors, vectors - begin), 0);
  }

  __device__ __forceinline__ int chunk_count(const RingShape& shape, int chunk) const {
    return max(min(shape.chunk_vectors, count - chunk * shape.chunk_vectors), 0);
  }
};

// Position in the ring: the slot, and the parity of its barriers.
struct RingPosition {
  int slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance(int slots) {
    if (++slot == slots) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// The producer warp. Vectors that are only partly the row's are put together by hand, -infinity beside it.
template <typename T>
__device__ __forceinline__ void bring_chunk(const RowPlace<T>& place, int classes, int first, int count,
                                            Vector<T, VECTOR_WIDTH<T>>* slot, uint64_t* full, int lane) {
  constexpr int WIDTH = VECTOR_WIDTH<T>;
  int skipped = 0, whole = count;
  if (count > 0) {
    const bool partial_first = first == 0 && place.phase != 0;
    const bool partial_last = first + count == place.vectors && (classes + place.phase) % WIDTH != 0;
    if (partial_first || partial_last) {
      for (int edge = 0; edge < 2; ++edge) {
        const int vector = edge == 0 ? 0 : count - 1;
        if (lane < WIDTH && (edge == 0 ? partial_first : partial_last)) {
          const int64_t element = static_cast<int64_t>(first + vector) * WIDTH + lane;
          const int64_t column = element - place.phase;
          const bool inside = column >= 0 && column < classes;
          slot[vector].lane[lane] = inside ? place.boundary[element] : narrow<T>(-INFINITY);
        }
      }
      hopper::fence_shared_writes();
      skipped = partial_first;
      whole = max(count - skipped - partial_last, 0);
    }
  }
  __syncwarp();
  if (lane == 0) {
    const uint32_t bytes = static_cast<uint32_t>(whole) * VECTOR_BYTES;
    hopper::arrive_expecting(full, bytes);
    if (bytes != 0) {
      hopper::bulk_copy(slot + skipped, place.boundary + static_cast<int64_t>(first + skipped) * WIDTH, bytes, full);
    }
  }
}

// The sums of all warps of the cluster, in each of them and in a fixed order. Every warp tells every block. Two sets of
// places are used in turn: a warp that is a row ahead overwrites nothing that a slower one still reads.
template <typename A, bool GENERAL>
__device__ __forceinline__ RowSum<A, GENERAL> gather(RingState<A>& state, RowSum<A, GENERAL> own, int cluster, int rank,
                                                     uint32_t parity) {
  const int lane = threadIdx.x % 32;
  own = warp_merge(own);
  if (lane < cluster) {
    const int place = rank * RING_WARPS + threadIdx.x / 32;
    hopper::store_in_cluster(hopper::address_in(&state.parts[parity][0][place], lane), own.maximum);
    hopper::store_in_cluster(hopper::address_in(&state.parts[parity][1][place], lane), own.sum);
    if constexpr (GENERAL) {
      hopper::store_in_cluster(hopper::address_in(&state.parts[parity][2][place], lane), own.weighted);
      hopper::store_in_cluster(hopper::address_in(&state.parts[parity][3][place], lane), own.weights);
    }
    hopper::arrive_in_cluster(hopper::address_in(&state.gathered, lane));
  }
  hopper::wait_cluster(&state.gathered, parity);
  RowSum<A, GENERAL> row;
  for (int place = lane; place < cluster * RING_WARPS; place += 32) {
    RowSum<A, GENERAL> part;
    part.maximum = state.parts[parity][0][place];
    part.sum = state.parts[parity][1][place];
    if constexpr (GENERAL) {
      part.weighted = state.parts[parity][2][place];
      part.weights = state.parts[parity][3][place];
    }
    row.merge(part);
  }
  return warp_merge(row);
}

// The gradient of a chunk whose vectors lie in the output as they lie in shared memory.
template <bool GENERAL, typename T>
__device__ __forceinline__ void write_vectors(const CrossEntropyCall<T>& call,
                                              const RowGradient<DeviceAccumulate<T>>& gradient, T* boundary, int phase,
                                              const Vector<T, VECTOR_WIDTH<T>>* chunk, int first, int count) {
  using A = DeviceAccumulate<T>;
  constexpr int WIDTH = VECTOR_WIDTH<T>;
  using Pack = Vector<T, WIDTH>;
  const int classes = static_cast<int>(call.layout.classes);
  const int64_t target = gradient.target + phase;
  const int target_vector = gradient.target < 0 ? -1 : static_cast<int>(target / WIDTH);
  const int target_lane = static_cast<int>(target % WIDTH);
  for (int base = threadIdx.x; base < count; base += BATCH * RING_THREADS) {
    Pack packs[BATCH];
#pragma unroll
    for (int v = 0; v < BATCH; ++v) {
      if (base + v * RING_THREADS < count) packs[v] = chunk[base + v * RING_THREADS];
    }
#pragma unroll
    for (int v = 0; v < BATCH; ++v) {
      const int vector = first + base + v * RING_THREADS;
      if (base + v * RING_THREADS >= count) break;
      const int64_t column = static_cast<int64_t>(vector) * WIDTH - phase;
      A found[WIDTH];
      vector_gradient<GENERAL>(call, gradient, packs[v], column, vector == target_vector ? target_lane : -1, found);
      Pack pack = narrow_all<T, WIDTH>(found);
      if (gradient.zero) {
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) pack.lane[i] = narrow<T>(A(0));
      }
      if (column >= 0 && column + WIDTH <= classes) {
        __stcs(reinterpret_cast<uint4*>(boundary) + vector, *reinterpret_cast<const uint4*>(&pack));
      } else {
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
          if (column + i >= 0 && column + i < classes) boundary[static_cast<int64_t>(vector) * WIDTH + i] = pack.lane[i];
        }
      }
    }
  }
}

#endif

template <typename T, bool GRADIENT, bool GENERAL>
__global__ void __launch_bounds__(RING_THREADS + 32, 2)
    cross_entropy_ring(const __grid_constant__ CrossEntropyCall<T> call, const __grid_constant__ RingShape shape) {
#ifdef OPGRAFT_HOPPER
  using A = DeviceAccumulate<T>;
  constexpr int WIDTH = VECTOR_WIDTH<T>;
  using Pack = Vector<T, WIDTH>;
  extern __shared__ __align__(128) unsigned char memory[];
  static_assert(sizeof(RingState<A>) <= RING_STATE_BYTES);
  RingState<A>& state = *reinterpret_cast<RingState<A>*>(memory);
  Pack* const ring = reinterpret_cast<Pack*>(memory + RING_STATE_BYTES);

  const int rank = static_cast<int>(hopper::cluster_rank());
  const int classes = static_cast<int>(call.layout.classes);
  const int64_t first_row = blockIdx.x / shape.cluster;
  const int64_t step = gridDim.x / shape.cluster;
  const int lane = threadIdx.x % 32;
  const bool twice = GRADIENT && !shape.held;

  if (threadIdx.x == 0) {
    for (int slot = 0; slot < shape.slots; ++slot) {
      hopper::barrier_init(&state.full[slot], 1);
      hopper::barrier_init(&state.empty[slot], RING_WARPS);
    }
    hopper::barrier_init(&state.gathered, shape.cluster * RING_WARPS);
    hopper::fence_barrier_init();
  }
  if (shape.cluster > 1) {
    hopper::cluster_sync();
  } else {
    __syncthreads();
  }

  RingPosition at;
  if (threadIdx.x >= RING_THREADS) {
    for (int64_t row = first_row; row < call.layout.rows; row += step) {
      const RowPlace<T> place(call.logits + call.layout.begin(row), classes, shape, rank);
      const int turns = twice ? 2 * shape.chunks : shape.chunks;
      for (int turn = 0; turn < turns; ++turn) {
        const int chunk = turn < shape.chunks ? turn : 2 * shape.chunks - 1 - turn;
        hopper::wait(&state.empty[at.slot], at.parity ^ 1);
        bring_chunk(place, classes, place.begin + chunk * shape.chunk_vectors, place.chunk_count(shape, chunk),
                    ring + at.slot * shape.chunk_vectors, &state.full[at.slot], lane);
        at.advance(shape.slots);
      }
    }
    return;
  }

  uint32_t parity = 0;
  for (int64_t row = first_row; row < call.layout.rows; row += step, parity ^= 1) {
    const T* const begin = call.logits + call.layout.begin(row);
    const RowPlace<T> place(begin, classes, shape, rank);
    const int64_t target = call.target_of(row);
    A picked = A(0);
    if (rank == 0 && threadIdx.x == 0) picked = picked_of<GENERAL>(call, begin, target);

    RowSum<A, GENERAL> sum;
    const RingPosition start = at;
    for (int chunk = 0; chunk < shape.chunks; ++chunk) {
      const int count = place.chunk_count(shape, chunk);
      const Pack* const packs = ring + at.slot * shape.chunk_vectors;
      hopper::wait(&state.full[at.slot], at.parity);
      for (int base = threadIdx.x; base < count; base += BATCH * RING_THREADS) {
        Pack taken[BATCH];
#pragma unroll
        for (int v = 0; v < BATCH; ++v) {
          taken[v] = nothing<T, WIDTH>();
          if (base + v * RING_THREADS < count) taken[v] = packs[base + v * RING_THREADS];
        }
        const int64_t first = static_cast<int64_t>(place.begin + chunk * shape.chunk_vectors + base) * WIDTH;
        take<GENERAL>(call, sum, taken, first - place.phase, RING_THREADS * WIDTH);
      }
      if (!GRADIENT || twice) {
        __syncwarp();
        if (lane == 0) hopper::arrive(&state.empty[at.slot]);
      }
      at.advance(shape.slots);
    }
    sum = gather<A, GENERAL>(state, sum, shape.cluster, rank, parity);
    const A log_sum = log_of(sum.sum);
    if (rank == 0 && threadIdx.x == 0) store_row(call, row, target, sum, log_sum, picked);

    if constexpr (GRADIENT) {
      const RowGradient<A> gradient = row_gradient<GENERAL>(call, target, sum.maximum, log_sum, A(1), A(0));
      T* const out = call.gradient + row * call.layout.classes;
      const bool in_step = reinterpret_cast<uintptr_t>(out) % VECTOR_BYTES == place.phase * sizeof(T);
      RingPosition second = twice ? at : start;
      for (int turn = 0; turn < shape.chunks; ++turn) {
        const int chunk = twice ? shape.chunks - 1 - turn : turn;
        const int first = place.begin + chunk * shape.chunk_vectors;
        const int count = place.chunk_count(shape, chunk);
        const Pack* const packs = ring + second.slot * shape.chunk_vectors;
        if (twice) hopper::wait(&state.full[second.slot], second.parity);
        if (in_step) {
          write_vectors<GENERAL>(call, gradient, out - place.phase, place.phase, packs, first, count);
        } else if (count > 0) {
          const int64_t from = max(static_cast<int64_t>(first) * WIDTH - place.phase, int64_t(0));
          const int64_t to = min(static_cast<int64_t>(first + count) * WIDTH - place.phase, call.layout.classes);
          const T* const elements = reinterpret_cast<const T*>(packs) + (from + place.phase - int64_t(first) * WIDTH);
          write_gradient<GENERAL, RING_THREADS>(call, gradient, out, elements, from, static_cast<int>(to - from),
                                                static_cast<int>(threadIdx.x));
        }
        __syncwarp();
        if (lane == 0) hopper::arrive(&state.empty[second.slot]);
        second.advance(shape.slots);
      }
      if (twice) at = second;
    }
  }
#endif
}

}  // namespace
}  // namespace opgraft::cuda
