// The kernel as a plain library ships it: pointers, a count, a stream, and nothing checked. C++ and CUDA alike.
//
// Compiled in a second or two, since no torch header is in it, and called through ctypes: the pitfalls are in how it
// is called, and so are their cures.
#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define BOTH __host__ __device__
#else
#define BOTH
#endif

template <typename T>
BOTH T gelu(T x) {
  return x / (T(1) + std::exp(-T(1.5957691216057308) * (x + T(0.044715) * x * x * x)));
}

#ifdef __CUDACC__

template <typename T>
__global__ void gelu_kernel(const T* in, T* out, int64_t elements) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < elements) out[i] = gelu(in[i]);
}

template <typename T>
void launch(const T* in, T* out, int64_t elements, int threads, void* stream) {
  const unsigned blocks = static_cast<unsigned>((elements + threads - 1) / threads);
  gelu_kernel<<<blocks, threads, 0, static_cast<cudaStream_t>(stream)>>>(in, out, elements);
}

extern "C" const char* last_launch_error() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

#else

template <typename T>
void launch(const T* in, T* out, int64_t elements, int, void*) {
  for (int64_t i = 0; i < elements; ++i) out[i] = gelu(in[i]);
}

extern "C" const char* last_launch_error() { return nullptr; }

#endif

extern "C" void gelu_float(const float* in, float* out, int64_t elements, int threads, void* stream) {
  launch(in, out, elements, threads, stream);
}

extern "C" void gelu_double(const double* in, double* out, int64_t elements, int threads, void* stream) {
  launch(in, out, elements, threads, stream);
}
