// rms_norm and add_rms_norm backward of rows in whole vectors of 16 bytes.
//
// A persistent grid: a row belongs to a group of threads, which walks every so-many-th row and keeps its share of dw in
// float registers. A thread copies its own vectors of the next rows into its own slots of a ring in shared memory
// (cp.async), so it waits for nobody but itself; 64 KB a multiprocessor are under way at any time. Rows over
// BLOCK_VECTORS vectors are cut over a cluster of blocks, which exchange their sums through distributed shared memory.
// Bytes: two reads (three with the sum's gradient) and one write of a row.
#pragma once

#include <cooperative_groups.h>

#include "cuda/rms_norm_gradient.cuh"

namespace opgraft::cuda {
namespace {

constexpr int BLOCK_VECTORS = BACKWARD_THREADS * BACKWARD_VECTORS;
constexpr int MAX_CLUSTER = 8;  // blocks; what every device with clusters takes
constexpr int STAGES = 2;

__device__ __forceinline__ unsigned cluster_rank() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  return cooperative_groups::this_cluster().block_rank();
#else
  return 0;
#endif
}

__device__ __forceinline__ void sync_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cooperative_groups::this_cluster().sync();
#endif
}

// Every block of the cluster gets the sums of all, added in the order of the blocks. `slots` holds two values a block.
__device__ __forceinline__ void reduce_cluster(float (&values)[2], int blocks, float* slots) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  namespace groups = cooperative_groups;
  const groups::cluster_group cluster = groups::this_cluster();
  const unsigned rank = cluster.block_rank();
  if (threadIdx.x < static_cast<unsigned>(blocks)) {
    float* remote = cluster.map_shared_rank(slots, threadIdx.x);
    remote[2 * rank] = values[0];
    remote[2 * rank + 1] = values[1];
  }
  cluster.sync();
  values[0] = values[1] = 0.0f;
  for (int b = 0; b < blocks; ++b) {
    values[0] += slots[2 * b];
    values[1] += slots[2 * b + 1];
  }
#endif
}

// STAGES rows of a group are in shared memory or on their way. TENSORS is 3 with the gradient of the sum. PATIENT: the
// next row is asked for when this one is done with. Where a block has many groups, that keeps the memory as busy and
// the multiprocessors more even: those that the memory serves better do not run away from the others.
template <typename T, typename W, int VECTORS, int TENSORS, int STAGES, bool CLUSTERED, bool PATIENT>
__global__ void __launch_bounds__(BACKWARD_THREADS, VECTORS == 1 ? 2 : 1)
    backward_registers(NormGradients<T, W> in, int threads, int shift, int blocks) {
  constexpr int WIDTH = VECTOR_WIDTH<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ float slots[2][2 * BACKWARD_THREADS / 32];
  __shared__ float cluster_slots[2][2 * MAX_CLUSTER];
  uint4* ring = reinterpret_cast<uint4*>(shared);  // [stage][tensor][vector][thread of the block]
  const int group = threadIdx.x >> shift;
  const int groups = BACKWARD_THREADS >> shift;
  const int thread = threadIdx.x & (threads - 1);
  const int all = static_cast<int>(in.length / WIDTH);
  const int own = CLUSTERED ? (all + blocks - 1) / blocks : all;  // vectors of this block
  const int first = CLUSTERED ? static_cast<int>(cluster_rank()) * own : 0;
  const int last = CLUSTERED ? min(first + own, all) : all;
  const int64_t team = static_cast<int64_t>(CLUSTERED ? blockIdx.x / blocks : blockIdx.x) * groups + group;
  const int64_t teams = static_cast<int64_t>(CLUSTERED ? gridDim.x / blocks : gridDim.x) * groups;

  const auto slot = [&](int stage, int tensor, int k) {
    return ring + (((stage * TENSORS + tensor) * VECTORS + k) * BACKWARD_THREADS + threadIdx.x);
  };
  const auto fetch = [&](int64_t row, int stage) {
    if (row < in.rows) {
#pragma unroll
      for (int k = 0; k < VECTORS; ++k) {
        const int v = first + k * threads + thread;
        if (v < last) {
          const int64_t at = static_cast<int64_t>(v) * WIDTH;
          copy_async(slot(stage, 0, k), in.x.row(row) + at);
          copy_async(slot(stage, 1, k), in.grad.row(row) + at);
          if constexpr (TENSORS == 3) copy_async(slot(stage, 2, k), in.grad_summed.row(row) + at);
        }
      }
    }
    commit_copies();
  };

  float share[VECTORS][WIDTH] = {};
  Words<W, WIDTH> weights[VECTORS];
  // A wide weight of narrow rows takes too many registers to be kept: it is read for every row, from the cache.
  constexpr bool KEPT = VECTORS * Words<W, WIDTH>::COUNT <= 16;
  const auto load_weights = [&](int k) {
    const int v = first + k * threads + thread;
    weights[k] = in.weight && v < last ? load_words<W, WIDTH>(in.weight + v * WIDTH) : constant_words<W, WIDTH>(1.0f);
  };
#pragma unroll
  for (int k = 0; k < VECTORS; ++k) {
    const int v = first + k * threads + thread;
    if constexpr (KEPT) load_weights(k);
    if (v >= last) {  // past the row's end: never copied to
#pragma unroll
      for (int s = 0; s < STAGES; ++s) {
#pragma unroll
        for (int t = 0; t < TENSORS; ++t) *slot(s, t, k) = uint4{};
      }
    }
  }
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) fetch(team + s * teams, s);

  // Nobody writes into a block that has not begun.
  if constexpr (CLUSTERED) sync_cluster();
  const float offset = in.weight ? in.offset : 0.0f;
  const auto load_factors = [&](int k, float (&factors)[WIDTH]) {
    unpack(weights[k], factors);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) factors[i] += offset;
  };
  int stage = 0, parity = 0;
  for (int64_t base = team - group; base < in.rows; base += teams) {
    const int64_t row = base + group;
    wait_copies<STAGES - 2>();
    // The slot of the row before is free: all that was read of it has been used.
    if constexpr (!PATIENT) fetch(row + (STAGES - 1) * teams, stage == 0 ? STAGES - 1 : stage - 1);
    // A group whose rows are out, in the last round. Where warps hold several groups it goes on, with zeros: the
    // shuffles take whole warps.
    const bool live = row < in.rows;
    if (!live && threads >= 32) continue;
    Words<T, WIDTH> x[VECTORS], grad[VECTORS];
    float squares[WIDTH] = {}, products[WIDTH] = {};
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
      x[k] = load_words<T, WIDTH>(reinterpret_cast<const T*>(slot(stage, 0, k)));
      grad[k] = load_words<T, WIDTH>(reinterpret_cast<const T*>(slot(stage, 1, k)));
      if (!live) {
        x[k] = Words<T, WIDTH>{};
        grad[k] = Words<T, WIDTH>{};
      }
      if constexpr (!KEPT) load_weights(k);
      float values[WIDTH], ups[WIDTH], factors[WIDTH];
      unpack(x[k], values);
      unpack(grad[k], ups);
      load_factors(k, factors);
      add_products(values, ups, factors, squares, products);
      forget(x[k]);
      forget(grad[k]);
      forget(weights[k]);
    }
    float sums[2] = {sum_lanes(squares), sum_lanes(products)};
    reduce_row(sums, threads, group, thread, &slots[parity][2 * group * (threads / 32)], Add{});
    if constexpr (CLUSTERED) reduce_cluster(sums, blocks, cluster_slots[parity]);
    const RowPull row_pull(in, sums, live);
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
      const int v = first + k * threads + thread;
      if constexpr (!KEPT) load_weights(k);
      float values[WIDTH], ups[WIDTH], factors[WIDTH];
      unpack(x[k], values);
      unpack(grad[k], ups);
      load_factors(k, factors);
      forget(weights[k]);
      row_pull.apply(values, ups, factors, share[k]);
      if constexpr (TENSORS == 3) {
        const Words<T, WIDTH> more = load_words<T, WIDTH>(reinterpret_cast<const T*>(slot(stage, 2, k)));
        unpack(more, ups);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) values[i] += ups[i];
      }
      if (live && v < last) store_words(in.grad_x + row * in.length + static_cast<int64_t>(v) * WIDTH, pack<T>(values));
    }
    if constexpr (PATIENT) fetch(row + (STAGES - 1) * teams, stage == 0 ? STAGES - 1 : stage - 1);
    stage = stage == STAGES - 1 ? 0 : stage + 1;
    parity ^= 1;
  }
  wait_copies<0>();
  if (!in.partial) return;
  if (groups > 1) {
    store_shares(in, share, reinterpret_cast<float*>(shared), group, groups, thread, threads);
  } else {
    const int64_t at = CLUSTERED ? blockIdx.x / blocks : blockIdx.x;
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
      const int v = first + k * threads + thread;
      if (v < last) {
        float* to = in.partial + at * in.length + static_cast<int64_t>(v) * WIDTH;
#pragma unroll
        for (int i = 0; i < WIDTH; i += 4) {
          *reinterpret_cast<float4*>(to + i) = {share[k][i], share[k][i + 1], share[k][i + 2], share[k][i + 3]};
        }
      }
    }
  }
}

constexpr int backward_bytes(int vectors, int tensors, int width) {
  const int ring = BACKWARD_THREADS * vectors * tensors * STAGES * VECTOR_BYTES;
  const int shares = BACKWARD_THREADS * vectors * width * static_cast<int>(sizeof(float));
  return ring > shares ? ring : shares;
}

}  // namespace
}  // namespace opgraft::cuda
