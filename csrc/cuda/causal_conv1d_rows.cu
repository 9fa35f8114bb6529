// Launches of causal_conv1d's plan for contiguous length.
#include <algorithm>
#include <limits>
#include <vector>

#include "cuda/causal_conv1d_rows.cuh"
#include "support/tensor.h"

namespace opgraft::cuda {

using namespace conv_rows;

namespace {

constexpr int WARPS = 4;
constexpr int64_t MAX_LENGTH = int64_t{1} << 30;
constexpr int64_t MAX_TASKS = int64_t{1} << 31;

// Blocks an SM that registers are allotted for: more in flight forward, more registers backward.
template <typename T>
inline constexpr int FORWARD_BLOCKS = sizeof(T) == 2 ? 6 : 4;
template <typename T>
inline constexpr int BACKWARD_BLOCKS = sizeof(T) == 2 ? 8 : 4;
constexpr int BACKWARD_WARPS_WANTED = 48;

template <typename T>
bool ragged(const ConvSizes& s, const T* x) {
  return !aligned(x) || s.length % ITEMS != 0;
}

// Steps of a row, from the 16 bytes at or before its first one.
template <typename T>
int64_t span(const ConvSizes& s, bool is_ragged) {
  return s.length + (is_ragged ? VECTOR_WIDTH<T> - 1 : 0);
}

template <typename Body>
void dispatch_bool(bool value, const Body& body) {
  value ? body(std::true_type{}) : body(std::false_type{});
}

}  // namespace

template <typename T>
bool fits_rows(const ConvSizes& s, std::initializer_list<const T*> tensors) {
  const auto offset = [](const T* tensor) { return reinterpret_cast<uintptr_t>(tensor) % VECTOR_BYTES; };
  const auto same = [&](const T* tensor) { return offset(tensor) == offset(*tensors.begin()); };
  return s.width >= 2 && s.width <= 4 && s.length > 0 && s.length < MAX_LENGTH && s.channels < MAX_TASKS &&
         s.batch * s.channels * ceil_div(span<T>(s, true), 31 * ITEMS) < MAX_TASKS &&
         std::all_of(tensors.begin(), tensors.end(), same);
}

template <typename T>
void forward_rows(const Launch& context, const ConvSizes& s, const ConvInputs<T>& in, const ConvOutputs<T>& to) {
  const bool is_ragged = ragged(s, in.x);
  auto launch = [&](auto vectors) {
    const int64_t tiles = ceil_div(span<T>(s, is_ragged), 32 * ITEMS * vectors);
    const int64_t warps = s.batch * s.channels * tiles;
    const Grid grid{static_cast<uint32_t>(warps), Divider(static_cast<uint32_t>(tiles)),
                    Divider(static_cast<uint32_t>(s.channels))};
    dispatch_width(s.width, [&](auto width) {
      dispatch_bool(is_ragged, [&](auto rag) {
        forward<T, width, rag, vectors, WARPS, FORWARD_BLOCKS<T>>
            <<<blocks_for(warps, WARPS), WARPS * 32, 0, context.stream()>>>(in, to, s, grid);
      });
    });
  };
  // Two vectors a lane share the weights; one where that leaves the machine half empty.
  const bool many = s.batch * s.channels * ceil_div(s.length, 64 * ITEMS) >= int64_t{16} * context.multiprocessors();
  many&& s.length > 32 * ITEMS ? launch(Int<2>{}) : launch(Int<1>{});
  Launch::check();
}

template <typename T>
void backward_rows(const Launch& context, const Tensor& like, const ConvSizes& s, const ConvInputs<T>& in,
                   const ConvGradients<T>& g) {
  using A = DeviceAccumulate<T>;
  const bool is_ragged = ragged(s, in.x);
  const int64_t rows = s.batch * s.channels;
  const int64_t tiles = ceil_div(span<T>(s, is_ragged), 31 * ITEMS);
  // Whole rows where there are warps enough, segments of a row else.
  const int64_t wanted =
      std::clamp<int64_t>(ceil_div(int64_t{BACKWARD_WARPS_WANTED} * context.multiprocessors(), rows), 1, tiles);
  const int64_t tiles_each = ceil_div(tiles, wanted);
  const int64_t segments = ceil_div(tiles, tiles_each);
  const int64_t warps = rows * segments;
  const Tensor space = new_contiguous(like, std::vector<int64_t>{warps * (s.width + 1)}, ACCUMULATE_TYPE<T>);
  A* partial = static_cast<A*>(space.mutable_data_ptr());
  const Grid grid{static_cast<uint32_t>(warps), Divider(static_cast<uint32_t>(segments)),
                  Divider(static_cast<uint32_t>(s.channels))};
  dispatch_width(s.width, [&](auto width) {
    dispatch_bool(is_ragged, [&](auto rag) {
      backward<T, width, rag, WARPS, BACKWARD_BLOCKS<T>><<<blocks_for(warps, WARPS), WARPS * 32, 0, context.stream()>>>(
          in, g, partial, s, grid, static_cast<int>(tiles_each));
    });
  });
  Launch::check();
  add_partials<T>(context, s, {partial, s.width, s.batch, segments, false}, g);
}

template bool fits_rows(const ConvSizes&, std::initializer_list<const float*>);
template void forward_rows(const Launch&, const ConvSizes&, const ConvInputs<float>&, const ConvOutputs<float>&);
template void backward_rows(const Launch&, const Tensor&, const ConvSizes&, const ConvInputs<float>&,
                            const ConvGradients<float>&);
template bool fits_rows(const ConvSizes&, std::initializer_list<const double*>);
template void forward_rows(const Launch&, const ConvSizes&, const ConvInputs<double>&, const ConvOutputs<double>&);
template void backward_rows(const Launch&, const Tensor&, const ConvSizes&, const ConvInputs<double>&,
                            const ConvGradients<double>&);
template bool fits_rows(const ConvSizes&, std::initializer_list<const __half*>);
template void forward_rows(const Launch&, const ConvSizes&, const ConvInputs<__half>&, const ConvOutputs<__half>&);
template void backward_rows(const Launch&, const Tensor&, const ConvSizes&, const ConvInputs<__half>&,
                            const ConvGradients<__half>&);
template bool fits_rows(const ConvSizes&, std::initializer_list<const __nv_bfloat16*>);
template void forward_rows(const Launch&, const ConvSizes&, const ConvInputs<__nv_bfloat16>&,
                           const ConvOutputs<__nv_bfloat16>&);
template void backward_rows(const Launch&, const Tensor&, const ConvSizes&, const ConvInputs<__nv_bfloat16>&,
                            const ConvGradients<__nv_bfloat16>&);

}  // namespace opgraft::cuda
