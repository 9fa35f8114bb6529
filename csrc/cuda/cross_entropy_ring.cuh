// Cross entropy of long rows on Hopper and newer: every logit is read from memory once, its gradient is written once.
//
// A cluster of 1 to 8 blocks owns a row, each block a slice of it. Three kinds of warps, none of which waits for
// another but through the ring: a producer streams slices through shared memory by bulk copies and runs ahead into the
// next rows; summing warps take maximum and sum as the chunks arrive, send them to all blocks of the cluster and go on
// to the next row; writing warps gather a row's sums and write its gradient from the chunks that are still there. So
// reads, arithmetic and writes of neighbouring rows overlap, and what the exchange takes is hidden. Bytes:
// 2 * classes * sizeof(T) a row, the copy bound; classes * sizeof(T) where no gradient is wanted, and one writing warp
// then. Arithmetic an element: two exponentials and about 14 other instructions, under half of what the copy rate
// leaves for 16-bit types. A slice that does not fit into the ring is streamed a second time, backwards, so that its
// end is found in L2.
#pragma once

#include <cstring>

#include "cuda/cross_entropy_gradient.cuh"
#include "cuda/cross_entropy_ring_state.cuh"

namespace opgraft::cuda {
namespace {

#ifdef OPGRAFT_HOPPER

template <typename T>
__device__ __forceinline__ T from_lane(T value, int lane) {
  if constexpr (sizeof(T) == 2) {
    unsigned short bits;
    memcpy(&bits, &value, sizeof(bits));
    bits = static_cast<unsigned short>(__shfl_sync(FULL_WARP, static_cast<unsigned>(bits), lane));
    memcpy(&value, &bits, sizeof(bits));
    return value;
  } else {
    return __shfl_sync(FULL_WARP, value, lane);
  }
}

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
        if (!(edge == 0 ? partial_first : partial_last)) continue;
        const int vector = edge == 0 ? 0 : count - 1;
        const int64_t element = static_cast<int64_t>(first + vector) * WIDTH + lane;
        const int64_t column = element - place.phase;
        const bool inside = lane < WIDTH && column >= 0 && column < classes;
        const T own = inside ? place.boundary[element] : narrow<T>(-INFINITY);
        // Written by the lane that tells of it.
        Vector<T, WIDTH> pack;
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) pack.lane[i] = from_lane(own, i);
        if (lane == 0) slot[vector] = pack;
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

// Walks vectors `thread`, `thread` + THREADS, ... below `count` in batches of COUNT, then of half as many, to one.
template <int COUNT, int THREADS, typename Body>
__device__ __forceinline__ void in_batches(int v, int count, const Body& body) {
  for (; v + (COUNT - 1) * THREADS < count; v += COUNT * THREADS) body(v, std::integral_constant<int, COUNT>{});
  if constexpr (COUNT > 1) {
    if (v < count) in_batches<COUNT / 2, THREADS>(v, count, body);
  }
}

// Vectors of a chunk that a thread has in hand at once: their loads and exponentials overlap.
template <bool GENERAL, int THREADS>
constexpr int RING_BATCH = GENERAL                       ? 1
                           : CHUNK_VECTORS / THREADS < 4 ? CHUNK_VECTORS / THREADS
                                                         : 4;

// The gradient of a chunk whose vectors lie in the output as they lie in shared memory. `first` counts the vectors of
// the row before it, and `boundary` is where the row's vector 0 goes. `thread` of THREADS does its share.
template <bool GENERAL, int THREADS, typename T>
__device__ __forceinline__ void write_vectors(const CrossEntropyCall<T>& call,
                                              const RowGradient<DeviceAccumulate<T>>& gradient, T* boundary,
                                              const RowPlace<T>& place, const Vector<T, VECTOR_WIDTH<T>>* chunk,
                                              int first, int count, int thread) {
  using A = DeviceAccumulate<T>;
  constexpr int WIDTH = VECTOR_WIDTH<T>;
  constexpr int BATCH = RING_BATCH<GENERAL, THREADS>;
  using Pack = Vector<T, WIDTH>;
  const int classes = static_cast<int>(call.layout.classes);
  Pack* const out = reinterpret_cast<Pack*>(boundary) + first;
  const auto store = [&](int v, Pack pack) {
    __stcs(reinterpret_cast<uint4*>(out + v), *reinterpret_cast<const uint4*>(&pack));
  };
  const auto column_of = [&](int v) { return static_cast<int64_t>(first + v) * WIDTH - place.phase; };
  const bool edges =
      (first == 0 && place.phase != 0) || (first + count == place.vectors && (classes + place.phase) % WIDTH != 0);
  if (edges || gradient.zero) {
    for (int v = thread; v < count; v += THREADS) {
      const int64_t column = column_of(v);
      if (column >= 0 && column + WIDTH <= classes) {
        store(v, gradient.zero ? all_of<T, WIDTH>(A(0)) : vector_gradient<GENERAL>(call, gradient, chunk[v], column));
        continue;
      }
      for (int i = 0; i < WIDTH; ++i) {
        if (column + i < 0 || column + i >= classes) continue;
        const A x = widen(chunk[v].lane[i]);
        const A found = element_gradient<GENERAL>(call, gradient, x, column + i, false);
        out[v].lane[i] = narrow<T>(gradient.zero ? A(0) : found);
      }
    }
  } else {
    in_batches<BATCH, THREADS>(thread, count, [&](int v, auto batch) {
      constexpr int COUNT = decltype(batch)::value;
      Pack packs[COUNT];
#pragma unroll
      for (int i = 0; i < COUNT; ++i) packs[i] = chunk[v + i * THREADS];
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        store(v + i * THREADS, vector_gradient<GENERAL>(call, gradient, packs[i], column_of(v + i * THREADS)));
      }
    });
  }
  // The target's element once more, by the thread that has written its vector.
  const int64_t at = gradient.target + place.phase - static_cast<int64_t>(first) * WIDTH;
  if (gradient.target >= 0 && at >= 0 && at < static_cast<int64_t>(count) * WIDTH && at / WIDTH % THREADS == thread) {
    const A x = widen(reinterpret_cast<const T*>(chunk)[at]);
    reinterpret_cast<T*>(out)[at] = narrow<T>(element_gradient<GENERAL>(call, gradient, x, gradient.target, true));
  }
}

// The producer warp of a block. That of the cluster's first block also gives out rows, the next one to whoever is ready
// first: the memory does not serve all multiprocessors alike, and rows dealt out beforehand wait for the slowest.
template <typename T>
__device__ __forceinline__ void bring_rows(const CrossEntropyCall<T>& call, const RingShape& shape, bool twice,
                                           Vector<T, VECTOR_WIDTH<T>>* ring, RingState<DeviceAccumulate<T>>& state,
                                           int rank) {
  const int classes = static_cast<int>(call.layout.classes);
  const int lane = threadIdx.x % 32;
  const int64_t clusters = gridDim.x / shape.cluster;
  const int turns = twice ? 2 * shape.chunks : shape.chunks;
  // Of few rows nothing comes before this kernel but the one that made the logits.
  if (call.measures_itself) wait_for_the_kernel_before();
  RingPosition at;
  for (int number = 0;; ++number) {
    const int64_t row = row_of_turn(call, state, shape.cluster, number);
    if (row >= call.layout.rows) break;
    const RowPlace<T> place(call.logits + call.layout.begin(row), classes, shape, rank);
    const bool more = call.layout.rows > clusters;
    if (more && lane == 0) expect_row(state, shape.cluster, number);
    for (int turn = 0; turn < turns; ++turn) {
      const int chunk = turn < shape.chunks ? turn : 2 * shape.chunks - 1 - turn;
      hopper::wait(&state.empty[at.slot], at.parity ^ 1);
      bring_chunk(place, classes, place.begin + chunk * shape.chunk_vectors, place.chunk_count(shape, chunk),
                  ring + at.slot * shape.chunk_vectors, &state.full[at.slot], lane);
      hopper::arrive(&state.empty[at.slot]);
      at.advance(shape.slots);
      if (turn == 0 && rank == 0 && more) {
        // The count was set to zero by the kernel before.
        if (number == 0) wait_for_the_kernel_before();
        int64_t next = 0;
        if (lane == 0) next = clusters + static_cast<int64_t>(atomicAdd(call.taken, 1ull));
        next = __shfl_sync(FULL_WARP, next, 0);
        announce(state, next, shape.cluster, number + 1);
      }
    }
  }
}

// The summing warps.
template <typename T, bool GENERAL, int WARPS, typename A = DeviceAccumulate<T>>
__device__ __forceinline__ void sum_rows(const CrossEntropyCall<T>& call, const RingShape& shape, bool twice,
                                         const Vector<T, VECTOR_WIDTH<T>>* ring, RingState<A>& state, int rank) {
  constexpr int WIDTH = VECTOR_WIDTH<T>;
  constexpr int THREADS = WARPS * 32;
  using Pack = Vector<T, WIDTH>;
  const int classes = static_cast<int>(call.layout.classes);
  RingPosition at;
  for (int turn = 0;; ++turn) {
    const int64_t row = row_of_turn(call, state, shape.cluster, turn);
    if (row >= call.layout.rows) break;
    const RowPlace<T> place(call.logits + call.layout.begin(row), classes, shape, rank);
    RowSum<A, GENERAL> sum;
    for (int chunk = 0; chunk < shape.chunks; ++chunk) {
      const int count = place.chunk_count(shape, chunk);
      const Pack* const packs = ring + at.slot * shape.chunk_vectors;
      hopper::wait(&state.full[at.slot], at.parity);
      const int64_t first = static_cast<int64_t>(place.begin + chunk * shape.chunk_vectors) * WIDTH - place.phase;
      in_batches<RING_BATCH<GENERAL, THREADS>, THREADS>(static_cast<int>(threadIdx.x), count, [&](int v, auto batch) {
        constexpr int COUNT = decltype(batch)::value;
        Pack taken[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; ++i) taken[i] = packs[v + i * THREADS];
        take<GENERAL>(call, sum, taken, first + v * WIDTH, THREADS * WIDTH);
      });
      done_with(&state.empty[at.slot]);
      at.advance(shape.slots);
    }
    send_sums<A, GENERAL, WARPS>(state, sum, shape.cluster, rank, turn);
    if (twice) {
      // The second pass over the row goes through the same slots: barriers tell apart but two rounds of a slot, so the
      // next row waits until it is over.
      hopper::wait(&state.read[turn % ROWS_AHEAD], turn / ROWS_AHEAD % 2);
      at.skip(shape.chunks, shape.slots);
    }
  }
}

// The writing warps: a row's loss, and its gradient where one is wanted. `thread` counts them alone.
template <typename T, bool GRADIENT, bool GENERAL, int WARPS, typename A = DeviceAccumulate<T>>
__device__ __forceinline__ void write_rows(const CrossEntropyCall<T>& call, const RingShape& shape, bool twice,
                                           const Vector<T, VECTOR_WIDTH<T>>* ring, RingState<A>& state, int rank,
                                           int thread) {
  constexpr int WIDTH = VECTOR_WIDTH<T>;
  constexpr int THREADS = WARPS * 32;
  using Pack = Vector<T, WIDTH>;
  const int classes = static_cast<int>(call.layout.classes);
  RingPosition at;
  for (int turn = 0;; ++turn) {
    const int64_t row = row_of_turn(call, state, shape.cluster, turn);
    if (row >= call.layout.rows) break;
    const T* const begin = call.logits + call.layout.begin(row);
    const int64_t target = call.target_of(row);
    A picked = A(0);
    if (rank == 0 && thread == 0) picked = picked_of<GENERAL>(call, begin, target);
    const RowSum<A, GENERAL> sum = gather_sums<A, GENERAL, WARPS>(state, shape.cluster, turn);
    if (!twice) release_sums(state, turn);
    const A log_sum = log_of(sum.sum);
    if (rank == 0 && thread == 0) store_row(call, row, target, sum, log_sum, picked);
    if constexpr (GRADIENT) {
      const RowPlace<T> place(begin, classes, shape, rank);
      const RowGradient<A> gradient = row_gradient<GENERAL>(call, target, sum.maximum, log_sum, A(1), A(0));
      T* const out = call.gradient + row * call.layout.classes;
      const bool in_step = reinterpret_cast<uintptr_t>(out) % VECTOR_BYTES == place.phase * sizeof(T);
      if (twice) at.skip(shape.chunks, shape.slots);
      for (int i = 0; i < shape.chunks; ++i) {
        const int chunk = twice ? shape.chunks - 1 - i : i;
        const int first = place.begin + chunk * shape.chunk_vectors;
        const int count = place.chunk_count(shape, chunk);
        const Pack* const packs = ring + at.slot * shape.chunk_vectors;
        hopper::wait(&state.full[at.slot], at.parity);
        if (in_step) {
          write_vectors<GENERAL, THREADS>(call, gradient, out - place.phase, place, packs, first, count, thread);
        } else if (count > 0) {
          const int64_t from = max(static_cast<int64_t>(first) * WIDTH - place.phase, int64_t(0));
          const int64_t to = min(static_cast<int64_t>(first + count) * WIDTH - place.phase, call.layout.classes);
          const T* const elements = reinterpret_cast<const T*>(packs) + (from + place.phase - int64_t(first) * WIDTH);
          write_gradient<GENERAL, THREADS>(call, gradient, out, elements, from, static_cast<int>(to - from), thread);
        }
        done_with(&state.empty[at.slot]);
        at.advance(shape.slots);
      }
    }
    if (twice) release_sums(state, turn);
  }
}

#endif

template <typename T, bool GRADIENT, bool GENERAL, int WARPS>
__global__ void __launch_bounds__(ring_threads(WARPS, GRADIENT), GRADIENT ? 2 : 3)
    cross_entropy_ring(const __grid_constant__ CrossEntropyCall<T> call, const __grid_constant__ RingShape shape) {
#ifdef OPGRAFT_HOPPER
  using A = DeviceAccumulate<T>;
  using Pack = Vector<T, VECTOR_WIDTH<T>>;
  constexpr int WRITERS = GRADIENT ? WARPS : 1;
  extern __shared__ __align__(128) unsigned char memory[];
  RingState<A>& state = *reinterpret_cast<RingState<A>*>(memory);
  Pack* const ring = reinterpret_cast<Pack*>(memory + RING_STATE_BYTES<T>);
  const int rank = static_cast<int>(hopper::cluster_rank());
  const int warp = threadIdx.x / 32;
  const bool twice = GRADIENT && !shape.held;

  // Both kinds of warps read a chunk, but where the row is brought twice: then one kind does, and both are as many.
  const int readers = GRADIENT && !twice ? WARPS + WRITERS : WARPS;
  const int starts = static_cast<int>(threadIdx.x);
  if (starts < shape.slots) {
    hopper::barrier_init(&state.full[starts], 1);
    hopper::barrier_init(&state.empty[starts], 32 * (readers + 1));
  }
  if (starts < SUM_SETS) hopper::barrier_init(&state.gathered[starts], gathering_arrivals<WARPS>(shape.cluster));
  if (starts < ROWS_AHEAD) hopper::barrier_init(&state.read[starts], 32 * WRITERS);
  if (starts < ROWS_ANNOUNCED) hopper::barrier_init(&state.announced[starts], 1);
  hopper::fence_barrier_init();
  if (shape.cluster > 1) {
    hopper::cluster_sync();
  } else {
    __syncthreads();
  }
  let_the_next_kernel_start();

  if (warp < WARPS) {
    sum_rows<T, GENERAL, WARPS>(call, shape, twice, ring, state, rank);
  } else if (warp < WARPS + WRITERS) {
    // Logits are older than the kernel before this one, but for few rows; else only `scales` may be its work.
    wait_for_the_kernel_before();
    CrossEntropyCall<T> measured = call;
    if (call.measures_itself) measured.scales = measure_few_targets(call, state.scales[warp - WARPS]);
    write_rows<T, GRADIENT, GENERAL, WARPS>(measured, shape, twice, ring, state, rank,
                                            static_cast<int>(threadIdx.x) - WARPS * 32);
  } else {
    bring_rows<T>(call, shape, twice, ring, state, rank);
  }
#endif
}

}  // namespace
}  // namespace opgraft::cuda
