// Mamba's selective scan on CUDA, backward.
//
// A first launch walks the forward scan again and keeps the states at the tiles' beginnings, in memory of this call
// only. Then a block goes backwards through tiles of time. As in the forward scan a thread has the steps of its chunk
// in registers and takes one state after the other: forward from the kept state, with all states of the chunk in
// registers, then back over them; the decays of the next state are taken meanwhile. What a state adds to the gradients
// of u, delta and y before the gate stays in the thread. What channels add to dB and dC goes through shared memory and
// is summed over the block; blocks write partial sums that a last launch adds. All sums have a fixed order.
//
// Many channels (selective_scan_serial_back.cuh; selective_scan_boxes_back.cuh where rows of 16-bit types can be moved
// as boxes; selective_scan_serial_walk.cuh is what both do with a tile): a thread has 8 steps of two channels and every
// other state of theirs, tiles are 8 steps, the next state is walked forward while one is walked back, and sums over
// channels are taken for four states at once, while the next four are walked. Cost a (step, channel, state): 13
// operations of the recurrence, 4 around them, 2.5 for sums over channels, and over 16 states about 7 for what is done
// once a step; 4 bytes * states / 8 a step and channel of kept states, written and read.
//
// Fewer channels (selective_scan_chunks_back.cuh): lanes have consecutive chunks of 16 steps, and scans over lanes give
// the states and the gradients at their ends, as in the forward scan. Still fewer: time is cut into segments; a launch
// walks each backwards from a zero gradient of the state, and the main launch folds those of the segments behind its
// own.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <bit>

#include "cuda/selective_scan.h"
#include "cuda/selective_scan_boxes_back.cuh"
#include "cuda/selective_scan_chunks_back.cuh"
#include "cuda/selective_scan_serial_back.cuh"
#include "ops.h"
#include "support/selective_call.h"

namespace opgraft::cuda {
namespace {

// out[i] = sum over parts of in[part * stride + i], in order, in double: there are few.
template <typename A, typename T>
__global__ void add_parts(const A* __restrict__ in, T* __restrict__ out, int64_t parts, int64_t stride, int64_t size) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= size) return;
  double sum = 0;
  for (int64_t p = 0; p < parts; ++p) sum += in[p * stride + i];
  out[i] = narrow<T>(static_cast<A>(sum));
}

// The blocks' parts of dB and dC, [part][B or C][size]. ADDERS threads take every ADDERS-th part of COUNT elements, so
// that there are loads enough in flight where parts are many and elements few.
template <int COUNT, typename A, typename T>
__global__ void add_matrices(const A* __restrict__ in, T* __restrict__ to_b, T* __restrict__ to_c, int64_t parts,
                             int64_t size) {
  constexpr int ADDERS = 8;
  __shared__ __align__(16) A sums[ADDERS][32][COUNT];
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x) * COUNT;
  A sum[COUNT] = {};
  if (i < 2 * size) {
#pragma unroll 4
    for (int64_t p = threadIdx.y; p < parts; p += ADDERS) {
      A value[COUNT];
      load_values(in + p * 2 * size + i, value);
#pragma unroll
      for (int k = 0; k < COUNT; ++k) sum[k] += value[k];
    }
  }
  store_values(sums[threadIdx.y][threadIdx.x], sum);
  __syncthreads();
  if (threadIdx.y > 0 || i >= 2 * size) return;
#pragma unroll
  for (int y = 1; y < ADDERS; ++y) {
#pragma unroll
    for (int k = 0; k < COUNT; ++k) sum[k] += sums[y][threadIdx.x][k];
  }
  T* to = i < size ? to_b + i : to_c + (i - size);
#pragma unroll
  for (int k = 0; k < COUNT; ++k) to[k] = narrow<T>(sum[k]);
}

template <typename A, typename T>
void launch_add_matrices(const Launch& context, const A* in, T* to_b, T* to_c, int64_t parts, int64_t size) {
  auto launch = [&](auto kernel, int64_t count) {
    const auto blocks = static_cast<unsigned>((2 * size / count + 31) / 32);
    kernel<<<blocks, dim3(32, 8), 0, context.stream()>>>(in, to_b, to_c, parts, size);
    Launch::check();
  };
  constexpr int WIDE = 16 / static_cast<int>(sizeof(A));
  size % WIDE == 0 ? launch(add_matrices<WIDE, A, T>, WIDE) : launch(add_matrices<1, A, T>, 1);
}

template <typename A, typename T>
void launch_add(const Launch& context, const A* in, T* out, int64_t parts, int64_t stride, int64_t size) {
  if (size == 0) return;
  add_parts<<<static_cast<unsigned>((size + 255) / 256), 256, 0, context.stream()>>>(in, out, parts, stride, size);
  Launch::check();
}

// The serial cut for rows that come as boxes.
struct BoxCut : SerialCut<4, 2> {
  static constexpr bool BOXES = true;
};

// Walking time serially costs least, and fills the machine where there are channels enough.
template <typename T, typename Body>
void dispatch_cut(const SelectiveShape& shape, int sms, bool boxes, const Body& body) {
  using Serial = SerialCut<4, 2>;
  // double is for checks: one kernel serves it.
  if constexpr (std::is_same_v<T, double>) {
    body(ChunkBackCut<8, 2, 1>{});
  } else {
    const int64_t blocks = blocks_of<Serial>(shape);
    if constexpr (sizeof(T) == 2) {
      if (boxes && serial_wins(blocks, sms, 0.64, 1.9) && device_has_boxes()) {
        body(BoxCut{});
        return;
      }
    }
    if (shape.states <= Serial::MOST && serial_wins(blocks, sms, 0.61, 1.62)) {
      body(Serial{});
    } else if (shape.length <= 8 * CHUNK_STEPS) {
      body(ChunkBackCut<8, 4, 2>{});
    } else {
      body(ChunkBackCut<16, 4, 2>{});
    }
  }
}

// Of a block: so many that the last wave of blocks is full, and as many as that allows, for fewer partial sums.
template <typename T, typename C>
int plan_rounds(const SelectiveShape& shape, int sms) {
  int best = 1;
  if constexpr (!C::SERIAL) {
    constexpr size_t SHARED = 227 * 1024 / C::BLOCKS - 1024;
    constexpr int MOST = 16;
    const int64_t places = int64_t{sms} * C::BLOCKS;
    int64_t least = 0;
    for (int rounds = 1; rounds <= MOST; ++rounds) {
      const int64_t blocks = blocks_of<C>(shape, rounds);
      const int64_t time = (blocks + places - 1) / places * rounds;
      const size_t bytes = ChunkBackShared<DeviceAccumulate<T>, C>::bytes(shape.states, rounds);
      if (rounds > 1 && (time > least || bytes > SHARED)) continue;
      best = rounds;
      least = time;
    }
  }
  return best;
}

template <typename T>
bool whole_vectors(const ScanData<T>& d, const ScanGradients<T>& g) {
  return d.length % VECTOR_WIDTH<T> == 0 && aligned(d.u) && aligned(d.delta) && aligned(d.z) && aligned(g.up) &&
         aligned(g.u) && aligned(g.delta) && aligned(g.z);
}

template <typename T, typename C, bool REDUCE>
void launch_back(const Launch& context, const ScanData<T>& d, const SegmentPlan& plan, const ScanGradients<T>& g,
                 int rounds, int64_t channel_blocks) {
  const auto blocks = static_cast<unsigned>(d.batch * d.groups * channel_blocks * plan.count);
  auto launch = [&](auto kernel, size_t bytes, auto... more) {
    STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
    kernel<<<blocks, C::THREADS, bytes, context.stream()>>>(d, more...);
    Launch::check();
  };
  const bool wide = whole_vectors(d, g);
  if constexpr (C::BOXES) {
    auto map = [&](const void* rows) {
      return box_map(rows, d.batch * d.groups, d.per_group(), d.length, C::WARP_ROWS, C::STEPS, BoxOrder::PLAIN);
    };
    launch(scan_boxes_back<T, C>, sizeof(BoxBackShared<T, C>),
           GradientBoxes{map(d.u), map(d.delta), map(g.up), map(d.z)}, g);
  } else if constexpr (C::SERIAL) {
    const size_t bytes = SerialShared<T, C>::bytes(d.states);
    wide ? launch(scan_serial_back<T, C, true>, bytes, g) : launch(scan_serial_back<T, C, false>, bytes, g);
  } else {
    const size_t bytes = ChunkBackShared<DeviceAccumulate<T>, C>::bytes(d.states, rounds);
    wide ? launch(scan_chunks_back<T, C, REDUCE, true>, bytes, plan, g, rounds)
         : launch(scan_chunks_back<T, C, REDUCE, false>, bytes, plan, g, rounds);
  }
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
  SelectiveBackward call = prepare_selective_backward(
      "selective_scan_backward", {u, delta, A, B, C, D, z, delta_bias, delta_softplus, initial_state}, grad,
      grad_final);
  const SelectiveShape& shape = call.shape;
  if (u.numel() == 0) {
    for (Tensor* sum : {&call.A, &call.B, &call.C, &call.D, &call.delta_bias}) torch::stable::zero_(*sum);
    call.grad_final ? torch::stable::copy_(call.initial, *call.grad_final) : torch::stable::zero_(call.initial);
    return call.gradients();
  }
  dispatch_floating("selective_scan_backward", u, [&](auto tag) {
    using T = typename DeviceType<typename decltype(tag)::type>::type;
    using W = DeviceAccumulate<T>;
    const ScanData<T> d = scan_data<T>(shape, call.in.arguments());
    Launch context(u);
    const int sms = context.multiprocessors();

    const bool boxes =
        fits_boxes(d, {call.grad.const_data_ptr(), data<T>(call.u), data<T>(call.delta), data<T>(call.z)});
    dispatch_cut<T>(shape, sms, boxes, [&](auto cut) {
      using Used = decltype(cut);
      // The states before every tile, by the forward walk.
      const int64_t marks = (shape.length + Used::TILE - 1) / Used::TILE;
      const int64_t marked = Used::BOXES ? blocks_of<Used>(shape) * Used::WARPS * MARKED_STATES
                                         : shape.batch * shape.channels * shape.states;
      Tensor states = new_contiguous(A, std::vector<int64_t>{marks * marked});
      if constexpr (Used::BOXES) {
        walk_boxes<T>(context, shape, d, data<W>(states));
      } else {
        SegmentPlan forward = Used::SERIAL ? SegmentPlan{1, shape.length} : plan_scan<T>(shape, sms);
        const Tensor space = segment_space(u, forward, shape);
        if (forward.count > 1) walk_segments<T>(context, shape, d, forward, StateWalk<T>::from_nothing());
        walk_segments<T>(context, shape, d, forward, {false, data<W>(states), std::countr_zero(unsigned{Used::TILE})});
      }
      const int64_t all_blocks = blocks_of<Used>(shape);
      SegmentPlan plan = Used::SERIAL ? SegmentPlan{1, shape.length}
                                      : plan_segments(shape, all_blocks, int64_t{sms} * Used::BLOCKS, Used::TILE);
      const int rounds = plan.count > 1 ? 1 : plan_rounds<T, Used>(shape, sms);
      const int64_t block_channels = int64_t{Used::CHANNELS} * rounds;
      const int64_t channel_blocks = (shape.per_group() + block_channels - 1) / block_channels;
      const Tensor space = segment_space(u, plan, shape);
      const int64_t rows_all = shape.batch * shape.channels;
      const int64_t parts = plan.count * shape.batch;
      const int64_t matrix = shape.batch * shape.groups * shape.states * shape.length;
      // One part is the sum.
      auto part = [&](Tensor& sum, int64_t size) {
        return parts == 1 ? sum : new_contiguous(A, std::vector<int64_t>{plan.count * rows_all * size});
      };
      Tensor part_a = part(call.A, shape.states), part_skip = part(call.D, 1), part_bias = part(call.delta_bias, 1);
      Tensor part_matrices = new_contiguous(A, std::vector<int64_t>{channel_blocks * 2 * matrix});
      const ScanGradients<T> g{static_cast<const T*>(call.grad.const_data_ptr()),
                               optional_data<W>(call.grad_final),
                               data<W>(states),
                               data<T>(call.u),
                               data<T>(call.delta),
                               data<T>(call.z),
                               data<W>(part_a),
                               data<W>(part_skip),
                               data<W>(part_bias),
                               data<W>(part_matrices),
                               data<W>(call.initial)};
      if constexpr (!Used::SERIAL) {
        if (plan.count > 1) launch_back<T, Used, true>(context, d, plan, g, rounds, channel_blocks);
      }
      launch_back<T, Used, false>(context, d, plan, g, rounds, channel_blocks);
      if (parts > 1) {
        const int64_t per_batch = shape.channels * shape.states;
        launch_add(context, data<W>(part_a), data<W>(call.A), parts, per_batch, per_batch);
        launch_add(context, data<W>(part_skip), data<W>(call.D), parts, shape.channels, shape.channels);
        launch_add(context, data<W>(part_bias), data<W>(call.delta_bias), parts, shape.channels, shape.channels);
      }
      launch_add_matrices(context, data<W>(part_matrices), data<T>(call.B), data<T>(call.C), channel_blocks, matrix);
    });
  });
  return call.gradients();
}

}  // namespace opgraft::cuda

STABLE_TORCH_LIBRARY_IMPL(opgraft, CUDA, m) {
  m.impl("selective_scan_backward", TORCH_BOX(&opgraft::cuda::selective_scan_backward));
}
