// Cross entropy of long rows on Hopper and newer (cross_entropy_ring.cuh): how rows are cut, what a block keeps beside
// its ring, and what the blocks of a cluster tell one another: the next row, and a row's sums.
#pragma once

#include "cuda/cross_entropy.cuh"
#include "support/hopper.h"
#include "support/overlap.h"

namespace opgraft::cuda {
namespace {

constexpr int MAX_CLUSTER = 8;
constexpr int MAX_SLOTS = 32;
// Vectors of a chunk: with 16 bytes each, 16 KiB.
constexpr int CHUNK_VECTORS = 1024;
// Warps of the largest block that sum up a row.
constexpr int MAX_WARPS = 4;
// Rows that summing warps may be ahead of the writing warps of their block. A block's writing warps need the sums of
// all blocks, so no block is further ahead of any other's writing warps than twice that: so many places for sums.
constexpr int ROWS_AHEAD = 4;
constexpr int SUM_SETS = 2 * ROWS_AHEAD;
// Rows that are announced to the warps of a block before the last of them has asked for its number. The producer is
// ahead of the summing warps by what the ring holds, MAX_SLOTS rows, those by ROWS_AHEAD of the writing warps, and the
// blocks of a cluster by as much of one another.
constexpr int ROWS_ANNOUNCED = 64;

// How a launch cuts rows: vectors of 16 bytes a slice and a chunk, and the ring.
struct RingShape {
  int slice_vectors = 0;
  int chunk_vectors = 0;
  int chunks = 0;  // of a slice
  int slots = 0;
  int cluster = 1;
  bool held = true;  // the whole slice stays in the ring until its gradient is written
};

// What a block keeps beside the ring. `parts`: maximum, sum and the two sums for smoothing of every summing warp of the
// cluster, a set for every row in turn. `gathered`: a set is complete. `read`: it has been read, by all writing warps.
template <typename A>
struct RingState {
  uint64_t full[MAX_SLOTS];
  uint64_t empty[MAX_SLOTS];
  uint64_t gathered[SUM_SETS];
  uint64_t read[ROWS_AHEAD];
  uint64_t announced[ROWS_ANNOUNCED];
  int64_t rows[ROWS_ANNOUNCED];
  A parts[SUM_SETS][4][MAX_WARPS * MAX_CLUSTER];
  A scales[MAX_WARPS][SCALES];  // few rows: what each writing warp has found itself
};

template <typename T>
constexpr int64_t RING_STATE_BYTES = (sizeof(RingState<DeviceAccumulate<T>>) + 127) / 128 * 128;

// A producer beside the summing warps, and as many writing warps as summing ones, or one where no gradient is written.
constexpr int ring_threads(int warps, bool gradient) { return 32 * (1 + warps + (gradient ? warps : 1)); }

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

// By a warp that has read what the barrier guards. Every lane arrives, so that racecheck sees each in order with the
// producer's, which arrive as well; one lane after __syncwarp would do, and takes as long.
__device__ __forceinline__ void done_with(uint64_t* barrier) {
  __syncwarp();
  hopper::arrive(barrier);
}

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
  __device__ __forceinline__ void skip(int chunks, int slots) {
    slot += chunks;
    while (slot >= slots) {
      slot -= slots;
      parity ^= 1;
    }
  }
};

// The row that is a cluster's number `turn`; none is left where it is not below the number of rows. The first one needs
// no announcement, nor does the end where no cluster has a second one: few rows, each with a cluster of its own, wait
// for nothing.
template <typename T>
__device__ __forceinline__ int64_t row_of_turn(const CrossEntropyCall<T>& call, RingState<DeviceAccumulate<T>>& state,
                                               int cluster, int turn) {
  if (turn == 0) return blockIdx.x / cluster;
  if (call.layout.rows <= gridDim.x / cluster) return call.layout.rows;
  const int place = (turn - 1) % ROWS_ANNOUNCED;
  hopper::wait(&state.announced[place], (turn - 1) / ROWS_ANNOUNCED % 2);
  return state.rows[place];
}

// Before a block's producer asks for its next row: its number will come from the cluster's first block.
template <typename A>
__device__ __forceinline__ void expect_row(RingState<A>& state, int cluster, int turn) {
  if (cluster > 1) hopper::arrive_expecting(&state.announced[turn % ROWS_ANNOUNCED], sizeof(int64_t));
}

// By the producer warp of the cluster's first block.
template <typename A>
__device__ __forceinline__ void announce(RingState<A>& state, int64_t row, int cluster, int turn) {
  const int lane = threadIdx.x % 32;
  const int place = (turn - 1) % ROWS_ANNOUNCED;
  if (lane >= cluster) return;
  if (cluster > 1) {
    hopper::send(hopper::address_in(&state.rows[place], lane), row, hopper::address_in(&state.announced[place], lane));
  } else {
    state.rows[place] = row;
    hopper::arrive(&state.announced[place]);
  }
}

// Arrivals that complete a set of sums: a block alone keeps its own, where no other is written to.
template <int WARPS>
__device__ __forceinline__ int gathering_arrivals(int cluster) {
  return cluster > 1 ? 1 : WARPS;
}

// A summing warp tells every block of the cluster its sums of the row that is number `turn`.
template <typename A, bool GENERAL, int WARPS>
__device__ __forceinline__ void send_sums(RingState<A>& state, RowSum<A, GENERAL> own, int cluster, int rank,
                                          int turn) {
  constexpr int NUMBERS = GENERAL ? 4 : 2;
  const int lane = threadIdx.x % 32;
  const int set = turn % SUM_SETS;
  const int place = rank * WARPS + threadIdx.x / 32;
  own = warp_merge(own);
  hopper::wait(&state.read[turn % ROWS_AHEAD], (turn / ROWS_AHEAD + 1) % 2);
  if (cluster == 1) {
    if (lane == 0) {
      state.parts[set][0][place] = own.maximum;
      state.parts[set][1][place] = own.sum;
      if constexpr (GENERAL) {
        state.parts[set][2][place] = own.weighted;
        state.parts[set][3][place] = own.weights;
      }
      hopper::arrive(&state.gathered[set]);
    }
    return;
  }
  if (threadIdx.x == 0) {
    hopper::arrive_expecting(&state.gathered[set], static_cast<uint32_t>(cluster * WARPS * NUMBERS * sizeof(A)));
  }
  if (lane < cluster) {
    const uint32_t barrier = hopper::address_in(&state.gathered[set], lane);
    hopper::send(hopper::address_in(&state.parts[set][0][place], lane), own.maximum, barrier);
    hopper::send(hopper::address_in(&state.parts[set][1][place], lane), own.sum, barrier);
    if constexpr (GENERAL) {
      hopper::send(hopper::address_in(&state.parts[set][2][place], lane), own.weighted, barrier);
      hopper::send(hopper::address_in(&state.parts[set][3][place], lane), own.weights, barrier);
    }
  }
}

// A writing warp takes the sums of that row together, always in the same order.
template <typename A, bool GENERAL, int WARPS>
__device__ __forceinline__ RowSum<A, GENERAL> gather_sums(RingState<A>& state, int cluster, int turn) {
  const int lane = threadIdx.x % 32;
  const int set = turn % SUM_SETS;
  hopper::wait(&state.gathered[set], turn / SUM_SETS % 2);
  RowSum<A, GENERAL> row;
  for (int place = lane; place < cluster * WARPS; place += 32) {
    RowSum<A, GENERAL> part;
    part.maximum = state.parts[set][0][place];
    part.sum = state.parts[set][1][place];
    if constexpr (GENERAL) {
      part.weighted = state.parts[set][2][place];
      part.weights = state.parts[set][3][place];
    }
    row.merge(part);
  }
  return warp_merge(row);
}

// A writing warp is done with that row's sums.
template <typename A>
__device__ __forceinline__ void release_sums(RingState<A>& state, int turn) {
  done_with(&state.read[turn % ROWS_AHEAD]);
}

#endif

}  // namespace
}  // namespace opgraft::cuda
