// rms_norm and add_rms_norm backward: which kernel serves, how it is cut, and its launch, behind plain pointers.
#pragma once

#include "cuda/rms_norm_backward_registers.cuh"
#include "cuda/rms_norm_backward_scalars.cuh"
#include "cuda/rms_norm_backward_shifted.cuh"

namespace opgraft::cuda {
namespace {

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
  NormGradients<T, W> marked = in;
  marked.keep = keep_of(in.rows * in.length * static_cast<int64_t>(sizeof(T)));
  STD_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, marked, plan.threads, shift, plan.cluster));
}

template <int TENSORS, typename T, typename W>
void launch_backward_tensors(const NormGradients<T, W>& in, const BackwardPlan& plan, cudaStream_t stream) {
  if (plan.cluster > 1) return launch_backward_registers<BACKWARD_VECTORS, TENSORS, true, false>(in, plan, stream);
  if (plan.vectors == 1) return launch_backward_registers<1, TENSORS, false, false>(in, plan, stream);
  if (plan.vectors == 2) return launch_backward_registers<2, TENSORS, false, false>(in, plan, stream);
  if constexpr (TENSORS == 2) {
    const bool several_groups = plan.threads < BACKWARD_THREADS;
    if (several_groups) return launch_backward_registers<BACKWARD_VECTORS, 2, false, true>(in, plan, stream);
  }
  launch_backward_registers<BACKWARD_VECTORS, TENSORS, false, false>(in, plan, stream);
}

template <int VECTORS, int TENSORS, typename T, typename W>
void run_backward_shifted(const NormGradients<T, W>& in, const BackwardPlan& plan, cudaStream_t stream) {
  const int groups = BACKWARD_THREADS / plan.threads;
  const int vectors = static_cast<int>((in.length * sizeof(T) + VECTOR_BYTES - 1) / VECTOR_BYTES) + 2;
  const int ring = SHIFTED_STAGES * TENSORS * groups * vectors * VECTOR_BYTES;
  const int shares = BACKWARD_THREADS * VECTORS * VECTOR_WIDTH<T> * static_cast<int>(sizeof(float));
  const int bytes = ring > shares ? ring : shares;
  const auto kernel = backward_shifted<T, W, VECTORS, TENSORS>;
  STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  kernel<<<static_cast<unsigned>(plan.grid), BACKWARD_THREADS, bytes, stream>>>(in, plan.threads, log2_of(plan.threads),
                                                                                vectors);
}

template <typename T, typename W>
void launch_backward_shifted(const NormGradients<T, W>& in, const BackwardPlan& plan, cudaStream_t stream) {
  if constexpr (!std::is_same_v<T, double>) {
    const auto run = [&](auto vectors) {
      if (in.grad_summed.data) return run_backward_shifted<vectors(), 3>(in, plan, stream);
      run_backward_shifted<vectors(), 2>(in, plan, stream);
    };
    if (plan.vectors == 1) return run(std::integral_constant<int, 1>{});
    if (plan.vectors == 2) return run(std::integral_constant<int, 2>{});
    run(std::integral_constant<int, BACKWARD_VECTORS>{});
  }
}

template <typename T, typename W>
void launch_backward(const NormGradients<T, W>& in, const BackwardPlan& plan, cudaStream_t stream) {
  if constexpr (!std::is_same_v<T, double>) {
    if (plan.shifted) return launch_backward_shifted(in, plan, stream);
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

}  // namespace
}  // namespace opgraft::cuda
