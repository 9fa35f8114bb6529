// Cross entropy on CUDA: checks, allocation, and the choice of kernel and launch around the .cuh files.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <utility>

#include "cuda/cross_entropy_ring.cuh"
#include "cuda/cross_entropy_rows.cuh"
#include "ops.h"
#include "support/check.h"
#include "support/tensor.h"

namespace opgraft::cuda {
namespace {

constexpr int RING_THREADS = 256;
constexpr int64_t SHORT_ROW_BYTES = 8192;
constexpr int64_t RING_BYTES = 98304;          // two blocks share a multiprocessor
constexpr int64_t FORWARD_RING_BYTES = 65536;  // three blocks share it: nothing is held
constexpr int64_t WHOLE_RING_BYTES = 212992;   // one block has it alone
constexpr int64_t SLICE_BYTES = 81920;         // leaves room to run ahead
constexpr int64_t CHUNK_BYTES = int64_t(CHUNK_VECTORS) * VECTOR_BYTES;

struct RingPlan {
  RingShape shape;
  int64_t bytes = 0;
};

// How rows of `row_bytes` are cut: over as few blocks as hold them, and over more where rows are few.
RingPlan plan_ring(int64_t rows, int64_t row_bytes, int multiprocessors, bool gradient) {
  RingPlan plan;
  int64_t ring = gradient ? RING_BYTES : FORWARD_RING_BYTES;
  int cluster = 1;
  const auto slice_of = [&](int blocks) { return (row_bytes + blocks - 1) / blocks; };
  while (cluster < MAX_CLUSTER && ((gradient && slice_of(cluster) > SLICE_BYTES) ||
                                   (rows * cluster < multiprocessors && slice_of(cluster) > CHUNK_BYTES / 2))) {
    cluster *= 2;
  }
  if (gradient && slice_of(cluster) > SLICE_BYTES) ring = WHOLE_RING_BYTES;
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
  plan.bytes = RING_STATE_BYTES + int64_t(shape.slots) * shape.chunk_vectors * VECTOR_BYTES;
  return plan;
}

// Machine code for Hopper or newer is in the library and fits the device: the kernel is not empty.
template <typename Kernel>
bool has_ring(Kernel kernel) {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess && attributes.ptxVersion >= 90;
}

// Clusters that run at once; rows are dealt to exactly so many.
template <typename Kernel>
int64_t clusters_at_once(Kernel kernel, const cudaLaunchConfig_t& config) {
  int clusters = 0;
  STD_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config));
  return std::max(clusters, 1);
}

template <typename T, bool GRADIENT, bool GENERAL>
bool launch_ring(const Launch& context, const CrossEntropyCall<T>& call) {
  const auto kernel = &cross_entropy_ring<T, GRADIENT, GENERAL, RING_THREADS>;
  static const bool usable = has_ring(kernel);
  if (!usable) return false;
  const RingPlan plan = plan_ring(call.layout.rows, call.layout.classes * static_cast<int64_t>(sizeof(T)),
                                  context.multiprocessors(), GRADIENT);
  STD_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(plan.bytes)));
  cudaLaunchConfig_t config = {};
  config.blockDim = dim3(RING_THREADS + 32);
  config.dynamicSmemBytes = static_cast<size_t>(plan.bytes);
  config.stream = context.stream();
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(plan.shape.cluster);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  config.gridDim = dim3(static_cast<unsigned>(plan.shape.cluster));
  const int64_t clusters = std::min(call.layout.rows, clusters_at_once(kernel, config));
  config.gridDim = dim3(static_cast<unsigned>(clusters * plan.shape.cluster));
  STD_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, call, plan.shape));
  return true;
}

template <typename T, bool GRADIENT, bool GENERAL>
void launch_rows(const Launch& context, const CrossEntropyCall<T>& call) {
  if (call.layout.classes * static_cast<int64_t>(sizeof(T)) > SHORT_ROW_BYTES) {
    if (launch_ring<T, GRADIENT, GENERAL>(context, call)) return;
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

// The inputs in the form that the kernels read. Keeps alive what was copied.
struct Inputs {
  Tensor logits;
  Tensor target;
  OptionalTensor weight;
  LogitRows layout;
};

Inputs read_inputs(const Tensor& logits, const Tensor& target, const OptionalTensor& weight) {
  if (const auto folded = fold_rows(logits)) {
    return {logits, as_contiguous(target), as_contiguous(weight), *folded};
  }
  return {as_contiguous(logits), as_contiguous(target), as_contiguous(weight), dense_rows(logits)};
}

template <typename T>
CrossEntropyCall<T> make_call(const Inputs& inputs, const CrossEntropyOptions& options) {
  using A = DeviceAccumulate<T>;
  CrossEntropyCall<T> call;
  call.layout = inputs.layout;
  call.logits = static_cast<const T*>(inputs.logits.const_data_ptr());
  call.target = inputs.target.const_data_ptr();
  call.target_is_wide = inputs.target.scalar_type() == ScalarType::Long;
  call.weight = optional_data<A>(inputs.weight);
  call.ignore_index = options.ignore_index;
  call.smoothing = static_cast<A>(options.label_smoothing);
  call.z_loss = static_cast<A>(options.z_loss);
  call.softcap = static_cast<A>(options.softcap);
  return call;
}

ScalarType wide_type(const Tensor& logits) {
  return logits.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// The mean's denominators and the mean class weight, where the call has a use for them.
template <typename T>
OptionalTensor measure(const Launch& context, CrossEntropyCall<T>& call, const Tensor& logits,
                       const CrossEntropyOptions& options) {
  using A = DeviceAccumulate<T>;
  const bool mean = options.reduction == Reduction::MEAN;
  if (!mean && (call.weight == nullptr || call.smoothing == A(0))) return std::nullopt;
  Tensor scales = new_contiguous(logits, {SCALES}, wide_type(logits));
  measure_targets<T><<<1, SUM_BLOCK, 0, context.stream()>>>(call, mean, static_cast<A*>(scales.mutable_data_ptr()));
  Launch::check();
  call.scales = static_cast<const A*>(scales.const_data_ptr());
  return scales;
}

std::vector<int64_t> statistics_sizes(const Tensor& target) {
  std::vector<int64_t> sizes{2};
  for (int64_t d = 0; d < target.dim(); ++d) sizes.push_back(target.size(d));
  return sizes;
}

struct Results {
  Tensor loss;
  Tensor lse;
  Tensor statistics;
};

Results forward(const char* op, const Tensor& logits, const Tensor& target, const OptionalTensor& weight,
                const CrossEntropyOptions& options, Tensor* gradient) {
  check_cross_entropy(op, logits, target, weight, options);
  const Inputs inputs = read_inputs(logits, target, weight);
  const ScalarType wide = wide_type(logits);
  Tensor per_row = new_contiguous(logits, target.sizes(), wide);
  Tensor lse = new_contiguous(logits, target.sizes(), wide);
  const auto sizes = statistics_sizes(target);
  Tensor statistics = new_contiguous(logits, sizes, wide);
  const bool reduced = options.reduction != Reduction::NONE;
  Tensor loss = reduced ? new_contiguous(logits, {}, wide) : per_row;
  dispatch_floating(op, logits, [&](auto tag) {
    using T = typename DeviceType<typename decltype(tag)::type>::type;
    using A = DeviceAccumulate<T>;
    const Launch context(logits);
    CrossEntropyCall<T> call = make_call<T>(inputs, options);
    call.loss = static_cast<A*>(per_row.mutable_data_ptr());
    call.lse = static_cast<A*>(lse.mutable_data_ptr());
    call.statistics = static_cast<A*>(statistics.mutable_data_ptr());
    const OptionalTensor scales = measure(context, call, logits, options);
    if (call.layout.rows > 0) {
      if (gradient != nullptr) {
        call.gradient = static_cast<T*>(gradient->mutable_data_ptr());
        is_general(call) ? launch_rows<T, true, true>(context, call) : launch_rows<T, true, false>(context, call);
      } else {
        is_general(call) ? launch_rows<T, false, true>(context, call) : launch_rows<T, false, false>(context, call);
      }
    }
    if (reduced) {
      sum_losses<A><<<1, SUM_BLOCK, 0, context.stream()>>>(call.loss, call.layout.rows, call.scales,
                                                           static_cast<A*>(loss.mutable_data_ptr()));
      Launch::check();
    }
  });
  return {loss, lse, statistics};
}

void check_gradients(const char* op, const OptionalTensor& grad_loss, const OptionalTensor& grad_lse,
                     const Tensor& logits, const Tensor& target, const CrossEntropyOptions& options) {
  const ScalarType wide = wide_type(logits);
  const auto check_one = [&](const char* name, const OptionalTensor& grad, bool per_row) {
    if (!grad) return;
    check(grad->scalar_type() == wide, op, name, " has dtype ", torch::headeronly::toString(grad->scalar_type()),
          ", expected ", torch::headeronly::toString(wide));
    check_same_device(op, name, *grad, "logits", logits);
    if (per_row) {
      check_same_shape(op, name, *grad, "target", target);
    } else {
      check(grad->dim() == 0, op, name, " has shape ", shape_text(*grad), ", expected one number");
    }
  };
  check_one("grad_loss", grad_loss, options.reduction == Reduction::NONE);
  check_one("grad_lse", grad_lse, true);
}

void backward_into(const char* op, Tensor& gradient, bool skip_if_one, const OptionalTensor& grad_loss,
                   const OptionalTensor& grad_lse, const Tensor& logits, const Tensor& target,
                   const OptionalTensor& weight, const Tensor& statistics, const CrossEntropyOptions& options) {
  check_cross_entropy(op, logits, target, weight, options);
  check_row_statistics(op, statistics, logits);
  check_gradients(op, grad_loss, grad_lse, logits, target, options);
  const Inputs inputs = read_inputs(logits, target, weight);
  const Tensor kept = as_contiguous(statistics);
  const OptionalTensor loss_gradient = as_contiguous(grad_loss), lse_gradient = as_contiguous(grad_lse);
  if (inputs.layout.rows == 0) return;
  dispatch_floating(op, logits, [&](auto tag) {
    using T = typename DeviceType<typename decltype(tag)::type>::type;
    using A = DeviceAccumulate<T>;
    const Launch context(logits);
    CrossEntropyCall<T> call = make_call<T>(inputs, options);
    call.statistics = const_cast<A*>(static_cast<const A*>(kept.const_data_ptr()));
    call.grad_loss = optional_data<A>(loss_gradient);
    call.grad_lse = optional_data<A>(lse_gradient);
    call.grad_per_row = options.reduction == Reduction::NONE;
    call.skip_if_one = skip_if_one;
    const OptionalTensor scales = measure(context, call, logits, options);
    call.gradient = static_cast<T*>(gradient.mutable_data_ptr());
    const int64_t tiles = call.layout.rows * ((call.layout.classes + TILE_ELEMENTS - 1) / TILE_ELEMENTS);
    const auto blocks = static_cast<unsigned>(
        std::min<int64_t>(tiles, int64_t(context.multiprocessors()) * (2048 / ROWS_BLOCK) * (skip_if_one ? 1 : 4)));
    if (is_general(call)) {
      cross_entropy_backward<T, true><<<blocks, ROWS_BLOCK, 0, context.stream()>>>(call);
    } else {
      cross_entropy_backward<T, false><<<blocks, ROWS_BLOCK, 0, context.stream()>>>(call);
    }
    Launch::check();
  });
}

CrossEntropyOptions options_of(int64_t ignore_index, double label_smoothing, double z_loss, double softcap,
                               int64_t reduction) {
  return {ignore_index, label_smoothing, z_loss, softcap, static_cast<Reduction>(reduction)};
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> cross_entropy(const Tensor& logits, const Tensor& target,
                                                 const OptionalTensor& weight, int64_t ignore_index,
                                                 double label_smoothing, double z_loss, double softcap,
                                                 int64_t reduction) {
  const auto options = options_of(ignore_index, label_smoothing, z_loss, softcap, reduction);
  Results found = forward("cross_entropy", logits, target, weight, options, nullptr);
  return {found.loss, found.lse, found.statistics};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> cross_entropy_with_gradient(const Tensor& logits, const Tensor& target,
                                                                       const OptionalTensor& weight,
                                                                       int64_t ignore_index, double label_smoothing,
                                                                       double z_loss, double softcap,
                                                                       int64_t reduction) {
  const auto options = options_of(ignore_index, label_smoothing, z_loss, softcap, reduction);
  Tensor gradient = new_contiguous_like(logits);
  Results found = forward("cross_entropy_with_gradient", logits, target, weight, options, &gradient);
  return {found.loss, found.lse, found.statistics, gradient};
}

Tensor cross_entropy_backward(const Tensor& logits, const Tensor& target, const OptionalTensor& weight,
                              const Tensor& statistics, const OptionalTensor& grad_loss, const OptionalTensor& grad_lse,
                              int64_t ignore_index, double label_smoothing, double z_loss, double softcap,
                              int64_t reduction) {
  Tensor gradient = new_contiguous_like(logits);
  backward_into("cross_entropy_backward", gradient, false, grad_loss, grad_lse, logits, target, weight, statistics,
                options_of(ignore_index, label_smoothing, z_loss, softcap, reduction));
  return gradient;
}

void cross_entropy_rescale_(Tensor gradient, const Tensor& grad_loss, const Tensor& logits, const Tensor& target,
                            const OptionalTensor& weight, const Tensor& statistics, int64_t ignore_index,
                            double label_smoothing, double z_loss, double softcap, int64_t reduction) {
  check_alike("cross_entropy_rescale_", "gradient", gradient, "logits", logits);
  check(gradient.is_contiguous(), "cross_entropy_rescale_",
        "gradient is not contiguous, expected what "
        "cross_entropy_with_gradient gave");
  check(reduction != 0, "cross_entropy_rescale_", "reduction is 0 (none), expected 1 (mean) or 2 (sum)");
  backward_into("cross_entropy_rescale_", gradient, true, grad_loss, std::nullopt, logits, target, weight, statistics,
                options_of(ignore_index, label_smoothing, z_loss, softcap, reduction));
}

}  // namespace opgraft::cuda

STABLE_TORCH_LIBRARY_IMPL(opgraft, CUDA, m) {
  m.impl("cross_entropy", TORCH_BOX(&opgraft::cuda::cross_entropy));
  m.impl("cross_entropy_with_gradient", TORCH_BOX(&opgraft::cuda::cross_entropy_with_gradient));
  m.impl("cross_entropy_backward", TORCH_BOX(&opgraft::cuda::cross_entropy_backward));
  m.impl("cross_entropy_rescale_", TORCH_BOX(&opgraft::cuda::cross_entropy_rescale_));
}
