// Between the forward and the backward launches of selective_scan.
#pragma once

#include <initializer_list>

#include "cuda/selective_scan_chunks.cuh"

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

// Blocks of CHANNELS channels that share B and C.
template <typename C>
int64_t blocks_of(const SelectiveShape& shape, int rounds = 1) {
  const int64_t channels = int64_t{C::CHANNELS} * rounds;
  return shape.batch * shape.groups * ((shape.per_group() + channels - 1) / channels);
}

// What kernels that walk time serially take, two blocks a multiprocessor, in units of a launch that fills the device
// so; `alone`: with one block each.
inline double serial_time(int64_t blocks, int sms, double alone) {
  const int64_t full = blocks / (2 * sms), rest = blocks % (2 * sms);
  return static_cast<double>(full) + (rest == 0 ? 0 : rest <= sms ? alone : 1);
}

// Whether that is less than with lanes along time, where time grows with the rows: `lanes`, for a full device's.
inline bool serial_wins(int64_t blocks, int sms, double alone, double lanes) {
  return serial_time(blocks, sms, alone) <= lanes * static_cast<double>(blocks) / (2 * sms);
}

// How the scan of many channels is cut.
using ManyChannels = ChunkCut<1, 2, 2, 4, 2>;

// Whether rows of these arguments can be moved as boxes. `others`: rows beside the arguments'.
template <typename T>
bool fits_boxes(const ScanData<T>& d, std::initializer_list<const void*> others) {
  bool whole = sizeof(T) == 2 && d.length % VECTOR_WIDTH<T> == 0 && aligned(d.u) && aligned(d.delta) && aligned(d.z);
  for (const void* rows : others) whole = whole && aligned(rows);
  // With half as many states half of the work would be for nothing. Steps are numbered by int.
  return whole && d.z && d.use_softplus && d.access != MatrixAccess::SINGLE && d.states <= CHUNK_STATES &&
         d.states > CHUNK_STATES / 2 && d.length < (int64_t{1} << 31) - 256;
}

// Whether the kernels that do so were built for this device.
bool device_has_boxes();

// The forward scan, where such kernels are there and win; false where it is left to others.
template <typename T>
bool scan_by_boxes(const Launch& context, const SelectiveShape& shape, const ScanData<T>& d, T* y,
                   DeviceAccumulate<T>* final_state);

// Their walk, which keeps the states before every eighth step, [mark][block][warp][state][row].
template <typename T>
void walk_boxes(const Launch& context, const SelectiveShape& shape, const ScanData<T>& d, DeviceAccumulate<T>* marks);

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
