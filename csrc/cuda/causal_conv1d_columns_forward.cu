// Launches of causal_conv1d's plan for contiguous channels, forward.
#include <algorithm>

#include "cuda/causal_conv1d_columns.cuh"

namespace opgraft::cuda {

using namespace conv_columns;

namespace {

constexpr int LANES = 32;
constexpr int LAYERS = 4;

// Steps a thread, and blocks an SM that registers are allotted for.
template <typename T, int PACK>
inline constexpr int STEPS = PACK * sizeof(DeviceAccumulate<T>) > 8 ? 16 : 24;
template <typename T, int PACK>
inline constexpr int BLOCKS = PACK * sizeof(T) > 8 ? 3 : 5;

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
    constexpr int64_t EACH = STEPS<T, pack>;
    const int64_t packs = s.channels / pack, pack_blocks = ceil_div(packs, LANES);
    const Walks walks{packs, pack_blocks, ceil_div(s.length, EACH * LAYERS), EACH};
    dispatch_width(s.width, [&](auto width) {
      forward<T, pack, width, STEPS<T, pack>, LANES, LAYERS, BLOCKS<T, pack>>
          <<<walks.blocks(s.batch), dim3(LANES, LAYERS), 0, context.stream()>>>(in, to, s, walks);
    });
  };
  constexpr int LARGE = sizeof(T) == 8 ? 2 : 4;
  const auto fits = [](const T* tensor) { return reinterpret_cast<uintptr_t>(tensor) % (LARGE * sizeof(T)) == 0; };
  fits(in.x) && fits(to.out) && s.channels % LARGE == 0 ? launch(Int<LARGE>{}) : launch(Int<SMALL_PACK<T>>{});
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
