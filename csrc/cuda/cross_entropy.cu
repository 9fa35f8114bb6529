// Cross entropy on CUDA: the choice of kernel and launch around the .cuh files.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <utility>

#include "cuda/cross_entropy_ring.cuh"
#include "cuda/cross_entropy_rows.cuh"
#include "ops.h"
#include "support/cross_entropy_call.h"

namespace opgraft::cuda {
namespace {

constexpr int RING_WARPS = 4;  // that sum up, and as many that write
constexpr int64_t SHORT_ROW_BYTES = 8192;
constexpr int64_t RING_BYTES = 98304;        // two blocks share a multiprocessor
constexpr int64_t THIRD_RING_BYTES = 65536;  // three blocks share it, for rows too short to keep two at work
constexpr int64_t THIRD_SLICE_BYTES = 32768;
constexpr int64_t WHOLE_RING_BYTES = 212992;  // one block has it alone
constexpr int64_t SLICE_BYTES = 81920;        // leaves room to run ahead
// Each has a cluster of its own, which counts the targets itself: no kernel before it, and no count of rows.
constexpr int64_t FEW_ROWS = 128;
constexpr int64_t CHUNK_BYTES = int64_t(CHUNK_VECTORS) * VECTOR_BYTES;

struct RingPlan {
  RingShape shape;
  int64_t bytes = 0;
};

// How rows of `row_bytes` are cut: over as few blocks as hold them, and over more where rows are few.
RingPlan plan_ring(int64_t rows, int64_t row_bytes, int multiprocessors, bool gradient) {
  RingPlan plan;
  int64_t ring = RING_BYTES;
  int cluster = 1;
  const auto slice_of = [&](int blocks) { return (row_bytes + blocks - 1) / blocks; };
  while (cluster < MAX_CLUSTER && ((gradient && slice_of(cluster) > SLICE_BYTES) ||
                                   (rows * cluster < multiprocessors && slice_of(cluster) > CHUNK_BYTES / 2))) {
    cluster *= 2;
  }
  if (gradient && slice_of(cluster) > SLICE_BYTES) ring = WHOLE_RING_BYTES;
  if (!gradient && slice_of(cluster) <= THIRD_SLICE_BYTES) ring = THIRD_RING_BYTES;
  // One vector more than the row has: an unaligned row touches it.
  const int64_t vectors = row_bytes / VECTOR_BYTES + 2;
  const int64_t share = (vectors + cluster - 1) / cluster;
  RingShape& shape = plan.shape;
  shape.cluster = cluster;
  shape.slice_vectors = static_cast<int>((share + 7) / 8 * 8);  // whole lines of 128 bytes
  shape.chunk_vectors = static_cast<int>(std::min<int64_t>(CHUNK_VECTORS, shape.slice_vectors));
  shape.chunks = (shape.slice_vectors + shape.chunk_vectors - 1) / shape.chunk_vectors;
  shape.slots = static_cast<int>(std::min<int64_t>(ring / (shape.chunk_vectors * VECTOR_BYTES), MAX_SLOTS));
  shape.held = shape.chunks <= shape.slots;
  plan.bytes = int64_t(shape.slots) * shape.chunk_vectors * VECTOR_BYTES;
  return plan;
}

// Clusters that run at once; rows are dealt to exactly so many.
template <typename Kernel>
int64_t clusters_at_once(Kernel kernel, const cudaLaunchConfig_t& config) {
  int clusters = 0;
  STD_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config));
  return std::max(clusters, 1);
}

template <typename T, bool GRADIENT, bool GENERAL>
void launch_ring(const Launch& context, const CrossEntropyCall<T>& call) {
  const auto kernel = &cross_entropy_ring<T, GRADIENT, GENERAL, RING_WARPS>;
  const RingPlan plan = plan_ring(call.layout.rows, call.layout.classes * static_cast<int64_t>(sizeof(T)),
                                  context.multiprocessors(), GRADIENT);
  const int64_t bytes = RING_STATE_BYTES<T> + plan.bytes;
  STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  cudaLaunchConfig_t config = {};
  config.blockDim = dim3(ring_threads(RING_WARPS, GRADIENT));
  config.dynamicSmemBytes = static_cast<size_t>(bytes);
  config.stream = context.stream();
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = static_cast<unsigned>(plan.shape.cluster);
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = attributes;
  config.numAttrs = 1;
  config.gridDim = dim3(static_cast<unsigned>(plan.shape.cluster));
  const int64_t clusters =
      call.measures_itself ? call.layout.rows : std::min(call.layout.rows, clusters_at_once(kernel, config));
  config.gridDim = dim3(static_cast<unsigned>(clusters * plan.shape.cluster));
  // Only `measure_targets` may be still at work when logits are read: whatever else stands before is older.
  config.numAttrs = 2;
  STD_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, call, plan.shape));
}

template <typename T>
bool is_long(const CrossEntropyCall<T>& call) {
  return call.layout.classes * static_cast<int64_t>(sizeof(T)) > SHORT_ROW_BYTES;
}

template <typename T>
bool needs_mean_weight(const CrossEntropyCall<T>& call) {
  return call.weight != nullptr && call.smoothing != 0;
}

template <typename T, bool GRADIENT, bool GENERAL>
void launch_rows(const Launch& context, const CrossEntropyCall<T>& call) {
  if (is_long(call)) {
    if (code_version() >= 90) return launch_ring<T, GRADIENT, GENERAL>(context, call);
    const auto blocks = static_cast<unsigned>(std::min<int64_t>(call.layout.rows, 0x7fffffff));
    cross_entropy_rows<T, GRADIENT, GENERAL, ROWS_BLOCK><<<blocks, ROWS_BLOCK, 0, context.stream()>>>(call);
  } else {
    const int64_t wanted = (call.layout.rows + ROWS_BLOCK / 32 - 1) / (ROWS_BLOCK / 32);
    const auto blocks = static_cast<unsigned>(std::min<int64_t>(wanted, 0x7fffffff));
    cross_entropy_rows<T, GRADIENT, GENERAL, 32><<<blocks, ROWS_BLOCK, 0, context.stream()>>>(call);
  }
  Launch::check();
}

template <typename T>
bool is_general(const CrossEntropyCall<T>& call) {
  return call.softcap != 0 || call.smoothing != 0;
}

template <typename T>
CrossEntropyCall<T> make_call(const CrossEntropyInputs& in) {
  using A = DeviceAccumulate<T>;
  CrossEntropyCall<T> call;
  call.layout = in.layout;
  call.logits = static_cast<const T*>(in.logits.const_data_ptr());
  call.target = in.target.const_data_ptr();
  call.target_is_wide = in.wide_target();
  call.weight = optional_data<A>(in.weight);
  call.ignore_index = in.options.ignore_index;
  call.smoothing = static_cast<A>(in.options.label_smoothing);
  call.z_loss = static_cast<A>(in.options.z_loss);
  call.softcap = static_cast<A>(in.options.softcap);
  call.mean = in.mean();
  return call;
}

// The mean's denominators and the mean class weight, where the call has a use for them; a forward always has one for
// the count of rows.
template <typename T>
OptionalTensor measure(const Launch& context, CrossEntropyCall<T>& call, const CrossEntropyInputs& in, bool counting) {
  using A = DeviceAccumulate<T>;
  if (!counting && !call.mean && !needs_mean_weight(call)) return std::nullopt;
  Tensor scales = new_contiguous(in.logits, {SCALES_SIZE}, accumulate_type(in.logits.scalar_type()));
  launch_overlapping(measure_targets<T>, 1, SUM_BLOCK, context.stream(), call,
                     static_cast<A*>(scales.mutable_data_ptr()));
  Launch::check();
  call.scales = static_cast<const A*>(scales.const_data_ptr());
  call.taken = reinterpret_cast<unsigned long long*>(static_cast<A*>(scales.mutable_data_ptr()) + TAKEN_AT);
  return scales;
}

void forward(const char* op, CrossEntropyForward& given) {
  dispatch_floating(op, given.in.logits, [&](auto tag) {
    using T = typename DeviceType<typename decltype(tag)::type>::type;
    using A = DeviceAccumulate<T>;
    const Launch context(given.in.logits);
    CrossEntropyCall<T> call = make_call<T>(given.in);
    call.loss = static_cast<A*>(given.losses.mutable_data_ptr());
    call.lse = static_cast<A*>(given.lse.mutable_data_ptr());
    call.statistics = static_cast<A*>(given.statistics.mutable_data_ptr());
    call.measures_itself =
        call.layout.rows <= FEW_ROWS && is_long(call) && code_version() >= 90 && !needs_mean_weight(call);
    const OptionalTensor scales = call.measures_itself ? std::nullopt : measure(context, call, given.in, true);
    // The sum of one loss is that loss.
    const bool sums = given.reduced() && !(call.measures_itself && call.layout.rows == 1);
    if (given.reduced() && !sums) call.loss = static_cast<A*>(given.loss.mutable_data_ptr());
    if (call.layout.rows > 0) {
      if (given.gradient) {
        call.gradient = static_cast<T*>(given.gradient->mutable_data_ptr());
        is_general(call) ? launch_rows<T, true, true>(context, call) : launch_rows<T, true, false>(context, call);
      } else {
        is_general(call) ? launch_rows<T, false, true>(context, call) : launch_rows<T, false, false>(context, call);
      }
    }
    if (sums) {
      const bool few = call.layout.rows <= FEW_ROWS;
      launch_overlapping(few ? sum_losses<A, 32> : sum_losses<A, SUM_BLOCK>, 1, few ? 32 : SUM_BLOCK, context.stream(),
                         call.loss, call.layout.rows, call.mean, static_cast<A*>(given.loss.mutable_data_ptr()));
      Launch::check();
    }
  });
}

// skip_if_one: the gradient is there already, for an incoming gradient of one.
void backward(const char* op, CrossEntropyBackward& given, bool skip_if_one) {
  if (given.in.layout.rows == 0) return;
  dispatch_floating(op, given.in.logits, [&](auto tag) {
    using T = typename DeviceType<typename decltype(tag)::type>::type;
    using A = DeviceAccumulate<T>;
    const Launch context(given.in.logits);
    CrossEntropyCall<T> call = make_call<T>(given.in);
    call.statistics = const_cast<A*>(static_cast<const A*>(given.statistics.const_data_ptr()));
    call.grad_loss = optional_data<A>(given.grad_loss);
    call.grad_lse = optional_data<A>(given.grad_lse);
    call.grad_per_row = given.per_row();
    call.skip_if_one = skip_if_one;
    const OptionalTensor scales = measure(context, call, given.in, false);
    call.gradient = static_cast<T*>(given.gradient.mutable_data_ptr());
    const int64_t tiles = call.layout.rows * ((call.layout.classes + TILE_ELEMENTS - 1) / TILE_ELEMENTS);
    const auto blocks = static_cast<unsigned>(
        std::min<int64_t>(tiles, int64_t(context.multiprocessors()) * (2048 / ROWS_BLOCK) * (skip_if_one ? 1 : 4)));
    launch_overlapping(is_general(call) ? cross_entropy_backward<T, true> : cross_entropy_backward<T, false>, blocks,
                       ROWS_BLOCK, context.stream(), call);
  });
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> cross_entropy(const Tensor& logits, const Tensor& target,
                                                 const OptionalTensor& weight, int64_t ignore_index,
                                                 double label_smoothing, double z_loss, double softcap,
                                                 int64_t reduction) {
  const auto options = cross_entropy_options(ignore_index, label_smoothing, z_loss, softcap, reduction);
  CrossEntropyForward call = prepare_cross_entropy("cross_entropy", logits, target, weight, options, false);
  forward("cross_entropy", call);
  return {call.loss, call.lse, call.statistics};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> cross_entropy_with_gradient(const Tensor& logits, const Tensor& target,
                                                                       const OptionalTensor& weight,
                                                                       int64_t ignore_index, double label_smoothing,
                                                                       double z_loss, double softcap,
                                                                       int64_t reduction) {
  const char* const op = "cross_entropy_with_gradient";
  const auto options = cross_entropy_options(ignore_index, label_smoothing, z_loss, softcap, reduction);
  CrossEntropyForward call = prepare_cross_entropy(op, logits, target, weight, options, true);
  forward(op, call);
  return {call.loss, call.lse, call.statistics, *call.gradient};
}

Tensor cross_entropy_backward(const Tensor& logits, const Tensor& target, const OptionalTensor& weight,
                              const Tensor& statistics, const OptionalTensor& grad_loss, const OptionalTensor& grad_lse,
                              int64_t ignore_index, double label_smoothing, double z_loss, double softcap,
                              int64_t reduction) {
  const char* const op = "cross_entropy_backward";
  const auto options = cross_entropy_options(ignore_index, label_smoothing, z_loss, softcap, reduction);
  CrossEntropyBackward call =
      prepare_cross_entropy_backward(op, logits, target, weight, statistics, grad_loss, grad_lse, options);
  backward(op, call, false);
  return call.gradient;
}

void cross_entropy_rescale_(Tensor gradient, const Tensor& grad_loss, const Tensor& logits, const Tensor& target,
                            const OptionalTensor& weight, const Tensor& statistics, int64_t ignore_index,
                            double label_smoothing, double z_loss, double softcap, int64_t reduction) {
  const char* const op = "cross_entropy_rescale_";
  const auto options = cross_entropy_options(ignore_index, label_smoothing, z_loss, softcap, reduction);
  CrossEntropyBackward call =
      prepare_cross_entropy_rescale(op, gradient, grad_loss, logits, target, weight, statistics, options);
  backward(op, call, true);
}

}  // namespace opgraft::cuda

STABLE_TORCH_LIBRARY_IMPL(opgraft, CUDA, m) {
  m.impl("cross_entropy", TORCH_BOX(&opgraft::cuda::cross_entropy));
  m.impl("cross_entropy_with_gradient", TORCH_BOX(&opgraft::cuda::cross_entropy_with_gradient));
  m.impl("cross_entropy_backward", TORCH_BOX(&opgraft::cuda::cross_entropy_backward));
  m.impl("cross_entropy_rescale_", TORCH_BOX(&opgraft::cuda::cross_entropy_rescale_));
}
