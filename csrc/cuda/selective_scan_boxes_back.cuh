// The backward kernel of selective_scan for many channels of 16-bit types, whose rows come as boxes: the walk of
// selective_scan_serial_walk.cuh. What a warp reads of a tile is asked for by one thread, a tile before it is
// wanted: u, delta, the gradient of y and the gate as boxes of 32 rows, kept states as the bytes in which the walk left
// them. Copies that each thread asks for itself cost a fifth of the time: the next instruction that writes to a
// register with their address waits until the data is there.
#pragma once

#include "cuda/selective_scan_boxes.cuh"
#include "cuda/selective_scan_serial_walk.cuh"

namespace opgraft::cuda {

struct GradientBoxes {
  CUtensorMap u, delta, up, gate;
};

struct alignas(128) TileBoxes {
  RowWords u[32], delta[32], up[32], gate[32];
  float states[CHUNK_STATES][32];
};

template <typename T, typename C>
struct BoxBackShared {
  using M = ChunkMatrices<float, C>;
  TileBoxes tiles[C::WARPS][2];
  float matrices[2 * M::KIND];
  float shares[MatrixSums<float, C>::SHARES];
  StagedMatrices<T, C, 2> staged;
  SerialEntry<float> entries[C::WARPS][CHUNK_STATES][32];
  float decays[C::WARPS][CHUNK_STATES][32];
  BoxBarrier barriers[C::WARPS][2];
};

// There are CHUNK_STATES states or fewer, softplus, a gate, and whole vectors of steps.
template <typename T, typename C>
__global__ void __launch_bounds__(C::THREADS, C::BLOCKS)
    scan_boxes_back(ScanData<T> d, const __grid_constant__ GradientBoxes boxes, ScanGradients<T> g) {
  using A = DeviceAccumulate<T>;
  using M = ChunkMatrices<A, C>;
  using Shared = BoxBackShared<T, C>;
  constexpr int S = C::STEPS, ROWS = 2, STATES = CHUNK_STATES;
  constexpr int ITEMS = VECTOR_WIDTH<T>;
  static_assert(sizeof(T) == 2 && S == ITEMS);
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int thread = thread_index(), warp = uniform(thread / 32), lane = thread % 32, part = lane % 2, group = lane / 2;
  A* matrices = shared.matrices;
  SerialEntry<A>* entries = shared.entries[warp][0];  // [state][row]
  A* decays = shared.decays[warp][0];
  const RowPair pair{warp, part, group};

  const BlockPlace place = block_place(d, C::CHANNELS);
  const int count = place.count - warp * 32;  // rows of this warp that are there
  const int64_t channel = place.channel + warp * 32;
  const int64_t first_row = place.batch * d.channels + channel;
  const T* b = d.b + place.batch * d.b_strides.batch + place.group * d.b_strides.group;
  const T* c = d.c + place.batch * d.c_strides.batch + place.group * d.c_strides.group;

  begin_rows(d, g, channel, first_row, count, lane, STATES, decays, entries);
  const bool leader = elected();
  if (leader) {
    shared.barriers[warp][0].init();
    shared.barriers[warp][1].init();
    BoxBarrier::publish();
  }
  __syncwarp();

  MatrixSums<A, C> sums(d, place, g.matrices, shared.shares, thread);

  const int own_row = pair.row(0);
  const bool there = own_row < count;
  const int64_t own_at = (first_row + (there ? own_row : 0)) * d.length;
  const A bias = d.bias && there ? d.bias[channel + own_row] : A(0);
  const A skip = d.skip && there ? d.skip[channel + own_row] : A(0);
  RowSum<T> skip_sum = 0, bias_sum = 0;

  const int64_t last = (d.length - 1) / S * S;
  const int box_row = static_cast<int>(channel - place.group * d.per_group());
  const int box_set = static_cast<int>(place.batch * d.groups + place.group);
  const int64_t mark_stride = int64_t{gridDim.x} * C::WARPS * MARKED_STATES;
  const A* next_marks = g.states + last / S * mark_stride + (int64_t{blockIdx.x} * C::WARPS + warp) * MARKED_STATES;
  auto fetch = [&](int64_t tile, int which) {
    if (leader) {
      TileBoxes& to = shared.tiles[warp][which];
      BoxBarrier& done = shared.barriers[warp][which];
      const int step = static_cast<int>(tile);
      done.expect(sizeof(TileBoxes));
      load_box(to.u, boxes.u, step, box_row, box_set, done);
      load_box(to.delta, boxes.delta, step, box_row, box_set, done);
      load_box(to.up, boxes.up, step, box_row, box_set, done);
      load_box(to.gate, boxes.gate, step, box_row, box_set, done);
      load_bytes(to.states, next_marks, sizeof(to.states), done);
    }
    next_marks -= mark_stride;
  };
  shared.staged.fetch(d, b, c, thread, last / C::SPAN * C::SPAN);
  fetch(last, 0);
  uint32_t turn = 0;  // tiles that were walked

  for (int64_t tile = last; tile >= 0; tile -= S) {
    const int64_t at = own_at + tile;
    const int which = turn % 2;
    const TileBoxes& row = shared.tiles[warp][which];
    shared.barriers[warp][which].wait(turn / 2);
    __syncwarp();  // all have read what the tile behind this one brought
    if (tile > 0) fetch(tile - S, which ^ 1);
    ++turn;
    A step[ROWS][S], input[ROWS][S], dy[ROWS][S];
    unpack<T>(row.u[lane], input[0]);
    unpack<T>(row.delta[lane], step[0]);
    unpack<T>(row.up[lane], dy[0]);
    A gated[S];
    unpack<T>(row.gate[lane], gated);
#pragma unroll
    for (int i = 0; i < S; ++i) {
      dy[0][i] *= silu<true>(gated[i]);
      step[0][i] = softplus<true>(step[0][i] + bias);
    }
#pragma unroll
    for (int i = 0; i < S; ++i) input[0][i] *= step[0][i];
#pragma unroll
    for (int i = 0; i < S; ++i) {
      step[1][i] = __shfl_xor_sync(WHOLE_WARP, step[0][i], 1);
      input[1][i] = __shfl_xor_sync(WHOLE_WARP, input[0][i], 1);
      dy[1][i] = __shfl_xor_sync(WHOLE_WARP, dy[0][i], 1);
    }
    A to_input[ROWS][S] = {}, to_step[ROWS][S] = {}, y[ROWS][S] = {};
    const int in_span = static_cast<int>(tile % C::SPAN);
    if (in_span == C::SPAN - S || tile == last) {
      wait_for_copies<0>();
      __syncthreads();
      shared.staged.spread(d, thread, matrices);
      __syncthreads();
    }
    if (in_span == 0 && tile > 0) shared.staged.fetch(d, b, c, thread, tile - C::SPAN);
    walk_back<A, C>(pair, STATES, tile, step, input, dy, to_input, to_step, y, row.states[0],
                    matrices + M::place(in_span), entries, decays, sums);
#pragma unroll
    for (int i = 0; i < S; ++i) {
      to_input[0][i] += __shfl_xor_sync(WHOLE_WARP, to_input[1][i], 1);
      to_step[0][i] += __shfl_xor_sync(WHOLE_WARP, to_step[1][i], 1);
      y[0][i] += __shfl_xor_sync(WHOLE_WARP, y[1][i], 1);
    }
    if (there) {
      finish_steps<T, true, true>(d, g, at, S, row.u[lane], row.delta[lane], row.up[lane], row.gate[lane], bias, skip,
                                  step[0], to_input[0], to_step[0], y[0], skip_sum, bias_sum);
    }
  }
  sums.finish();
  __syncwarp();

  end_rows(d, g, first_row, count, lane, entries);
  if (there) {
    g.skip[first_row + own_row] = static_cast<A>(skip_sum);
    g.bias[first_row + own_row] = static_cast<A>(bias_sum);
  }
}

}  // namespace opgraft::cuda
