// The forward kernel of selective_scan: see selective_scan.cu for how it works and what it costs.
#pragma once

#include "cuda/selective_scan.cuh"
#include "cuda/selective_scan.h"
#include "cuda/selective_scan_tiles.cuh"

namespace opgraft::cuda {

inline constexpr int SCAN_ROW_BYTES = 64;
inline constexpr int SCAN_STEPS = 4;  // steps between sums over lanes

template <typename T>
inline constexpr int TILE_STEPS = SCAN_ROW_BYTES / static_cast<int>(sizeof(T));

// WARPS walk, HELPERS bring in and carry out.
template <typename Cut, int HELPERS_, int BLOCKS_>
struct ScanCut : Cut {
  static constexpr int HELPERS = HELPERS_;
  static constexpr int BLOCKS = BLOCKS_;  // an SM
  static constexpr int ALL_THREADS = Cut::THREADS + 32 * HELPERS;
  static_assert(Cut::CHANNELS % HELPERS == 0 && Cut::LANES % Cut::ROWS == 0);

  // Rows that a helper serves, as RowTasks wants them.
  struct Helper {
    static constexpr int WARP_ROWS = Cut::CHANNELS / HELPERS;
  };
};

template <typename A>
struct alignas(2 * sizeof(A)) StepPair {
  A step;
  A input;
};

// Where tiles of B and C and the rows' pairs stand in shared memory, each twice. Row pitches are 4 words modulo 32.
// What a walk gives, y of SCAN_STEPS steps, takes the place of the first half of their pairs.
template <typename T, typename C>
struct ScanShared {
  using A = DeviceAccumulate<T>;
  static constexpr int STEPS = TILE_STEPS<T>;
  static constexpr int MATRIX = 2 * C::PADDED + 4;  // B, then C, of one step
  static constexpr int PITCH = 2 * (STEPS + 2);
  static constexpr int TILE = STEPS * MATRIX;
  static constexpr int ROWS = C::CHANNELS * PITCH;
  static constexpr size_t BYTES = sizeof(A) * 2 * (TILE + ROWS);

  static __device__ __forceinline__ int result(int step) {
    return 2 * (step / SCAN_STEPS * SCAN_STEPS) + step % SCAN_STEPS;
  }
};

// What the helper warps do with a tile: fetch, and turn step sizes and inputs into pairs; later take y, gate and store.
template <typename T, typename C, bool WALK, bool WIDE>
class ScanHelper {
  using A = DeviceAccumulate<T>;
  using Shared = ScanShared<T, C>;
  static constexpr bool FAST = sizeof(T) == 2;
  static constexpr int STEPS = TILE_STEPS<T>;
  static constexpr int ITEMS = VECTOR_WIDTH<T>;
  using Tasks = RowTasks<typename C::Helper, STEPS, ITEMS>;
  static constexpr int AT_ONCE = Tasks::COUNT < 2 ? Tasks::COUNT : 2;  // tasks of a lane whose loads are in flight
  static_assert(Tasks::COUNT % AT_ONCE == 0);

 public:
  __device__ __forceinline__ ScanHelper(const ScanData<T>& d, const BlockPlace& place, T* y)
      : d_(d),
        y_(y),
        lane_(threadIdx.x % 32),
        first_((threadIdx.x / 32 - C::WARPS) * C::Helper::WARP_ROWS + Tasks::row(lane_)),
        step_(Tasks::step(lane_)),
        count_(place.count - first_),
        channel_(place.channel + first_),
        offset_((place.batch * d.channels + channel_) * d.length + step_),
        stride_(Tasks::ROWS_APART * d.length),
        matrices_(d, place, threadIdx.x - C::THREADS) {}

  // `done` and `next` are the first steps of tiles that share a place in shared memory; either may be absent (< 0).
  __device__ __forceinline__ void serve(A* tile, A* rows, int64_t done, int64_t next) {
    const int done_left = done < 0 ? 0 : steps_left(done) - step_, next_left = next < 0 ? 0 : steps_left(next) - step_;
    const bool more = next >= 0 && next + STEPS + step_ < d_.length && step_ % (2 * ITEMS) == 0;
    if (next >= 0) matrices_.fetch(next, steps_left(next));
    A* own = rows + first_ * Shared::PITCH;
    int64_t at = offset_;
#pragma unroll 1
    for (int first = 0; first < Tasks::COUNT; first += AT_ONCE) {
      RowWords u[AT_ONCE], delta[AT_ONCE], old[AT_ONCE], gate[AT_ONCE];
#pragma unroll
      for (int k = 0; k < AT_ONCE; ++k) {
        const bool there = real(first + k);
        const int64_t from = at + k * stride_;
        load_row<WIDE>(d_.u + from + next, there ? next_left : 0, u[k]);
        load_row<WIDE>(d_.delta + from + next, there ? next_left : 0, delta[k]);
        if constexpr (!WALK) {
          load_row<WIDE>(d_.u + from + done, there ? done_left : 0, old[k]);
          if (d_.z) load_row<WIDE>(d_.z + from + done, there ? done_left : 0, gate[k]);
        }
      }
      // What the tile after these reads: one lane a sector of 32 bytes.
      if (more) {
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
          if (!real(first + k)) continue;
          const int64_t from = at + k * stride_ + STEPS;
          prefetch_row(d_.u + from + next);
          prefetch_row(d_.delta + from + next);
          if (!WALK && d_.z && done >= 0) prefetch_row(d_.z + from + done);
        }
      }
      if constexpr (!WALK) {
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
          if (real(first + k)) finish(own, first + k, at + k * stride_ + done, done_left, old[k], gate[k]);
        }
        __syncwarp();
      }
      if (next >= 0) {
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) prepare(own, first + k, next_left, u[k], delta[k]);
      }
      at += AT_ONCE * stride_;
    }
    if (next >= 0) matrices_.store(tile, next, steps_left(next));
  }

 private:
  __device__ __forceinline__ int steps_left(int64_t tile) const {
    return static_cast<int>(min(d_.length - tile, int64_t{STEPS}));
  }

  // Is this lane's k-th task there, as far as channels go?
  __device__ __forceinline__ bool real(int k) const {
    return (Tasks::ALL % 32 == 0 || lane_ + k * 32 < Tasks::ALL) && k * Tasks::ROWS_APART < count_;
  }

  __device__ __forceinline__ void prepare(A* own, int k, int left, const RowWords& u, const RowWords& delta) const {
    if (Tasks::ALL % 32 != 0 && lane_ + k * 32 >= Tasks::ALL) return;
    const int there = real(k) ? left : 0;
    const A bias = d_.bias && there > 0 ? d_.bias[channel_ + k * Tasks::ROWS_APART] : A(0);
    // Loops of their own: the chains of eight softplus run side by side.
    A step[ITEMS], x[ITEMS];
    unpack<T>(delta, step);
    unpack<T>(u, x);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) step[i] += bias;
    if (d_.use_softplus) {
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) step[i] = softplus<FAST>(step[i]);
    }
    if (there < ITEMS) {
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) step[i] = i < there ? step[i] : A(0);
    }
    A* to = own + k * Tasks::ROWS_APART * Shared::PITCH + 2 * step_;
#pragma unroll
    for (int i = 0; i < ITEMS; i += 2) {
      store_values(to + 2 * i, {step[i], step[i] * x[i], step[i + 1], step[i + 1] * x[i + 1]});
    }
  }

  __device__ __forceinline__ void finish(const A* own, int k, int64_t at, int there, const RowWords& u,
                                         const RowWords& gate) const {
    if (there <= 0) return;
    const A skip = d_.skip ? d_.skip[channel_ + k * Tasks::ROWS_APART] : A(0);
    constexpr int PART = ITEMS < SCAN_STEPS ? ITEMS : SCAN_STEPS;
    A value[ITEMS], x[ITEMS];
    unpack<T>(u, x);
#pragma unroll
    for (int i = 0; i < ITEMS; i += PART) {
      A part[PART];
      load_values(own + k * Tasks::ROWS_APART * Shared::PITCH + Shared::result(step_ + i), part);
#pragma unroll
      for (int p = 0; p < PART; ++p) value[i + p] = fma(skip, x[i + p], part[p]);
    }
    if (d_.z) {
      A gated[ITEMS];
      unpack<T>(gate, gated);
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) value[i] *= silu<FAST>(gated[i]);
    }
    store_row<WIDE>(y_ + at, there, value);
  }

  const ScanData<T>& d_;
  T* y_;
  int lane_;
  int first_;  // row of the lane's first task, in the block
  int step_;   // of all its tasks
  int count_;  // rows that are there, from the first
  int64_t channel_, offset_, stride_;
  MatrixTiles<T, STEPS, C::PADDED, Shared::MATRIX, 1, 32 * C::HELPERS, true, !WALK> matrices_;
};

// WALK: states only (see selective_scan.h); else outputs are written. WIDE: see load_row.
template <typename T, typename C, bool WALK, bool WIDE>
__global__ void __launch_bounds__(C::ALL_THREADS, C::BLOCKS)
    scan(ScanData<T> d, SegmentPlan plan, StateWalk<T> walk, T* __restrict__ y,
         DeviceAccumulate<T>* __restrict__ final_state) {
  using A = DeviceAccumulate<T>;
  using Shared = ScanShared<T, C>;
  constexpr int STEPS = TILE_STEPS<T>, K = SCAN_STEPS;
  constexpr int NS = C::NS, ROWS = C::ROWS, LANES = C::LANES, PADDED = C::PADDED, MATRIX = Shared::MATRIX;
  extern __shared__ __align__(16) unsigned char shared[];
  A* tiles = reinterpret_cast<A*>(shared);
  A* rows = tiles + 2 * Shared::TILE;

  const BlockPlace place = block_place(d, C::CHANNELS);
  if (WALK && walk.from_zero && place.segment == plan.count - 1) return;  // nothing comes after it
  const int64_t begin = place.segment * plan.length;
  const int64_t end = min(begin + plan.length, d.length);
  const int turns = static_cast<int>((end - begin + STEPS - 1) / STEPS);

  if (threadIdx.x >= C::THREADS) {
    ScanHelper<T, C, WALK, WIDE> helper(d, place, y);
    helper.serve(tiles, rows, -1, begin);
    for (int turn = 0; turn <= turns; ++turn) {
      if (turn > 0 || turns > 0) __syncthreads();
      const int64_t tile = begin + int64_t{turn} * STEPS;
      const int place_of = (turn + 1) % 2;
      const int64_t done = !WALK && turn > 0 ? tile - STEPS : -1;
      const int64_t next = turn + 1 < turns ? tile + STEPS : -1;
      helper.serve(tiles + place_of * Shared::TILE, rows + place_of * Shared::ROWS, done, next);
    }
    return;
  }

  const int warp = threadIdx.x / 32, thread = threadIdx.x % 32;
  const int lane = thread % LANES, group = thread / LANES;
  const int count = place.count - warp * C::WARP_ROWS;  // rows of this warp that are there
  const int64_t channel = place.channel + warp * C::WARP_ROWS;
  const int64_t first_row = place.batch * d.channels + channel;
  // A lane takes its group's rows in an order of its own, so sums over lanes need no choice of what to send.
  const int turn_rows = WALK ? 0 : lane % ROWS;
  auto row_of = [&](int j) { return group * ROWS + (j ^ turn_rows); };

  alignas(16) A h[ROWS][NS];
  A decay[ROWS][NS], step_sum[ROWS] = {};
#pragma unroll
  for (int j = 0; j < ROWS; ++j) {
    const int r = row_of(j);
#pragma unroll
    for (int i = 0; i < NS; ++i) {
      const int n = lane * NS + i;
      const bool real = r < count && n < d.states;
      decay[j][i] = real ? d.a[(channel + r) * d.states + n] * A(LOG2_E) : A(0);
      h[j][i] = real && !walk.from_zero && d.initial ? d.initial[(first_row + r) * d.states + n] : A(0);
    }
  }
  // The segments before, all rows and states at once: only segments wait for one another.
  for (int64_t s = 0; s < (walk.from_zero ? 0 : place.segment); ++s) {
#pragma unroll
    for (int j = 0; j < ROWS; ++j) {
      if (row_of(j) >= count) continue;
      const int64_t row = s * d.batch * d.channels + first_row + row_of(j);
      const A sum = plan_sums<T>(plan)[row];
#pragma unroll
      for (int i = 0; i < NS; ++i) {
        const int n = lane * NS + i;
        const A end_state = n < d.states ? plan_ends<T>(plan)[row * d.states + n] : A(0);
        h[j][i] = fma(exp2_fast(decay[j][i] * sum), h[j][i], end_state);
      }
    }
  }

  for (int turn = 0; turn < turns; ++turn) {
    __syncthreads();
    const int64_t tile = begin + int64_t{turn} * STEPS;
    const A* tile_of = tiles + turn % 2 * Shared::TILE;
    A* own = rows + turn % 2 * Shared::ROWS + warp * C::WARP_ROWS * Shared::PITCH;
#pragma unroll 1
    for (int t = 0; t < STEPS; t += K) {
      if constexpr (WALK) {
        if (walk.states && (t & ((1 << walk.every_log2) - 1)) == 0 && tile + t < end) {
          const int64_t mark = (tile + t) >> walk.every_log2;
#pragma unroll
          for (int j = 0; j < ROWS; ++j) {
            const int r = row_of(j);
            if (r >= count) continue;
            A* to = walk.states + (mark * d.batch * d.channels + first_row + r) * d.states + lane * NS;
            if (d.states % NS == 0) {
              if (lane * NS < d.states) store_values(to, h[j]);
            } else {
#pragma unroll
              for (int i = 0; i < NS; ++i) {
                if (lane * NS + i < d.states) to[i] = h[j][i];
              }
            }
          }
        }
      }
      StepPair<A> pair[ROWS][K];
      A sum[ROWS][K];
#pragma unroll
      for (int j = 0; j < ROWS; ++j) {
        A both[2 * K];
        load_values(own + row_of(j) * Shared::PITCH + 2 * t, both);
#pragma unroll
        for (int k = 0; k < K; ++k) pair[j][k] = {both[2 * k], both[2 * k + 1]};
      }
#pragma unroll
      for (int k = 0; k < K; ++k) {
        A b[NS], c[NS];
        load_values(tile_of + (t + k) * MATRIX + lane * NS, b);
        if (!WALK) load_values(tile_of + (t + k) * MATRIX + PADDED + lane * NS, c);
#pragma unroll
        for (int j = 0; j < ROWS; ++j) {
          const StepPair<A> p = pair[j][k];
          if (WALK) step_sum[j] += p.step;
          A y_part = A(0);
#pragma unroll
          for (int i = 0; i < NS; ++i) {
            const A factor = exp2_fast(p.step * decay[j][i]);
            h[j][i] = fma(factor, h[j][i], p.input * b[i]);
            if (!WALK) y_part = i ? fma(h[j][i], c[i], y_part) : h[j][i] * c[i];
          }
          sum[j][k] = y_part;
        }
      }
      if constexpr (!WALK) {
        constexpr int LEFT = ROWS * K / LANES > 1 ? ROWS * K / LANES : 1;
        add_rows(sum);
        int base = 0;
        scatter_sums<K, ROWS, LANES>(sum[0], lane, base);
        A mine[LEFT];
#pragma unroll
        for (int i = 0; i < LEFT; ++i) mine[i] = sum[0][i];
        __syncwarp();  // all lanes have read the pairs
        store_values(own + row_of(0) * Shared::PITCH + Shared::result(t) + base, mine);
      }
    }
  }
  if (turns > 0) __syncthreads();

#pragma unroll
  for (int j = 0; j < ROWS; ++j) {
    const int r = row_of(j);
    if (r >= count) continue;
    const int64_t row = first_row + r;
    if (WALK && walk.from_zero) {
      const int64_t at = place.segment * d.batch * d.channels + row;
      if (lane == 0) plan_sums<T>(plan)[at] = step_sum[j];
#pragma unroll
      for (int i = 0; i < NS; ++i) {
        if (lane * NS + i < d.states) plan_ends<T>(plan)[at * d.states + lane * NS + i] = h[j][i];
      }
    } else if (!WALK && end == d.length) {
#pragma unroll
      for (int i = 0; i < NS; ++i) {
        if (lane * NS + i < d.states) final_state[row * d.states + lane * NS + i] = h[j][i];
      }
    }
  }
}

}  // namespace opgraft::cuda
