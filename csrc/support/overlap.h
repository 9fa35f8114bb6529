// Hopper's launches that overlap (programmatic dependent launch): a kernel starts while the one before it in the stream
// ends, and waits for its writes before it touches memory. Saves most of a launch where kernels are short.
#pragma once

#include <array>
#include <atomic>

#include "support/cuda.h"

namespace opgraft::cuda {

__device__ __forceinline__ void wait_for_the_kernel_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_the_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

namespace {
__global__ void probe() {}
}  // namespace

inline constexpr int MAX_DEVICES = 64;

inline int current_device() {
  int device = 0;
  STD_CUDA_CHECK(cudaGetDevice(&device));
  return device < MAX_DEVICES ? device : MAX_DEVICES - 1;
}

// The architecture for which the code that runs on this device was compiled, 90 for Hopper's: a newer device may run
// code that a driver made from older PTX, in which clusters and overlapping launches are compiled out.
inline int code_version() {
  static std::array<std::atomic<int>, MAX_DEVICES> known;
  std::atomic<int>& version = known[current_device()];
  if (version == 0) {
    cudaFuncAttributes attributes;
    STD_CUDA_CHECK(cudaFuncGetAttributes(&attributes, probe));
    version = attributes.ptxVersion;
  }
  return version;
}

// A launch that may begin before the kernel before it has ended: the kernel must call wait_for_the_kernel_before.
// `shared`: its bytes of dynamic shared memory.
template <typename... Parameters, typename... Arguments>
void launch_overlapping_shared(void (*kernel)(Parameters...), unsigned grid, int block, size_t shared,
                               cudaStream_t stream, const Arguments&... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid);
  config.blockDim = dim3(static_cast<unsigned>(block));
  config.stream = stream;
  config.dynamicSmemBytes = shared;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = code_version() >= 90 ? 1 : 0;
  STD_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, arguments...));
}

template <typename... Parameters, typename... Arguments>
void launch_overlapping(void (*kernel)(Parameters...), unsigned grid, int block, cudaStream_t stream,
                        const Arguments&... arguments) {
  launch_overlapping_shared(kernel, grid, block, 0, stream, arguments...);
}

}  // namespace opgraft::cuda
