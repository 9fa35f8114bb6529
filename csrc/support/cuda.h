// CUDA kernels: the current stream, the device guard, the launch check, and vector access. The only CUDA file that
// touches the ABI shims.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>

#include "support/dispatch.h"

namespace opgraft::cuda {

// Makes the tensor's device current while it lives, and knows the stream to launch on.
class Launch {
 public:
  explicit Launch(const Tensor& tensor) : guard_(tensor.get_device_index()) {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }

  cudaStream_t stream() const { return stream_; }

  // Multiprocessors of the device, by which work is cut. The runtime keeps it: about 20 ns a call.
  int multiprocessors() const {
    int device = 0;
    int count = 1;
    STD_CUDA_CHECK(cudaGetDevice(&device));
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
    return count;
  }

  // Call right after <<<>>>: a bad configuration surfaces here, at the op that made it.
  static void check() { STD_CUDA_KERNEL_LAUNCH_CHECK(); }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

// The device type for a storage type, and the trip to float and back.
template <typename T>
struct DeviceType {
  using type = T;
};
template <>
struct DeviceType<Half> {
  using type = __half;
};
template <>
struct DeviceType<BFloat16> {
  using type = __nv_bfloat16;
};

__device__ __forceinline__ float widen(float value) { return value; }
__device__ __forceinline__ double widen(double value) { return value; }
__device__ __forceinline__ float widen(__half value) { return __half2float(value); }
__device__ __forceinline__ float widen(__nv_bfloat16 value) { return __bfloat162float(value); }

template <typename T, typename A>
__device__ __forceinline__ T narrow(A value) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(value);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(value);
  } else {
    return static_cast<T>(value);
  }
}

template <typename T>
using DeviceAccumulate = std::conditional_t<std::is_same_v<T, double>, double, float>;

// COUNT elements moved by one instruction of up to 16 bytes; the pointer must be aligned to the whole.
template <typename T, int COUNT>
struct alignas(sizeof(T) * COUNT) Vector {
  T lane[COUNT];
};

inline constexpr int VECTOR_BYTES = 16;

template <typename T>
inline constexpr int VECTOR_WIDTH = VECTOR_BYTES / static_cast<int>(sizeof(T));

inline bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % VECTOR_BYTES == 0; }

// How a kernel reads and writes an element. Plain by default; a neighbour that is to be compiled into a kernel gives
// its own pair.
template <typename T>
struct PlainLoad {
  __device__ __forceinline__ DeviceAccumulate<T> operator()(T value, int64_t /*index*/) const { return widen(value); }
};

template <typename T>
struct PlainStore {
  __device__ __forceinline__ T operator()(DeviceAccumulate<T> value, int64_t /*index*/) const {
    return narrow<T>(value);
  }
};

}  // namespace opgraft::cuda
