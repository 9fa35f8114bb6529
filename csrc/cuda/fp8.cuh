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
