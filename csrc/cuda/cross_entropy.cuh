// Cross entropy on CUDA: what its kernels share. The call, a row's statistics while it is read, and its loss; its
// gradient is in cross_entropy_gradient.cuh.
//
// With m the row's maximum, s the sum of e^(x - m), lse = m + ln s, and w the class weights (one where there are none),
//   loss = (1 - smoothing) w[t] (lse - x[t]) + smoothing / C sum_c w[c] (lse - x[c]) + z_loss lse^2
//   d loss / d x[c] = p[c] a - b [c = t] - e w[c],  p[c] = e^(x[c] - m - ln s)
// with three numbers a row: a, b and e. A soft cap maps x to cap tanh(x / cap) on the way in and multiplies the
// gradient by 1 - tanh^2 on the way out. Everything is in float (double for double).
#pragma once

#include <cfloat>

#include "support/cross_entropy_shape.h"
#include "support/cuda.h"

namespace opgraft::cuda {
namespace {

constexpr unsigned FULL_WARP = 0xffffffffu;

// What a kernel needs to know of the call. Pointers that a call has no use for are null.
template <typename T>
struct CrossEntropyCall {
  using A = DeviceAccumulate<T>;

  LogitRows layout;
  const T* logits = nullptr;
  const void* target = nullptr;
  bool target_is_wide = true;  // int64, else int32
  const A* weight = nullptr;
  const A* scales = nullptr;            // what `measure_targets` found; null stands for one
  A* loss = nullptr;                    // one a row
  A* lse = nullptr;                     // one a row
  A* statistics = nullptr;              // rows maxima, then rows logarithms
  T* gradient = nullptr;                // dense rows
  unsigned long long* taken = nullptr;  // rows given out so far, the first of every cluster not counted
  const A* grad_loss = nullptr;         // backward: one number, or one a row
  const A* grad_lse = nullptr;          // backward: one a row
  bool grad_per_row = false;
  bool skip_if_one = false;  // the gradient is there already, for an incoming gradient of one
  bool mean = false;
  bool measures_itself = false;  // few rows: no kernel before this one has found `scales`
  int64_t ignore_index = -100;
  A smoothing = 0;
  A z_loss = 0;
  A softcap = 0;

  __device__ __forceinline__ int64_t target_of(int64_t row) const {
    return target_is_wide ? static_cast<const int64_t*>(target)[row] : static_cast<const int32_t*>(target)[row];
  }
};

// Found by one block from the targets, for the mean and for smoothed class weights. Behind them in memory a count of
// rows, which starts at zero.
enum Scale { LOSS_SCALE = 0, Z_SCALE = 1, MEAN_WEIGHT = 2, SCALES = 3 };
constexpr int TAKEN_AT = 4;     // in elements: a multiple of 8 bytes
constexpr int SCALES_SIZE = 6;  // with the count

__device__ __forceinline__ float fast_exp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

constexpr float LOG2_E = 1.44269504088896341f;

// e^x for x <= 0 or NaN. In float by the hardware's ex2: 2 ulp, and the rounding of x log2(e) where e^x is small.
__device__ __forceinline__ float exp_of(float x) { return fast_exp2(x * LOG2_E); }
__device__ __forceinline__ double exp_of(double x) { return exp(x); }

// e^(x - log_sum), the second argument made by `log_in_base`: one multiply-add before the exponential.
__device__ __forceinline__ float log_in_base(float log_sum) { return log_sum * LOG2_E; }
__device__ __forceinline__ double log_in_base(double log_sum) { return log_sum; }
// What that argument's rounding has left of e^-log_sum, a factor: log2(e) to twice the digits.
__device__ __forceinline__ float left_by_base(float log_sum) {
  constexpr float LOG2_E_REST = 1.92596303e-8f;
  const float rest = fmaf(log_sum, LOG2_E, -log_in_base(log_sum));
  return fast_exp2(-fmaf(log_sum, LOG2_E_REST, rest));
}
__device__ __forceinline__ double left_by_base(double) { return 1.0; }
__device__ __forceinline__ float probability(float x, float log_sum) { return fast_exp2(fmaf(x, LOG2_E, -log_sum)); }
__device__ __forceinline__ double probability(double x, double log_sum) { return exp(x - log_sum); }

template <typename A>
__device__ __forceinline__ A lowest();
template <>
__device__ __forceinline__ float lowest<float>() {
  return -FLT_MAX;
}
template <>
__device__ __forceinline__ double lowest<double>() {
  return -DBL_MAX;
}

__device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ double larger(double a, double b) { return fmax(a, b); }

// The largest of a warp's numbers, in every lane; NaN has no say. Floats compare as integers once the negative ones are
// turned round.
__device__ __forceinline__ float warp_largest(float x) {
  const int bits = __float_as_int(x);
  const int top = __reduce_max_sync(FULL_WARP, bits ^ ((bits >> 31) & 0x7fffffff));
  return __int_as_float(top ^ ((top >> 31) & 0x7fffffff));
}

__device__ __forceinline__ double warp_largest(double x) {
#pragma unroll
  for (int by = 16; by > 0; by /= 2) x = larger(x, __shfl_xor_sync(FULL_WARP, x, by));
  return x;
}

// A sum of two is the same both ways round, so that every lane ends with the same bits.
template <typename A>
__device__ __forceinline__ A warp_total(A x) {
#pragma unroll
  for (int by = 16; by > 0; by /= 2) x += __shfl_xor_sync(FULL_WARP, x, by);
  return x;
}

// Maximum and sum of e^(x - maximum) of some elements. The maximum starts at the lowest finite number, so that
// -infinity gives e^-infinity and not NaN. For label smoothing also the sum of w (x - maximum), and of the class
// weights w.
template <typename A, bool SMOOTH>
struct RowSum {
  A maximum = lowest<A>();
  A sum = 0;
  A weighted = 0;
  A weights = 0;

  __device__ __forceinline__ void raise(A candidate) {
    if (candidate > maximum) {
      sum *= exp_of(maximum - candidate);
      if (SMOOTH && weights != A(0)) weighted -= weights * (candidate - maximum);
      maximum = candidate;
    }
  }

  __device__ __forceinline__ void merge(RowSum other) {
    const A top = larger(maximum, other.maximum);
    raise(top);
    other.raise(top);
    sum += other.sum;
    if constexpr (SMOOTH) {
      weighted += other.weighted;
      weights += other.weights;
    }
  }
};

// Of all lanes, in each of them.
template <typename A, bool SMOOTH>
__device__ __forceinline__ RowSum<A, SMOOTH> warp_merge(RowSum<A, SMOOTH> own) {
  own.raise(warp_largest(own.maximum));
  own.sum = warp_total(own.sum);
  if constexpr (SMOOTH) {
    own.weighted = warp_total(own.weighted);
    own.weights = warp_total(own.weights);
  }
  return own;
}

// Near zero an odd polynomial (coefficients of Cephes' tanhf, |x| < 0.625), else 1 - 2 / (e^2|x| + 1): two instructions
// of the special-function unit.
__device__ __forceinline__ float tanh_of(float x) {
  const float size = fabsf(x);
  const float square = x * x;
  float p = fmaf(-5.70498872745e-3f, square, 2.06390887954e-2f);
  p = fmaf(p, square, -5.37397155531e-2f);
  p = fmaf(p, square, 1.33314422036e-1f);
  p = fmaf(p, square, -3.33332819422e-1f);
  const float near = fmaf(x * square, p, x);
  const float far = 1.0f - __fdividef(2.0f, fast_exp2(fminf(size, 20.0f) * (2.0f * LOG2_E)) + 1.0f);
  return size < 0.625f ? near : (size >= 0.625f ? copysignf(far, x) : x);
}
__device__ __forceinline__ double tanh_of(double x) { return tanh(x); }

// The element as the loss sees it.
template <bool GENERAL, typename T, typename A = DeviceAccumulate<T>>
__device__ __forceinline__ A seen(const CrossEntropyCall<T>& call, A x) {
  if constexpr (GENERAL) {
    if (call.softcap != A(0)) return call.softcap * tanh_of(x * (A(1) / call.softcap));
  }
  return x;
}

template <typename T, typename A = DeviceAccumulate<T>>
__device__ __forceinline__ A scale_of(const CrossEntropyCall<T>& call, Scale which) {
  return call.scales == nullptr ? A(1) : call.scales[which];
}

template <typename T, typename A = DeviceAccumulate<T>>
__device__ __forceinline__ bool valid_target(const CrossEntropyCall<T>& call, int64_t target) {
  return target >= 0 && target < call.layout.classes;
}

template <typename T, typename A = DeviceAccumulate<T>>
__device__ __forceinline__ A mean_weight(const CrossEntropyCall<T>& call) {
  return call.weight == nullptr || call.smoothing == A(0) ? A(1) : call.scales[MEAN_WEIGHT];
}

__device__ __forceinline__ float log_of(float x) { return logf(x); }
__device__ __forceinline__ double log_of(double x) { return log(x); }

// The mean's denominators, from the targets.
struct Counted {
  double kept = 0;     // rows that are not ignored
  double weights = 0;  // of their classes

  template <typename T>
  __device__ __forceinline__ void add(const CrossEntropyCall<T>& call, int64_t row) {
    const int64_t target = call.target_of(row);
    if (target == call.ignore_index) return;
    kept += 1;
    if (call.weight != nullptr && valid_target(call, target)) weights += call.weight[target];
  }

  template <typename A>
  __device__ __forceinline__ void store(bool mean, bool weighted, A* scales) const {
    scales[LOSS_SCALE] = static_cast<A>(mean ? 1 / (weighted ? weights : kept) : 1);
    scales[Z_SCALE] = static_cast<A>(mean ? 1 / kept : 1);
  }
};

// By one warp, for itself; without a mean class weight.
template <typename T, typename A = DeviceAccumulate<T>>
__device__ __forceinline__ const A* measure_few_targets(const CrossEntropyCall<T>& call, A* scales) {
  const int lane = threadIdx.x % 32;
  Counted own;
  for (int64_t row = lane; call.mean && row < call.layout.rows; row += 32) own.add(call, row);
  own.kept = warp_total(own.kept);
  own.weights = warp_total(own.weights);
  if (lane == 0) own.store(call.mean, call.weight != nullptr, scales);
  __syncwarp();
  return scales;
}

// A row's loss, divided by the mean's denominators; NaN where the mean is of no rows, as torch has it. A target that is
// no class and not ignored gives NaN: nothing on the device may read beside the row, or wait for the host to complain.
template <typename T, bool SMOOTH, typename A = DeviceAccumulate<T>>
__device__ __forceinline__ A row_loss(const CrossEntropyCall<T>& call, int64_t target, const RowSum<A, SMOOTH>& row,
                                      A log_sum, A picked) {
  if (target == call.ignore_index) return isinf(scale_of(call, Z_SCALE)) ? A(NAN) : A(0);
  if (!valid_target(call, target)) return A(NAN);
  const A weight = call.weight == nullptr ? A(1) : call.weight[target];
  A loss = (A(1) - call.smoothing) * weight * ((row.maximum - picked) + log_sum);
  if constexpr (SMOOTH) {
    const A others = mean_weight(call) * log_sum - row.weighted / static_cast<A>(call.layout.classes);
    if (call.smoothing != A(0)) loss += call.smoothing * others;
  }
  const A lse = row.maximum + log_sum;
  return loss * scale_of(call, LOSS_SCALE) + call.z_loss * lse * lse * scale_of(call, Z_SCALE);
}

// What a row leaves behind: its loss and the numbers that the backward starts from. One thread a row.
template <typename T, bool SMOOTH, typename A = DeviceAccumulate<T>>
__device__ __forceinline__ void store_row(const CrossEntropyCall<T>& call, int64_t row, int64_t target,
                                          const RowSum<A, SMOOTH>& sum, A log_sum, A picked) {
  call.loss[row] = row_loss(call, target, sum, log_sum, picked);
  call.lse[row] = sum.maximum + log_sum;
  call.statistics[row] = isnan(log_sum) ? log_sum : sum.maximum;
  call.statistics[call.layout.rows + row] = log_sum;
}

// The target's logit as the loss sees it; zero where the target is no class.
template <bool GENERAL, typename T, typename A = DeviceAccumulate<T>>
__device__ __forceinline__ A picked_of(const CrossEntropyCall<T>& call, const T* row, int64_t target) {
  return valid_target(call, target) ? seen<GENERAL>(call, widen(row[target])) : A(0);
}

template <typename T, int WIDTH>
__device__ __forceinline__ DeviceAccumulate<T> largest(const Vector<T, WIDTH>& pack) {
  DeviceAccumulate<T> top = widen(pack.lane[0]);
#pragma unroll
  for (int i = 1; i < WIDTH; ++i) top = larger(top, widen(pack.lane[i]));
  return top;
}

// All lanes of a vector in the type of sums: of a pair of bfloat16, a shift and a mask.
template <typename T, int WIDTH>
__device__ __forceinline__ void widen_all(const Vector<T, WIDTH>& pack, DeviceAccumulate<T> (&x)[WIDTH]) {
#pragma unroll
  for (int i = 0; i < WIDTH; ++i) x[i] = widen(pack.lane[i]);
}

__device__ __forceinline__ void widen_all(const Vector<__nv_bfloat16, 8>& pack, float (&x)[8]) {
  const auto* pairs = reinterpret_cast<const uint32_t*>(&pack);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = __uint_as_float(pairs[i] << 16);
    x[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
  }
}

__device__ __forceinline__ void widen_all(const Vector<__half, 8>& pack, float (&x)[8]) {
  const auto* pairs = reinterpret_cast<const __half2*>(&pack);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 both = __half22float2(pairs[i]);
    x[2 * i] = both.x;
    x[2 * i + 1] = both.y;
  }
}

// Pairs of 16-bit numbers are compared as they are.
__device__ __forceinline__ float largest(const Vector<__nv_bfloat16, 8>& pack) {
  const auto* pairs = reinterpret_cast<const __nv_bfloat162*>(&pack);
  const __nv_bfloat162 top = __hmax2(__hmax2(pairs[0], pairs[1]), __hmax2(pairs[2], pairs[3]));
  return larger(widen(top.x), widen(top.y));
}

__device__ __forceinline__ float largest(const Vector<__half, 8>& pack) {
  const auto* pairs = reinterpret_cast<const __half2*>(&pack);
  const __half2 top = __hmax2(__hmax2(pairs[0], pairs[1]), __hmax2(pairs[2], pairs[3]));
  return larger(widen(top.x), widen(top.y));
}

// Vectors of elements, the first of column `first` and each `step` columns after the one before: one comparison of the
// maximum of all, then one exponential each. What is outside the row holds -infinity.
template <bool GENERAL, int COUNT, int WIDTH, typename T, typename A = DeviceAccumulate<T>>
__device__ __forceinline__ void take(const CrossEntropyCall<T>& call, RowSum<A, GENERAL>& sum,
                                     const Vector<T, WIDTH> (&packs)[COUNT], int64_t first, int step) {
  if constexpr (GENERAL) {
#pragma unroll
    for (int v = 0; v < COUNT; ++v) {
      const int64_t column = first + v * step;
      const bool inside = column >= 0 && column + WIDTH <= call.layout.classes;
      A x[WIDTH];
      widen_all(packs[v], x);
      if (call.softcap != A(0)) {
        const A scale = A(1) / call.softcap;
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) x[i] = call.softcap * tanh_of(x[i] * scale);
      }
      if (!inside) {
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
          if (column + i < 0 || column + i >= call.layout.classes) x[i] = A(-INFINITY);
        }
      }
      A top = x[0];
#pragma unroll
      for (int i = 1; i < WIDTH; ++i) top = larger(top, x[i]);
      sum.raise(top);
      A part = A(0);
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) part += exp_of(x[i] - sum.maximum);
      sum.sum += part;
      if (call.smoothing != A(0)) {
        if (inside && call.weight == nullptr) {
          A below = A(0);
#pragma unroll
          for (int i = 0; i < WIDTH; ++i) below += x[i] - sum.maximum;
          sum.weighted += below;
          sum.weights += A(WIDTH);
        } else {
#pragma unroll
          for (int i = 0; i < WIDTH; ++i) {
            if (!inside && (column + i < 0 || column + i >= call.layout.classes)) continue;
            const A weight = call.weight == nullptr ? A(1) : call.weight[column + i];
            sum.weighted += weight * (x[i] - sum.maximum);
            sum.weights += weight;
          }
        }
      }
    }
  } else {
    A top = largest(packs[0]);
#pragma unroll
    for (int v = 1; v < COUNT; ++v) top = larger(top, largest(packs[v]));
    sum.raise(top);
#pragma unroll
    for (int v = 0; v < COUNT; ++v) {
      A x[WIDTH];
      widen_all(packs[v], x);
      A part = A(0);
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) part += exp_of(x[i] - sum.maximum);
      sum.sum += part;
    }
  }
}

}  // namespace
}  // namespace opgraft::cuda
