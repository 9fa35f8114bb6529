// The backward kernel of selective_scan for many channels, where time is walked serially: see
// selective_scan_backward.cu for how it works and what it costs.
#pragma once

#include "cuda/selective_scan_serial_walk.cuh"

namespace opgraft::cuda {

// What a warp reads of a tile arrives while the tile behind it is walked. Rows of 16-bit types are brought for two
// tiles at once, by two lanes a row, and so have a third place.
template <typename T, typename C>
struct alignas(16) SerialRows {
  static constexpr int VECTORS = C::STEPS / VECTOR_WIDTH<T>;
  static constexpr bool BY_TWO = VECTORS == 1;
  static constexpr int PLACES = BY_TWO ? 3 : 2;
  RowWords u[VECTORS][32], delta[VECTORS][32], up[VECTORS][32], gate[VECTORS][32];
};

template <typename T, typename C>
struct alignas(16) SerialTile {
  SerialRows<T, C> rows[SerialRows<T, C>::PLACES];
  DeviceAccumulate<T> states[2][C::MOST][32];
};

template <typename T, typename C>
struct SerialShared {
  using A = DeviceAccumulate<T>;
  using M = ChunkMatrices<A, C>;
  static __host__ __device__ int padded(int states) { return (states + C::BATCH - 1) / C::BATCH * C::BATCH; }
  static size_t bytes(int states) {
    return sizeof(A) * (2 * M::KIND + MatrixSums<A, C>::SHARES) + C::WARPS * sizeof(SerialTile<T, C>) +
           (sizeof(SerialEntry<A>) + sizeof(A)) * padded(states) * C::CHANNELS;
  }
};

template <typename T, typename C, bool WIDE>
__global__ void __launch_bounds__(C::THREADS, C::BLOCKS) scan_serial_back(ScanData<T> d, ScanGradients<T> g) {
  using A = DeviceAccumulate<T>;
  using M = ChunkMatrices<A, C>;
  using Shared = SerialShared<T, C>;
  constexpr bool FAST = sizeof(T) == 2;
  constexpr int S = C::STEPS, ROWS = 2;
  constexpr int ITEMS = VECTOR_WIDTH<T>, VECTORS = S / ITEMS;
  extern __shared__ __align__(16) unsigned char shared[];
  const int thread = thread_index(), warp = thread / 32, lane = thread % 32, part = lane % 2, group = lane / 2;
  const int padded = Shared::padded(d.states);
  A* matrices = reinterpret_cast<A*>(shared);
  A* shares = matrices + 2 * M::KIND;
  auto* tiles = reinterpret_cast<SerialTile<T, C>*>(shares + MatrixSums<A, C>::SHARES);
  SerialTile<T, C>& held = tiles[warp];
  auto* all_entries = reinterpret_cast<SerialEntry<A>*>(tiles + C::WARPS);
  SerialEntry<A>* entries = all_entries + warp * 32 * padded;  // [state][row]
  A* decays = reinterpret_cast<A*>(all_entries + C::CHANNELS * padded) + warp * 32 * padded;
  const RowPair pair{warp, part, group};

  const BlockPlace place = block_place(d, C::CHANNELS);
  const int count = place.count - warp * 32;  // rows of this warp that are there
  const int64_t channel = place.channel + warp * 32;
  const int64_t first_row = place.batch * d.channels + channel;
  const int64_t all_rows = d.batch * d.channels;
  const T* b = d.b + place.batch * d.b_strides.batch + place.group * d.b_strides.group;
  const T* c = d.c + place.batch * d.c_strides.batch + place.group * d.c_strides.group;

  begin_rows(d, g, channel, first_row, count, lane, padded, decays, entries);
  __syncwarp();

  MatrixSums<A, C> sums(d, place, g.matrices, shares, thread);

  const int own_row = pair.row(0);
  const bool there = own_row < count;
  const int64_t own_at = (first_row + (there ? own_row : 0)) * d.length;
  const A bias = d.bias && there ? d.bias[channel + own_row] : A(0);
  const A skip = d.skip && there ? d.skip[channel + own_row] : A(0);
  RowSum<T> skip_sum = 0, bias_sum = 0;

  const bool four_rows = all_rows % 4 == 0 && first_row % 4 == 0 && (count >= 32 || count % 4 == 0);
  // Where the next tile that is fetched is: kept, as finding it takes longer than to go a tile back.
  const int64_t last = (d.length - 1) / S * S;
  int64_t fetch_at = own_at + last;
  const int64_t by_two_at = (first_row + lane / 2) * d.length + lane % 2 * S;
  const int mark_row = four_rows ? lane % 8 * 4 : lane, mark_state = four_rows ? lane / 8 : 0;
  const A* fetch_marks = g.states + (last / S * d.states + mark_state) * all_rows + first_row + mark_row;
  const bool mark_there = mark_row < count;
  using Rows = SerialRows<T, C>;
  auto place_after = [](int row_place) { return row_place + 1 < Rows::PLACES ? row_place + 1 : 0; };
  auto fetch_rows = [&](int64_t tile, int row_place) {
    if constexpr (WIDE && Rows::BY_TWO) {
      // The tile and the one before it, of which it is the second half, or the first of them alone.
      const int64_t first = tile / (2 * S) * (2 * S);
      const bool both = tile != first;
      if (!both && tile != last) return;  // it came with the one behind it
      const bool second = lane % 2;
      Rows& to = held.rows[both && !second ? place_after(row_place) : row_place];
      if (second && !both) return;
#pragma unroll
      for (int r = lane / 2; r < 32; r += 16) {
        const int64_t at = by_two_at + first + (r - lane / 2) * d.length;
        const bool real = r < count;
        copy_async<16>(&to.u[0][r], d.u + at, real);
        copy_async<16>(&to.delta[0][r], d.delta + at, real);
        copy_async<16>(&to.up[0][r], g.up + at, real);
        if (d.z) copy_async<16>(&to.gate[0][r], d.z + at, real);
      }
    } else {
      const int left = there ? static_cast<int>(min(d.length - tile, int64_t{S})) : 0;
      Rows& to = held.rows[row_place];
#pragma unroll
      for (int v = 0; v < VECTORS; ++v) {
        const int64_t at = fetch_at + v * ITEMS;
        const int left_v = left - v * ITEMS;
        if constexpr (WIDE) {
          copy_async<16>(&to.u[v][lane], d.u + at, left_v > 0);
          copy_async<16>(&to.delta[v][lane], d.delta + at, left_v > 0);
          copy_async<16>(&to.up[v][lane], g.up + at, left_v > 0);
          if (d.z) copy_async<16>(&to.gate[v][lane], d.z + at, left_v > 0);
        } else {
          load_row<false>(d.u + at, left_v, to.u[v][lane]);
          load_row<false>(d.delta + at, left_v, to.delta[v][lane]);
          load_row<false>(g.up + at, left_v, to.up[v][lane]);
          if (d.z) load_row<false>(d.z + at, left_v, to.gate[v][lane]);
        }
      }
      fetch_at -= S;
    }
  };
  auto fetch = [&](int64_t tile, int row_place, A(&states)[C::MOST][32]) {
    fetch_rows(tile, row_place);
    const A* mark = fetch_marks;
    if (four_rows) {
#pragma unroll
      for (int n = 0; n < C::MOST; n += 4) {
        copy_async<16>(&states[n + mark_state][mark_row], mark, mark_there && n + mark_state < d.states);
        mark += 4 * all_rows;
      }
    } else {
#pragma unroll 1
      for (int n = 0; n < C::MOST; ++n) {
        copy_async<4>(&states[n][mark_row], mark, mark_there && n < d.states);
        mark += all_rows;
      }
    }
    fetch_marks -= d.states * all_rows;
    commit_copies();
  };
  fetch(last, 0, held.states[0]);
  int buffer = 0, row_place = 0;

  for (int64_t tile = last; tile >= 0; tile -= S) {
    const int steps = static_cast<int>(min(d.length - tile, int64_t{S}));
    const int left = there ? steps : 0;
    const int64_t at = own_at + tile;
    const Rows& row = held.rows[row_place];
    const A* mark = &held.states[buffer][0][0];
    buffer ^= 1;
    row_place = place_after(row_place);
    wait_for_copies<0>();
    __syncwarp();
    if (tile > 0) fetch(tile - S, row_place, held.states[buffer]);
    A step[ROWS][S], input[ROWS][S], dy[ROWS][S];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      unpack<T>(load_words<16>(&row.u[v][lane]), input[0] + v * ITEMS);
      unpack<T>(load_words<16>(&row.delta[v][lane]), step[0] + v * ITEMS);
      unpack<T>(load_words<16>(&row.up[v][lane]), dy[0] + v * ITEMS);
      if (d.z) {
        A gated[ITEMS];
        unpack<T>(load_words<16>(&row.gate[v][lane]), gated);
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) dy[0][v * ITEMS + i] *= silu<FAST>(gated[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < S; ++i) step[0][i] += bias;
    if (d.use_softplus) {
#pragma unroll
      for (int i = 0; i < S; ++i) step[0][i] = softplus<FAST>(step[0][i]);
    }
    if (left < S) {
#pragma unroll
      for (int i = 0; i < S; ++i) step[0][i] = i < left ? step[0][i] : A(0);
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
    if (in_span == C::SPAN - S || tile + S >= d.length) {
      const int64_t span = tile - in_span;
      __syncthreads();
      fill_matrices<T, C, 2>(d, b, c, span, static_cast<int>(min(d.length - span, int64_t{C::SPAN})), 0, padded,
                             matrices);
      __syncthreads();
    }
    walk_back<A, C>(pair, padded, tile, step, input, dy, to_input, to_step, y, mark, matrices + M::place(in_span),
                    entries, decays, sums);
#pragma unroll
    for (int i = 0; i < S; ++i) {
      to_input[0][i] += __shfl_xor_sync(WHOLE_WARP, to_input[1][i], 1);
      to_step[0][i] += __shfl_xor_sync(WHOLE_WARP, to_step[1][i], 1);
      y[0][i] += __shfl_xor_sync(WHOLE_WARP, y[1][i], 1);
    }
    if (left > 0) {
#pragma unroll
      for (int v = 0; v < VECTORS; ++v) {
        const int left_v = left - v * ITEMS;
        A to_in[ITEMS], to_size[ITEMS], out[ITEMS];
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
          to_in[i] = to_input[0][v * ITEMS + i];
          to_size[i] = to_step[0][v * ITEMS + i];
          out[i] = y[0][v * ITEMS + i];
        }
        RowWords gate = {};
        if (d.z) gate = load_words<16>(&row.gate[v][lane]);
        finish_steps<T, FAST, WIDE>(d, g, at + v * ITEMS, left_v, load_words<16>(&row.u[v][lane]),
                                    load_words<16>(&row.delta[v][lane]), load_words<16>(&row.up[v][lane]), gate, bias,
                                    skip, step[0] + v * ITEMS, to_in, to_size, out, skip_sum, bias_sum);
      }
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
