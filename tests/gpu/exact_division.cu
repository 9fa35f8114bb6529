// Tries inverse_of and over_largest (csrc/support/fp8_rule.h) for every float32 that they may be given, against the
// hardware's correctly rounded division. Prints two counts of differences, which must be 0.
//   nvcc -std=c++20 -arch=native --expt-relaxed-constexpr -I csrc tests/gpu/exact_division.cu -o /tmp/exact &&
//   /tmp/exact
#include <cstdint>
#include <cstdio>

#include "support/fp8_rule.h"

__global__ void compare(unsigned long long* differences) {
  const uint32_t step = gridDim.x * blockDim.x;
  for (uint64_t bits = blockIdx.x * blockDim.x + threadIdx.x; bits <= 0x7f800000u; bits += step) {
    const float value = __uint_as_float(static_cast<uint32_t>(bits));
    const bool whole = value >= 0x1p-126f && (value < 0x1p126f || bits == 0x7f800000u);
    if (whole && opgraft::inverse_of(value) != __frcp_rn(value)) atomicAdd(differences, 1ull);
    const float exact = __fdiv_rn(value, opgraft::FP8_LARGEST);
    // Smaller quotients become the smallest scale.
    if (exact >= 0x1p-100f && opgraft::over_largest(value) != exact) atomicAdd(differences + 1, 1ull);
  }
}

int main() {
  unsigned long long* differences = nullptr;
  if (cudaMallocManaged(&differences, 2 * sizeof(*differences)) != cudaSuccess) return 2;
  differences[0] = differences[1] = 0;
  compare<<<1024, 256>>>(differences);
  if (cudaDeviceSynchronize() != cudaSuccess) return 2;
  std::printf("inverse_of %llu, over_largest %llu differences\n", differences[0], differences[1]);
  return differences[0] || differences[1];
}
