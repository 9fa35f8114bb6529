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
  static constexpr int BATCH = 8;  // states whose dB and dC are added up at once
  static constexpr int MOST = CHUNK_STATES;
  static_assert(THREADS == 128 && THREADS == MOST * STEPS, "a thread has one sum of a batch, or two of a tile");
};

template <typename A>
struct alignas(8) SerialEntry {
  A carry;  // the gradient of the state that leaves the tile
  A slope;  // the gradient of the decay, so far
};

// Adds what the threads of a warp hold for one pair of states (a lane's part says which of the two): to dB of 8 steps,
// to dC of 8 steps, each the sum of a thread's rows. Sixteen groups of two lanes hold parts of the same sum.
//
// Tensor cores add over lanes: a product with a matrix of ones and zeros sums columns. The first, twice for four steps,
// puts step s of part p into row 2 s + p and adds up two groups; the second adds up the eight columns that are left.
// Operands are TF32. The first product cuts addends off after 11 bits (ROUND: rounds them), so this is for gradients
// that are rounded to 8 (11) bits in the end.
template <bool ROUND>
struct WarpSums {
  static constexpr uint32_t ONE = 0x3f800000;
  uint32_t first[2][4], ones[2];

  // The compiler cannot know where it comes from, and so cannot make it again wherever it is used.
  static __device__ __forceinline__ uint32_t kept(uint32_t value) {
    uint32_t out;
    asm volatile("mov.b32 %0, %1;" : "=r"(out) : "r"(value));
    return out;
  }

  // Rows from 8 on, every other operand, are not used: they are given what differs, as operands have to stand in
  // registers of their own, and the compiler would copy what is equal into them before every product.
  __device__ __forceinline__ explicit WarpSums(int lane) {
    const int row = lane / 4, part = lane % 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int before = i / 2 * 2 + i % 2 + part;
      first[0][i] = kept(row == before ? ONE : 0u);
      first[1][i] = kept(row == 4 + before ? ONE : 0u);
    }
    uint32_t index;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(index));
    ones[0] = kept(ONE | index >> 5);
    ones[1] = kept(index);
  }

  // To the nearest number of 11 bits, for finite values.
  static __device__ __forceinline__ uint32_t rounded(float value) { return __float_as_uint(value) + 0x1000u; }

  static __device__ __forceinline__ void multiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }

  // The sums over the warp of four steps, in every fourth lane alike: out[p] is that of step lane % 4 of part p.
  __device__ __forceinline__ void add(const float (&values)[4], float (&out)[2]) const {
    float sum[4] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float v0 = values[2 * i], v1 = values[2 * i + 1];
      multiply(sum, first[i], ROUND ? rounded(v0) : __float_as_uint(v0), ROUND ? rounded(v1) : __float_as_uint(v1));
    }
    // Of row 2 s + p a lane has two columns: their sum is the operand that it holds of column 2 s + p.
    float all[4] = {};
    asm("mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(all[0]), "+f"(all[1]), "+f"(all[2]), "+f"(all[3])
        : "r"(ones[0]), "r"(ones[1]), "r"(rounded(sum[0] + sum[1])));
    out[0] = all[0];
    out[1] = all[1];
  }
};

// What a warp reads of the rows in two tiles, and of the kept states in one: it arrives while the tiles behind are
// walked. Lanes read a row together; eight rows at the same place meet all banks.
template <typename T, typename C>
struct alignas(16) SerialStage {
  static constexpr int GROUP = 2 * C::STEPS;
  static constexpr int VECTORS = GROUP / VECTOR_WIDTH<T>;
  using Rows = RowWords[32][VECTORS + 1];
  Rows u[2], delta[2], up[2], gate[2];
  DeviceAccumulate<T> states[2][C::MOST][32];
};

template <typename T, typename C>
struct SerialShared {
  using A = DeviceAccumulate<T>;
  using M = ChunkMatrices<A, C>;
  static constexpr bool TENSOR = sizeof(T) == 2;  // sums over channels by WarpSums, else through shared memory
  static constexpr int PLACES = 36;  // of a vector of every lane: odd lanes from 20, so that writers meet all banks
  static constexpr int KIND_SUMS = C::MOST * C::STEPS + 8;  // of a warp's tile; writers meet all banks
  static constexpr int WARP_SHARES = TENSOR ? 2 * 2 * KIND_SUMS : C::BATCH / 2 * 4 * PLACES * 4;
  static __host__ __device__ int padded(int states) { return (states + C::BATCH - 1) / C::BATCH * C::BATCH; }
  static size_t bytes(int states) {
    return sizeof(A) * (2 * M::KIND + C::WARPS * WARP_SHARES) + C::WARPS * sizeof(SerialStage<T, C>) +
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
  auto* stages = reinterpret_cast<SerialStage<T, C>*>(shares + C::WARPS * Shared::WARP_SHARES);
  SerialStage<T, C>& stage = stages[warp];
  auto* all_entries = reinterpret_cast<SerialEntry<A>*>(stages + C::WARPS);
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
  // Of a batch a thread adds up one vector of 4 steps of every pair of states, over one group of every warp, and
  // sixteen neighbours add up the groups: what a thread ends with is one step of one state. The pairs stand in an order
  // of the thread's own, so that the first sums over neighbours need no choice of what to send.
  const int adder = thread % 16, vector = thread / 16 % 4, adder_part = thread / 64;
  const int out_pair = adder / 4, out_step = vector % 2 * 4 + adder % 4;
  const A* shares_from = shares + (vector * Shared::PLACES + adder_part * 20 + adder) * 4;
  A* sum_to = own_matrices + (vector / 2) * kind_stride + (2 * out_pair + adder_part) * d.length + out_step;
  auto add_shares = [&](int first, int64_t tile, int steps) {
    A sum[PAIRS][4];
#pragma unroll
    for (int r = 0; r < PAIRS; ++r) {
      const A* from = shares_from + (r ^ out_pair) * 4 * Shared::PLACES * 4;
#pragma unroll
      for (int w = 0; w < C::WARPS; ++w) {
        A wide[4];
        load_values(from + w * Shared::WARP_SHARES, wide);
#pragma unroll
        for (int k = 0; k < 4; ++k) sum[r][k] = w ? sum[r][k] + wide[k] : wide[k];
      }
    }
#pragma unroll
    for (int by = 2; by >= 1; by /= 2) {
#pragma unroll
      for (int r = 0; r < by; ++r) {
#pragma unroll
        for (int k = 0; k < 4; ++k) sum[r][k] += __shfl_xor_sync(WHOLE_WARP, sum[r + by][k], by * 4);
      }
    }
    int base = 0;
    scatter_sums<4, 1, 4>(sum[0], adder, base);  // ends with step adder % 4
    if (first + 2 * out_pair + adder_part < d.states && out_step < steps) sum_to[first * d.length + tile] = sum[0][0];
  };

  // A tile's sums of every warp, [warp][B or C][state][step]; the tile after it has its own.
  const WarpSums<std::is_same_v<T, __half>> warp_sums(lane);
  const bool sum_kind = lane / 4 % 2, sum_half = lane / 8 % 2;  // what this lane keeps of them
  A* const own_sums = shares + warp * Shared::WARP_SHARES + sum_kind * Shared::KIND_SUMS + sum_half * 4 + lane % 4;
  auto keep_sums = [&](A* to, const float (&sums)[2][2][2]) {
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      const A early = sum_kind ? sums[0][1][p] : sums[0][0][p], late = sum_kind ? sums[1][1][p] : sums[1][0][p];
      if (lane < 16) to[p * S] = sum_half ? late : early;
    }
  };
  auto add_warps = [&](int which, int64_t tile, int steps) {
#pragma unroll
    for (int kind = 0; kind < 2; ++kind) {
      const A* from = shares + (which * 2 + kind) * Shared::KIND_SUMS + thread;
      A sum = from[0];
#pragma unroll
      for (int w = 1; w < C::WARPS; ++w) sum += from[w * Shared::WARP_SHARES];
      const int n = thread / S, t = thread % S;
      if (n < d.states && t < steps) own_matrices[kind * kind_stride + n * d.length + tile + t] = sum;
    }
  };

  const int own_row = row_of(0);
  const bool there = own_row < count;
  const int64_t own_at = (first_row + (there ? own_row : 0)) * d.length;
  const A bias = d.bias && there ? d.bias[channel + own_row] : A(0);
  const A skip = d.skip && there ? d.skip[channel + own_row] : A(0);
  RowSum<T> skip_sum = 0, bias_sum = 0;

  const bool four_rows = all_rows % 4 == 0 && first_row % 4 == 0 && (count >= 32 || count % 4 == 0);
  // Where the rows and the states are that are fetched next: kept, as finding it takes longer than to go back.
  using Stage = SerialStage<T, C>;
  constexpr int GROUP = Stage::GROUP, TOGETHER = Stage::VECTORS, APART = 32 / TOGETHER;
  const int64_t last = (d.length - 1) / S * S;
  const int fetch_row = lane / TOGETHER, fetch_vector = lane % TOGETHER;
  int64_t fetch_at = (first_row + fetch_row) * d.length + last / GROUP * GROUP + fetch_vector * ITEMS;
  auto fetch_rows = [&](int64_t first) {
    const int which = static_cast<int>(first / GROUP % 2);
    const int left = static_cast<int>(min(d.length - first, int64_t{GROUP})) - fetch_vector * ITEMS;
    int64_t at = fetch_at;
#pragma unroll
    for (int r = 0; r < 32; r += APART) {
      const int row = r + fetch_row, there = row < count ? left : 0;
      if constexpr (WIDE) {
        copy_async<16>(&stage.u[which][row][fetch_vector], d.u + at, there > 0);
        copy_async<16>(&stage.delta[which][row][fetch_vector], d.delta + at, there > 0);
        copy_async<16>(&stage.up[which][row][fetch_vector], g.up + at, there > 0);
        if (d.z) copy_async<16>(&stage.gate[which][row][fetch_vector], d.z + at, there > 0);
      } else {
        load_row<false>(d.u + at, there, stage.u[which][row][fetch_vector]);
        load_row<false>(d.delta + at, there, stage.delta[which][row][fetch_vector]);
        load_row<false>(g.up + at, there, stage.up[which][row][fetch_vector]);
        if (d.z) load_row<false>(d.z + at, there, stage.gate[which][row][fetch_vector]);
      }
      at += APART * d.length;
    }
    fetch_at -= GROUP;
  };
  const int mark_row = four_rows ? lane % 8 * 4 : lane, mark_state = four_rows ? lane / 8 : 0;
  const A* fetch_marks = g.states + (last / S * d.states + mark_state) * all_rows + first_row + mark_row;
  const bool mark_there = mark_row < count;
  auto fetch_states = [&](A(&to)[C::MOST][32]) {
    const A* mark = fetch_marks;
    if (four_rows) {
#pragma unroll
      for (int n = 0; n < C::MOST; n += 4) {
        copy_async<16>(&to[n + mark_state][mark_row], mark, mark_there && n + mark_state < d.states);
        mark += 4 * all_rows;
      }
    } else {
#pragma unroll 1
      for (int n = 0; n < C::MOST; ++n) {
        copy_async<4>(&to[n][mark_row], mark, mark_there && n < d.states);
        mark += all_rows;
      }
    }
    fetch_marks -= d.states * all_rows;
  };
  fetch_rows(last / GROUP * GROUP);
  fetch_states(stage.states[0]);
  commit_copies();
  int buffer = 0;

  for (int64_t tile = last; tile >= 0; tile -= S) {
    const int steps = static_cast<int>(min(d.length - tile, int64_t{S}));
    const int left = there ? steps : 0;
    const int64_t at = own_at + tile;
    const A(&held_states)[C::MOST][32] = stage.states[buffer];
    buffer ^= 1;
    wait_for_copies<0>();
    __syncwarp();
    const int in_group = static_cast<int>(tile % GROUP), rows_of = static_cast<int>(tile / GROUP % 2);
    if (tile >= GROUP && (in_group == S || tile == last)) fetch_rows(tile - in_group - GROUP);
    if (tile > 0) fetch_states(stage.states[buffer]);
    commit_copies();
    const int held = in_group / ITEMS;  // this tile's first vector of a row
    A step[ROWS][S], input[ROWS][S], dy[ROWS][S];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      unpack<T>(load_words<16>(&stage.u[rows_of][lane][held + v]), input[0] + v * ITEMS);
      unpack<T>(load_words<16>(&stage.delta[rows_of][lane][held + v]), step[0] + v * ITEMS);
      unpack<T>(load_words<16>(&stage.up[rows_of][lane][held + v]), dy[0] + v * ITEMS);
      if (d.z) {
        A gated[ITEMS];
        unpack<T>(load_words<16>(&stage.gate[rows_of][lane][held + v]), gated);
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
    // The decays of a state and the state itself are fetched while the state before it is walked.
    A factor[ROWS][S], before[ROWS], next[ROWS];
    const A* mark = &held_states[part][0];
    [[maybe_unused]] A* sum_at = own_sums + buffer * 2 * Shared::KIND_SUMS;
#pragma unroll
    for (int j = 0; j < ROWS; ++j) {
      next[j] = decay_of[row_of(j)];
      before[j] = mark[row_of(j)];
#pragma unroll
      for (int i = 0; i < S; ++i) factor[j][i] = exp2_fast(step[j][i] * next[j]);
    }
    for (int first = 0; first < padded; first += BATCH) {
#pragma unroll 1
      for (int pair = 0; pair < PAIRS; ++pair) {
        const int n = first + 2 * pair + part;
        SerialEntry<A> own[ROWS];
        A own_decay[ROWS], start[ROWS], state[ROWS][S], carry[ROWS], slope[ROWS] = {}, wide_b[S];
#pragma unroll
        for (int j = 0; j < ROWS; ++j) {
          own_decay[j] = next[j];
          own[j] = entry[row_of(j)];
          start[j] = before[j];
          carry[j] = own[j].carry;
          if (n + 2 < padded) {
            next[j] = decay_of[64 + row_of(j)];
            before[j] = mark[64 + row_of(j)];
          }
        }
        mark += 64;
        load_values(from, wide_b);
#pragma unroll
        for (int i = 0; i < S; ++i) {
#pragma unroll
          for (int j = 0; j < ROWS; ++j) {
            state[j][i] = fma(factor[j][i], i ? state[j][i ? i - 1 : 0] : start[j], input[j][i] * wide_b[i]);
          }
        }
        A* share = shares + warp * Shared::WARP_SHARES + (pair * 4 * Shared::PLACES + part * 20 + group) * 4;
        [[maybe_unused]] float sums[2][2][2];  // [half of the steps][B or C][part]
#pragma unroll
        for (int half = 1; half >= 0; --half) {
          A wide_c[4], to_b[4], to_c[4];
          load_values(from + M::KIND + half * 4, wide_c);
#pragma unroll
          for (int k = 3; k >= 0; --k) {
            const int i = half * 4 + k;
#pragma unroll
            for (int j = 0; j < ROWS; ++j) {
              const A total = fma(dy[j][i], wide_c[k], carry[j]);
              y[j][i] = fma(state[j][i], wide_c[k], y[j][i]);
              to_c[k] = j ? fma(dy[j][i], state[j][i], to_c[k]) : dy[j][i] * state[j][i];
              to_b[k] = j ? fma(total, input[j][i], to_b[k]) : total * input[j][i];
              to_input[j][i] = fma(total, wide_b[i], to_input[j][i]);
              carry[j] = factor[j][i] * total;
              factor[j][i] = exp2_fast(step[j][i] * next[j]);
              const A to_exponent = carry[j] * (i ? state[j][i ? i - 1 : 0] : start[j]);
              to_step[j][i] = fma(to_exponent, own_decay[j], to_step[j][i]);
              slope[j] = fma(to_exponent, step[j][i], slope[j]);
            }
          }
          if constexpr (!Shared::TENSOR) {
            store_values(share + half * Shared::PLACES * 4, to_b);
            store_values(share + (2 + half) * Shared::PLACES * 4, to_c);
          } else {
            warp_sums.add(to_b, sums[half][0]);
            warp_sums.add(to_c, sums[half][1]);
          }
        }
        if constexpr (Shared::TENSOR) {
          keep_sums(sum_at, sums);
          sum_at += 2 * S;
        }
#pragma unroll
        for (int j = 0; j < ROWS; ++j) {
          entry[row_of(j)] = {carry[j], own[j].slope + slope[j]};
        }
        entry += 64;
        decay_of += 64;
        from += 2 * M::ROW;
      }
      if constexpr (!Shared::TENSOR) {
        __syncthreads();
        add_shares(first, tile, steps);
        __syncthreads();
      }
    }
    if constexpr (Shared::TENSOR) {
      __syncthreads();
      add_warps(buffer, tile, steps);
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
        if (d.z) gate = load_words<16>(&stage.gate[rows_of][lane][held + v]);
        finish_steps<T, FAST, WIDE>(d, g, at + v * ITEMS, left_v, load_words<16>(&stage.u[rows_of][lane][held + v]),
                                    load_words<16>(&stage.delta[rows_of][lane][held + v]),
                                    load_words<16>(&stage.up[rows_of][lane][held + v]), gate, bias, skip,
                                    step[0] + v * ITEMS, to_in, to_size, out, skip_sum, bias_sum);
      }
    }
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
