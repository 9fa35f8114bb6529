// Mamba's selective scan on CUDA, forward.
//
// A thread has a chunk of 16 steps: step sizes, inputs and y of all of them are in registers, and states are walked one
// after the other, each through the whole chunk. So B and C come from shared memory in vectors of four steps, sums over
// states need no other thread. Decays are taken ahead of the walk, into the next state, so that nothing waits for the
// exponential unit. What a state is between chunks stands in shared memory.
//
// Many channels: a thread walks two channels' chunks (vectors of B and C serve both), and shares their states with its
// neighbour; rows of 16-bit types come and go as boxes (selective_scan_boxes.cuh). Fewer: the lanes of a warp have
// consecutive chunks. A lane walks its chunk from zero, a scan over the lanes gives the state that each begins
// with (the decay of a chunk is one exponential, of A times the sum of its step sizes), and it walks once more, with
// the decays it has. Still fewer: time is cut into segments; a first launch keeps the state that each ends with from
// zero and the sum of its step sizes, the second folds those of the segments before its own, in order.
//
// Cost a (step, channel, state): one exponential (ex2; A is scaled by log2 e beforehand) and 3/16 for softplus and
// gate; 5.7 issue slots and over 16 states about 2.5 for what is done once a step; 1.2 wavefronts of shared memory.
// With lanes along time 8.8 slots in place of 5.7. What it takes is in docs/ops/selective_scan.md.
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "cuda/selective_scan.h"
#include "cuda/selective_scan_forward.cuh"
#include "ops.h"
#include "support/selective_call.h"

namespace opgraft::cuda {
namespace {

// Channels and states go to threads before time does: a scan over lanes costs one operation a step and state more, and
// the scan itself. What is left of the machine, lanes along time fill, where there are as many steps.
template <typename T, typename Body>
void dispatch_cut(const SelectiveShape& shape, int sms, const Body& body) {
  const int64_t rows = shape.batch * shape.channels;
  const int64_t warps = int64_t{sms} * 12;  // that keep a device busy: 3 of 4 a scheduler
  // double is for checks: one kernel serves it.
  if constexpr (std::is_same_v<T, double>) {
    body(ChunkCut<8, 1, 1, 4, 1>{});
  } else if (shape.states <= CHUNK_STATES &&
             (serial_wins(blocks_of<ManyChannels>(shape), sms, 0.64, 1.37) || shape.length <= 2 * CHUNK_STEPS)) {
    body(ManyChannels{});
  } else if (rows >= 4 * warps || shape.length <= 8 * CHUNK_STEPS) {
    body(ChunkCut<8, 1, 1, 8, 2>{});
  } else {
    body(ChunkCut<32, 1, 1, 8, 2>{});
  }
}

template <typename T, typename C, bool WALK>
void launch_scan(const Launch& context, const SelectiveShape& shape, const ScanData<T>& d, const SegmentPlan& plan,
                 const StateWalk<T>& walk, T* y, DeviceAccumulate<T>* final_state) {
  const bool wide = d.length % VECTOR_WIDTH<T> == 0 && aligned(d.u) && aligned(d.delta) && aligned(d.z) && aligned(y);
  auto launch = [&](auto kernel, size_t bytes, auto... arguments) {
    STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
    kernel<<<static_cast<unsigned>(blocks_of<C>(shape) * plan.count), C::THREADS, bytes, context.stream()>>>(
        d, arguments...);
    Launch::check();
  };
  const size_t bytes = ChunkShared<T, C>::bytes(d.states);
  wide ? launch(scan_chunks<T, C, WALK, true>, bytes, plan, walk, y, final_state)
       : launch(scan_chunks<T, C, WALK, false>, bytes, plan, walk, y, final_state);
}

}  // namespace

SegmentPlan plan_segments(const SelectiveShape& shape, int64_t blocks, int64_t places, int64_t tile) {
  // Time in segments is walked twice, so fewer than four do not pay.
  constexpr int64_t FEWEST = 4, MOST = 64;
  const int64_t tiles = (shape.length + tile - 1) / tile;
  const int64_t count = std::min({places / std::max<int64_t>(blocks, 1), tiles / 2, MOST});
  if (count < FEWEST) return {1, std::max<int64_t>(shape.length, 1)};
  const int64_t length = (tiles + count - 1) / count * tile;
  return {(shape.length + length - 1) / length, length};
}

template <typename T>
SegmentPlan plan_scan(const SelectiveShape& shape, int sms) {
  SegmentPlan plan;
  dispatch_cut<T>(shape, sms, [&](auto cut) {
    using C = decltype(cut);
    plan = plan_segments(shape, blocks_of<C>(shape), int64_t{sms} * C::BLOCKS, C::SPAN);
  });
  return plan;
}

template <typename T>
void walk_segments(const Launch& context, const SelectiveShape& shape, const ScanData<T>& d, const SegmentPlan& plan,
                   const StateWalk<T>& walk) {
  if constexpr (!std::is_same_v<T, double>) {
    // Marks closer than a chunk come of a walk whose tile is a chunk.
    if (walk.states && 1 << walk.every_log2 < CHUNK_STEPS) {
      launch_scan<T, ManyChannels, true>(context, shape, d, plan, walk, nullptr, nullptr);
      return;
    }
  }
  dispatch_cut<T>(shape, context.multiprocessors(), [&](auto cut) {
    launch_scan<T, decltype(cut), true>(context, shape, d, plan, walk, nullptr, nullptr);
  });
}

template SegmentPlan plan_scan<float>(const SelectiveShape&, int);
template SegmentPlan plan_scan<double>(const SelectiveShape&, int);
template SegmentPlan plan_scan<__half>(const SelectiveShape&, int);
template SegmentPlan plan_scan<__nv_bfloat16>(const SelectiveShape&, int);

template void walk_segments(const Launch&, const SelectiveShape&, const ScanData<float>&, const SegmentPlan&,
                            const StateWalk<float>&);
template void walk_segments(const Launch&, const SelectiveShape&, const ScanData<double>&, const SegmentPlan&,
                            const StateWalk<double>&);
template void walk_segments(const Launch&, const SelectiveShape&, const ScanData<__half>&, const SegmentPlan&,
                            const StateWalk<__half>&);
template void walk_segments(const Launch&, const SelectiveShape&, const ScanData<__nv_bfloat16>&, const SegmentPlan&,
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
  const SelectiveForward call =
      prepare_selective("selective_scan", {u, delta, A, B, C, D, z, delta_bias, delta_softplus, initial_state});
  const SelectiveShape& shape = call.shape;
  Tensor y = call.y, final_state = call.final_state;
  if (shape.batch * shape.channels == 0) return {y, final_state};
  if (shape.length == 0) {
    call.in.initial ? torch::stable::copy_(final_state, *call.in.initial) : torch::stable::zero_(final_state);
    return {y, final_state};
  }
  dispatch_floating("selective_scan", u, [&](auto tag) {
    using T = typename DeviceType<typename decltype(tag)::type>::type;
    const ScanData<T> d = scan_data<T>(shape, call.in.arguments());
    Launch context(u);
    auto* to_y = static_cast<T*>(y.mutable_data_ptr());
    auto* to_state = static_cast<DeviceAccumulate<T>*>(final_state.mutable_data_ptr());
    if constexpr (sizeof(T) == 2) {
      if (scan_by_boxes(context, shape, d, to_y, to_state)) return;
    }
    SegmentPlan plan = plan_scan<T>(shape, context.multiprocessors());
    const Tensor space = segment_space(u, plan, shape);
    if (plan.count > 1) walk_segments<T>(context, shape, d, plan, StateWalk<T>::from_nothing());
    dispatch_cut<T>(shape, context.multiprocessors(), [&](auto cut) {
      launch_scan<T, decltype(cut), false>(context, shape, d, plan, StateWalk<T>{}, to_y, to_state);
    });
  });
  return {y, final_state};
}

}  // namespace opgraft::cuda

STABLE_TORCH_LIBRARY_IMPL(opgraft, CUDA, m) { m.impl("selective_scan", TORCH_BOX(&opgraft::cuda::selective_scan)); }
