// What the serial backward kernels of selective_scan share: a tile's states, one after the other, and sums over
// channels.
#pragma once

#include "cuda/selective_scan_back.cuh"
#include "cuda/selective_scan_chunks.cuh"

namespace opgraft::cuda {

// A thread has STEPS steps of two channels, whose states it shares with its neighbour: one takes the even ones.
template <int WARPS_, int BLOCKS_>
struct SerialCut {
  static constexpr bool SERIAL = true;
  static constexpr bool BOXES = false;
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

// dB and dC of a block's channels. Of a batch of states a thread adds up one vector of 4 steps of either pair of
// states, over one group of every warp, and sixteen neighbours add up the groups: what two threads end with is one step
// of one state. The pairs stand in an order of the thread's own, so that the first sum over neighbours needs no choice
// of what to send. A batch is added up while the next one is walked.
template <typename A, typename C>
class MatrixSums {
 public:
  static constexpr int PAIRS = C::BATCH / 2;
  static constexpr int PLACES = 36;  // of a vector of every lane: odd lanes from 20, so that writers meet all banks
  static constexpr int WARP_SHARES = PAIRS * 4 * PLACES * 4;
  static constexpr int SHARES = 2 * C::WARPS * WARP_SHARES;  // in shared memory

  // `parts`: of each block, [block of channels][B or C][batch][group][state][step].
  template <typename T>
  __device__ __forceinline__ MatrixSums(const ScanData<T>& d, const BlockPlace& place, A* parts, A* shares, int thread)
      : shares_(shares), length_(d.length), states_(d.states), adder_(thread % 16), out_pair_(adder_ / 8) {
    const int vector = thread / 16 % 4, part = thread / 64;
    from_ = shares + (vector * PLACES + part * 20 + adder_) * 4;
    out_step_ = vector % 2 * 4 + (adder_ & 4) / 2 + (adder_ & 2) / 2;
    out_state_ = 2 * out_pair_ + part;
    const int64_t kind = d.batch * d.groups * d.states * d.length;
    to_ = parts + 2 * (place.channel % d.per_group() / C::CHANNELS) * kind +
          (place.batch * d.groups + place.group) * d.states * d.length + vector / 2 * kind + out_state_ * d.length +
          out_step_;
  }

  // Where a thread puts what it has of a pair of states: vectors of dB, of dB's second half, of dC, of its second half.
  __device__ __forceinline__ A* share(int warp, int pair, int part, int group) const {
    return shares_ + written_ * BUFFER + warp * WARP_SHARES + (pair * 4 * PLACES + part * 20 + group) * 4;
  }

  __device__ __forceinline__ void add_pair(int pair, A (&sum)[4]) const {
    const A* from = from_ + (written_ ^ 1) * BUFFER + (pair ^ out_pair_) * (4 * PLACES * 4);
#pragma unroll
    for (int w = 0; w < C::WARPS; ++w) {
      A wide[4];
      load_values(from + w * WARP_SHARES, wide);
#pragma unroll
      for (int k = 0; k < 4; ++k) sum[k] = w ? sum[k] + wide[k] : wide[k];
    }
  }

  // The batch before this one has been added up, this one is in shared memory when all threads have come here.
  __device__ __forceinline__ void turn_over(A (&sum)[PAIRS][4], int first, int64_t tile) {
    write(sum);
    first_ = first;
    tile_ = tile;
    written_ ^= 1;
    __syncthreads();
  }

  __device__ __forceinline__ void finish() {
    A sum[PAIRS][4];
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair) add_pair(pair, sum[pair]);
    write(sum);
  }

 private:
  static constexpr int BUFFER = C::WARPS * WARP_SHARES;

  __device__ __forceinline__ void write(A (&sum)[PAIRS][4]) const {
#pragma unroll
    for (int k = 0; k < 4; ++k) sum[0][k] += __shfl_xor_sync(WHOLE_WARP, sum[1][k], 8);
    int base = 0;
    scatter_sums<4, 1, 8>(sum[0], adder_, base);
    const bool real = adder_ % 2 == 0 && first_ >= 0 && first_ + out_state_ < states_ && tile_ + out_step_ < length_;
    if (real) to_[first_ * length_ + tile_] = sum[0][0];
  }

  A* shares_;
  const A* from_;
  A* to_;
  int64_t length_;
  int states_, adder_, out_pair_, out_step_, out_state_;
  int written_ = 0;  // of two buffers of shares
  int first_ = -1;   // the first state of the batch that is to be added up, and its tile
  int64_t tile_ = 0;
};

// A thread's place in a warp: one of two that share two rows.
struct RowPair {
  int warp, part, group;

  // Each of the two takes the row first that it reads and writes.
  __device__ __forceinline__ int row(int j) const { return 2 * group + (j ^ part); }
};

// The decays of a warp's 32 rows, of which `count` are there, and the gradients of their states where time begins to
// run backwards.
template <typename T, typename A>
__device__ __forceinline__ void begin_rows(const ScanData<T>& d, const ScanGradients<T>& g, int64_t channel,
                                           int64_t first_row, int count, int lane, int padded, A* decays,
                                           SerialEntry<A>* entries) {
  for (int i = lane; i < 32 * padded; i += 32) {
    const int n = i / 32;
    const bool real = lane < count && n < d.states;
    decays[i] = real ? d.a[(channel + lane) * d.states + n] * A(LOG2_E) : A(0);
    entries[i] = {real && g.up_final ? g.up_final[(first_row + lane) * d.states + n] : A(0), A(0)};
  }
}

// The gradients of A and of the initial state of such rows.
template <typename T, typename A>
__device__ __forceinline__ void end_rows(const ScanData<T>& d, const ScanGradients<T>& g, int64_t first_row, int count,
                                         int lane, const SerialEntry<A>* entries) {
  for (int i = lane; i < 32 * d.states; i += 32) {
    if (lane >= count) continue;
    const int64_t at = (first_row + lane) * d.states + i / 32;
    g.a[at] = entries[i].slope;
    g.initial[at] = entries[i].carry;
  }
}

// Walks a tile's states: forward from the kept ones (`mark`), and back. B is at `from`, C a KIND behind it; states
// stand in shared memory as [state][row].
template <typename A, typename C>
__device__ __forceinline__ void walk_back(const RowPair& at, int padded, int64_t tile, const A (&step)[2][C::STEPS],
                                          const A (&input)[2][C::STEPS], const A (&dy)[2][C::STEPS],
                                          A (&to_input)[2][C::STEPS], A (&to_step)[2][C::STEPS], A (&y)[2][C::STEPS],
                                          const A* mark, const A* from, SerialEntry<A>* entries, const A* decays,
                                          MatrixSums<A, C>& sums) {
  using M = ChunkMatrices<A, C>;
  using Sums = MatrixSums<A, C>;
  constexpr int S = C::STEPS, ROWS = 2, BATCH = C::BATCH, PAIRS = Sums::PAIRS;
  const int warp = at.warp, part = at.part, group = at.group;
  mark += part * 32;
  from += part * M::ROW;
  SerialEntry<A>* entry = entries + part * 32;
  const A* decay_of = decays + part * 32;
  // While a state is walked back, the next one is walked forward: its steps take the registers that those of the
  // first leave. What is so made behind the last state is not used.
  A factor[2][ROWS][S], state[2][ROWS][S], start[2][ROWS], wide_b[2][S], decay[ROWS], next[ROWS];
  load_values(from, wide_b[0]);
#pragma unroll
  for (int j = 0; j < ROWS; ++j) {
    decay[j] = decay_of[at.row(j)];
    next[j] = padded > 2 ? decay_of[64 + at.row(j)] : A(0);
    start[0][j] = mark[at.row(j)];
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
        own[j] = entry[at.row(j)];
        carry[j] = own[j].carry;
        if (n + 2 < padded) start[then][j] = mark[64 + at.row(j)];
        if (n + 4 < padded) next[j] = decay_of[128 + at.row(j)];
      }
      mark += 64;
#pragma unroll
      for (int j = 0; j < ROWS; ++j) factor[then][j][0] = exp2_fast(step[j][0] * next_decay[j]);
      A* share = sums.share(warp, pair, part, group);
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
        if (back == 1) sums.add_pair(pair, sum[pair]);
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
          state[then][j][back] = fma(factor[then][j][back], back ? state[then][j][back ? back - 1 : 0] : start[then][j],
                                     input[j][back] * wide_b[then][back]);
        }
        if (k == 0) {
          store_values(share + half * Sums::PLACES * 4, to_b);
          store_values(share + (2 + half) * Sums::PLACES * 4, to_c);
        }
      }
#pragma unroll
      for (int j = 0; j < ROWS; ++j) {
        entry[at.row(j)] = {carry[j], own[j].slope + slope[j]};
      }
      entry += 64;
      decay_of += 64;
      from += 2 * M::ROW;
    }
    sums.turn_over(sum, first, tile);
  }
}

}  // namespace opgraft::cuda
