// The backward kernel of selective_scan for many channels, where time is walked serially: see
// selective_scan_backward.cu for how it works and what it costs.
#pragma once

#include "cuda/selective_scan_back.cuh"
#include "cuda/selective_scan_chunks.cuh"

namespace opgraft::cuda {

// A thread has STEPS steps of two channels, whose states it shares with its neighbour: one takes the even ones.
template <int WARPS_, int BLOCKS_>
struct SerialCut {
  static constexpr bool SERIAL = true;
  static constexpr int STEPS = 8;
  static constexpr int TILE = STEPS;
  static constexpr int WARPS = WARPS_;
  static constexpr int BLOCKS = BLOCKS_;  // an SM
  static constexpr int THREADS = 32 * WARPS;
  static constexpr int WARP_ROWS = 32;
  static constexpr int CHANNELS = WARP_ROWS * WARPS;
  static constexpr int SPAN = 64;  // steps of B and C in shared memory
  static constexpr int BATCH = 4;  // states whose dB and dC are added up at once, while the next ones are walked
  static constexpr int MOST = CHUNK_STATES;
  static_assert(THREADS == 128 && BATCH == 4, "two threads have one sum of a batch");
};

template <typename A>
struct alignas(8) SerialEntry {
  A carry;  // the gradient of the state that leaves the tile
  A slope;  // the gradient of the decay, so far
};

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
  static constexpr int PLACES = 36;  // of a vector of every lane: odd lanes from 20, so that writers meet all banks
  static constexpr int WARP_SHARES = C::BATCH / 2 * 4 * PLACES * 4;
  static __host__ __device__ int padded(int states) { return (states + C::BATCH - 1) / C::BATCH * C::BATCH; }
  static size_t bytes(int states) {
    return sizeof(A) * (2 * M::KIND + 2 * C::WARPS * WARP_SHARES) + C::WARPS * sizeof(SerialTile<T, C>) +
           (sizeof(SerialEntry<A>) + sizeof(A)) * padded(states) * C::CHANNELS;
  }
};

template <typename T, typename C, bool WIDE>
__global__ void __launch_bounds__(C::THREADS, C::BLOCKS) scan_serial_back(ScanData<T> d, ScanGradients<T> g) {
  using A = DeviceAccumulate<T>;
  using M = ChunkMatrices<A, C>;
  using Shared = SerialShared<T, C>;
  constexpr bool FAST = sizeof(T) == 2;
  constexpr int S = C::STEPS, ROWS = 2, BATCH = C::BATCH, PAIRS = BATCH / 2;
  constexpr int ITEMS = VECTOR_WIDTH<T>, VECTORS = S / ITEMS;
  extern __shared__ __align__(16) unsigned char shared[];
  const int thread = thread_index(), warp = thread / 32, lane = thread % 32, part = lane % 2, group = lane / 2;
  const int padded = Shared::padded(d.states);
  A* matrices = reinterpret_cast<A*>(shared);
  A* shares = matrices + 2 * M::KIND;
  auto* tiles = reinterpret_cast<SerialTile<T, C>*>(shares + 2 * C::WARPS * Shared::WARP_SHARES);
  SerialTile<T, C>& held = tiles[warp];
  auto* all_entries = reinterpret_cast<SerialEntry<A>*>(tiles + C::WARPS);
  SerialEntry<A>* entries = all_entries + warp * 32 * padded;  // [state][row]
  A* decays = reinterpret_cast<A*>(all_entries + C::CHANNELS * padded) + warp * 32 * padded;
  // Each of the two takes the row first that it reads and writes.
  auto row_of = [&](int j) { return 2 * group + (j ^ part); };

  const BlockPlace place = block_place(d, C::CHANNELS);
  const int count = place.count - warp * 32;  // rows of this warp that are there
  const int64_t channel = place.channel + warp * 32;
  const int64_t first_row = place.batch * d.channels + channel;
  const int64_t all_rows = d.batch * d.channels;
  const T* b = d.b + place.batch * d.b_strides.batch + place.group * d.b_strides.group;
  const T* c = d.c + place.batch * d.c_strides.batch + place.group * d.c_strides.group;

  for (int i = lane; i < 32 * padded; i += 32) {
    const int n = i / 32;
    const bool real = lane < count && n < d.states;
    decays[i] = real ? d.a[(channel + lane) * d.states + n] * A(LOG2_E) : A(0);
    entries[i] = {real && g.up_final ? g.up_final[(first_row + lane) * d.states + n] : A(0), A(0)};
  }
  __syncwarp();

  // This block's parts of dB and dC: [block of channels][B or C][batch][group][state][step].
  const int64_t kind_stride = d.batch * d.groups * d.states * d.length;
  A* own_matrices = g.matrices + 2 * (place.channel % d.per_group() / C::CHANNELS) * kind_stride +
                    (place.batch * d.groups + place.group) * d.states * d.length;
  // Of a batch a thread adds up one vector of 4 steps of either pair of states, over one group of every warp, and
  // sixteen neighbours add up the groups: what two threads end with is one step of one state. The pairs stand in an
  // order of the thread's own, so that the first sum over neighbours needs no choice of what to send. A batch is added
  // up while the next one is walked.
  const int adder = thread % 16, vector = thread / 16 % 4, adder_part = thread / 64;
  const int out_pair = adder / 8;
  const A* shares_from = shares + (vector * Shared::PLACES + adder_part * 20 + adder) * 4;
  constexpr int BUFFER = C::WARPS * Shared::WARP_SHARES, PAIR_SHARES = 4 * Shared::PLACES * 4;
  auto add_pair = [&](int r, int which, A(&sum)[4]) {
    const A* from = shares_from + which * BUFFER + (r ^ out_pair) * PAIR_SHARES;
#pragma unroll
    for (int w = 0; w < C::WARPS; ++w) {
      A wide[4];
      load_values(from + w * Shared::WARP_SHARES, wide);
#pragma unroll
      for (int k = 0; k < 4; ++k) sum[k] = w ? sum[k] + wide[k] : wide[k];
    }
  };
  const int out_step = vector % 2 * 4 + (adder & 4) / 2 + (adder & 2) / 2;
  const int out_state = 2 * out_pair + adder_part;
  A* sum_to = own_matrices + (vector / 2) * kind_stride + out_state * d.length + out_step;
  auto add_neighbours = [&](A(&sum)[PAIRS][4], int first, int64_t tile) {
#pragma unroll
    for (int k = 0; k < 4; ++k) sum[0][k] += __shfl_xor_sync(WHOLE_WARP, sum[1][k], 8);
    int base = 0;
    scatter_sums<4, 1, 8>(sum[0], adder, base);
    const bool real = adder % 2 == 0 && first >= 0 && first + out_state < d.states && tile + out_step < d.length;
    if (real) sum_to[first * d.length + tile] = sum[0][0];
  };

  const int own_row = row_of(0);
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
  int shared_by = 0;     // of two buffers of shares, the one that is written
  int added_first = -1;  // the first state of the batch that is to be added up, and its tile
  int64_t added_tile = 0;

  for (int64_t tile = last; tile >= 0; tile -= S) {
    const int steps = static_cast<int>(min(d.length - tile, int64_t{S}));
    const int left = there ? steps : 0;
    const int64_t at = own_at + tile;
    const Rows& row = held.rows[row_place];
    const A* mark = &held.states[buffer][part][0];
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
    const A* from = matrices + M::place(in_span) + part * M::ROW;
    SerialEntry<A>* entry = entries + part * 32;
    const A* decay_of = decays + part * 32;
    // While a state is walked back, the next one is walked forward: its steps take the registers that those of the
    // first leave. What is so made behind the last state is not used.
    A factor[2][ROWS][S], state[2][ROWS][S], start[2][ROWS], wide_b[2][S], decay[ROWS], next[ROWS];
    load_values(from, wide_b[0]);
#pragma unroll
    for (int j = 0; j < ROWS; ++j) {
      decay[j] = decay_of[row_of(j)];
      next[j] = padded > 2 ? decay_of[64 + row_of(j)] : A(0);
      start[0][j] = mark[row_of(j)];
    }
#pragma unroll
    for (int i = 0; i < S; ++i) {
#pragma unroll
      for (int j = 0; j < ROWS; ++j) {
        factor[0][j][i] = exp2_fast(step[j][i] * decay[j]);
        state[0][j][i] = fma(factor[0][j][i], i ? state[0][j][i ? i - 1 : 0] : start[0][j], input[j][i] * wide_b[0][i]);
      }
    }
#pragma unroll 1
    for (int first = 0; first < padded; first += BATCH) {
      A sum[PAIRS][4];
#pragma unroll
      for (int pair = 0; pair < PAIRS; ++pair) {
        const int n = first + 2 * pair + part, now = pair % 2, then = now ^ 1;
        SerialEntry<A> own[ROWS];
        A own_decay[ROWS], next_decay[ROWS], carry[ROWS], slope[ROWS] = {};
#pragma unroll
        for (int j = 0; j < ROWS; ++j) {
          own_decay[j] = decay[j];
          next_decay[j] = next[j];
          decay[j] = next[j];
          own[j] = entry[row_of(j)];
          carry[j] = own[j].carry;
          if (n + 2 < padded) start[then][j] = mark[64 + row_of(j)];
          if (n + 4 < padded) next[j] = decay_of[128 + row_of(j)];
        }
        mark += 64;
#pragma unroll
        for (int j = 0; j < ROWS; ++j) factor[then][j][0] = exp2_fast(step[j][0] * next_decay[j]);
        A* share = shares + shared_by * BUFFER + warp * Shared::WARP_SHARES +
                   (pair * 4 * Shared::PLACES + part * 20 + group) * 4;
        A wide_c[4], to_b[4], to_c[4];
#pragma unroll
        for (int back = 0; back < S; ++back) {
          const int i = S - 1 - back, half = i / 4, k = i % 4;
          if (k == 3) {
            load_values(from + M::KIND + half * 4, wide_c);
            A next_b[4];
            load_values(from + 2 * M::ROW + back, next_b);
#pragma unroll
            for (int q = 0; q < 4; ++q) wide_b[then][back + q] = next_b[q];
          }
          if (back == 1) add_pair(pair, shared_by ^ 1, sum[pair]);
#pragma unroll
          for (int j = 0; j < ROWS; ++j) {
            const A total = fma(dy[j][i], wide_c[k], carry[j]);
            y[j][i] = fma(state[now][j][i], wide_c[k], y[j][i]);
            to_c[k] = j ? fma(dy[j][i], state[now][j][i], to_c[k]) : dy[j][i] * state[now][j][i];
            to_b[k] = j ? fma(total, input[j][i], to_b[k]) : total * input[j][i];
            to_input[j][i] = fma(total, wide_b[now][i], to_input[j][i]);
            carry[j] = factor[now][j][i] * total;
            const A to_exponent = carry[j] * (i ? state[now][j][i ? i - 1 : 0] : start[now][j]);
            to_step[j][i] = fma(to_exponent, own_decay[j], to_step[j][i]);
            slope[j] = fma(to_exponent, step[j][i], slope[j]);
          }
#pragma unroll
          for (int j = 0; j < ROWS; ++j) {
            if (back + 1 < S) factor[then][j][(back + 1) % S] = exp2_fast(step[j][(back + 1) % S] * next_decay[j]);
            state[then][j][back] =
                fma(factor[then][j][back], back ? state[then][j][back ? back - 1 : 0] : start[then][j],
                    input[j][back] * wide_b[then][back]);
          }
          if (k == 0) {
            store_values(share + half * Shared::PLACES * 4, to_b);
            store_values(share + (2 + half) * Shared::PLACES * 4, to_c);
          }
        }
#pragma unroll
        for (int j = 0; j < ROWS; ++j) {
          entry[row_of(j)] = {carry[j], own[j].slope + slope[j]};
        }
        entry += 64;
        decay_of += 64;
        from += 2 * M::ROW;
      }
      add_neighbours(sum, added_first, added_tile);
      added_first = first;
      added_tile = tile;
      shared_by ^= 1;
      __syncthreads();
    }

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
  {
    A sum[PAIRS][4];
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair) add_pair(pair, shared_by ^ 1, sum[pair]);
    add_neighbours(sum, added_first, added_tile);
  }
  __syncwarp();

  for (int i = lane; i < 32 * d.states; i += 32) {
    if (lane >= count) continue;
    const int64_t at = (first_row + lane) * d.states + i / 32;
    g.a[at] = entries[i].slope;
    g.initial[at] = entries[i].carry;
  }
  if (there) {
    g.skip[first_row + own_row] = static_cast<A>(skip_sum);
    g.bias[first_row + own_row] = static_cast<A>(bias_sum);
  }
}

}  // namespace opgraft::cuda
