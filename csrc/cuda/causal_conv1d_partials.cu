// The gradients of causal_conv1d's weights and bias from partial sums. A block owns 32 values side by side; its LAYERS
// warps add layers of them in fixed order, in double, so the result does not depend on timing.
#include "cuda/causal_conv1d.cuh"

namespace opgraft::cuda {
namespace {

constexpr int LAYERS = 16;

template <typename T>
__global__ void __launch_bounds__(32 * LAYERS)
    add_layers(Partials<DeviceAccumulate<T>> from, T* __restrict__ grad_weight, T* __restrict__ grad_bias,
               int64_t channels, int width) {
  __shared__ double sums[LAYERS][32];
  const int64_t values = channels * (from.bound + 1);
  const int64_t value = static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x;
  const int64_t channel = from.channel_last ? value % channels : value / (from.bound + 1);
  const int place = static_cast<int>(from.channel_last ? value / channels : value % (from.bound + 1));
  // Neighbours in `value` are neighbours in memory in either layout, but for where an inner group lies between
  // channels.
  const int64_t inner_stride = from.channel_last ? values : from.bound + 1;
  const int64_t first = from.channel_last ? value : channel * from.inner * (from.bound + 1) + place;
  double sum = 0;
  if (value < values) {
    for (int64_t layer = threadIdx.y; layer < from.outer * from.inner; layer += LAYERS) {
      const int64_t outer = layer / from.inner;
      sum += static_cast<double>(
          from.sums[first + outer * from.inner * values + (layer - outer * from.inner) * inner_stride]);
    }
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  const int tap = place - (from.bound - width);
  if (threadIdx.y == 0 && value < values && tap >= 0) {
    for (int layer = 1; layer < LAYERS; ++layer) sum += sums[layer][threadIdx.x];
    const T result = narrow<T>(static_cast<DeviceAccumulate<T>>(sum));
    if (tap < width) {
      grad_weight[channel * width + tap] = result;
    } else {
      grad_bias[channel] = result;
    }
  }
}

}  // namespace

template <typename T>
void add_partials(const Launch& context, const ConvSizes& s, const Partials<DeviceAccumulate<T>>& partials,
                  const ConvGradients<T>& g) {
  add_layers<T><<<blocks_for(s.channels * (partials.bound + 1), 32), dim3(32, LAYERS), 0, context.stream()>>>(
      partials, g.weight, g.bias, s.channels, s.width);
  Launch::check();
}

template void add_partials(const Launch&, const ConvSizes&, const Partials<float>&, const ConvGradients<float>&);
template void add_partials(const Launch&, const ConvSizes&, const Partials<double>&, const ConvGradients<double>&);
template void add_partials(const Launch&, const ConvSizes&, const Partials<float>&, const ConvGradients<__half>&);
template void add_partials(const Launch&, const ConvSizes&, const Partials<float>&,
                           const ConvGradients<__nv_bfloat16>&);

}  // namespace opgraft::cuda
