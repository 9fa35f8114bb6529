// The backward kernel of selective_scan with time dealt over lanes: see selective_scan_backward.cu for how it works and
// what it costs.
#pragma once

#include "cuda/selective_scan_back.cuh"
#include "cuda/selective_scan_chunks.cuh"

namespace opgraft::cuda {

template <int LANES_, int WARPS_, int BLOCKS_>
struct ChunkBackCut : ChunkCut<LANES_, 1, 1, WARPS_, BLOCKS_> {
  using Base = ChunkCut<LANES_, 1, 1, WARPS_, BLOCKS_>;
  static constexpr bool SERIAL = false;
  static constexpr bool BOXES = false;
  static constexpr int VECTORS = 2 * Base::TILE / 4;  // of 4 steps of dB or dC of one state
  static constexpr int ADDERS = Base::THREADS > VECTORS ? Base::THREADS / VECTORS : 1;  // threads that share a vector
  static constexpr int EACH = Base::CHANNELS / ADDERS;                                  // channels that each adds up
  static_assert(Base::CHANNELS % ADDERS == 0 && VECTORS * ADDERS % Base::THREADS == 0);
};

template <typename A>
struct alignas(16) BackEntry {
  A decay;
  A state;  // before the tile
  A carry;  // the gradient of the state that leaves the tile
  A slope;  // the gradient of the decay, so far
};

template <typename A, typename C>
struct ChunkBackShared {
  using M = ChunkMatrices<A, C>;
  // What a channel adds to dB and dC of a tile's steps and one state. Threads that share a vector meet all banks.
  static constexpr int SHARE = 2 * M::ROW + (C::ADDERS > 2 ? 8 : C::ADDERS > 1 ? 16 : 0);
  static constexpr int SHARES = C::CHANNELS * SHARE;
  static size_t bytes(int states, int rounds) {
    const size_t rows = static_cast<size_t>(C::CHANNELS) * rounds;
    return sizeof(A) * (2 * M::KIND + 2 * SHARES + rows * 4 * states) + rows * 2 * sizeof(double);
  }
};

// A block takes `rounds` times CHANNELS channels through a tile of time before it goes to the tile before.
// REDUCE: only the gradient of the state that leaves each segment, from zero, into the plan. WIDE: see load_row.
template <typename T, typename C, bool REDUCE, bool WIDE>
__global__ void __launch_bounds__(C::THREADS, C::BLOCKS)
    scan_chunks_back(ScanData<T> d, SegmentPlan plan, ScanGradients<T> g, int rounds) {
  using A = DeviceAccumulate<T>;
  using M = ChunkMatrices<A, C>;
  using Shared = ChunkBackShared<A, C>;
  constexpr bool FAST = sizeof(T) == 2;
  constexpr int S = CHUNK_STEPS, LANES = C::LANES, ROWS = C::WARP_ROWS, TILE = C::TILE;
  constexpr int ITEMS = VECTOR_WIDTH<T>, VECTORS = S / ITEMS;
  extern __shared__ __align__(16) unsigned char shared[];
  const int thread = thread_index(), warp = thread / 32, lane = thread % 32;
  const int slot = lane % LANES, row = lane / LANES;
  A* matrices = reinterpret_cast<A*>(shared);
  A* shares = matrices + 2 * M::KIND;
  auto* all_entries = reinterpret_cast<BackEntry<A>*>(shares + 2 * Shared::SHARES);
  auto* all_sums = reinterpret_cast<RowSum<T>*>(all_entries + C::CHANNELS * rounds * d.states);
  A* own_share = shares + (warp * ROWS + row) * Shared::SHARE + slot * M::PITCH;

  const BlockPlace place = block_place(d, C::CHANNELS * rounds);
  if (REDUCE && place.segment == 0) return;  // nothing comes before it
  const int64_t begin = place.segment * plan.length;
  const int64_t end = min(begin + plan.length, d.length);
  const int64_t all_rows = d.batch * d.channels;
  const T* b = d.b + place.batch * d.b_strides.batch + place.group * d.b_strides.group;
  const T* c = d.c + place.batch * d.c_strides.batch + place.group * d.c_strides.group;

  // A warp's rows of a round: [state][row], and the rows' sums for D and delta_bias.
  auto entries_of = [&](int round) { return all_entries + (round * C::WARPS + warp) * ROWS * d.states; };
  auto sums_of = [&](int round) { return all_sums + (round * C::WARPS + warp) * ROWS * 2; };
  auto count_of = [&](int round) { return place.count - (round * C::WARPS + warp) * ROWS; };
  auto channel_of = [&](int round) { return place.channel + (round * C::WARPS + warp) * ROWS; };
  for (int round = 0; round < rounds; ++round) {
    const int64_t channel = channel_of(round), first_row = place.batch * d.channels + channel;
    BackEntry<A>* entries = entries_of(round);
    for (int i = lane; i < ROWS * d.states; i += 32) {
      const int r = i % ROWS, n = i / ROWS;
      const bool real = r < count_of(round);
      const A decay = real ? d.a[(channel + r) * d.states + n] * A(LOG2_E) : A(0);
      A carry = real && !REDUCE && g.up_final ? g.up_final[(first_row + r) * d.states + n] : A(0);
#pragma unroll 1
      for (int64_t s = plan.count - 1; real && s > (REDUCE ? plan.count : place.segment); --s) {
        const int64_t at = s * all_rows + first_row + r;
        carry = fma(exp2_fast(decay * plan_sums<T>(plan)[at]), carry, plan_ends<T>(plan)[at * d.states + n]);
      }
      entries[i] = {decay, A(0), carry, A(0)};
    }
    if (lane < 2 * ROWS) sums_of(round)[lane] = 0;
  }
  __syncwarp();

  // This block's parts of dB and dC: [block of channels][B or C][batch][group][state][step].
  const int64_t kind_stride = d.batch * d.groups * d.states * d.length;
  A* own_matrices = g.matrices + 2 * (place.channel % d.per_group() / (C::CHANNELS * rounds)) * kind_stride +
                    (place.batch * d.groups + place.group) * d.states * d.length;
  const bool whole = d.length % 4 == 0;
  // A thread adds up vectors of 4 steps. Eight lanes in a row take the same place of eight chunks, or one chunk's
  // vectors of several channels, so that they meet all banks; a warp writes steps that are together.
  constexpr int TURNS = C::VECTORS * C::ADDERS / C::THREADS;
  auto vector_of = [&](int turn) {
    const int task = turn * C::THREADS + thread;
    return C::ADDERS > 1 ? task / C::ADDERS : task / 32 * 32 + task % 8 * 4 + task % 32 / 8;
  };
  const int adder = thread % C::ADDERS;
  auto add_shares = [&](const A* from_shares, A* to_state, int steps, bool more) {
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
      const int kind = vector_of(turn) / (TILE / 4), t = vector_of(turn) % (TILE / 4) * 4;
      const A* from = from_shares + adder * Shared::SHARE + kind * M::ROW + M::place(t);
      A* to = to_state + (kind ? kind_stride : 0) + t;
      const int there = adder == 0 ? steps - t : 0;
      A sum[C::EACH + 1][4];
#pragma unroll
      for (int i = 0; i < C::EACH; ++i) load_values(from + i * C::ADDERS * Shared::SHARE, sum[i]);
#pragma unroll
      for (int k = 0; k < 4; ++k) sum[C::EACH][k] = A(0);
      if (more) {
        if (whole) {
          if (there > 0) load_values(to, sum[C::EACH]);
        } else {
#pragma unroll
          for (int k = 0; k < 4; ++k) sum[C::EACH][k] = k < there ? to[k] : A(0);
        }
      }
#pragma unroll
      for (int by = 1; by < C::EACH; by *= 2) {
#pragma unroll
        for (int i = 0; i + by < C::EACH; i += 2 * by) {
#pragma unroll
          for (int k = 0; k < 4; ++k) sum[i][k] += sum[i + by][k];
        }
      }
#pragma unroll
      for (int by = 1; by < C::ADDERS; by *= 2) {
#pragma unroll
        for (int k = 0; k < 4; ++k) sum[0][k] += __shfl_xor_sync(WHOLE_WARP, sum[0][k], by);
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) sum[0][k] += sum[C::EACH][k];
      if (whole) {
        if (there > 0) store_values(to, sum[0]);
      } else {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          if (k < there) to[k] = sum[0][k];
        }
      }
    }
  };

  int buffer = 0;
  for (int64_t tile = begin + (end - begin - 1) / TILE * TILE; tile >= begin; tile -= TILE) {
    const int steps = static_cast<int>(min(end - tile, int64_t{TILE}));
    for (int round = 0; round < rounds; ++round) {
      const int count = count_of(round);
      const bool there = row < count;
      const int64_t channel = channel_of(round), first_row = place.batch * d.channels + channel;
      const int left = there ? steps - slot * S : 0;
      const int64_t at = (first_row + (there ? row : 0)) * d.length + tile + slot * S;
      const A bias = d.bias && there ? d.bias[channel + row] : A(0);
      BackEntry<A>* entries = entries_of(round);

      A step[S], input[S], dy[S];
#pragma unroll
      for (int v = 0; v < VECTORS; ++v) {
        RowWords u, delta, up, gate;
        const int left_v = left - v * ITEMS;
        if (!REDUCE) load_row<WIDE>(d.u + at + v * ITEMS, left_v, u);
        load_row<WIDE>(d.delta + at + v * ITEMS, left_v, delta);
        load_row<WIDE>(g.up + at + v * ITEMS, left_v, up);
        if (d.z) load_row<WIDE>(d.z + at + v * ITEMS, left_v, gate);
        if (!REDUCE) unpack<T>(u, input + v * ITEMS);
        unpack<T>(delta, step + v * ITEMS);
        unpack<T>(up, dy + v * ITEMS);
        if (d.z) {
          A gated[ITEMS];
          unpack<T>(gate, gated);
#pragma unroll
          for (int i = 0; i < ITEMS; ++i) dy[v * ITEMS + i] *= silu<FAST>(gated[i]);
        }
      }
      if (there && tile > begin) {
        if (!REDUCE) prefetch_row(d.u + at - TILE);
        prefetch_row(d.delta + at - TILE);
        prefetch_row(g.up + at - TILE);
        if (d.z) prefetch_row(d.z + at - TILE);
      }
      for (int i = lane; !REDUCE && i < ROWS * d.states; i += 32) {
        const int r = i % ROWS, n = i / ROWS;
        if (r < count) entries[i].state = g.states[(tile / TILE * d.states + n) * all_rows + first_row + r];
      }
#pragma unroll
      for (int i = 0; i < S; ++i) step[i] += bias;
      if (d.use_softplus) {
#pragma unroll
        for (int i = 0; i < S; ++i) step[i] = softplus<FAST>(step[i]);
      }
      A chunk_sum = A(0);
#pragma unroll
      for (int i = 0; i < S; ++i) {
        if (i >= left) step[i] = A(0);
        chunk_sum += step[i];
        if (!REDUCE) input[i] *= step[i];
      }
      __syncwarp();
      A to_input[S] = {}, to_step[S] = {}, y[S] = {};

      for (int first = 0; first < d.states; first += CHUNK_STATES) {
        const int states = min(CHUNK_STATES, d.states - first);
        if (round == 0 || d.states > CHUNK_STATES) {
          __syncthreads();
          fill_matrices<T, C, 2>(d, b, c, tile, steps, first, states, matrices);
          __syncthreads();
        }
        // The decays of a state are taken while the state before it is walked: nothing waits for the exponential unit.
        BackEntry<A>* entry = entries + first * ROWS + row;
        A* to_state = own_matrices + first * d.length + tile;
        BackEntry<A> next = *entry;
        __syncwarp();  // before the first is written; the others have a barrier between
        A factor[S], whole_factor = exp2_fast(chunk_sum * next.decay);
#pragma unroll
        for (int i = 0; i < S; ++i) factor[i] = exp2_fast(step[i] * next.decay);
        const A* from = matrices + slot * M::PITCH;
#pragma unroll 1
        for (int n = 0; n < states; ++n) {
          const BackEntry<A> own = next;
          if (n + 1 < states) next = entry[ROWS];
          const bool first_lane = slot == 0, last_lane = slot == LANES - 1;
          // Gradients of the state, backwards through the chunk.
          A up[1] = {last_lane ? own.carry : A(0)};
#pragma unroll
          for (int i = S - 4; i >= 0; i -= 4) {
            A wide[4];
            load_values(from + M::KIND + i, wide);
#pragma unroll
            for (int k = 3; k >= 0; --k) up[0] = factor[i + k] * fma(dy[i + k], wide[k], up[0]);
          }
          const A decays[1] = {last_lane ? A(0) : whole_factor};
          if constexpr (REDUCE) {
            carry_over<C, true>(up, decays);
            __syncwarp();  // every lane has read it
            if (first_lane) entry->carry = up[0];
            whole_factor = exp2_fast(chunk_sum * next.decay);
#pragma unroll
            for (int i = 0; i < S; ++i) factor[i] = exp2_fast(step[i] * next.decay);
          } else {
            // States, forward through it.
            A state[S], local[1] = {walk_chunk(from, factor, input, first_lane ? own.state : A(0), state)};
            const A forward_decays[1] = {first_lane ? A(0) : whole_factor};
            carry_over<C, false>(local, forward_decays);
            carry_over<C, true>(up, decays);
            whole_factor = exp2_fast(chunk_sum * next.decay);
            const A before = from_lane<C, false>(local[0], 1), after = from_lane<C, true>(up[0], 1);
            const A start = first_lane ? own.state : before;
            A carry = last_lane ? own.carry : after, slope = A(0);
#pragma unroll
            for (int i = 0; i < S; ++i) state[i] = fma(factor[i], i ? state[i ? i - 1 : 0] : start, state[i]);
            A* share = own_share + buffer * Shared::SHARES;
#pragma unroll
            for (int i = S - 4; i >= 0; i -= 4) {
              A wide_b[4], wide_c[4], to_b[4], to_c[4];
              load_values(from + i, wide_b);
              load_values(from + M::KIND + i, wide_c);
#pragma unroll
              for (int k = 3; k >= 0; --k) {
                const int j = i + k;
                const A total = fma(dy[j], wide_c[k], carry);
                y[j] = fma(state[j], wide_c[k], y[j]);
                to_c[k] = dy[j] * state[j];
                to_b[k] = total * input[j];
                to_input[j] = fma(total, wide_b[k], to_input[j]);
                carry = factor[j] * total;
                factor[j] = exp2_fast(step[j] * next.decay);
                const A to_exponent = carry * (j ? state[j ? j - 1 : 0] : start);
                to_step[j] = fma(to_exponent, own.decay, to_step[j]);
                slope = fma(to_exponent, step[j], slope);
              }
              store_values(share + i, to_b);
              store_values(share + M::ROW + i, to_c);
            }
#pragma unroll
            for (int by = 1; by < LANES; by *= 2) slope += __shfl_xor_sync(WHOLE_WARP, slope, by);
            if (first_lane) {
              entry->carry = carry;
              entry->slope = own.slope + slope;
            }
            __syncthreads();
            add_shares(shares + buffer * Shared::SHARES, to_state, steps, round > 0);
            buffer ^= 1;
          }
          entry += ROWS;
          from += M::ROW;
          to_state += d.length;
        }
      }

      if constexpr (REDUCE) {
#pragma unroll
        for (int by = 1; by < LANES; by *= 2) chunk_sum += __shfl_xor_sync(WHOLE_WARP, chunk_sum, by);
        if (slot == 0) sums_of(round)[2 * row] += chunk_sum;
        continue;
      }
      RowSum<T> skip_sum = 0, bias_sum = 0;
      if (left > 0) {
        const A skip = d.skip ? d.skip[channel + row] : A(0);
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
          A to_in[ITEMS], to_size[ITEMS], out[ITEMS];
#pragma unroll
          for (int i = 0; i < ITEMS; ++i) {
            to_in[i] = to_input[v * ITEMS + i];
            to_size[i] = to_step[v * ITEMS + i];
            out[i] = y[v * ITEMS + i];
          }
          const int left_v = left - v * ITEMS;
          RowWords u, delta, up, gate;
          load_row<WIDE>(d.u + at + v * ITEMS, left_v, u);
          load_row<WIDE>(d.delta + at + v * ITEMS, left_v, delta);
          load_row<WIDE>(g.up + at + v * ITEMS, left_v, up);
          if (d.z) load_row<WIDE>(d.z + at + v * ITEMS, left_v, gate);
          finish_steps<T, FAST, WIDE>(d, g, at + v * ITEMS, left_v, u, delta, up, gate, bias, skip, step + v * ITEMS,
                                      to_in, to_size, out, skip_sum, bias_sum);
        }
      }
#pragma unroll
      for (int by = 1; by < LANES; by *= 2) {
        skip_sum += __shfl_xor_sync(WHOLE_WARP, skip_sum, by);
        bias_sum += __shfl_xor_sync(WHOLE_WARP, bias_sum, by);
      }
      if (slot == 0) {
        sums_of(round)[2 * row] += skip_sum;
        sums_of(round)[2 * row + 1] += bias_sum;
      }
    }
  }
  __syncwarp();

  for (int round = 0; round < rounds; ++round) {
    const int count = count_of(round);
    const int64_t first_row = place.batch * d.channels + channel_of(round);
    const BackEntry<A>* entries = entries_of(round);
    for (int i = lane; i < ROWS * d.states; i += 32) {
      const int r = i / d.states, n = i % d.states;
      if (r >= count) continue;
      const int64_t at = (first_row + r) * d.states + n, part = place.segment * all_rows * d.states + at;
      if (REDUCE) {
        plan_ends<T>(plan)[part] = entries[n * ROWS + r].carry;
      } else {
        g.a[part] = entries[n * ROWS + r].slope;
        if (begin == 0) g.initial[at] = entries[n * ROWS + r].carry;
      }
    }
    if (lane < ROWS && lane < count) {
      const int64_t part = place.segment * all_rows + first_row + lane;
      if (REDUCE) {
        plan_sums<T>(plan)[part] = static_cast<A>(sums_of(round)[2 * lane]);
      } else {
        g.skip[part] = static_cast<A>(sums_of(round)[2 * lane]);
        g.bias[part] = static_cast<A>(sums_of(round)[2 * lane + 1]);
      }
    }
  }
}

}  // namespace opgraft::cuda
