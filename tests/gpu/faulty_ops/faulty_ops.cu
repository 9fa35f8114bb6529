// Ops on CUDA that each break one rule of launching, beside their mended twins. All compute y = 2 x in float32.
//
// Built by `build.sh` with plain nvcc against torch's stable ABI, as the project's own library is.
#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>

namespace {

using torch::stable::Tensor;
using torch::stable::accelerator::DeviceGuard;

constexpr int THREADS = 256;

cudaStream_t current_stream(const Tensor& x) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

unsigned blocks_for(int64_t elements) { return static_cast<unsigned>((elements + THREADS - 1) / THREADS); }

const float* in(const Tensor& x) {
  STD_TORCH_CHECK(x.scalar_type() == torch::headeronly::ScalarType::Float, "x must be float32");
  return static_cast<const float*>(x.const_data_ptr());
}
float* out(Tensor& y) { return static_cast<float*>(y.mutable_data_ptr()); }

__global__ void twice(int64_t n, const float* x, float* y) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) y[i] = 2.0f * x[i];
}

// Four elements at a time; the address must be a multiple of 16.
__global__ void twice_vector(int64_t n, const float* x, float* y) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (4 * i + 3 < n) {
    const float4 v = reinterpret_cast<const float4*>(x)[i];
    reinterpret_cast<float4*>(y)[i] = make_float4(2 * v.x, 2 * v.y, 2 * v.z, 2 * v.w);
  } else {
    for (int64_t j = 4 * i; j < n; ++j) y[j] = 2.0f * x[j];
  }
}

template <typename Index>
__global__ void twice_strided(Index rows, Index columns, Index row_stride, Index column_stride, const float* x,
                              float* y) {
  const Index i = static_cast<Index>(blockIdx.x) * static_cast<Index>(blockDim.x) + static_cast<Index>(threadIdx.x);
  if (i < rows * columns) y[i] = 2.0f * x[(i / columns) * row_stride + (i % columns) * column_stride];
}

// One row a block in y, of which a grid takes 65,535.
__global__ void twice_rows(int64_t rows, int64_t columns, const float* x, float* y) {
  const int64_t row = blockIdx.y;
  for (int64_t column = threadIdx.x; column < columns; column += blockDim.x)
    y[row * columns + column] = 2.0f * x[row * columns + column];
}

// The bound is one element too high.
__global__ void twice_too_far(int64_t n, const float* x, float* y) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i <= n) y[i] = 2.0f * x[i < n ? i : 0];
}

// Each block sums THREADS elements of its own; without the bound the last block reads what lies behind x.
template <bool BOUND>
__global__ void block_sums(int64_t n, const float* x, float* sums) {
  __shared__ float part[THREADS];
  const int64_t i = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  part[threadIdx.x] = BOUND && i >= n ? 0.0f : x[i];
  __syncthreads();
  for (int width = THREADS / 2; width > 0; width /= 2) {
    if (threadIdx.x < width) part[threadIdx.x] += part[threadIdx.x + width];
    __syncthreads();
  }
  if (threadIdx.x == 0) sums[blockIdx.x] = part[0];
}

struct Prepared {
  Tensor x, y;
};

Prepared prepare(const Tensor& x) {
  Tensor dense = x.is_contiguous() ? x : torch::stable::contiguous(x);
  return {dense, torch::stable::new_empty(x, x.sizes())};
}

// The mended twin of most: current stream, device guard, checked launch, 64-bit indices, any address.
Tensor good(const Tensor& x) {
  DeviceGuard guard(x.get_device_index());
  auto [dense, y] = prepare(x);
  if (x.numel() == 0) return y;
  twice<<<blocks_for(x.numel()), THREADS, 0, current_stream(x)>>>(x.numel(), in(dense), out(y));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return y;
}

Tensor wrong_stream(const Tensor& x) {
  DeviceGuard guard(x.get_device_index());
  auto [dense, y] = prepare(x);
  if (x.numel() == 0) return y;
  twice<<<blocks_for(x.numel()), THREADS>>>(x.numel(), in(dense), out(y));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return y;
}

Tensor no_guard(const Tensor& x) {
  auto [dense, y] = prepare(x);
  if (x.numel() == 0) return y;
  int device = 0;
  STD_CUDA_CHECK(cudaGetDevice(&device));
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  twice<<<blocks_for(x.numel()), THREADS, 0, static_cast<cudaStream_t>(stream)>>>(x.numel(), in(dense), out(y));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return y;
}

// One block of as many threads as there are elements, and nobody looks whether it was launched.
Tensor unchecked(const Tensor& x) {
  DeviceGuard guard(x.get_device_index());
  auto [dense, y] = prepare(x);
  if (x.numel() == 0) return y;
  twice<<<1, static_cast<unsigned>(x.numel()), 0, current_stream(x)>>>(x.numel(), in(dense), out(y));
  return y;
}

// The same launch, checked: it refuses what it cannot do.
Tensor checked(const Tensor& x) {
  DeviceGuard guard(x.get_device_index());
  auto [dense, y] = prepare(x);
  if (x.numel() == 0) return y;
  twice<<<1, static_cast<unsigned>(x.numel()), 0, current_stream(x)>>>(x.numel(), in(dense), out(y));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return y;
}

Tensor unchecked_rows(const Tensor& x) {
  STD_TORCH_CHECK(x.dim() == 2, "unchecked_rows: x has another number of dimensions than 2");
  DeviceGuard guard(x.get_device_index());
  auto [dense, y] = prepare(x);
  if (x.numel() == 0) return y;
  twice_rows<<<dim3(1, static_cast<unsigned>(x.size(0))), THREADS, 0, current_stream(x)>>>(x.size(0), x.size(1),
                                                                                           in(dense), out(y));
  return y;
}

Tensor too_far(const Tensor& x) {
  DeviceGuard guard(x.get_device_index());
  auto [dense, y] = prepare(x);
  if (x.numel() == 0) return y;
  twice_too_far<<<blocks_for(x.numel() + 1), THREADS, 0, current_stream(x)>>>(x.numel(), in(dense), out(y));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return y;
}

template <bool BOUND>
Tensor sums(const Tensor& x) {
  DeviceGuard guard(x.get_device_index());
  Tensor dense = x.is_contiguous() ? x : torch::stable::contiguous(x);
  Tensor y = torch::stable::new_empty(x, {static_cast<int64_t>(blocks_for(x.numel()))});
  if (x.numel() == 0) return y;
  block_sums<BOUND><<<blocks_for(x.numel()), THREADS, 0, current_stream(x)>>>(x.numel(), in(dense), out(y));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return y;
}

// A workspace from the driver at every call: neither cudaMalloc nor cudaFree can be captured, and the latter waits.
Tensor allocates(const Tensor& x) {
  DeviceGuard guard(x.get_device_index());
  auto [dense, y] = prepare(x);
  if (x.numel() == 0) return y;
  void* workspace = nullptr;
  STD_CUDA_CHECK(cudaMalloc(&workspace, x.numel() * sizeof(float)));
  twice<<<blocks_for(x.numel()), THREADS, 0, current_stream(x)>>>(x.numel(), in(dense), static_cast<float*>(workspace));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  STD_CUDA_CHECK(
      cudaMemcpyAsync(out(y), workspace, x.numel() * sizeof(float), cudaMemcpyDeviceToDevice, current_stream(x)));
  STD_CUDA_CHECK(cudaFree(workspace));
  return y;
}

template <typename Index>
Tensor strided(const Tensor& x) {
  STD_TORCH_CHECK(x.dim() == 2, "strided: x has another number of dimensions than 2");
  DeviceGuard guard(x.get_device_index());
  Tensor y = torch::stable::new_empty(x, x.sizes());
  if (x.numel() == 0) return y;
  twice_strided<Index><<<blocks_for(x.numel()), THREADS, 0, current_stream(x)>>>(
      static_cast<Index>(x.size(0)), static_cast<Index>(x.size(1)), static_cast<Index>(x.stride(0)),
      static_cast<Index>(x.stride(1)), in(x), out(y));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return y;
}

template <bool TESTED>
Tensor vector(const Tensor& x) {
  DeviceGuard guard(x.get_device_index());
  auto [dense, y] = prepare(x);
  if (x.numel() == 0) return y;
  if (TESTED && reinterpret_cast<uintptr_t>(in(dense)) % 16 != 0) return good(x);
  twice_vector<<<blocks_for((x.numel() + 3) / 4), THREADS, 0, current_stream(x)>>>(x.numel(), in(dense), out(y));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return y;
}

Tensor syncs(const Tensor& x) {
  Tensor y = good(x);
  STD_CUDA_CHECK(cudaStreamSynchronize(current_stream(x)));
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY(faulty_gpu, m) {
  m.def("good(Tensor x) -> Tensor");
  m.def("wrong_stream(Tensor x) -> Tensor");
  m.def("no_guard(Tensor x) -> Tensor");
  m.def("unchecked(Tensor x) -> Tensor");
  m.def("checked(Tensor x) -> Tensor");
  m.def("int_index(Tensor x) -> Tensor");
  m.def("wide_index(Tensor x) -> Tensor");
  m.def("misaligned(Tensor x) -> Tensor");
  m.def("aligned(Tensor x) -> Tensor");
  m.def("syncs(Tensor x) -> Tensor");
  m.def("allocates(Tensor x) -> Tensor");
  m.def("sums_exact(Tensor x) -> Tensor");
  m.def("sums_past(Tensor x) -> Tensor");
  m.def("too_far(Tensor x) -> Tensor");
  m.def("unchecked_rows(Tensor x) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(faulty_gpu, CUDA, m) {
  m.impl("good", TORCH_BOX(&good));
  m.impl("wrong_stream", TORCH_BOX(&wrong_stream));
  m.impl("no_guard", TORCH_BOX(&no_guard));
  m.impl("unchecked", TORCH_BOX(&unchecked));
  m.impl("checked", TORCH_BOX(&checked));
  m.impl("int_index", TORCH_BOX(&strided<int>));
  m.impl("wide_index", TORCH_BOX(&strided<int64_t>));
  m.impl("misaligned", TORCH_BOX(&vector<false>));
  m.impl("aligned", TORCH_BOX(&vector<true>));
  m.impl("syncs", TORCH_BOX(&syncs));
  m.impl("allocates", TORCH_BOX(&allocates));
  m.impl("sums_exact", TORCH_BOX(&sums<true>));
  m.impl("sums_past", TORCH_BOX(&sums<false>));
  m.impl("too_far", TORCH_BOX(&too_far));
  m.impl("unchecked_rows", TORCH_BOX(&unchecked_rows));
}
