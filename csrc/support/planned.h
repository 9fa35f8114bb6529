// Results in memory that the caller gives: what stands behind the `out` overloads, for which a compiler plans memory.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>

#include "support/check.h"

namespace opgraft {

// Kernels store vectors of 16 bytes into what they allocate.
constexpr std::uintptr_t PLANNED_ALIGNMENT = 16;

// While it lives, this thread's next allocation of the given tensor's sizes and dtype is this tensor. Kernels allocate
// what they return in one place (tensor.h), so none of them has to know.
class Planned {
 public:
  explicit Planned(const Tensor& tensor) : tensor_(&tensor), before_(current()) { current() = this; }
  ~Planned() { current() = before_; }
  Planned(const Planned&) = delete;
  Planned& operator=(const Planned&) = delete;

  // The planned tensor for an allocation like `like`, or null.
  static const Tensor* take(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes, ScalarType dtype) {
    Planned* planned = current();
    if (planned == nullptr || planned->tensor_ == nullptr) return nullptr;
    const Tensor& tensor = *planned->tensor_;
    const auto own = tensor.sizes();
    if (tensor.scalar_type() != dtype || !std::equal(own.begin(), own.end(), sizes.begin(), sizes.end()) ||
        !tensor.is_contiguous() || tensor.device() != like.device() ||
        reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()) % PLANNED_ALIGNMENT != 0) {
      return nullptr;
    }
    planned->tensor_ = nullptr;
    return &tensor;
  }

 private:
  static Planned*& current() {
    static thread_local Planned* planned = nullptr;
    return planned;
  }

  const Tensor* tensor_;
  Planned* before_;
};

// Puts a result where the caller wants it. Mostly it is there already; what the kernel had to put elsewhere is copied.
inline void deliver(const Tensor& result, Tensor& out) {
  constexpr const char* OP = "opgraft, out overload";
  check_alike(OP, "out", out, "the result", result);
  if (out.const_data_ptr() != result.const_data_ptr()) torch::stable::copy_(out, result);
}

// The `out` form of a kernel: the same arguments, then the tensor that takes its result.
template <auto kernel, typename Signature = decltype(kernel)>
struct WithOut;

template <auto kernel, typename... Arguments>
struct WithOut<kernel, Tensor (*)(Arguments...)> {
  static Tensor call(Arguments... arguments, Tensor out) {
    const Planned planned(out);
    deliver(kernel(arguments...), out);
    return out;
  }
};

}  // namespace opgraft
