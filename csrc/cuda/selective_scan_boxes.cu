// Launches the forward kernels of selective_scan whose rows come and go as boxes.
#include "cuda/selective_scan_boxes.cuh"

namespace opgraft::cuda {
namespace {

// Whether two halves of a block that take turns are faster than two blocks a multiprocessor that do not, which can
// leave a multiprocessor to one of them. In units of a launch of halves that fills the device once.
bool halves_win(int64_t blocks, int sms) {
  constexpr double TWO_BLOCKS = 1.04, ONE_BLOCK = 0.65;
  const double singly = TWO_BLOCKS * serial_time(blocks, sms, ONE_BLOCK / TWO_BLOCKS);
  return blocks % 2 == 0 && static_cast<double>((blocks / 2 + sms - 1) / sms) < singly;
}

template <typename T, bool WALK, int HALVES>
void launch_halves(const Launch& context, int64_t blocks, const ScanData<T>& d, const ScanBoxes& boxes, float* marks,
                   float* final_state) {
  using C = ManyChannels;
  const auto kernel = scan_boxes<T, C, WALK, HALVES>;
  const size_t bytes = HALVES * sizeof(BoxShared<T, C, WALK>);
  STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  kernel<<<static_cast<unsigned>(blocks / HALVES), HALVES * C::THREADS, bytes, context.stream()>>>(d, boxes, marks,
                                                                                                   final_state);
  Launch::check();
}

template <typename T, bool WALK>
void launch_boxes(const Launch& context, const SelectiveShape& shape, const ScanData<T>& d, T* y, float* marks,
                  float* final_state) {
  auto map = [&](const void* rows) {
    return box_map(rows, d.batch * d.groups, d.per_group(), d.length, ManyChannels::WARP_ROWS, RowBoxes::STEPS,
                   BoxOrder::ROWS_OF_64_BYTES);
  };
  const ScanBoxes boxes{map(d.u), map(d.delta), WALK ? CUtensorMap{} : map(d.z), WALK ? CUtensorMap{} : map(y)};
  const int64_t blocks = blocks_of<ManyChannels>(shape);
  halves_win(blocks, context.multiprocessors())
      ? launch_halves<T, WALK, 2>(context, blocks, d, boxes, marks, final_state)
      : launch_halves<T, WALK, 1>(context, blocks, d, boxes, marks, final_state);
}

}  // namespace

bool device_has_boxes() { return has_boxes(scan_boxes<__half, ManyChannels, true, 1>); }

template <typename T>
bool scan_by_boxes(const Launch& context, const SelectiveShape& shape, const ScanData<T>& d, T* y,
                   DeviceAccumulate<T>* final_state) {
  if (!fits_boxes(d, {y}) || !serial_wins(blocks_of<ManyChannels>(shape), context.multiprocessors(), 0.65, 1.62) ||
      !device_has_boxes()) {
    return false;
  }
  launch_boxes<T, false>(context, shape, d, y, nullptr, final_state);
  return true;
}

template <typename T>
void walk_boxes(const Launch& context, const SelectiveShape& shape, const ScanData<T>& d, DeviceAccumulate<T>* marks) {
  launch_boxes<T, true>(context, shape, d, nullptr, marks, nullptr);
}

template bool scan_by_boxes(const Launch&, const SelectiveShape&, const ScanData<__half>&, __half*, float*);
template bool scan_by_boxes(const Launch&, const SelectiveShape&, const ScanData<__nv_bfloat16>&, __nv_bfloat16*,
                            float*);
template void walk_boxes(const Launch&, const SelectiveShape&, const ScanData<__half>&, float*);
template void walk_boxes(const Launch&, const SelectiveShape&, const ScanData<__nv_bfloat16>&, float*);

}  // namespace opgraft::cuda
