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
// next row is asked for when this one is done with. Where a block has several groups, that keeps the memory as busy
// and the multiprocessors more even: those that the memory serves better do not run away from the others.
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
  const auto inside = [&](int k) { return first + k * threads + thread < last; };
  // In elements: this thread's first vector of a row, and from one of its vectors to the next.
  const int begin = (first + thread) * WIDTH, step = threads * WIDTH;
  // The row that is fetched next, at this thread's first vector of it.
  int64_t next = team;
  const T* next_x = in.x.row(team) + begin;
  const T* next_grad = in.grad.row(team) + begin;
  [[maybe_unused]] const T* next_more = TENSORS == 3 ? in.grad_summed.row(team) + begin : nullptr;
  const auto fetch = [&](int stage) {
    if (next < in.rows) {
#pragma unroll
      for (int k = 0; k < VECTORS; ++k) {
        if (inside(k)) {
          copy_async(slot(stage, 0, k), next_x + k * step, in.keep);
          copy_async(slot(stage, 1, k), next_grad + k * step, in.keep);
          if constexpr (TENSORS == 3) copy_async(slot(stage, 2, k), next_more + k * step, in.keep);
        }
      }
      next += teams;
      next_x += teams * in.x.stride;
      next_grad += teams * in.grad.stride;
      if constexpr (TENSORS == 3) next_more += teams * in.grad_summed.stride;
    }
    commit_copies();
  };

  float share[VECTORS][WIDTH] = {}, factors[VECTORS][WIDTH];
#pragma unroll
  for (int k = 0; k < VECTORS; ++k) {
    Words<W, WIDTH> weights = constant_words<W, WIDTH>(1.0f);
    if (in.weight && inside(k)) weights = load_words<W, WIDTH>(in.weight + begin + k * step);
    unpack(weights, factors[k]);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) factors[k][i] += in.weight ? in.offset : 0.0f;
    if (!inside(k)) {  // past the row's end: never copied to
#pragma unroll
      for (int s = 0; s < STAGES; ++s) {
#pragma unroll
        for (int t = 0; t < TENSORS; ++t) *slot(s, t, k) = uint4{};
      }
    }
  }
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) fetch(s);

  // Nobody writes into a block that has not begun.
  if constexpr (CLUSTERED) sync_cluster();
  T* to = in.grad_x + team * in.length + begin;
  int stage = 0, parity = 0;
  for (int64_t base = team - group; base < in.rows; base += teams, to += teams * in.length) {
    wait_copies<STAGES - 2>();
    // The slot of the row before is free: all that was read of it has been used.
    if constexpr (!PATIENT) fetch(stage == 0 ? STAGES - 1 : stage - 1);
    // A group whose rows are out goes on in the last round, with zeros: warps may hold several groups, of a vector a
    // thread, and shuffles and barriers take whole warps.
    const bool live = base + group < in.rows;
    const auto load = [&](int tensor, int k, float (&values)[WIDTH]) {
      Words<T, WIDTH> words = load_words<T, WIDTH>(reinterpret_cast<const T*>(slot(stage, tensor, k)));
      if (VECTORS == 1 && !live) words = Words<T, WIDTH>{};
      unpack(words, values);
    };
    float squares[WIDTH] = {}, products[WIDTH] = {};
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
      if (VECTORS > 1 && !live) break;
      float values[WIDTH], ups[WIDTH];
      load(0, k, values);
      load(1, k, ups);
      add_products(values, ups, factors[k], squares, products);
    }
    float sums[2] = {sum_lanes(squares), sum_lanes(products)};
    reduce_row<(VECTORS > 1)>(sums, threads, group, thread, &slots[parity][2 * group * (threads / 32)], Add{});
    if constexpr (CLUSTERED) reduce_cluster(sums, blocks, cluster_slots[parity]);
    // The row is read from shared memory again: its words would fill half of the registers meanwhile.
    asm volatile("" ::: "memory");
    if (VECTORS > 1 && !live) break;
    const RowPull row_pull(in, sums, live);
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
      float values[WIDTH], ups[WIDTH];
      load(0, k, values);
      load(1, k, ups);
      row_pull.apply(values, ups, factors[k], share[k]);
      if constexpr (TENSORS == 3) {
        load(2, k, ups);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) values[i] += ups[i];
      }
      if (live && inside(k)) store_words(to + k * step, pack<T>(values));
    }
    if constexpr (PATIENT) fetch(stage == 0 ? STAGES - 1 : stage - 1);
    stage = stage == STAGES - 1 ? 0 : stage + 1;
    parity ^= 1;
  }
  wait_copies<0>();
  if (!in.partial) return;
  if (groups > 1) {
    store_shares(in, share, reinterpret_cast<float*>(shared), group, groups, thread, threads);
  } else {
    float* const shares = in.partial + (CLUSTERED ? blockIdx.x / blocks : blockIdx.x) * in.length + begin;
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
      if (!inside(k)) continue;
#pragma unroll
      for (int i = 0; i < WIDTH; i += 4) {
        *reinterpret_cast<float4*>(shares + k * step + i) = {share[k][i], share[k][i + 1], share[k][i + 2],
                                                             share[k][i + 3]};
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
