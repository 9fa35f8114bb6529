// Launches of causal_conv1d's plan for contiguous channels, forward.
#include <algorithm>

#include "cuda/causal_conv1d_columns.cuh"

namespace opgraft::cuda {

using namespace conv_columns;

namespace {

constexpr int LANES = 128;
constexpr int STEPS = 8;

// Blocks an SM that registers are allotted for, which are what a wave of blocks is.
template <typename T, int PACK>
inline constexpr int BLOCKS = PACK * sizeof(DeviceAccumulate<T>) > 16  ? 4
                              : PACK * sizeof(DeviceAccumulate<T>) > 8 ? 6
                                                                       : 8;

}  // namespace

// All tensors must be aligned to the smallest pack; larger ones are taken where they fit.
template <typename T>
bool fits_columns(const ConvSizes& s, std::initializer_list<const T*> tensors) {
  const auto even = [](const T* tensor) { return reinterpret_cast<uintptr_t>(tensor) % SMALL_BYTES<T> == 0; };
  return s.width >= 2 && s.width <= 4 && s.length > 0 && s.length < (int64_t{1} << 31) - 64 &&
         s.channels % SMALL_PACK<T> == 0 && std::all_of(tensors.begin(), tensors.end(), even);
}

template <typename T>
void forward_columns(const Launch& context, const ConvSizes& s, const ConvInputs<T>& in, const ConvOutputs<T>& to) {
  auto launch = [&](auto pack) {
    const Walks walks = plan_walks(s, pack, LANES, 1, int64_t{BLOCKS<T, pack>} * context.multiprocessors());
    dispatch_width(s.width, [&](auto width) {
      forward<T, pack, width, STEPS, LANES, 1, BLOCKS<T, pack>>
          <<<walks.blocks(s.batch), dim3(LANES, 1), 0, context.stream()>>>(in, to, s, walks);
    });
  };
  constexpr int LARGE = VECTOR_BYTES / sizeof(T);
  aligned(in.x) && aligned(to.out) && s.channels % LARGE == 0 ? launch(Int<LARGE>{}) : launch(Int<SMALL_PACK<T>>{});
  Launch::check();
}

template bool fits_columns(const ConvSizes&, std::initializer_list<const float*>);
template void forward_columns(const Launch&, const ConvSizes&, const ConvInputs<float>&, const ConvOutputs<float>&);
template bool fits_columns(const ConvSizes&, std::initializer_list<const double*>);
template void forward_columns(const Launch&, const ConvSizes&, const ConvInputs<double>&, const ConvOutputs<double>&);
template bool fits_columns(const ConvSizes&, std::initializer_list<const __half*>);
template void forward_columns(const Launch&, const ConvSizes&, const ConvInputs<__half>&, const ConvOutputs<__half>&);
template bool fits_columns(const ConvSizes&, std::initializer_list<const __nv_bfloat16*>);
template void forward_columns(const Launch&, const ConvSizes&, const ConvInputs<__nv_bfloat16>&,
                              const ConvOutputs<__nv_bfloat16>&);

}  // namespace opgraft::cuda
