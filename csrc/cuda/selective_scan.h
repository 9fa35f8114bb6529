// Between the forward and the backward launches of selective_scan.
#pragma once

#include "cuda/selective_scan.cuh"

namespace opgraft::cuda {

// Time in `count` segments of `length` steps. For each (segment, batch, channel): the sum of its step sizes, and the
// state that it ends with when it starts from zero, [states].
struct SegmentPlan {
  int64_t count = 1;
  int64_t length = 1;
  void* sums = nullptr;
  void* ends = nullptr;
};

template <typename T>
__host__ __device__ __forceinline__ DeviceAccumulate<T>* plan_sums(const SegmentPlan& plan) {
  return static_cast<DeviceAccumulate<T>*>(plan.sums);
}

template <typename T>
__host__ __device__ __forceinline__ DeviceAccumulate<T>* plan_ends(const SegmentPlan& plan) {
  return static_cast<DeviceAccumulate<T>*>(plan.ends);
}

// A walk without outputs: from zero in every segment, to fill the plan, or from the true state, to keep the state
// before every 2^every_log2-th step in [mark][state][batch][channel].
template <typename T>
struct StateWalk {
  bool from_zero = false;
  DeviceAccumulate<T>* states = nullptr;
  int every_log2 = 0;

  static StateWalk from_nothing() { return {true, nullptr, 0}; }
};

// Whether kernels that walk time serially, two blocks a multiprocessor, take less time than those with lanes along
// time, whose time grows with the rows. In units of a launch that fills the device with two blocks each: `alone`, with
// one each; `lanes`, the other kernels with as many rows.
inline bool serial_wins(int64_t blocks, int sms, double alone, double lanes) {
  const int64_t full = blocks / (2 * sms), rest = blocks % (2 * sms);
  const double last = rest == 0 ? 0 : rest <= sms ? alone : 1;
  return static_cast<double>(full) + last <= lanes * static_cast<double>(blocks) / (2 * sms);
}

// For `blocks` blocks a segment where `places` run at once.
SegmentPlan plan_segments(const SelectiveShape& shape, int64_t blocks, int64_t places, int64_t tile);

// Of a forward scan.
template <typename T>
SegmentPlan plan_scan(const SelectiveShape& shape, int sms);

// Memory for the plan's sums and ends, where it has several segments.
Tensor segment_space(const Tensor& like, SegmentPlan& plan, const SelectiveShape& shape);

template <typename T>
void walk_segments(const Launch& context, const SelectiveShape& shape, const ScanData<T>& d, const SegmentPlan& plan,
                   const StateWalk<T>& walk);

template <typename T>
MatrixAccess matrix_access(const Tensor& B, const Tensor& C, const SelectiveShape& shape) {
  constexpr int64_t ITEMS = VECTOR_WIDTH<T>;
  bool steps = shape.length % ITEMS == 0, states = shape.states % ITEMS == 0;
  for (const Tensor* matrix : {&B, &C}) {
    const MatrixStrides s = MatrixStrides::of(*matrix);
    const bool whole = aligned(matrix->const_data_ptr()) && s.batch % ITEMS == 0 && s.group % ITEMS == 0;
    steps = steps && whole && s.step == 1 && s.state % ITEMS == 0;
    states = states && whole && s.state == 1 && s.step % ITEMS == 0;
  }
  return steps ? MatrixAccess::ALONG_STEPS : states ? MatrixAccess::ALONG_STATES : MatrixAccess::SINGLE;
}

template <typename T>
ScanData<T> scan_data(const SelectiveShape& shape, const SelectiveArguments& a) {
  using W = DeviceAccumulate<T>;
  return {shape.batch,
          shape.channels,
          shape.length,
          shape.groups,
          shape.states,
          static_cast<const T*>(a.u.const_data_ptr()),
          static_cast<const T*>(a.delta.const_data_ptr()),
          static_cast<const T*>(a.B.const_data_ptr()),
          static_cast<const T*>(a.C.const_data_ptr()),
          optional_data<T>(a.z),
          static_cast<const W*>(a.A.const_data_ptr()),
          optional_data<W>(a.D),
          optional_data<W>(a.delta_bias),
          optional_data<W>(a.initial_state),
          MatrixStrides::of(a.B),
          MatrixStrides::of(a.C),
          matrix_access<T>(a.B, a.C, shape),
          a.delta_softplus};
}

}  // namespace opgraft::cuda
