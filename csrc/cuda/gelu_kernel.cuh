// GELU, tanh form: the kernels and their launch, behind plain pointers. cuda/gelu.cu binds them to the op.
//
// Memory-bound: one read and one write of an element forward (two reads and one write backward), so the copy rate is
// the limit. A thread moves VECTORS_PER_THREAD vectors of 16 bytes, all loaded before the first is used: 64 bytes in
// flight a thread cover the latency of HBM at full occupancy. Arithmetic an element: one exponential, one division
// and about 10 FMA, under a third of the issue slots that 16-bit elements leave at the copy rate on Hopper. The
// logistic form needs no tanh and keeps full relative precision on the negative side (see cpu/gelu.cpp). A pointer
// that is not 16-byte aligned takes the same kernel with vectors of one element.
#pragma once

#include "support/cuda.h"

namespace opgraft::cuda {
namespace {

constexpr int THREADS = 256;
constexpr int VECTORS_PER_THREAD = 4;

__device__ __forceinline__ float exp2_hardware(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// e^x for x <= 0 in float: one ex2 of the rounded x log2(e), corrected to first order by what the rounding left out.
// 2 ulp, in 4 instructions; expf takes 10 and made the float32 kernel miss the copy rate.
__device__ __forceinline__ float exponential(float x) {
  constexpr float LOG2_E = 1.44269504088896341f;
  constexpr float LOG2_E_REST = 1.92596299e-8f;
  constexpr float LN_2 = 0.693147180559945309f;
  const float scaled = x * LOG2_E;
  const float rest = fmaf(x, LOG2_E_REST, fmaf(x, LOG2_E, -scaled));
  const float power = exp2_hardware(scaled);
  return fmaf(power, rest * LN_2, power);
}

__device__ __forceinline__ double exponential(double x) { return exp(x); }

// s(v) and s(v) s(-v) from e^-|v|, as in cpu/gelu.cpp.
template <typename A>
struct Logistic {
  A value;
  A curve;
};

// For 16-bit types the hardware's exponential is far below their rounding; division in float is the hardware's (2 ulp).
template <bool FAST, typename A>
__device__ __forceinline__ Logistic<A> logistic_of_twice_inner(A x) {
  const A twice_inner = A(1.5957691216057308) * (x + A(0.044715) * x * x * x);
  A decay, large;
  if constexpr (FAST) {
    decay = __expf(-fabsf(twice_inner));
    large = __fdividef(1.0f, 1.0f + decay);
  } else if constexpr (std::is_same_v<A, float>) {
    // Below e^-104 float has no value left; the bound keeps infinity out of the correction, and lets NaN through.
    const float exponent = -fabsf(twice_inner);
    decay = exponential(exponent < -104.0f ? -104.0f : exponent);
    large = __fdividef(1.0f, 1.0f + decay);
  } else {
    decay = exponential(-fabs(twice_inner));
    large = A(1) / (A(1) + decay);
  }
  const A small = decay * large;
  return {twice_inner < A(0) ? small : large, small * large};
}

template <bool FAST>
struct Forward {
  template <typename A>
  __device__ __forceinline__ A operator()(A x) const {
    const A s = logistic_of_twice_inner<FAST>(x).value;
    return s == A(0) ? A(0) : x * s;
  }
};

template <bool FAST>
struct Backward {
  template <typename A>
  __device__ __forceinline__ A operator()(A grad, A x) const {
    const Logistic<A> s = logistic_of_twice_inner<FAST>(x);
    const A inner_slope = A(1.5957691216057308) * (A(1) + A(3) * A(0.044715) * x * x);
    return grad * (s.value + (s.curve == A(0) ? A(0) : x * s.curve * inner_slope));
  }
};

// A block owns a tile of THREADS * VECTORS_PER_THREAD vectors; the grid's x dimension counts tiles, so sizes over
// 2^31 elements need no loop. The tail, shorter than a vector, is done element by element by the last block.
template <typename T, int WIDTH, typename Function, typename Load, typename Store, typename... Inputs>
__global__ void __launch_bounds__(THREADS) pointwise(int64_t elements, Function function, Load load, Store store,
                                                     T* __restrict__ out, const Inputs* __restrict__... in) {
  using Pack = Vector<T, WIDTH>;
  const int64_t vectors = elements / WIDTH;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (THREADS * VECTORS_PER_THREAD) + threadIdx.x;
  constexpr int INPUTS = sizeof...(Inputs);
  const T* pointers[INPUTS] = {in...};

  Pack packs[INPUTS][VECTORS_PER_THREAD];
#pragma unroll
  for (int v = 0; v < VECTORS_PER_THREAD; ++v) {
    const int64_t index = first + v * THREADS;
    if (index < vectors) {
#pragma unroll
      for (int i = 0; i < INPUTS; ++i) packs[i][v] = reinterpret_cast<const Pack*>(pointers[i])[index];
    }
  }
#pragma unroll
  for (int v = 0; v < VECTORS_PER_THREAD; ++v) {
    const int64_t index = first + v * THREADS;
    if (index < vectors) {
      Pack result;
#pragma unroll
      for (int lane = 0; lane < WIDTH; ++lane) {
        const int64_t element = index * WIDTH + lane;
        if constexpr (INPUTS == 1) {
          result.lane[lane] = store(function(load(packs[0][v].lane[lane], element)), element);
        } else {
          result.lane[lane] =
              store(function(load(packs[0][v].lane[lane], element), load(packs[1][v].lane[lane], element)), element);
        }
      }
      reinterpret_cast<Pack*>(out)[index] = result;
    }
  }

  if constexpr (WIDTH > 1) {
    const int64_t element = vectors * WIDTH + threadIdx.x;
    if (blockIdx.x == gridDim.x - 1 && element < elements) {
      if constexpr (INPUTS == 1) {
        out[element] = store(function(load(pointers[0][element], element)), element);
      } else {
        out[element] =
            store(function(load(pointers[0][element], element), load(pointers[1][element], element)), element);
      }
    }
  }
}

// out = function(in...) over `elements` contiguous elements, on `stream`. The caller checks the launch.
template <typename T, typename Function, typename... Inputs>
void launch(int64_t elements, cudaStream_t stream, Function function, T* out, const Inputs*... in) {
  if (elements == 0) return;
  const PlainLoad<T> load;
  const PlainStore<T> store;
  auto tiles = [&](int64_t width) {
    const int64_t tile = THREADS * VECTORS_PER_THREAD * width;
    return static_cast<unsigned>((elements + tile - 1) / tile);
  };
  constexpr int WIDE = VECTOR_WIDTH<T>;
  if (aligned(out) && (aligned(in) && ...)) {
    pointwise<T, WIDE><<<tiles(WIDE), THREADS, 0, stream>>>(elements, function, load, store, out, in...);
  } else {
    pointwise<T, 1><<<tiles(1), THREADS, 0, stream>>>(elements, function, load, store, out, in...);
  }
}

}  // namespace
}  // namespace opgraft::cuda
