// rms_norm and add_rms_norm backward: what its kernels share. The call, a row's arithmetic, and the weight's gradient.
//
// With n = x r, r = 1 / sqrt(mean(x^2) + eps) and g = dy (w + offset):
//   dx = r g - n (r / N) sum(g n) [+ the gradient of the sum x + residual],   dw = sum over rows of dy n.
// r is computed anew, since x is read anyway: both sums go through one reduction, and nothing is saved by the forward.
// Every block writes its share of dw, and a second launch adds the shares in fixed order: no atomics.
#pragma once

#include "cuda/rms_norm_kernel.cuh"

namespace opgraft::cuda {
namespace {

constexpr int BACKWARD_THREADS = 512;
constexpr int BACKWARD_VECTORS = 4;  // at most, a thread
constexpr int REDUCE_COLUMNS = 32;
constexpr int REDUCE_ROWS = 32;

template <typename T, typename W>
struct NormGradients {
  Rows<const T> grad;
  Rows<const T> x;            // what was normalised
  Rows<const T> grad_summed;  // add_rms_norm alone, and there not always
  const W* weight = nullptr;
  T* grad_x = nullptr;
  DeviceAccumulate<T>* partial = nullptr;  // (shares, length); null where there is no weight
  int64_t rows = 0;
  int64_t length = 0;
  DeviceAccumulate<T> eps = 0;
  DeviceAccumulate<T> offset = 0;
  DeviceAccumulate<T> share_of_mean = 0;  // 1 / length
  Keep keep = Keep::NORMAL;
};

// The sums that a row's gradient needs, of a vector's elements: squares of x, and products of x with what comes in.
template <int WIDTH>
__device__ __forceinline__ void add_products(const float (&x)[WIDTH], const float (&grad)[WIDTH],
                                             const float (&factors)[WIDTH], float (&squares)[WIDTH],
                                             float (&products)[WIDTH]) {
#pragma unroll
  for (int i = 0; i < WIDTH; ++i) {
    squares[i] = fmaf(x[i], x[i], squares[i]);
    products[i] = fmaf(x[i], grad[i] * factors[i], products[i]);
  }
}

// What those sums leave: r, and r^3 / N sum(x g).
struct RowPull {
  float scale;
  float pull;

  // A row that is not there has no share, also where eps is zero.
  template <typename T, typename W>
  __device__ __forceinline__ RowPull(const NormGradients<T, W>& in, const float (&sums)[2], bool live) {
    scale = live ? inverse_root<float>(sums[0], in.length, in.eps) : 0.0f;
    pull = scale * scale * scale * (sums[1] * in.share_of_mean);
  }

  // x becomes its gradient; `share` gets what the row adds to the weight's.
  template <int WIDTH>
  __device__ __forceinline__ void apply(float (&x)[WIDTH], const float (&grad)[WIDTH], const float (&factors)[WIDTH],
                                        float (&share)[WIDTH]) const {
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
      const float scaled = grad[i] * scale;
      share[i] = fmaf(scaled, x[i], share[i]);
      x[i] = fmaf(scaled, factors[i], -x[i] * pull);
    }
  }
};

// The shares of a block's groups, added in the order of the groups. `staged`: shared memory of BACKWARD_THREADS *
// VECTORS * WIDTH floats.
template <int VECTORS, int WIDTH, typename T, typename W>
__device__ __forceinline__ void store_shares(const NormGradients<T, W>& in, const float (&share)[VECTORS][WIDTH],
                                             float* staged, int group, int groups, int thread, int threads) {
  const int width = VECTORS * threads * WIDTH;
  __syncthreads();
#pragma unroll
  for (int k = 0; k < VECTORS; ++k) {
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) staged[group * width + (k * threads + thread) * WIDTH + i] = share[k][i];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < static_cast<int>(in.length); i += BACKWARD_THREADS) {
    float sum = 0.0f;
    for (int g = 0; g < groups; ++g) sum += staged[g * width + i];
    in.partial[blockIdx.x * in.length + i] = sum;
  }
}

// dw[i] = partial[0][i] + partial[1][i] + ...: every thread adds every REDUCE_ROWS-th share, then those are added.
template <typename A, typename W>
__global__ void __launch_bounds__(REDUCE_COLUMNS* REDUCE_ROWS)
    add_shares(const A* __restrict__ partial, W* __restrict__ out, int64_t shares, int64_t length) {
  __shared__ A sums[REDUCE_ROWS][REDUCE_COLUMNS + 1];
  const int64_t column = static_cast<int64_t>(blockIdx.x) * REDUCE_COLUMNS + threadIdx.x;
  A sum = 0;
  if (column < length) {
#pragma unroll 8
    for (int64_t s = threadIdx.y; s < shares; s += REDUCE_ROWS) sum += partial[s * length + column];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  A total[1] = {sums[threadIdx.x][threadIdx.y]};
  reduce_lanes(total, 32, Add{});
  const int64_t to = static_cast<int64_t>(blockIdx.x) * REDUCE_COLUMNS + threadIdx.y;
  if (threadIdx.x == 0 && to < length) out[to] = narrow<W>(total[0]);
}

template <typename A, typename W>
void launch_add_shares(const A* partial, W* out, int64_t shares, int64_t length, cudaStream_t stream) {
  const dim3 block(REDUCE_COLUMNS, REDUCE_ROWS);
  const unsigned grid = static_cast<unsigned>((length + REDUCE_COLUMNS - 1) / REDUCE_COLUMNS);
  add_shares<<<grid, block, 0, stream>>>(partial, out, shares, length);
}

}  // namespace
}  // namespace opgraft::cuda
