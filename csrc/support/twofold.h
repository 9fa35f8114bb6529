// Running sums for scans on the GPU: plain, or with what each operation rounded off kept beside the value.
//
// Where decays are near one and alike, a scan's roundings add up in one direction, to one for every step or tile. The
// results of 16-bit tensors do not show it; those of float and double would, so they use the second form: a pair whose
// unevaluated sum is the value (Dekker 1971; Knuth's two-sum; the product's error by FMA).
#pragma once

#include <type_traits>

namespace opgraft::cuda {

__device__ __forceinline__ float exact_product_error(float a, float b, float product) {
  return __fmaf_rn(a, b, -product);
}
__device__ __forceinline__ double exact_product_error(double a, double b, double product) {
  return __fma_rn(a, b, -product);
}
__device__ __forceinline__ float rounded_product(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double rounded_product(double a, double b) { return __dmul_rn(a, b); }
__device__ __forceinline__ float rounded_sum(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ double rounded_sum(double a, double b) { return __dadd_rn(a, b); }

template <typename A>
struct Plain {
  A high;

  static __device__ __forceinline__ Plain of(A value) { return {value}; }
  __device__ __forceinline__ A value() const { return high; }
};

template <typename A>
struct Twofold {
  A high;
  A low;

  static __device__ __forceinline__ Twofold of(A value) { return {value, A(0)}; }

  // Infinity and NaN are the high part's alone.
  __device__ __forceinline__ A value() const { return high - high == A(0) ? high + low : high; }
};

template <typename T, typename A>
using Sum = std::conditional_t<(sizeof(T) < 4), Plain<A>, Twofold<A>>;

// a * x + b. Nothing carried stays nothing: a product of growing decays may be infinite, and infinity times zero is
// NaN where the recurrence has zero.
template <typename A>
__device__ __forceinline__ Plain<A> multiply_add(Plain<A> a, Plain<A> x, Plain<A> b) {
  return {x.high == A(0) ? b.high : fma(a.high, x.high, b.high)};
}

template <typename A>
__device__ __forceinline__ Plain<A> multiply(Plain<A> a, Plain<A> x) {
  return {x.high == A(0) ? A(0) : a.high * x.high};
}

template <typename A>
__device__ __forceinline__ Twofold<A> multiply_add(Twofold<A> a, Twofold<A> x, Twofold<A> b) {
  const A product = rounded_product(a.high, x.high);
  const A product_error = fma(a.high, x.low, fma(a.low, x.high, exact_product_error(a.high, x.high, product)));
  const A sum = rounded_sum(product, b.high);
  const A part = rounded_sum(sum, -product);
  const A sum_error = rounded_sum(rounded_sum(product, -rounded_sum(sum, -part)), rounded_sum(b.high, -part));
  const A low = product_error + (sum_error + b.low);
  const bool nothing = x.high == A(0) && x.low == A(0);
  return {nothing ? b.high : sum, nothing ? b.low : low};
}

template <typename A>
__device__ __forceinline__ Twofold<A> multiply(Twofold<A> a, Twofold<A> x) {
  const A product = rounded_product(a.high, x.high);
  const A low = fma(a.high, x.low, fma(a.low, x.high, exact_product_error(a.high, x.high, product)));
  const bool nothing = x.high == A(0) && x.low == A(0);
  return {nothing ? A(0) : product, nothing ? A(0) : low};
}

// The same for one step of the recurrence, whose decay and update are exact.
template <typename A>
__device__ __forceinline__ Plain<A> step(A decay, Plain<A> x, A update) {
  return {fma(decay, x.high, update)};
}

template <typename A>
__device__ __forceinline__ Twofold<A> step(A decay, Twofold<A> x, A update) {
  const A product = rounded_product(decay, x.high);
  const A sum = rounded_sum(product, update);
  const A part = rounded_sum(sum, -product);
  const A sum_error = rounded_sum(rounded_sum(product, -rounded_sum(sum, -part)), rounded_sum(update, -part));
  const A low = fma(decay, x.low, exact_product_error(decay, x.high, product) + sum_error);
  return {sum, low - low == A(0) ? low : A(0)};
}

constexpr unsigned WHOLE_WARP = 0xffffffffu;

template <typename A>
__device__ __forceinline__ Plain<A> shuffle_up(Plain<A> x, int by) {
  return {__shfl_up_sync(WHOLE_WARP, x.high, by)};
}

template <typename A>
__device__ __forceinline__ Twofold<A> shuffle_up(Twofold<A> x, int by) {
  return {__shfl_up_sync(WHOLE_WARP, x.high, by), __shfl_up_sync(WHOLE_WARP, x.low, by)};
}

template <typename A>
__device__ __forceinline__ Plain<A> shuffle(Plain<A> x, int lane) {
  return {__shfl_sync(WHOLE_WARP, x.high, lane)};
}

template <typename A>
__device__ __forceinline__ Twofold<A> shuffle(Twofold<A> x, int lane) {
  return {__shfl_sync(WHOLE_WARP, x.high, lane), __shfl_sync(WHOLE_WARP, x.low, lane)};
}

// What a run of steps does to the state that enters it: state -> decay * state + update.
template <typename S>
struct Affine {
  S decay;
  S update;
};

// `later` after `earlier`.
template <typename S>
__device__ __forceinline__ Affine<S> compose(Affine<S> later, Affine<S> earlier) {
  return {multiply(later.decay, earlier.decay), multiply_add(later.decay, earlier.update, later.update)};
}

// Inclusive scan over the lanes of a warp.
template <typename S>
__device__ __forceinline__ Affine<S> warp_scan(Affine<S> own, int lane) {
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const Affine<S> before{shuffle_up(own.decay, by), shuffle_up(own.update, by)};
    if (lane >= by) own = compose(own, before);
  }
  return own;
}

}  // namespace opgraft::cuda
