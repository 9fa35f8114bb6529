// Mamba's selective scan on CUDA, backward.
//
// A first launch walks the forward scan again and keeps the state before every EVERY-th step (4 bytes * states / EVERY
// a step and channel, in memory of this call only). Then a block owns the channels of CHANNELS rows and one segment of
// time and goes backwards through tiles of STEPS steps: step sizes, u and the gradient of y before the gate are put
// into shared memory by all threads; a thread owns NS states of one channel, computes EVERY states and decays forward
// from the kept one into registers, and walks back over them.
//
// Sums over a channel's states (for du, d delta and dz) go over the LANES threads of the channel, sums over channels
// (for dB and dC) over the rows of a warp, both by exchanges that halve what is left at every shuffle; warps add up in
// shared memory and blocks in a later launch, always in the same order. Sums over time (dA, dD, d delta_bias) stay in
// registers.
//
// Cost a (step, channel, state): two exponentials (one in the first launch) and about 27 issue slots, 10 of them in
// the sums over channels: 8x4096x4096 with 16 states is about 2 ms of issue slots on 132 SMs at 1.85 GHz.
//
// Few channels: time is cut into segments; a launch walks each backwards from a zero gradient of the state, and the
// main launch folds those of the segments behind its own, in order, as the forward scan does.
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "cuda/selective_scan.cuh"
#include "cuda/selective_scan.h"
#include "ops.h"
#include "support/check.h"

namespace opgraft::cuda {
namespace {

template <typename T>
constexpr int EVERY = sizeof(DeviceAccumulate<T>) == 8 ? 4 : 8;

// How a block is cut: LANES threads a channel with NS states each.
template <typename T, int LANES_, int NS_, int STEPS_, int THREADS_>
struct Cut {
  static constexpr int LANES = LANES_;
  static constexpr int NS = NS_;
  static constexpr int STEPS = STEPS_;
  static constexpr int THREADS = THREADS_;
  static constexpr int CHANNELS = THREADS / LANES;
  static constexpr int ROWS = 32 / LANES;  // channels a warp
  static constexpr int WARPS = THREADS / 32;
  static constexpr int PADDED = LANES * NS;
  static constexpr int ITEMS = VECTOR_WIDTH<T>;
  static constexpr int VECTORS = STEPS / ITEMS;
  static constexpr int TASKS = (CHANNELS * VECTORS + THREADS - 1) / THREADS;
  static constexpr int PITCH = STEPS + 1;
  static_assert(STEPS % ITEMS == 0 && STEPS % EVERY<T> == 0 && 2 * NS % ROWS == 0);
};

// In: step size, u, gradient of y before the gate. Out: gradient of (step * u), of step by the decays, and y.
template <typename A>
struct alignas(4 * sizeof(A)) Slot {
  A value[4];
};

template <typename A, typename C>
constexpr size_t SHARED_BYTES = sizeof(Slot<A>) * C::CHANNELS * C::PITCH +
                                sizeof(A) * (2 * C::STEPS * C::PADDED + 2 * C::WARPS * C::STEPS * C::PADDED);

template <typename T>
struct ScanGradients {
  using W = DeviceAccumulate<T>;
  const T* up;
  const W* up_final;
  const W* states;  // [batch][channel][mark][state]
  int64_t marks;
  T *u, *delta, *z;
  W *a, *skip, *bias;  // [segment][batch][channel]...
  W* matrices;         // [block of channels][B or C][batch][group][state][step]
  W* initial;
};

template <int NS, typename A>
__device__ __forceinline__ void load_states(const A* from, A (&out)[NS]) {
  constexpr int WIDE = 16 / sizeof(A);
#pragma unroll
  for (int v = 0; v < NS / WIDE; ++v) {
    const auto pack = reinterpret_cast<const Vector<A, WIDE>*>(from)[v];
#pragma unroll
    for (int i = 0; i < WIDE; ++i) out[v * WIDE + i] = pack.lane[i];
  }
}

// Adds up COUNT values over the lanes at distances FIRST * 2^k below END; each lane is left with COUNT / (END / FIRST)
// of the sums, from index `base`.
template <int COUNT, int FIRST, int END, typename A>
__device__ __forceinline__ void scatter_sums(A (&values)[COUNT], int lane, int& base) {
  if constexpr (FIRST < END) {
    constexpr int HALF = COUNT / 2;
    constexpr int BY = END / 2;
    const bool upper = lane & BY;
    A kept[HALF];
#pragma unroll
    for (int i = 0; i < HALF; ++i) {
      const A mine = upper ? values[HALF + i] : values[i];
      const A theirs = upper ? values[i] : values[HALF + i];
      kept[i] = mine + __shfl_xor_sync(WHOLE_WARP, theirs, BY);
    }
    if (upper) base += HALF;
    scatter_sums<HALF, FIRST, BY>(kept, lane, base);
#pragma unroll
    for (int i = 0; i < HALF; ++i) values[i] = kept[i];
  }
}

// The first of three sums over a channel's LANES lands in lane 0, the second in lane 1, the third in lane 2.
template <int LANES, typename A>
__device__ __forceinline__ A lane_sums(A first, A second, A third, int lane) {
  static_assert(LANES >= 4);
  const bool odd = lane & 1;
  A a = (odd ? second : first) + __shfl_xor_sync(WHOLE_WARP, odd ? first : second, 1);
  A b = third + __shfl_xor_sync(WHOLE_WARP, third, 1);
  const bool upper = lane & 2;
  A sum = (upper ? b : a) + __shfl_xor_sync(WHOLE_WARP, upper ? a : b, 2);
#pragma unroll
  for (int by = 4; by < LANES; by *= 2) sum += __shfl_xor_sync(WHOLE_WARP, sum, by);
  return sum;
}

// REDUCE: only the gradient of the state that leaves each segment, from zero, into the plan.
template <typename T, typename C, bool REDUCE>
__global__ void __launch_bounds__(C::THREADS, C::THREADS <= 256 && sizeof(DeviceAccumulate<T>) == 4 ? 2 : 1)
    scan_back(ScanData<T> d, SegmentPlan plan, ScanGradients<T> g, bool wide) {
  using A = DeviceAccumulate<T>;
  constexpr bool FAST = sizeof(T) == 2;
  constexpr int NS = C::NS, LANES = C::LANES, STEPS = C::STEPS, PADDED = C::PADDED, K = EVERY<T>;
  extern __shared__ __align__(32) unsigned char shared[];
  auto* slots = reinterpret_cast<Slot<A>*>(shared);
  A* tile_b = reinterpret_cast<A*>(slots + C::CHANNELS * C::PITCH);
  A* tile_c = tile_b + STEPS * PADDED;
  A* sums = tile_c + STEPS * PADDED;  // [warp][step][B or C][state]

  const BlockPlace place = block_place(d, C::CHANNELS);
  const int lane = threadIdx.x % LANES;
  const int warp = threadIdx.x / 32;
  const int channel = threadIdx.x / LANES;
  const bool there = channel < place.count;
  const int64_t begin = place.segment * plan.length;
  const int64_t end = min(begin + plan.length, d.length);
  const int64_t block_row = place.batch * d.channels + place.channel;
  const int64_t row = block_row + channel;
  const int64_t all_rows = d.batch * d.channels;

  A decay[NS], carry[NS], slope[NS] = {}, step_sum = A(0);
#pragma unroll
  for (int i = 0; i < NS; ++i) {
    const int n = lane * NS + i;
    const bool real = there && n < d.states;
    decay[i] = real ? d.a[(place.channel + channel) * d.states + n] * A(LOG2_E) : A(0);
    carry[i] = A(0);
    if (real && !REDUCE) {
      A state = g.up_final ? g.up_final[row * d.states + n] : A(0);
      for (int64_t s = plan.count - 1; s > place.segment; --s) {
        const int64_t at = s * all_rows + row;
        state = exp2_fast(decay[i] * plan_sums<T>(plan)[at]) * state + plan_ends<T>(plan)[at * d.states + n];
      }
      carry[i] = state;
    }
  }
  A skip_sum[C::TASKS] = {}, bias_sum[C::TASKS] = {};

  MatrixTile<T, STEPS, PADDED, C::THREADS> matrix_b(d.b, d.b_strides, place), matrix_c(d.c, d.c_strides, place);
  // The kept states of the next part to be walked, loaded while the part before it is.
  A start[NS], next_start[NS];
  auto fetch_start = [&](int64_t mark) {
#pragma unroll
    for (int i = 0; i < NS; ++i) {
      const int n = lane * NS + i;
      const bool real = there && n < d.states && mark >= 0 && mark < g.marks;
      next_start[i] = real ? g.states[(row * g.marks + mark) * d.states + n] : A(0);
    }
  };

  const int64_t last_tile = begin + (end - begin - 1) / STEPS * STEPS;
  if (!REDUCE) fetch_start(last_tile / K + STEPS / K - 1);
  for (int64_t tile = last_tile; tile >= begin; tile -= STEPS) {
    if (!REDUCE) matrix_b.fetch(tile, d.length, d.states);
    matrix_c.fetch(tile, d.length, d.states);
#pragma unroll
    for (int k = 0; k < C::TASKS; ++k) {
      const int task = threadIdx.x + k * C::THREADS;
      const int r = task / C::VECTORS;
      const int64_t t = tile + task % C::VECTORS * C::ITEMS;
      if (r >= C::CHANNELS) continue;
      const int64_t left = r < place.count ? d.length - t : 0;
      const int64_t at = (block_row + r) * d.length + t;
      Vector<T, C::ITEMS> u, delta, up, gate;
      if (!REDUCE) load_row(d.u + at, left, wide, u);
      load_row(d.delta + at, left, wide, delta);
      load_row(g.up + at, left, wide, up);
      if (d.z) load_row(d.z + at, left, wide, gate);
      if (tile > begin) {  // the tile before, in time: the next one here
        const bool more = r < place.count;
        if (!REDUCE) prefetch_row(d.u + at - STEPS, more);
        prefetch_row(d.delta + at - STEPS, more);
        prefetch_row(g.up + at - STEPS, more);
        if (d.z) prefetch_row(d.z + at - STEPS, more);
      }
      const A bias = d.bias && r < place.count ? d.bias[place.channel + r] : A(0);
      // Loops of their own: the chains of exponentials run side by side.
      A step[C::ITEMS], dy[C::ITEMS];
#pragma unroll
      for (int i = 0; i < C::ITEMS; ++i) {
        step[i] = A(widen(delta.lane[i])) + bias;
        dy[i] = widen(up.lane[i]);
      }
      if (d.use_softplus) {
#pragma unroll
        for (int i = 0; i < C::ITEMS; ++i) step[i] = softplus<FAST>(step[i]);
      }
      if (d.z) {
#pragma unroll
        for (int i = 0; i < C::ITEMS; ++i) dy[i] *= silu<FAST>(A(widen(gate.lane[i])));
      }
#pragma unroll
      for (int i = 0; i < C::ITEMS; ++i) {
        const bool real = i < left;
        Slot<A> slot;
        slot.value[0] = real ? step[i] : A(0);
        slot.value[1] = REDUCE || !real ? A(0) : A(widen(u.lane[i]));
        slot.value[2] = real ? dy[i] : A(0);
        slot.value[3] = A(0);
        slots[r * C::PITCH + task % C::VECTORS * C::ITEMS + i] = slot;
      }
    }
    if (!REDUCE) matrix_b.store(tile_b, tile, d.length, d.states);
    matrix_c.store(tile_c, tile, d.length, d.states);
    __syncthreads();

    if constexpr (REDUCE) {
#pragma unroll 4
      for (int t = STEPS - 1; t >= 0; --t) {
        const Slot<A> slot = slots[channel * C::PITCH + t];
        A c[NS];
        load_states<NS>(tile_c + t * PADDED + lane * NS, c);
        step_sum += slot.value[0];
#pragma unroll
        for (int i = 0; i < NS; ++i) {
          carry[i] = exp2_fast(slot.value[0] * decay[i]) * fma(slot.value[2], c[i], carry[i]);
        }
      }
      __syncthreads();
      continue;
    }

    for (int part = STEPS / K - 1; part >= 0; --part) {
      A h[K][NS], factor[K][NS];
#pragma unroll
      for (int i = 0; i < NS; ++i) start[i] = next_start[i];
      fetch_start(tile / K + part - 1);
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const int t = part * K + k;
        const Slot<A> slot = slots[channel * C::PITCH + t];
        const A input = slot.value[0] * slot.value[1];
        A b[NS];
        load_states<NS>(tile_b + t * PADDED + lane * NS, b);
#pragma unroll
        for (int i = 0; i < NS; ++i) {
          factor[k][i] = exp2_fast(slot.value[0] * decay[i]);
          h[k][i] = fma(factor[k][i], k ? h[k ? k - 1 : 0][i] : start[i], input * b[i]);
        }
      }
#pragma unroll
      for (int k = K - 1; k >= 0; --k) {
        const int t = part * K + k;
        const Slot<A> slot = slots[channel * C::PITCH + t];
        const A step = slot.value[0], dy = slot.value[2];
        const A input = step * slot.value[1];
        A b[NS], c[NS], to_matrix[2 * NS], to_input = A(0), to_step = A(0), y = A(0);
        load_states<NS>(tile_b + t * PADDED + lane * NS, b);
        load_states<NS>(tile_c + t * PADDED + lane * NS, c);
#pragma unroll
        for (int i = 0; i < NS; ++i) {
          const A total = fma(dy, c[i], carry[i]);
          y = fma(h[k][i], c[i], y);
          to_matrix[i] = total * input;
          to_matrix[NS + i] = dy * h[k][i];
          to_input = fma(total, b[i], to_input);
          carry[i] = factor[k][i] * total;
          const A to_exponent = carry[i] * (k ? h[k ? k - 1 : 0][i] : start[i]);
          to_step = fma(to_exponent, decay[i], to_step);
          slope[i] = fma(to_exponent, step, slope[i]);
        }
        const A sum = lane_sums<LANES>(to_input, to_step, y, lane);
        if (lane < 3) slots[channel * C::PITCH + t].value[lane] = sum;
        int base = 0;
        scatter_sums<2 * NS, LANES, 32>(to_matrix, threadIdx.x % 32, base);
        constexpr int LEFT = 2 * NS / C::ROWS;
#pragma unroll
        for (int i = 0; i < LEFT; ++i) {
          const int which = base + i;
          sums[((warp * STEPS + t) * 2 + which / NS) * PADDED + lane * NS + which % NS] = to_matrix[i];
        }
      }
    }
    __syncthreads();

    // Every (kind, state, step) once: the warps' sums in order. Steps are neighbours in memory.
    const int64_t groups_states = d.groups * d.states;
    const int64_t block = place.channel % d.per_group() / C::CHANNELS;
    for (int i = threadIdx.x; i < 2 * PADDED * STEPS; i += C::THREADS) {
      const int t = i % STEPS;
      const int n = i / STEPS % PADDED;
      const int kind = i / STEPS / PADDED;
      if (tile + t >= d.length || n >= d.states) continue;
      A sum = A(0);
#pragma unroll
      for (int w = 0; w < C::WARPS; ++w) sum += sums[((w * STEPS + t) * 2 + kind) * PADDED + n];
      const int64_t matrix = ((block * 2 + kind) * d.batch + place.batch) * groups_states + place.group * d.states + n;
      g.matrices[matrix * d.length + tile + t] = sum;
    }
#pragma unroll
    for (int k = 0; k < C::TASKS; ++k) {
      const int task = threadIdx.x + k * C::THREADS;
      const int r = task / C::VECTORS;
      const int64_t t = tile + task % C::VECTORS * C::ITEMS;
      if (r >= place.count || r >= C::CHANNELS || t >= d.length) continue;
      const int64_t left = d.length - t;
      const int64_t at = (block_row + r) * d.length + t;
      Vector<T, C::ITEMS> u, delta, up, gate, d_u, d_delta, d_z;
      load_row(d.u + at, left, wide, u);
      load_row(d.delta + at, left, wide, delta);
      load_row(g.up + at, left, wide, up);
      if (d.z) load_row(d.z + at, left, wide, gate);
      const A bias = d.bias ? d.bias[place.channel + r] : A(0);
      const A skip = d.skip ? d.skip[place.channel + r] : A(0);
      A x[C::ITEMS], step[C::ITEMS], dy[C::ITEMS], slope_of[C::ITEMS];
#pragma unroll
      for (int i = 0; i < C::ITEMS; ++i) {
        x[i] = widen(u.lane[i]);
        step[i] = A(widen(delta.lane[i])) + bias;
        slope_of[i] = A(1);
        dy[i] = widen(up.lane[i]);
      }
      if (d.use_softplus) {
#pragma unroll
        for (int i = 0; i < C::ITEMS; ++i) {
          slope_of[i] = step[i] > A(SOFTPLUS_THRESHOLD) ? A(1) : sigmoid<FAST>(step[i]);
          step[i] = softplus<FAST>(step[i]);
        }
      }
      if (d.z) {
#pragma unroll
        for (int i = 0; i < C::ITEMS; ++i) {
          const A gated = widen(gate.lane[i]);
          const A s = sigmoid<FAST>(gated);
          const A curve = s * (A(1) - s);
          const A silu_slope = s + (curve == A(0) ? A(0) : gated * curve);
          const A y = slots[r * C::PITCH + task % C::VECTORS * C::ITEMS + i].value[2];
          d_z.lane[i] = narrow<T>(dy[i] * fma(skip, x[i], y) * silu_slope);
          dy[i] *= s == A(0) ? A(0) : gated * s;
        }
      }
#pragma unroll
      for (int i = 0; i < C::ITEMS; ++i) {
        const Slot<A> slot = slots[r * C::PITCH + task % C::VECTORS * C::ITEMS + i];
        // decay carries the factor log2 e.
        const A to_raw = fma(slot.value[0], x[i], slot.value[1] * A(0.6931471805599453)) * slope_of[i];
        d_u.lane[i] = narrow<T>(fma(slot.value[0], step[i], dy[i] * skip));
        d_delta.lane[i] = narrow<T>(to_raw);
        if (i < left) {
          skip_sum[k] = fma(dy[i], x[i], skip_sum[k]);
          bias_sum[k] += to_raw;
        }
      }
      store_row(g.u + at, left, wide, d_u);
      store_row(g.delta + at, left, wide, d_delta);
      if (d.z) store_row(g.z + at, left, wide, d_z);
    }
    __syncthreads();
  }

  if constexpr (REDUCE) {
    if (!there) return;
    const int64_t at = place.segment * all_rows + row;
    if (lane == 0) plan_sums<T>(plan)[at] = step_sum;
#pragma unroll
    for (int i = 0; i < NS; ++i) {
      if (lane * NS + i < d.states) plan_ends<T>(plan)[at * d.states + lane * NS + i] = carry[i];
    }
  } else {
    const int64_t part = place.segment * all_rows;
    if (there) {
#pragma unroll
      for (int i = 0; i < NS; ++i) {
        if (lane * NS + i < d.states) {
          g.a[(part + row) * d.states + lane * NS + i] = slope[i];
          if (begin == 0) g.initial[row * d.states + lane * NS + i] = carry[i];
        }
      }
    }
    A* skips = reinterpret_cast<A*>(shared);
    A* biases = skips + C::CHANNELS * C::VECTORS;
#pragma unroll
    for (int k = 0; k < C::TASKS; ++k) {
      const int task = threadIdx.x + k * C::THREADS;
      if (task < C::CHANNELS * C::VECTORS) {
        skips[task] = skip_sum[k];
        biases[task] = bias_sum[k];
      }
    }
    __syncthreads();
    for (int r = threadIdx.x; r < place.count; r += C::THREADS) {
      A skip = A(0), bias = A(0);
#pragma unroll
      for (int v = 0; v < C::VECTORS; ++v) {
        skip += skips[r * C::VECTORS + v];
        bias += biases[r * C::VECTORS + v];
      }
      g.skip[part + block_row + r] = skip;
      g.bias[part + block_row + r] = bias;
    }
  }
}

// out[i] = sum over parts of in[part * stride + i], in order.
template <typename A, typename T>
__global__ void add_parts(const A* __restrict__ in, T* __restrict__ out, int64_t parts, int64_t stride, int64_t size) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= size) return;
  A sum = A(0);
  for (int64_t p = 0; p < parts; ++p) sum += in[p * stride + i];
  out[i] = narrow<T>(sum);
}

template <typename A, typename T>
void launch_add(const Launch& context, const A* in, T* out, int64_t parts, int64_t stride, int64_t size) {
  if (size == 0) return;
  add_parts<<<static_cast<unsigned>((size + 255) / 256), 256, 0, context.stream()>>>(in, out, parts, stride, size);
  Launch::check();
}

template <typename T, typename Body>
void dispatch_cut(int states, const Body& body) {
  // double is for checks: one kernel serves it.
  if constexpr (std::is_same_v<T, double>) {
    body(Cut<T, 32, 8, 8, 128>{});
  } else if (states <= 16) {
    body(Cut<T, 4, 4, 32, 256>{});
  } else if (states <= 64) {
    body(Cut<T, 16, 4, 8, 256>{});
  } else {
    body(Cut<T, 32, 8, 8, 128>{});
  }
}

template <typename T, typename C, bool REDUCE>
void launch_back(const Launch& context, const ScanData<T>& d, const SegmentPlan& plan, const ScanGradients<T>& g,
                 int64_t channel_blocks) {
  constexpr size_t BYTES = SHARED_BYTES<DeviceAccumulate<T>, C>;
  const bool wide = d.length % VECTOR_WIDTH<T> == 0 && aligned(d.u) && aligned(d.delta) && aligned(d.z) &&
                    aligned(g.up) && aligned(g.u) && aligned(g.delta) && aligned(g.z);
  STD_CUDA_CHECK(cudaFuncSetAttribute(scan_back<T, C, REDUCE>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      static_cast<int>(BYTES)));
  scan_back<T, C, REDUCE><<<static_cast<unsigned>(d.batch * d.groups * channel_blocks * plan.count), C::THREADS, BYTES,
                            context.stream()>>>(d, plan, g, wide);
  Launch::check();
}

template <typename T>
T* data(Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

}  // namespace

SelectiveGradients selective_scan_backward(const Tensor& grad, const OptionalTensor& grad_final, const Tensor& u,
                                           const Tensor& delta, const Tensor& A, const Tensor& B, const Tensor& C,
                                           const OptionalTensor& D, const OptionalTensor& z,
                                           const OptionalTensor& delta_bias, bool delta_softplus,
                                           const OptionalTensor& initial_state) {
  const SelectiveShape shape =
      check_selective_backward("selective_scan_backward",
                               {u, delta, A, B, C, D, z, delta_bias, delta_softplus, initial_state}, grad, grad_final);
  const Tensor rows = as_contiguous(u), steps = as_contiguous(delta), decays = as_contiguous(A);
  const Tensor up = as_contiguous(grad);
  const OptionalTensor skip = as_contiguous(D), gate = as_contiguous(z), bias = as_contiguous(delta_bias);
  const OptionalTensor start = as_contiguous(initial_state), up_final = as_contiguous(grad_final);
  Tensor d_u = new_contiguous_like(u), d_delta = new_contiguous_like(u), d_z = new_contiguous_like(u);
  Tensor d_A = new_contiguous_like(A), d_B = new_contiguous_like(B), d_C = new_contiguous_like(C);
  Tensor d_D = new_contiguous(A, std::vector<int64_t>{shape.channels});
  Tensor d_bias = new_contiguous(A, std::vector<int64_t>{shape.channels});
  Tensor d_initial = new_contiguous(A, std::vector<int64_t>{shape.batch, shape.channels, shape.states});
  const SelectiveGradients result{d_u, d_delta, d_A, d_B, d_C, d_D, d_z, d_bias, d_initial};
  if (!z) torch::stable::zero_(d_z);
  if (u.numel() == 0) {
    for (Tensor* sum : {&d_A, &d_B, &d_C, &d_D, &d_bias}) torch::stable::zero_(*sum);
    up_final ? torch::stable::copy_(d_initial, *up_final) : torch::stable::zero_(d_initial);
    return result;
  }
  dispatch_floating("selective_scan_backward", u, [&](auto tag) {
    using T = typename DeviceType<typename decltype(tag)::type>::type;
    using W = DeviceAccumulate<T>;
    const ScanData<T> d = scan_data<T>(shape, {rows, steps, decays, B, C, skip, gate, bias, delta_softplus, start});
    Launch context(u);
    const int sms = context.multiprocessors();

    // The states before every EVERY-th step, by the forward walk.
    const int64_t marks = (shape.length + EVERY<T> - 1) / EVERY<T>;
    Tensor states = new_contiguous(A, std::vector<int64_t>{shape.batch * shape.channels * marks * shape.states});
    {
      SegmentPlan plan = plan_segments(shape, scan_warps(shape), sms, 64 / static_cast<int64_t>(sizeof(T)));
      const Tensor space = segment_space(u, plan, shape);
      if (plan.count > 1) walk_segments<T>(context, d, plan, StateWalk<T>::from_nothing());
      StateWalk<T> walk;
      walk.states = data<W>(states);
      walk.every = EVERY<T>;
      walk.marks = marks;
      walk_segments<T>(context, d, plan, walk);
    }

    dispatch_cut<T>(shape.states, [&](auto cut) {
      using Used = decltype(cut);
      const int64_t channel_blocks = (shape.per_group() + Used::CHANNELS - 1) / Used::CHANNELS;
      const int64_t warps = shape.batch * shape.groups * channel_blocks * Used::WARPS;
      SegmentPlan plan = plan_segments(shape, warps / 2, sms, Used::STEPS);
      const Tensor space = segment_space(u, plan, shape);
      const int64_t rows_all = shape.batch * shape.channels;
      const int64_t parts = plan.count * shape.batch;
      const int64_t matrix = shape.batch * shape.groups * shape.states * shape.length;
      Tensor part_a = new_contiguous(A, std::vector<int64_t>{plan.count * rows_all * shape.states});
      Tensor part_skip = new_contiguous(A, std::vector<int64_t>{plan.count * rows_all});
      Tensor part_bias = new_contiguous(A, std::vector<int64_t>{plan.count * rows_all});
      Tensor part_matrices = new_contiguous(A, std::vector<int64_t>{channel_blocks * 2 * matrix});
      const ScanGradients<T> g{static_cast<const T*>(up.const_data_ptr()),
                               optional_data<W>(up_final),
                               data<W>(states),
                               marks,
                               data<T>(d_u),
                               data<T>(d_delta),
                               data<T>(d_z),
                               data<W>(part_a),
                               data<W>(part_skip),
                               data<W>(part_bias),
                               data<W>(part_matrices),
                               data<W>(d_initial)};
      if (plan.count > 1) launch_back<T, Used, true>(context, d, plan, g, channel_blocks);
      launch_back<T, Used, false>(context, d, plan, g, channel_blocks);
      const int64_t per_batch = shape.channels * shape.states;
      launch_add(context, data<W>(part_a), data<W>(d_A), parts, per_batch, per_batch);
      launch_add(context, data<W>(part_skip), data<W>(d_D), parts, shape.channels, shape.channels);
      launch_add(context, data<W>(part_bias), data<W>(d_bias), parts, shape.channels, shape.channels);
      launch_add(context, data<W>(part_matrices), data<T>(d_B), channel_blocks, 2 * matrix, matrix);
      launch_add(context, data<W>(part_matrices) + matrix, data<T>(d_C), channel_blocks, 2 * matrix, matrix);
    });
  });
  return result;
}

}  // namespace opgraft::cuda

STABLE_TORCH_LIBRARY_IMPL(opgraft, CUDA, m) {
  m.impl("selective_scan_backward", TORCH_BOX(&opgraft::cuda::selective_scan_backward));
}
