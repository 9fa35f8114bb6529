// Mamba's selective scan on CUDA, forward.
//
// A warp works alone on 16 channels (2 rows a thread, 4 lanes with 4 states each; more lanes where there are more
// states) and walks time serially: no work beyond the recurrence itself. Tile by tile it turns step sizes and u into
// pairs (step size, step size * u) in its own shared memory, from 16-byte loads along time issued a tile ahead; walks;
// adds up y over the lanes, four steps and two rows at once so that every exchange halves what is left; and writes y
// gated, in 16-byte stores. Warps of a block share the tile of B and C, in two buffers, so a tile has one barrier.
//
// Cost a (step, channel, state): one exponential (ex2; A is scaled by log2 e beforehand), 6.4 issue slots of the walk
// and, over 16 states, 3.5 of step sizes, gate, tiles and stores; 1.5 words of shared memory into registers. On 132 SMs
// at 1.93 GHz, 8x4096x4096 with 16 states: 0.65 ms of exponentials (2.1e9, and 0.5e9 of softplus and gate), 0.66 ms of
// issue slots, 0.4 ms of shared memory, 0.25 ms of bytes. What it takes is in docs/ops/selective_scan.md.
//
// Few channels: time is cut into segments. A first launch walks every segment from a zero state and keeps its end
// state and the sum of its step sizes; the second folds those of the segments before its own, in order (the decay of
// a whole segment is one exponential, of A times that sum), and walks with outputs.
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "cuda/selective_scan.cuh"
#include "cuda/selective_scan.h"
#include "ops.h"
#include "support/check.h"

namespace opgraft::cuda {
namespace {

constexpr int ROW_BYTES = 64;
constexpr int K = 4;  // steps between sums over lanes

template <typename T>
constexpr int TILE_STEPS = ROW_BYTES / static_cast<int>(sizeof(T));

template <typename A>
struct alignas(2 * sizeof(A)) StepPair {
  A step;
  A input;
};

// Where the block's tiles and each warp's pairs and sums stand in shared memory. Row pitches are 4 words modulo 32.
template <typename T, typename C>
struct ScanShared {
  using A = DeviceAccumulate<T>;
  static constexpr int STEPS = TILE_STEPS<T>;
  static constexpr int MATRIX = 2 * C::PADDED + 4;  // B, then C, of one step
  static constexpr int PAIRS = STEPS + 2;
  static constexpr int SUMS = STEPS + 4;
  static constexpr int TILES = 2 * STEPS * MATRIX;
  static constexpr int WARP = C::WARP_ROWS * (2 * PAIRS + SUMS);
  static constexpr size_t BYTES = sizeof(A) * (TILES + C::WARPS * WARP);
};

// WALK: states only (see selective_scan.h); else outputs are written. WIDE: see load_row.
template <typename T, typename C, bool WALK, bool WIDE>
__global__ void __launch_bounds__(C::THREADS, sizeof(DeviceAccumulate<T>) == 4 ? 16 / C::WARPS : 1)
    scan(ScanData<T> d, SegmentPlan plan, StateWalk<T> walk, T* __restrict__ y,
         DeviceAccumulate<T>* __restrict__ final_state) {
  using A = DeviceAccumulate<T>;
  using Shared = ScanShared<T, C>;
  constexpr bool FAST = sizeof(T) == 2;
  constexpr int STEPS = TILE_STEPS<T>;
  constexpr int ITEMS = VECTOR_WIDTH<T>;
  constexpr int NS = C::NS, ROWS = C::ROWS, LANES = C::LANES, PADDED = C::PADDED, MATRIX = Shared::MATRIX;
  using Tasks = RowTasks<C, STEPS, ITEMS>;
  extern __shared__ __align__(16) unsigned char shared[];
  const int warp = threadIdx.x / 32, thread = threadIdx.x % 32;
  const int lane = thread % LANES, group = thread / LANES;
  A* tiles = reinterpret_cast<A*>(shared);
  A* own = tiles + Shared::TILES + warp * Shared::WARP;
  auto* pairs = reinterpret_cast<StepPair<A>*>(own);
  A* sums = own + C::WARP_ROWS * 2 * Shared::PAIRS;

  const BlockPlace place = block_place(d, C::CHANNELS);
  const int64_t begin = place.segment * plan.length;
  const int64_t end = min(begin + plan.length, d.length);
  const int count = place.count - warp * C::WARP_ROWS;  // rows of this warp that are there
  const int64_t channel = place.channel + warp * C::WARP_ROWS;
  const int64_t first_row = place.batch * d.channels + channel;

  alignas(16) A h[ROWS][NS];
  A decay[ROWS][NS], step_sum[ROWS] = {};
#pragma unroll
  for (int j = 0; j < ROWS; ++j) {
    const int r = group + j * C::GROUPS;
#pragma unroll
    for (int i = 0; i < NS; ++i) {
      const int n = lane * NS + i;
      const bool real = r < count && n < d.states;
      decay[j][i] = real ? d.a[(channel + r) * d.states + n] * A(LOG2_E) : A(0);
      h[j][i] = A(0);
      if (!real || walk.from_zero) continue;
      const int64_t at = (first_row + r) * d.states + n;
      A state = d.initial ? d.initial[at] : A(0);
      for (int64_t s = 0; s < place.segment; ++s) {
        const int64_t row = s * d.batch * d.channels + first_row + r;
        state = exp2_fast(decay[j][i] * plan_sums<T>(plan)[row]) * state + plan_ends<T>(plan)[row * d.states + n];
      }
      h[j][i] = state;
    }
  }

  MatrixTiles<T, STEPS, PADDED, MATRIX, C::THREADS, true, !WALK> matrices(d, place);
  // The tasks of a lane: vectors of rows, the same ones in every tile.
  int64_t offset[Tasks::COUNT];
#pragma unroll
  for (int k = 0; k < Tasks::COUNT; ++k) {
    const int r = Tasks::row(thread + k * 32);
    const bool there = Tasks::real(thread + k * 32) && r < count;
    offset[k] = (first_row + (there ? r : 0)) * d.length + Tasks::step(thread + k * 32);
  }
  auto steps_left = [&](int64_t tile) { return static_cast<int>(min(d.length - tile, int64_t{STEPS})); };
  // How much of the k-th task is there, given the tile's steps.
  auto left = [&](int k, int steps) {
    const int task = thread + k * 32;
    return Tasks::real(task) && Tasks::row(task) < count ? steps - Tasks::step(task) : 0;
  };
  matrices.fetch(begin, steps_left(begin));
  A* tile_of = tiles;
  for (int64_t tile = begin; tile < end; tile += STEPS) {
    const int steps = steps_left(tile);
    Vector<T, ITEMS> u[Tasks::COUNT], delta[Tasks::COUNT];
#pragma unroll
    for (int k = 0; k < Tasks::COUNT; ++k) {
      load_row<WIDE>(d.u + offset[k] + tile, left(k, steps), u[k]);
      load_row<WIDE>(d.delta + offset[k] + tile, left(k, steps), delta[k]);
    }
    matrices.store(tile_of, tile, steps);
    __syncthreads();
    if (tile + STEPS < end) {
      matrices.fetch(tile + STEPS, steps_left(tile + STEPS));
#pragma unroll
      for (int k = 0; k < Tasks::COUNT; ++k) {
        // One lane a sector of 32 bytes.
        if (Tasks::step(thread + k * 32) % (2 * ITEMS) || left(k, steps_left(tile + STEPS)) <= 0) continue;
        const int64_t next = offset[k] + tile + STEPS;
        prefetch_row(d.u + next);
        prefetch_row(d.delta + next);
        if (!WALK && d.z) prefetch_row(d.z + next);
      }
    }
#pragma unroll
    for (int k = 0; k < Tasks::COUNT; ++k) {
      const int task = thread + k * 32;
      const A bias = d.bias && left(k, steps) > 0 ? d.bias[channel + Tasks::row(task)] : A(0);
      // Loops of their own: the chains of eight softplus run side by side.
      A step[ITEMS];
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) step[i] = A(widen(delta[k].lane[i])) + bias;
      if (d.use_softplus) {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) step[i] = softplus<FAST>(step[i]);
      }
      if (left(k, steps) < ITEMS) {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) step[i] = i < left(k, steps) ? step[i] : A(0);
      }
      if (Tasks::real(task)) {
        auto* to = pairs + Tasks::row(task) * Shared::PAIRS + Tasks::step(task);
#pragma unroll
        for (int i = 0; i < ITEMS; i += 2) {
          store_values(reinterpret_cast<A*>(to + i), {step[i], step[i] * A(widen(u[k].lane[i])), step[i + 1],
                                                      step[i + 1] * A(widen(u[k].lane[i + 1]))});
        }
      }
    }
    __syncwarp();

#pragma unroll 1
    for (int t = 0; t < STEPS; t += K) {
      if constexpr (WALK) {
        if (walk.states && (t & ((1 << walk.every_log2) - 1)) == 0 && tile + t < end) {
          const int64_t mark = (tile + t) >> walk.every_log2;
#pragma unroll
          for (int j = 0; j < ROWS; ++j) {
            const int r = group + j * C::GROUPS;
            if (r >= count) continue;
            A* to = walk.states + ((first_row + r) * walk.marks + mark) * d.states + lane * NS;
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
      A sum[ROWS * K];
#pragma unroll
      for (int j = 0; j < ROWS; ++j) {
        A both[2 * K];
        load_values(reinterpret_cast<const A*>(pairs + (group + j * C::GROUPS) * Shared::PAIRS + t), both);
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
            h[j][i] = fma(exp2_fast(p.step * decay[j][i]), h[j][i], p.input * b[i]);
            if (!WALK) y_part = fma(h[j][i], c[i], y_part);
          }
          sum[j * K + k] = y_part;
        }
      }
      if constexpr (!WALK) {
        constexpr int LEFT = ROWS * K / LANES > 1 ? ROWS * K / LANES : 1;
        int base = 0;
        scatter_sums<ROWS * K, 1, LANES>(sum, lane, base);
        A mine[LEFT];
#pragma unroll
        for (int i = 0; i < LEFT; ++i) mine[i] = sum[i];
        store_values(sums + (group + base / K * C::GROUPS) * Shared::SUMS + t + base % K, mine);
      }
    }
    __syncwarp();

    if constexpr (!WALK) {
      Vector<T, ITEMS> gate[Tasks::COUNT];
#pragma unroll
      for (int k = 0; k < Tasks::COUNT; ++k) {
        load_row<WIDE>(d.u + offset[k] + tile, left(k, steps), u[k]);
        if (d.z) load_row<WIDE>(d.z + offset[k] + tile, left(k, steps), gate[k]);
      }
#pragma unroll
      for (int k = 0; k < Tasks::COUNT; ++k) {
        const int task = thread + k * 32;
        if (left(k, steps) <= 0) continue;
        const A skip = d.skip ? d.skip[channel + Tasks::row(task)] : A(0);
        A value[ITEMS];
        load_values(sums + Tasks::row(task) * Shared::SUMS + Tasks::step(task), value);
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) value[i] = fma(skip, A(widen(u[k].lane[i])), value[i]);
        if (d.z) {
#pragma unroll
          for (int i = 0; i < ITEMS; ++i) value[i] *= silu<FAST>(A(widen(gate[k].lane[i])));
        }
        Vector<T, ITEMS> out;
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) out.lane[i] = narrow<T>(value[i]);
        store_row<WIDE>(y + offset[k] + tile, left(k, steps), out);
      }
    }
    tile_of = tiles + (tile_of == tiles ? STEPS * MATRIX : 0);
  }

#pragma unroll
  for (int j = 0; j < ROWS; ++j) {
    const int r = group + j * C::GROUPS;
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

template <typename T, typename Body>
void dispatch_cut(int states, const Body& body) {
  // double is for checks: one kernel serves it.
  if constexpr (std::is_same_v<T, double>) {
    body(WarpCut<32, 8, 1, 4>{});
  } else if (states <= 16) {
    body(WarpCut<4, 4, 2, 4>{});
  } else if (states <= 64) {
    body(WarpCut<16, 4, 2, 4>{});
  } else {
    body(WarpCut<32, 8, 1, 4>{});
  }
}

template <typename T, typename C, bool WALK>
void launch_scan(const Launch& context, const ScanData<T>& d, const SegmentPlan& plan, const StateWalk<T>& walk, T* y,
                 DeviceAccumulate<T>* final_state) {
  constexpr size_t BYTES = ScanShared<T, C>::BYTES;
  const int64_t per_group = d.channels / d.groups;
  const int64_t blocks = d.batch * d.groups * ((per_group + C::CHANNELS - 1) / C::CHANNELS) * plan.count;
  const bool wide = d.length % VECTOR_WIDTH<T> == 0 && aligned(d.u) && aligned(d.delta) && aligned(d.z) && aligned(y);
  auto launch = [&](auto kernel) {
    STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(BYTES)));
    kernel<<<static_cast<unsigned>(blocks), C::THREADS, BYTES, context.stream()>>>(d, plan, walk, y, final_state);
    Launch::check();
  };
  wide ? launch(scan<T, C, WALK, true>) : launch(scan<T, C, WALK, false>);
}

}  // namespace

SegmentPlan plan_segments(const SelectiveShape& shape, int64_t warps_a_segment, int sms, int64_t tile) {
  constexpr int64_t ENOUGH = 8, WANTED = 16;  // warps an SM
  if (warps_a_segment >= ENOUGH * sms || shape.length <= 2 * tile) return {1, std::max<int64_t>(shape.length, 1)};
  const int64_t aim = (WANTED * sms + warps_a_segment - 1) / warps_a_segment;
  const int64_t tiles = (shape.length + tile - 1) / tile;
  const int64_t count = std::min({aim, tiles, int64_t{64}});
  const int64_t length = (tiles + count - 1) / count * tile;
  return {(shape.length + length - 1) / length, length};
}

int64_t scan_warps(const SelectiveShape& shape) {
  int64_t warps = 0;
  dispatch_cut<float>(shape.states, [&](auto cut) {
    using C = decltype(cut);
    warps = shape.batch * shape.groups * ((shape.per_group() + C::WARP_ROWS - 1) / C::WARP_ROWS);
  });
  return warps;
}

template <typename T>
void walk_segments(const Launch& context, const ScanData<T>& d, const SegmentPlan& plan, const StateWalk<T>& walk) {
  dispatch_cut<T>(d.states,
                  [&](auto cut) { launch_scan<T, decltype(cut), true>(context, d, plan, walk, nullptr, nullptr); });
}

template void walk_segments(const Launch&, const ScanData<float>&, const SegmentPlan&, const StateWalk<float>&);
template void walk_segments(const Launch&, const ScanData<double>&, const SegmentPlan&, const StateWalk<double>&);
template void walk_segments(const Launch&, const ScanData<__half>&, const SegmentPlan&, const StateWalk<__half>&);
template void walk_segments(const Launch&, const ScanData<__nv_bfloat16>&, const SegmentPlan&,
                            const StateWalk<__nv_bfloat16>&);

Tensor segment_space(const Tensor& like, SegmentPlan& plan, const SelectiveShape& shape) {
  const int64_t rows = plan.count > 1 ? plan.count * shape.batch * shape.channels : 0;
  Tensor space = new_contiguous(like, std::vector<int64_t>{rows * (shape.states + 1)}, state_type(like));
  plan.sums = space.mutable_data_ptr();
  const size_t size = state_type(like) == ScalarType::Double ? 8 : 4;
  plan.ends = static_cast<unsigned char*>(plan.sums) + rows * size;
  return space;
}

std::tuple<Tensor, Tensor> selective_scan(const Tensor& u, const Tensor& delta, const Tensor& A, const Tensor& B,
                                          const Tensor& C, const OptionalTensor& D, const OptionalTensor& z,
                                          const OptionalTensor& delta_bias, bool delta_softplus,
                                          const OptionalTensor& initial_state) {
  const SelectiveShape shape =
      check_selective("selective_scan", {u, delta, A, B, C, D, z, delta_bias, delta_softplus, initial_state});
  const Tensor rows = as_contiguous(u), steps = as_contiguous(delta), decays = as_contiguous(A);
  const OptionalTensor skip = as_contiguous(D), gate = as_contiguous(z), bias = as_contiguous(delta_bias);
  const OptionalTensor start = as_contiguous(initial_state);
  Tensor y = new_contiguous_like(u);
  Tensor final_state =
      new_contiguous(u, std::vector<int64_t>{shape.batch, shape.channels, shape.states}, state_type(u));
  if (shape.batch * shape.channels == 0) return {y, final_state};
  if (shape.length == 0) {
    start ? torch::stable::copy_(final_state, *start) : torch::stable::zero_(final_state);
    return {y, final_state};
  }
  dispatch_floating("selective_scan", u, [&](auto tag) {
    using T = typename DeviceType<typename decltype(tag)::type>::type;
    const ScanData<T> d = scan_data<T>(shape, {rows, steps, decays, B, C, skip, gate, bias, delta_softplus, start});
    Launch context(u);
    SegmentPlan plan = plan_segments(shape, scan_warps(shape), context.multiprocessors(), TILE_STEPS<T>);
    const Tensor space = segment_space(u, plan, shape);
    if (plan.count > 1) walk_segments<T>(context, d, plan, StateWalk<T>::from_nothing());
    dispatch_cut<T>(shape.states, [&](auto cut) {
      launch_scan<T, decltype(cut), false>(context, d, plan, StateWalk<T>{}, static_cast<T*>(y.mutable_data_ptr()),
                                           static_cast<DeviceAccumulate<T>*>(final_state.mutable_data_ptr()));
    });
  });
  return {y, final_state};
}

}  // namespace opgraft::cuda

STABLE_TORCH_LIBRARY_IMPL(opgraft, CUDA, m) { m.impl("selective_scan", TORCH_BOX(&opgraft::cuda::selective_scan)); }
