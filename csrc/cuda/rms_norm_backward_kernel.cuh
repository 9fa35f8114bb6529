// rms_norm and add_rms_norm backward: the kernels and their launches, behind plain pointers.
//
// With n = x r, r = 1 / sqrt(mean(x^2) + eps) and g = dy (w + offset):
//   dx = r g - n (r / N) sum(g n) [+ the gradient of the sum x + residual],   dw = sum over rows of dy n.
// r is computed anew, since x is read anyway: both sums go through one reduction, and nothing is saved by the forward.
//
// A persistent grid: a row belongs to a group of threads, which walks every so-many-th row and keeps its share of dw in
// float registers. A thread copies its own vectors of the next rows into its own slots of a ring in shared memory
// (cp.async), so it waits for nobody but itself; 64 KB a multiprocessor are under way at any time. Rows over
// BLOCK_VECTORS vectors are cut over a cluster of blocks, which exchange their sums through distributed shared memory.
// At the end every block writes its share of dw, and a second launch adds the shares in fixed order: no atomics.
// Bytes: two reads (three with the sum's gradient) and one write of a row.
#pragma once

#include <cooperative_groups.h>

#include "cuda/rms_norm_kernel.cuh"

namespace opgraft::cuda {
namespace {

constexpr int BACKWARD_THREADS = 512;
constexpr int BACKWARD_VECTORS = 4;  // at most, a thread
constexpr int BLOCK_VECTORS = BACKWARD_THREADS * BACKWARD_VECTORS;
constexpr int MAX_CLUSTER = 8;  // blocks; what every device with clusters takes
constexpr int SCALARS = 16;     // elements a thread where rows do not suit vectors
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
};

__device__ __forceinline__ unsigned cluster_rank() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  return cooperative_groups::this_cluster().block_rank();
#else
  return 0;
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

  const float length = static_cast<float>(in.length);
  const float offset = in.weight ? in.offset : 0.0f;
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
      unpack(weights[k], factors);
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) {
        squares[i] = fmaf(values[i], values[i], squares[i]);
        products[i] = fmaf(values[i], ups[i] * (factors[i] + offset), products[i]);
      }
      forget(x[k]);
      forget(grad[k]);
      forget(weights[k]);
    }
    float sums[2] = {sum_lanes(squares), sum_lanes(products)};
    reduce_row(sums, threads, group, thread, &slots[parity][2 * group * (threads / 32)], Add{});
    if constexpr (CLUSTERED) reduce_cluster(sums, blocks, cluster_slots[parity]);
    // Not the fast one, though results are of 16 bits: ptxas then unpacks the rows before the sums are there, and
    // spills.
    // A row that is not there has no share, also where eps is zero.
    const float scale = live ? inverse_root<float>(sums[0], in.length, in.eps) : 0.0f;
    const float pull = scale * scale * scale * sums[1] / length;
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
      const int v = first + k * threads + thread;
      if constexpr (!KEPT) load_weights(k);
      float values[WIDTH], ups[WIDTH], factors[WIDTH];
      unpack(x[k], values);
      unpack(grad[k], ups);
      unpack(weights[k], factors);
      forget(weights[k]);
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) {
        share[k][i] = fmaf(ups[i], values[i] * scale, share[k][i]);
        values[i] = fmaf(ups[i] * (factors[i] + offset), scale, -values[i] * pull);
      }
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
  // The groups' shares, added in the order of the groups.
  __syncthreads();
  float* staged = reinterpret_cast<float*>(shared);  // [group][vector of the block][lane]
  const int width = VECTORS * threads * WIDTH;
  if (groups > 1) {
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) staged[group * width + (k * threads + thread) * WIDTH + i] = share[k][i];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < all * WIDTH; i += BACKWARD_THREADS) {
      float sum = 0.0f;
      for (int g = 0; g < groups; ++g) sum += staged[g * width + i];
      in.partial[blockIdx.x * in.length + i] = sum;
    }
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

// Rows that do not suit vectors, and float64: elements one by one, SCALARS of them a thread, in registers.
template <typename T, typename W>
__global__ void __launch_bounds__(BACKWARD_THREADS) backward_scalars(NormGradients<T, W> in, int threads, int shift) {
  using A = DeviceAccumulate<T>;
  __shared__ A slots[2][2 * BACKWARD_THREADS / 32];
  const int group = threadIdx.x >> shift;
  const int groups = BACKWARD_THREADS >> shift;
  const int thread = threadIdx.x & (threads - 1);
  const int64_t team = static_cast<int64_t>(blockIdx.x) * groups + group;
  const int64_t teams = static_cast<int64_t>(gridDim.x) * groups;
  const int length = static_cast<int>(in.length);
  const A offset = in.weight ? A(in.offset) : A(0);
  A share[SCALARS] = {};
  int parity = 0;
  for (int64_t base = team - group; base < in.rows; base += teams) {
    const int64_t row = base + group;
    const int end = row < in.rows ? length : 0;
    const T* x = in.x.row(row);
    const T* grad = in.grad.row(row);
    const T* more = in.grad_summed.data ? in.grad_summed.row(row) : nullptr;
    T own[SCALARS], up[SCALARS];
#pragma unroll
    for (int k = 0; k < SCALARS; ++k) {
      const int i = k * threads + thread;
      own[k] = i < end ? x[i] : narrow<T>(A(0));
      up[k] = i < end ? grad[i] : narrow<T>(A(0));
    }
    A sums[2] = {};
#pragma unroll
    for (int k = 0; k < SCALARS; ++k) {
      const int i = k * threads + thread;
      const A factor = (in.weight && i < end ? A(widen(in.weight[i])) : A(1)) + offset;
      const A value = widen(own[k]);
      sums[0] = fma(value, value, sums[0]);
      sums[1] = fma(value, A(widen(up[k])) * factor, sums[1]);
    }
    reduce_row(sums, threads, group, thread, &slots[parity][2 * group * (threads / 32)], Add{});
    const A scale = inverse_root<A>(sums[0], in.length, A(in.eps));
    const A pull = scale * scale * scale * sums[1] / static_cast<A>(in.length);
#pragma unroll
    for (int k = 0; k < SCALARS; ++k) {
      const int i = k * threads + thread;
      if (i < end) {
        const A factor = (in.weight ? A(widen(in.weight[i])) : A(1)) + offset;
        const A value = widen(own[k]);
        A result = fma(A(widen(up[k])) * factor, scale, -value * pull);
        if (more) result += A(widen(more[i]));
        in.grad_x[row * in.length + i] = narrow<T>(result);
        share[k] = fma(A(widen(up[k])), value * scale, share[k]);
      }
    }
    parity ^= 1;
  }
  if (!in.partial) return;
#pragma unroll
  for (int k = 0; k < SCALARS; ++k) {
    const int i = k * threads + thread;
    if (i < length) in.partial[team * in.length + i] = share[k];
  }
}

// Such rows where registers do not hold them: a block a row, which is read twice; its share of dw lives in memory.
template <typename T, typename W>
__global__ void __launch_bounds__(BACKWARD_THREADS) backward_memory(NormGradients<T, W> in) {
  using A = DeviceAccumulate<T>;
  __shared__ A slots[2][2 * BACKWARD_THREADS / 32];
  A* share = in.partial ? in.partial + blockIdx.x * in.length : nullptr;
  int parity = 0;
  for (int64_t row = blockIdx.x; row < in.rows; row += gridDim.x) {
    const T* x = in.x.row(row);
    const T* grad = in.grad.row(row);
    const T* more = in.grad_summed.data ? in.grad_summed.row(row) : nullptr;
    A sums[2] = {};
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < in.length; i += BACKWARD_THREADS) {
      const A value = widen(x[i]);
      const A scaled = A(widen(grad[i])) * (in.weight ? A(widen(in.weight[i])) + A(in.offset) : A(1));
      sums[0] = fma(value, value, sums[0]);
      sums[1] = fma(value, scaled, sums[1]);
    }
    reduce_row(sums, BACKWARD_THREADS, 0, threadIdx.x, slots[parity], Add{});
    const A scale = inverse_root<A>(sums[0], in.length, A(in.eps));
    const A pull = scale * scale * scale * sums[1] / static_cast<A>(in.length);
    const bool begin = row == blockIdx.x;
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < in.length; i += BACKWARD_THREADS) {
      const A value = widen(x[i]);
      const A up = widen(grad[i]);
      const A scaled = up * (in.weight ? A(widen(in.weight[i])) + A(in.offset) : A(1));
      A result = fma(scaled, scale, -value * pull);
      if (more) result += A(widen(more[i]));
      in.grad_x[row * in.length + i] = narrow<T>(result);
      if (share) share[i] = fma(up, value * scale, begin ? A(0) : share[i]);
    }
    parity ^= 1;
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

// How the gradient's kernel is cut, from the shape alone: the caller allocates `shares` rows of dw.
struct BackwardPlan {
  bool registers = false;
  bool shifted = false;  // rows do not suit vectors, and go through shared memory as they lie
  int threads = BACKWARD_THREADS;
  int vectors = 1;
  int cluster = 1;
  int64_t grid = 1;
  int64_t shares = 1;
};

constexpr int STAGES = 2;

constexpr int backward_bytes(int vectors, int tensors, int width) {
  const int ring = BACKWARD_THREADS * vectors * tensors * STAGES * VECTOR_BYTES;
  const int shares = BACKWARD_THREADS * vectors * width * static_cast<int>(sizeof(float));
  return ring > shares ? ring : shares;
}

// Clusters that the device holds at a time: of 4 blocks 30 on an H200 and not 33, since one must lie in one group of
// its multiprocessors. A grid of one more would take twice the time.
template <typename T, typename W>
int most_clusters(int cluster) {
  static std::array<std::array<std::atomic<int>, MAX_CLUSTER + 1>, MAX_DEVICES> known;
  std::atomic<int>& most = known[current_device()][cluster];
  if (most == 0) {
    const auto kernel = backward_registers<T, W, BACKWARD_VECTORS, 3, STAGES, true, false>;
    constexpr int BYTES = backward_bytes(BACKWARD_VECTORS, 3, VECTOR_WIDTH<T>);
    STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES));
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(cluster));
    config.blockDim = dim3(BACKWARD_THREADS);
    config.dynamicSmemBytes = BYTES;
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(cluster);
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
    int found = 0;
    STD_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&found, kernel, &config));
    most = found > 0 ? found : 1;
  }
  return most;
}

template <typename T, typename W>
BackwardPlan backward_plan(int64_t rows, int64_t length, bool wide, int processors) {
  BackwardPlan plan;
  const int64_t all = (length + VECTOR_WIDTH<T> - 1) / VECTOR_WIDTH<T>;
  const int64_t cluster = power_of_two_from((all + BLOCK_VECTORS - 1) / BLOCK_VECTORS);
  if constexpr (!std::is_same_v<T, double>) {
    if (cluster == 1 || (wide && cluster <= MAX_CLUSTER && code_version() >= 90)) {
      plan.registers = true;
      plan.shifted = !wide;
      plan.cluster = static_cast<int>(cluster);
      const int64_t own = (all + cluster - 1) / cluster;
      const int64_t threads = power_of_two_from((own + BACKWARD_VECTORS - 1) / BACKWARD_VECTORS);
      plan.threads = static_cast<int>(own <= 32 ? power_of_two_from(own < 8 ? 8 : own) : threads < 32 ? 32 : threads);
      const int64_t vectors = (own + plan.threads - 1) / plan.threads;
      plan.vectors = vectors <= 2 ? static_cast<int>(vectors) : BACKWARD_VECTORS;
      const int64_t groups = BACKWARD_THREADS / plan.threads;
      const int64_t most =
          cluster > 1 ? most_clusters<T, W>(plan.cluster) : static_cast<int64_t>(processors) * (vectors == 1 ? 2 : 1);
      const int64_t wanted = (rows + groups - 1) / groups;
      plan.shares = wanted < most ? wanted : most;
      plan.grid = plan.shares * plan.cluster;
      return plan;
    }
  }
  const int64_t most = static_cast<int64_t>(processors) * 2;
  if (length <= SCALARS * BACKWARD_THREADS) {
    const int64_t threads = power_of_two_from((length + SCALARS - 1) / SCALARS);
    plan.threads = static_cast<int>(threads < 8 ? 8 : threads);
    const int64_t groups = BACKWARD_THREADS / plan.threads;
    const int64_t wanted = (rows + groups - 1) / groups;
    plan.grid = wanted < most ? wanted : most;
    plan.shares = plan.grid * groups;
  } else {
    plan.shares = plan.grid = rows < most ? rows : most;
  }
  return plan;
}

template <int VECTORS, int TENSORS, bool CLUSTERED, bool PATIENT, typename T, typename W>
void launch_backward_registers(const NormGradients<T, W>& in, const BackwardPlan& plan, cudaStream_t stream) {
  const auto kernel = backward_registers<T, W, VECTORS, TENSORS, STAGES, CLUSTERED, PATIENT>;
  constexpr int BYTES = backward_bytes(VECTORS, TENSORS, VECTOR_WIDTH<T>);
  STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES));
  const int shift = log2_of(plan.threads);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(plan.grid));
  config.blockDim = dim3(BACKWARD_THREADS);
  config.dynamicSmemBytes = BYTES;
  config.stream = stream;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(plan.cluster);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  config.attrs = &attribute;
  config.numAttrs = CLUSTERED ? 1 : 0;
  STD_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, in, plan.threads, shift, plan.cluster));
}

template <int TENSORS, typename T, typename W>
void launch_backward_tensors(const NormGradients<T, W>& in, const BackwardPlan& plan, cudaStream_t stream) {
  if (plan.cluster > 1) return launch_backward_registers<BACKWARD_VECTORS, TENSORS, true, false>(in, plan, stream);
  if (plan.vectors == 1) return launch_backward_registers<1, TENSORS, false, false>(in, plan, stream);
  if (plan.vectors == 2) return launch_backward_registers<2, TENSORS, false, false>(in, plan, stream);
  if constexpr (TENSORS == 2) {
    const bool many_groups = plan.threads <= BACKWARD_THREADS / 4;
    if (many_groups) return launch_backward_registers<BACKWARD_VECTORS, 2, false, true>(in, plan, stream);
  }
  launch_backward_registers<BACKWARD_VECTORS, TENSORS, false, false>(in, plan, stream);
}

template <typename T, typename W>
void launch_backward(const NormGradients<T, W>& in, const BackwardPlan& plan, cudaStream_t stream) {
  if constexpr (!std::is_same_v<T, double>) {
    if (plan.registers) {
      if (in.grad_summed.data) return launch_backward_tensors<3>(in, plan, stream);
      return launch_backward_tensors<2>(in, plan, stream);
    }
  }
  const unsigned grid = static_cast<unsigned>(plan.grid);
  if (in.length <= SCALARS * BACKWARD_THREADS) {
    backward_scalars<T, W><<<grid, BACKWARD_THREADS, 0, stream>>>(in, plan.threads, log2_of(plan.threads));
  } else {
    backward_memory<T, W><<<grid, BACKWARD_THREADS, 0, stream>>>(in);
  }
}

template <typename A, typename W>
void launch_add_shares(const A* partial, W* out, int64_t shares, int64_t length, cudaStream_t stream) {
  const dim3 block(REDUCE_COLUMNS, REDUCE_ROWS);
  const unsigned grid = static_cast<unsigned>((length + REDUCE_COLUMNS - 1) / REDUCE_COLUMNS);
  add_shares<<<grid, block, 0, stream>>>(partial, out, shares, length);
}

}  // namespace
}  // namespace opgraft::cuda
