// Mamba's selective scan on CUDA, forward and one decoding step.
//
// A thread owns two channels and NS states of each, in registers, and walks time serially: no work beyond the
// recurrence itself. LANES threads share a channel pair's states and add up y with one shuffle a step. A block owns
// channels of one group, so that the tile of B and C in shared memory serves them all; the tile of (step size, step
// size * u) pairs is made by all threads from 16-byte loads along time, next tile's loads issued before this tile's
// walk, and y goes back through the same shared memory, so that global accesses are whole vectors in any layout.
//
// Cost a (step, channel, state): one exponential (ex2; A is scaled by log2 e beforehand) and five issue slots, 0.6 for
// shared memory, about 2 for step sizes, gate and stores divided over 16 states. On 132 SMs at 1.85 GHz, 16
// exponentials a clock and SM: 8x4096x4096 with 16 states is 2.1e9 exponentials and 0.29e9 of softplus and gate,
// 0.6 ms; 8 issue slots are 0.55 ms; bytes 0.25 ms. One exponential in POLYNOMIAL_SHARE runs on the FMA units.
// Shared memory: 4 + 1 bytes a (step, channel, state), half of what the unit gives at that rate; with one channel a
// thread it would be the limit.
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

constexpr int THREADS = 128;
constexpr int CHANNELS = 2;  // a thread
constexpr int NS = 8;        // states a thread
constexpr int ROW_BYTES = 64;
constexpr int POLYNOMIAL_SHARE = 8;

template <typename T>
constexpr int TILE_STEPS = ROW_BYTES / static_cast<int>(sizeof(T));

template <typename A>
struct alignas(2 * sizeof(A)) StepPair {
  A step;
  A input;
};

// Pairs of one channel, padded so that lanes on neighbouring channels use different banks.
template <typename T>
constexpr int PITCH = TILE_STEPS<T> + 2;

template <typename T, int LANES>
constexpr int CHANNELS_PER_BLOCK = THREADS / LANES * CHANNELS;

template <typename T, int LANES>
constexpr size_t SHARED_BYTES = (static_cast<size_t>(CHANNELS_PER_BLOCK<T, LANES>) * PITCH<T> * 2 +
                                 2 * static_cast<size_t>(TILE_STEPS<T>) * LANES * NS) *
                                sizeof(DeviceAccumulate<T>);

template <int N>
__device__ __forceinline__ float decay_of(float exponent) {
  return N % POLYNOMIAL_SHARE == POLYNOMIAL_SHARE - 1 ? exp2_polynomial(exponent) : exp2_fast(exponent);
}
template <int N>
__device__ __forceinline__ double decay_of(double exponent) {
  return exp2_fast(exponent);
}

template <typename A>
__device__ __forceinline__ void load_states(const A* from, A (&out)[NS]) {
  constexpr int WIDE = 16 / sizeof(A);
#pragma unroll
  for (int v = 0; v < NS / WIDE; ++v) {
    const auto pack = reinterpret_cast<const Vector<A, WIDE>*>(from)[v];
#pragma unroll
    for (int i = 0; i < WIDE; ++i) out[v * WIDE + i] = pack.lane[i];
  }
}

// WALK: states only (see selective_scan.h); else outputs are written.
template <typename T, int LANES, bool WALK>
__global__ void __launch_bounds__(THREADS) scan(ScanData<T> d, SegmentPlan plan, StateWalk<T> walk, T* __restrict__ y,
                                                DeviceAccumulate<T>* __restrict__ final_state, bool wide) {
  using A = DeviceAccumulate<T>;
  constexpr bool FAST = sizeof(T) == 2;
  constexpr int STEPS = TILE_STEPS<T>;
  constexpr int ITEMS = VECTOR_WIDTH<T>;
  constexpr int VECTORS = STEPS / ITEMS;
  constexpr int PADDED = LANES * NS;
  constexpr int PER_BLOCK = CHANNELS_PER_BLOCK<T, LANES>;
  constexpr int TASKS = (PER_BLOCK * VECTORS + THREADS - 1) / THREADS;
  extern __shared__ __align__(16) unsigned char shared[];
  auto* pairs = reinterpret_cast<StepPair<A>*>(shared);
  A* tile_b = reinterpret_cast<A*>(pairs + PER_BLOCK * PITCH<T>);
  A* tile_c = tile_b + STEPS * PADDED;

  const BlockPlace place = block_place(d, PER_BLOCK);
  const int lane = threadIdx.x % LANES;
  const int slot = threadIdx.x / LANES * CHANNELS;
  const int64_t begin = place.segment * plan.length;
  const int64_t end = min(begin + plan.length, d.length);
  const int64_t block_row = place.batch * d.channels + place.channel;

  A h[CHANNELS][NS], decay[CHANNELS][NS], step_sum[CHANNELS] = {};
#pragma unroll
  for (int j = 0; j < CHANNELS; ++j) {
    const bool there = slot + j < place.count;
#pragma unroll
    for (int i = 0; i < NS; ++i) {
      const int n = lane * NS + i;
      const bool real = there && n < d.states;
      decay[j][i] = real ? d.a[(place.channel + slot + j) * d.states + n] * A(LOG2_E) : A(0);
      h[j][i] = A(0);
      const int64_t at = (block_row + slot + j) * d.states + n;
      if (real && !walk.from_zero && place.segment == 0 && d.initial) h[j][i] = d.initial[at];
      if (real && !walk.from_zero && place.segment > 0) {
        A state = d.initial ? d.initial[at] : A(0);
        for (int64_t s = 0; s < place.segment; ++s) {
          const int64_t row = s * d.batch * d.channels + block_row + slot + j;
          state = exp2_fast(decay[j][i] * plan_sums<T>(plan)[row]) * state + plan_ends<T>(plan)[row * d.states + n];
        }
        h[j][i] = state;
      }
    }
  }

  MatrixTile<T, STEPS, PADDED, THREADS> matrix_b(d.b, d.b_strides, place), matrix_c(d.c, d.c_strides, place);
  // The tasks of a thread: vectors of rows, the same ones in every tile.
  Vector<T, ITEMS> u[TASKS], next_u[TASKS], next_delta[TASKS], gate[TASKS];
  auto fetch = [&](int64_t first) {
    matrix_b.fetch(first, d.length, d.states);
    if (!WALK) matrix_c.fetch(first, d.length, d.states);
#pragma unroll
    for (int k = 0; k < TASKS; ++k) {
      const int task = threadIdx.x + k * THREADS;
      const int row = task / VECTORS;
      const int64_t t = first + task % VECTORS * ITEMS;
      const bool there = row < place.count && task < PER_BLOCK * VECTORS;
      const int64_t at = (block_row + row) * d.length + t;
      load_row(d.u + at, there ? d.length - t : 0, wide, next_u[k]);
      load_row(d.delta + at, there ? d.length - t : 0, wide, next_delta[k]);
    }
  };
  fetch(begin);
  for (int64_t tile = begin; tile < end; tile += STEPS) {
#pragma unroll
    for (int k = 0; k < TASKS; ++k) {
      const int task = threadIdx.x + k * THREADS;
      const int row = task / VECTORS;
      const int64_t t = tile + task % VECTORS * ITEMS;
      u[k] = next_u[k];
      if (row < PER_BLOCK && task < PER_BLOCK * VECTORS) {
        const A bias = d.bias && row < place.count ? d.bias[place.channel + row] : A(0);
        // Loops of their own: the chains of eight softplus run side by side.
        A step[ITEMS];
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) step[i] = A(widen(next_delta[k].lane[i])) + bias;
        if (d.use_softplus) {
#pragma unroll
          for (int i = 0; i < ITEMS; ++i) step[i] = softplus<FAST>(step[i]);
        }
        if (t + ITEMS > d.length || row >= place.count) {
#pragma unroll
          for (int i = 0; i < ITEMS; ++i) step[i] = t + i >= d.length || row >= place.count ? A(0) : step[i];
        }
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
          pairs[row * PITCH<T> + task % VECTORS * ITEMS + i] = {step[i], step[i] * A(widen(u[k].lane[i]))};
        }
      }
    }
    matrix_b.store(tile_b, tile, d.length, d.states);
    if (!WALK) matrix_c.store(tile_c, tile, d.length, d.states);
    __syncthreads();
    if (tile + STEPS < end) fetch(tile + STEPS);
    if (!WALK && d.z) {
#pragma unroll
      for (int k = 0; k < TASKS; ++k) {
        const int task = threadIdx.x + k * THREADS;
        const int row = task / VECTORS;
        const int64_t t = tile + task % VECTORS * ITEMS;
        const bool there = row < place.count && task < PER_BLOCK * VECTORS;
        load_row(d.z + (block_row + row) * d.length + t, there ? d.length - t : 0, wide, gate[k]);
      }
    }

    for (int t = 0; t < STEPS; t += 2) {
      StepPair<A> pair[CHANNELS][2];
#pragma unroll
      for (int j = 0; j < CHANNELS; ++j) {
        if constexpr (sizeof(A) == 4) {
          const auto both = *reinterpret_cast<const Vector<A, 4>*>(pairs + (slot + j) * PITCH<T> + t);
          pair[j][0] = {both.lane[0], both.lane[1]};
          pair[j][1] = {both.lane[2], both.lane[3]};
        } else {
          pair[j][0] = pairs[(slot + j) * PITCH<T> + t];
          pair[j][1] = pairs[(slot + j) * PITCH<T> + t + 1];
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if constexpr (WALK) {
          if (walk.states && (t + half) % walk.every == 0 && tile + t + half < end) {
            const int64_t mark = (tile + t + half) / walk.every;
#pragma unroll
            for (int j = 0; j < CHANNELS; ++j) {
              if (slot + j < place.count) {
                A* to = walk.states + ((block_row + slot + j) * walk.marks + mark) * d.states + lane * NS;
#pragma unroll
                for (int i = 0; i < NS; ++i) {
                  if (lane * NS + i < d.states) to[i] = h[j][i];
                }
              }
            }
          }
        }
        A b[NS], c[NS], sum[CHANNELS] = {};
        load_states(tile_b + (t + half) * PADDED + lane * NS, b);
        if (!WALK) load_states(tile_c + (t + half) * PADDED + lane * NS, c);
#pragma unroll
        for (int j = 0; j < CHANNELS; ++j) {
          const StepPair<A> p = pair[j][half];
          if (WALK) step_sum[j] += p.step;
#pragma unroll
          for (int i = 0; i < NS; ++i) {
            const A exponent = p.step * decay[j][i];
            const A factor = i % POLYNOMIAL_SHARE == POLYNOMIAL_SHARE - 1 ? decay_of<POLYNOMIAL_SHARE - 1>(exponent)
                                                                          : decay_of<0>(exponent);
            h[j][i] = fma(factor, h[j][i], p.input * b[i]);
            if (!WALK) sum[j] = fma(h[j][i], c[i], sum[j]);
          }
        }
        if constexpr (!WALK) {
          // Lane 0 of the pair ends up with channel 0, lane 1 with channel 1.
          static_assert(CHANNELS == 2 && LANES >= 2);
          const bool odd = lane & 1;
          A mine = odd ? sum[1] : sum[0];
          mine += __shfl_xor_sync(WHOLE_WARP, odd ? sum[0] : sum[1], 1);
#pragma unroll
          for (int by = 2; by < LANES; by *= 2) mine += __shfl_xor_sync(WHOLE_WARP, mine, by);
          if (lane < 2) pairs[(slot + lane) * PITCH<T> + t + half].step = mine;
        }
      }
    }
    __syncthreads();

    if constexpr (!WALK) {
#pragma unroll
      for (int k = 0; k < TASKS; ++k) {
        const int task = threadIdx.x + k * THREADS;
        const int row = task / VECTORS;
        const int64_t t = tile + task % VECTORS * ITEMS;
        if (row < place.count && task < PER_BLOCK * VECTORS && t < d.length) {
          const A skip = d.skip ? d.skip[place.channel + row] : A(0);
          A value[ITEMS];
#pragma unroll
          for (int i = 0; i < ITEMS; ++i) {
            const A sum = pairs[row * PITCH<T> + task % VECTORS * ITEMS + i].step;
            value[i] = fma(skip, A(widen(u[k].lane[i])), sum);
          }
          if (d.z) {
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) value[i] *= silu<FAST>(A(widen(gate[k].lane[i])));
          }
          Vector<T, ITEMS> out;
#pragma unroll
          for (int i = 0; i < ITEMS; ++i) out.lane[i] = narrow<T>(value[i]);
          store_row(y + (block_row + row) * d.length + t, d.length - t, wide, out);
        }
      }
    }
  }

#pragma unroll
  for (int j = 0; j < CHANNELS; ++j) {
    if (slot + j >= place.count) continue;
    const int64_t row = block_row + slot + j;
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

template <int N>
using Int = std::integral_constant<int, N>;

template <typename T, typename Body>
void dispatch_lanes(int states, const Body& body) {
  // double is for checks: one kernel serves it.
  if constexpr (std::is_same_v<T, double>) {
    body(Int<32>{});
  } else if (states <= 16) {
    body(Int<2>{});
  } else if (states <= 64) {
    body(Int<8>{});
  } else {
    body(Int<32>{});
  }
}

template <typename T, int LANES, bool WALK>
void launch_scan(const Launch& context, const ScanData<T>& d, const SegmentPlan& plan, const StateWalk<T>& walk, T* y,
                 DeviceAccumulate<T>* final_state) {
  constexpr int PER_BLOCK = CHANNELS_PER_BLOCK<T, LANES>;
  constexpr size_t BYTES = SHARED_BYTES<T, LANES>;
  const int64_t per_group = d.channels / d.groups;
  const int64_t blocks = d.batch * d.groups * ((per_group + PER_BLOCK - 1) / PER_BLOCK) * plan.count;
  const bool wide = d.length % VECTOR_WIDTH<T> == 0 && aligned(d.u) && aligned(d.delta) && aligned(d.z) && aligned(y);
  STD_CUDA_CHECK(
      cudaFuncSetAttribute(scan<T, LANES, WALK>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(BYTES)));
  scan<T, LANES, WALK>
      <<<static_cast<unsigned>(blocks), THREADS, BYTES, context.stream()>>>(d, plan, walk, y, final_state, wide);
  Launch::check();
}

template <typename T>
__global__ void update_rows(ScanData<T> d, const DeviceAccumulate<T>* state, DeviceAccumulate<T>* next,
                            T* __restrict__ y, int lanes) {
  using A = DeviceAccumulate<T>;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t row = index / lanes;
  const int lane = static_cast<int>(index % lanes);
  const bool there = row < d.batch * d.channels;
  A sum = A(0);
  const int64_t channel = there ? row % d.channels : 0;
  const int64_t batch = there ? row / d.channels : 0;
  const A x = there ? A(widen(d.u[row])) : A(0);
  if (there) {
    const int64_t group = channel / d.per_group();
    A step = A(widen(d.delta[row])) + (d.bias ? d.bias[channel] : A(0));
    if (d.use_softplus) step = softplus<sizeof(T) == 2>(step);
    for (int n = lane; n < d.states; n += lanes) {
      const A b = widen(d.b[batch * d.b_strides.batch + group * d.b_strides.group + n * d.b_strides.state]);
      const A c = widen(d.c[batch * d.c_strides.batch + group * d.c_strides.group + n * d.c_strides.state]);
      const A h =
          fma(exp2_fast(step * d.a[channel * d.states + n] * A(LOG2_E)), state[row * d.states + n], step * x * b);
      next[row * d.states + n] = h;
      sum = fma(h, c, sum);
    }
  }
  for (int by = lanes / 2; by > 0; by /= 2) sum += __shfl_xor_sync(WHOLE_WARP, sum, by);
  if (there && lane == 0) {
    if (d.skip) sum = fma(d.skip[channel], x, sum);
    if (d.z) sum *= silu<sizeof(T) == 2>(A(widen(d.z[row])));
    y[row] = narrow<T>(sum);
  }
}

}  // namespace

SegmentPlan plan_segments(const SelectiveShape& shape, int64_t warps_a_segment, int sms, int64_t tile) {
  constexpr int64_t ENOUGH = 6, WANTED = 8;  // warps an SM
  if (warps_a_segment >= ENOUGH * sms || shape.length <= 2 * tile) return {1, std::max<int64_t>(shape.length, 1)};
  const int64_t aim = (WANTED * sms + warps_a_segment - 1) / warps_a_segment;
  const int64_t tiles = (shape.length + tile - 1) / tile;
  const int64_t count = std::min({aim, tiles, int64_t{64}});
  const int64_t length = (tiles + count - 1) / count * tile;
  return {(shape.length + length - 1) / length, length};
}

int64_t scan_warps(const SelectiveShape& shape) {
  const int64_t lanes = shape.states <= 16 ? 2 : shape.states <= 64 ? 8 : 32;
  const int64_t per_block = THREADS / lanes * CHANNELS;
  return shape.batch * shape.groups * ((shape.per_group() + per_block - 1) / per_block) * (THREADS / 32);
}

template <typename T>
void walk_segments(const Launch& context, const ScanData<T>& d, const SegmentPlan& plan, const StateWalk<T>& walk) {
  dispatch_lanes<T>(d.states,
                    [&](auto lanes) { launch_scan<T, lanes, true>(context, d, plan, walk, nullptr, nullptr); });
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
    dispatch_lanes<T>(shape.states, [&](auto lanes) {
      launch_scan<T, lanes, false>(context, d, plan, StateWalk<T>{}, static_cast<T*>(y.mutable_data_ptr()),
                                   static_cast<DeviceAccumulate<T>*>(final_state.mutable_data_ptr()));
    });
  });
  return {y, final_state};
}

namespace {

void update_into(const char* op, const Tensor& state, Tensor& next, Tensor& y, const SelectiveArguments& given) {
  const SelectiveShape shape = check_selective_update(op, state, given);
  const Tensor u = as_contiguous(given.u), delta = as_contiguous(given.delta), A = as_contiguous(given.A);
  const Tensor kept = as_contiguous(state);
  const OptionalTensor D = as_contiguous(given.D), z = as_contiguous(given.z), bias = as_contiguous(given.delta_bias);
  if (shape.batch * shape.channels == 0) return;
  dispatch_floating(op, u, [&](auto tag) {
    using T = typename DeviceType<typename decltype(tag)::type>::type;
    using W = DeviceAccumulate<T>;
    const ScanData<T> d = scan_data<T>(shape, {u, delta, A, given.B, given.C, D, z, bias, given.delta_softplus, kept});
    Launch context(u);
    int lanes = 1;
    while (lanes < 32 && lanes * 4 < shape.states) lanes *= 2;
    const int64_t threads = shape.batch * shape.channels * lanes;
    update_rows<T><<<static_cast<unsigned>((threads + 127) / 128), 128, 0, context.stream()>>>(
        d, d.initial, static_cast<W*>(next.mutable_data_ptr()), static_cast<T*>(y.mutable_data_ptr()), lanes);
    Launch::check();
  });
}

}  // namespace

std::tuple<Tensor, Tensor> selective_scan_update(const Tensor& state, const Tensor& u, const Tensor& delta,
                                                 const Tensor& A, const Tensor& B, const Tensor& C,
                                                 const OptionalTensor& D, const OptionalTensor& z,
                                                 const OptionalTensor& delta_bias, bool delta_softplus) {
  const OptionalTensor none;
  Tensor y = new_contiguous_like(u), next = new_contiguous_like(state);
  update_into("selective_scan_update", state, next, y, {u, delta, A, B, C, D, z, delta_bias, delta_softplus, none});
  return {y, next};
}

Tensor selective_scan_update_(Tensor state, const Tensor& u, const Tensor& delta, const Tensor& A, const Tensor& B,
                              const Tensor& C, const OptionalTensor& D, const OptionalTensor& z,
                              const OptionalTensor& delta_bias, bool delta_softplus) {
  const OptionalTensor none;
  Tensor y = new_contiguous_like(u);
  const SelectiveArguments arguments{u, delta, A, B, C, D, z, delta_bias, delta_softplus, none};
  if (state.is_contiguous()) {
    update_into("selective_scan_update_", state, state, y, arguments);
  } else {
    Tensor next = new_contiguous_like(state);
    update_into("selective_scan_update_", state, next, y, arguments);
    torch::stable::copy_(state, next);
  }
  return y;
}

}  // namespace opgraft::cuda

STABLE_TORCH_LIBRARY_IMPL(opgraft, CUDA, m) {
  m.impl("selective_scan", TORCH_BOX(&opgraft::cuda::selective_scan));
  m.impl("selective_scan_update", TORCH_BOX(&opgraft::cuda::selective_scan_update));
  m.impl("selective_scan_update_", TORCH_BOX(&opgraft::cuda::selective_scan_update_));
}
