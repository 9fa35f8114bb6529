// Launches of causal_conv1d's plan for contiguous channels, backward.
#include <algorithm>
#include <vector>

#include "cuda/causal_conv1d_columns.cuh"
#include "support/tensor.h"

namespace opgraft::cuda {

using namespace conv_columns;

namespace {

constexpr int LANES = 32;
constexpr int WALKS = 4;
constexpr int STEPS = 6;

// Blocks an SM that registers are allotted for, which are what a wave of blocks is.
template <typename T, int PACK>
inline constexpr int BLOCKS = PACK * sizeof(DeviceAccumulate<T>) > 8 ? 4 : 6;

}  // namespace

template <typename T>
void backward_columns(const Launch& context, const Tensor& like, const ConvSizes& s, const ConvInputs<T>& in,
                      const ConvGradients<T>& g) {
  using A = DeviceAccumulate<T>;
  auto launch = [&](auto pack) {
    const Walks walks = plan_walks(s, pack, LANES, WALKS, int64_t{BLOCKS<T, pack>} * context.multiprocessors());
    const Tensor space = new_contiguous(like, std::vector<int64_t>{s.batch * walks.groups * (s.width + 1) * s.channels},
                                        ACCUMULATE_TYPE<T>);
    A* partial = static_cast<A*>(space.mutable_data_ptr());
    dispatch_width(s.width, [&](auto width) {
      backward<T, pack, width, STEPS, LANES, WALKS, BLOCKS<T, pack>>
          <<<walks.blocks(s.batch), dim3(LANES, WALKS), 0, context.stream()>>>(in, g, partial, s, walks);
    });
    Launch::check();
    add_partials<T>(context, s, {partial, s.width, s.batch, walks.groups, true}, g);
  };
  // Packs of four 16-bit channels: of eight, the sums do not fit into registers.
  constexpr int LARGE = sizeof(T) == 2 ? 4 : SMALL_PACK<T>;
  const auto fits = [](const T* tensor) { return reinterpret_cast<uintptr_t>(tensor) % (LARGE * sizeof(T)) == 0; };
  fits(in.x) && fits(g.grad) && fits(g.x) && s.channels % LARGE == 0 ? launch(Int<LARGE>{})
                                                                     : launch(Int<SMALL_PACK<T>>{});
}

template void backward_columns(const Launch&, const Tensor&, const ConvSizes&, const ConvInputs<float>&,
                               const ConvGradients<float>&);
template void backward_columns(const Launch&, const Tensor&, const ConvSizes&, const ConvInputs<double>&,
                               const ConvGradients<double>&);
template void backward_columns(const Launch&, const Tensor&, const ConvSizes&, const ConvInputs<__half>&,
                               const ConvGradients<__half>&);
template void backward_columns(const Launch&, const Tensor&, const ConvSizes&, const ConvInputs<__nv_bfloat16>&,
                               const ConvGradients<__nv_bfloat16>&);

}  // namespace opgraft::cuda
