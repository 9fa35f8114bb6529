// float8_e4m3fn results in kernels over rows: largest values of blocks, scales, codes. The rule is support/fp8_rule.h.
#pragma once

#include <cuda_fp8.h>

#include "cuda/row.cuh"
#include "support/fp8_rule.h"

namespace opgraft::cuda {

// Two codes, the first in the low byte. Saturated, ties to even; NaN becomes 0x7f.
__device__ __forceinline__ uint32_t encode_pair(float low, float high) {
  return __nv_cvt_float2_to_fp8x2(float2{low, high}, __NV_SATFINITE, __NV_E4M3);
}

__device__ __forceinline__ uint8_t encode(float value) {
  return __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
}

template <int WIDTH>
__device__ __forceinline__ void store_codes(uint8_t* to, const float (&values)[WIDTH], float inverse) {
  uint32_t word[WIDTH / 4];
#pragma unroll
  for (int w = 0; w < WIDTH / 4; ++w) {
    const float* v = values + 4 * w;
    word[w] = encode_pair(__fmul_rn(v[0], inverse), __fmul_rn(v[1], inverse)) |
              encode_pair(__fmul_rn(v[2], inverse), __fmul_rn(v[3], inverse)) << 16;
  }
  if constexpr (WIDTH == 8) {
    *reinterpret_cast<uint2*>(to) = {word[0], word[1]};
  } else {
    *reinterpret_cast<uint32_t*>(to) = word[0];
  }
}

template <int WIDTH>
__device__ __forceinline__ float largest_magnitude(const float (&values)[WIDTH], float so_far) {
#pragma unroll
  for (int i = 0; i < WIDTH; ++i) so_far = Largest{}(so_far, fabsf(values[i]));
  return so_far;
}

// The largest magnitude of a warp, in every lane, NaN before all: bits of magnitudes are ordered as they are.
__device__ __forceinline__ float warp_largest_magnitude(float magnitude) {
  return __uint_as_float(__reduce_max_sync(FULL_WARP, __float_as_uint(magnitude)));
}

// Over a row's threads, any number of warps; `slots` as for reduce_row, a value a warp.
__device__ __forceinline__ float row_largest_magnitude(float magnitude, int threads, int group, int thread,
                                                       float* slots) {
  magnitude = warp_largest_magnitude(magnitude);
  if (threads <= 32) return magnitude;
  const int lane = thread % 32;
  if (lane == 0) slots[thread / 32] = magnitude;
  row_barrier(group, threads);
  return warp_largest_magnitude(lane < threads / 32 ? slots[lane] : 0.0f);
}

// COUNT values a lane, over `lanes` neighbours, a power of two and at least COUNT: each lane gets the largest of one of
// them, lane l that of index_of_lane(l). Fewer shuffles than COUNT reductions, and what follows is done once a lane.
template <int COUNT>
__device__ __forceinline__ float scatter_largest(float (&values)[COUNT], int lanes) {
  const int lane = threadIdx.x % 32;
  int step = 1;
#pragma unroll
  for (int half = COUNT / 2; half > 0; half /= 2) {
    const bool upper = lane & step;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float sent = upper ? values[i] : values[i + half];
      const float kept = upper ? values[i + half] : values[i];
      values[i] = Largest{}(kept, __shfl_xor_sync(FULL_WARP, sent, step));
    }
    step *= 2;
  }
  for (; step < lanes; step *= 2) values[0] = Largest{}(values[0], __shfl_xor_sync(FULL_WARP, values[0], step));
  return values[0];
}

// Its own inverse: the low bits the other way round.
template <int COUNT>
__device__ __forceinline__ int index_of_lane(int lane) {
  int index = 0;
#pragma unroll
  for (int bit = 1; bit < COUNT; bit *= 2) index += (lane & bit) ? COUNT / (2 * bit) : 0;
  return index;
}

// Where codes and scales go. blocks: scales a row; 1 where the row has one.
struct Fp8Outputs {
  uint8_t* codes = nullptr;
  float* scales = nullptr;
  int64_t blocks = 1;
  Fp8Rule rule;
};

// The codes of one row from values in float32 that are computed anew by value(k, lanes) for the thread's k-th vector;
// the row's or its blocks' largest values are found first. Of vectors past the end, values are zero.
template <int WIDTH, int VECTORS, bool BLOCKS, typename Value>
__device__ __forceinline__ void encode_row(const Fp8Outputs& out, int64_t row, int64_t length, int end, int threads,
                                           int group, int thread, float* slots, const Value& value) {
  uint8_t* codes = out.codes + row * length;
  if constexpr (BLOCKS) {
    constexpr int BLOCK_THREADS = FP8_BLOCK / WIDTH;
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
      const int v = k * threads + thread;
      float lanes[WIDTH];
      value(k, lanes);
      float amax[1] = {largest_magnitude(lanes, 0.0f)};
      reduce_lanes(amax, min(threads, BLOCK_THREADS), Largest{});
      const float scale = fp8_scale(amax[0], out.rule);
      const float inverse = inverse_of(scale);
      if (v < end) {
        store_codes(codes + v * WIDTH, lanes, inverse);
        if (v % BLOCK_THREADS == 0) out.scales[row * out.blocks + v / BLOCK_THREADS] = scale;
      }
    }
  } else {
    float amax[1] = {0.0f};
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
      float lanes[WIDTH];
      value(k, lanes);
      amax[0] = largest_magnitude(lanes, amax[0]);
    }
    reduce_row(amax, threads, group, thread, slots, Largest{});
    const float scale = fp8_scale(amax[0], out.rule);
    const float inverse = inverse_of(scale);
    if (thread == 0 && end > 0) out.scales[row] = scale;
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
      const int v = k * threads + thread;
      float lanes[WIDTH];
      value(k, lanes);
      if (v < end) store_codes(codes + v * WIDTH, lanes, inverse);
    }
  }
}

// The codes of one row whose values wait in registers, vector k of a thread in values[k]; a multiple of 32 threads a
// row.
template <int WIDTH, int VECTORS, bool BLOCKS>
__device__ __forceinline__ void encode_held_row(const Fp8Outputs& out, int64_t row, int64_t length, int end,
                                                int threads, int group, int thread, float* slots,
                                                const float (&values)[VECTORS][WIDTH]) {
  uint8_t* codes = out.codes + row * length;
  float inverse[VECTORS];
  if constexpr (BLOCKS) {
    constexpr int BLOCK_THREADS = FP8_BLOCK / WIDTH;
    float amax[VECTORS];
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) amax[k] = largest_magnitude(values[k], 0.0f);
    const float scale = fp8_scale(scatter_largest(amax, BLOCK_THREADS), out.rule);
    const float own = inverse_of(scale);
    const int first = thread / BLOCK_THREADS * BLOCK_THREADS;
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
      inverse[k] = __shfl_sync(FULL_WARP, own, index_of_lane<VECTORS>(k), BLOCK_THREADS);
    }
    const int v = index_of_lane<VECTORS>(thread % VECTORS) * threads + first;
    if (thread % BLOCK_THREADS < VECTORS && v < end) out.scales[row * out.blocks + v / BLOCK_THREADS] = scale;
  } else {
    float amax = 0.0f;
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) amax = largest_magnitude(values[k], amax);
    const float scale = fp8_scale(row_largest_magnitude(amax, threads, group, thread, slots), out.rule);
    const float all = inverse_of(scale);
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) inverse[k] = all;
    if (thread == 0 && end > 0) out.scales[row] = scale;
  }
#pragma unroll
  for (int k = 0; k < VECTORS; ++k) {
    const int v = k * threads + thread;
    if (v < end) store_codes(codes + v * WIDTH, values[k], inverse[k]);
  }
}

// The same for any length and alignment, from value(i): a row's threads walk it together, or each of its warps a block.
template <typename Value>
__device__ __forceinline__ void encode_row_from_memory(const Fp8Outputs& out, bool by_block, int64_t row,
                                                       int64_t length, bool live, int threads, int group, int thread,
                                                       float* slots, const Value& value) {
  uint8_t* codes = out.codes + row * length;
  const int64_t end = live ? length : 0;
  if (by_block) {
    const int team = min(threads, 32);
    const int64_t blocks = live ? out.blocks : 0;
    const int64_t teams = threads / team;
    const int64_t rounds = (out.blocks + teams - 1) / teams;  // the same for all lanes of a warp
    for (int64_t r = 0; r < rounds; ++r) {
      const int64_t block = r * teams + thread / team;
      const int64_t first = block * FP8_BLOCK;
      const int64_t last = block < blocks ? (first + FP8_BLOCK < length ? first + FP8_BLOCK : length) : 0;
      float amax[1] = {0.0f};
      for (int64_t i = first + thread % team; i < last; i += team) amax[0] = Largest{}(amax[0], fabsf(value(i)));
      reduce_lanes(amax, team, Largest{});
      const float scale = fp8_scale(amax[0], out.rule);
      const float inverse = inverse_of(scale);
      for (int64_t i = first + thread % team; i < last; i += team) codes[i] = encode(__fmul_rn(value(i), inverse));
      if (block < blocks && thread % team == 0) out.scales[row * out.blocks + block] = scale;
    }
  } else {
    float amax[1] = {0.0f};
    for (int64_t i = thread; i < end; i += threads) amax[0] = Largest{}(amax[0], fabsf(value(i)));
    reduce_row(amax, threads, group, thread, slots, Largest{});
    const float scale = fp8_scale(amax[0], out.rule);
    const float inverse = inverse_of(scale);
    for (int64_t i = thread; i < end; i += threads) codes[i] = encode(__fmul_rn(value(i), inverse));
    if (live && thread == 0) out.scales[row] = scale;
  }
}

}  // namespace opgraft::cuda
