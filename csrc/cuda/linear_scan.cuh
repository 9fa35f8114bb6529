// What the plans of linear_scan share: rows cut into segments of time where they are few.
//
// A first launch reduces every segment to its (decay, update) pair; the second folds the pairs before its own segment
// in their order, and scans. That reads the inputs twice, from L2 as a rule, since few rows are few bytes; the order of
// every sum is fixed, so results do not depend on timing.
#pragma once

#include <algorithm>

#include "support/check.h"
#include "support/cuda.h"
#include "support/scan_shape.h"
#include "support/tensor.h"
#include "support/twofold.h"

namespace opgraft::cuda {

struct Segments {
  int64_t count;   // segments a row
  int64_t length;  // steps a segment, the last may be shorter
};

template <typename T>
using ScanPair = Affine<Sum<T, DeviceAccumulate<T>>>;

template <typename T>
struct ScanForward {
  const T* decay;
  const T* update;
  const T* initial;
  T* output;
};

template <typename T>
struct ScanBackward {
  const T* grad;
  const T* decay;
  const T* output;
  const T* initial;
  T* grad_decay;
  T* grad_update;
  T* grad_initial;
};

// Cuts `length` so that `warps` warps a whole row become about `wanted` an SM. Segments are whole `unit`s.
inline Segments cut(int64_t warps, int64_t length, int64_t unit, int enough, int wanted, int sms) {
  if (warps >= static_cast<int64_t>(enough) * sms || length <= 2 * unit) return {1, length};
  const int64_t aim = (static_cast<int64_t>(wanted) * sms + warps - 1) / warps;
  const int64_t most = (length + unit - 1) / unit;
  const int64_t count = std::min(aim, most);
  const int64_t per_segment = ((length + count - 1) / count + unit - 1) / unit * unit;
  return {(length + per_segment - 1) / per_segment, per_segment};
}

inline unsigned blocks_for(int64_t tasks, int64_t per_block) {
  return static_cast<unsigned>((tasks + per_block - 1) / per_block);
}

// launch(pairs, reduce): once to reduce the segments, where there are several, and once to scan. Pairs are
// [segment][row].
template <typename T, typename Launcher>
void run_segments(const Tensor& like, Segments segments, int64_t rows, const Launcher& launch) {
  const int64_t bytes = segments.count > 1 ? segments.count * rows * static_cast<int64_t>(sizeof(ScanPair<T>)) : 0;
  Tensor space = new_contiguous(like, {&bytes, 1}, ScalarType::Byte);
  auto* pairs = static_cast<ScanPair<T>*>(space.mutable_data_ptr());
  if (segments.count > 1) launch(pairs, true);
  launch(pairs, false);
}

// The plans. `reverse` is the direction of the forward scan.
template <typename T>
void scan_rows(const Launch& context, const Tensor& like, ScanShape shape, const ScanForward<T>& d, bool reverse);
template <typename T>
void scan_rows(const Launch& context, const Tensor& like, ScanShape shape, const ScanBackward<T>& d, bool reverse);
template <typename T>
void scan_columns(const Launch& context, const Tensor& like, ScanShape shape, const ScanForward<T>& d, bool reverse);
template <typename T>
void scan_columns(const Launch& context, const Tensor& like, ScanShape shape, const ScanBackward<T>& d, bool reverse);

}  // namespace opgraft::cuda
