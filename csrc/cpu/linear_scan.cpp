// h[t] = decay[t] h[t-1] + update[t] along one dimension, forward and backward on the CPU.
//
// The walk along time is serial; rows are independent. A thread takes LANES rows at once and keeps their states in
// registers, so the loop over rows is a vector operation and the latency of the chained FMA is hidden. With a
// contiguous dimension after time the rows lie side by side (vector loads); where time itself is contiguous, LANES
// rows are walked together with one stream each. Bytes: two reads and one write an element forward, three reads and
// two writes backward; arithmetic is far below that.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "ops.h"
#include "support/check.h"
#include "support/convert.h"
#include "support/dispatch.h"
#include "support/parallel.h"
#include "support/scan_shape.h"
#include "support/tensor.h"

namespace opgraft::cpu {
namespace {

constexpr int64_t LANES = 32;

// The type in which a state is kept from step to step. A walk rounds once a step, and where decays are near one and
// alike those roundings add up in one direction: after n steps the error is of n roundings. float is kept in double,
// the 16-bit types in float, and double in an unevaluated sum of two (compensated, below).
template <typename T>
using State = std::conditional_t<std::is_same_v<T, float>, double, Accumulate<T>>;

// value + low is a running sum of which low collects what each operation rounded off (Dekker 1971; Knuth's two-sum).
template <typename T>
constexpr bool COMPENSATED = std::is_same_v<T, double>;

// value, low = a * (value + low) + b
template <bool COMPENSATE, typename S>
OPGRAFT_INLINE void multiply_add(S a, S& value, S& low, S b) {
  if constexpr (COMPENSATE) {
    const S product = a * value;
    const S product_error = std::fma(a, value, -product);
    const S sum = product + b;
    const S part = sum - product;
    const S sum_error = (product - (sum - part)) + (b - part);
    const S rest = a * low + (product_error + sum_error);
    low = rest - rest == S(0) ? rest : S(0);  // infinity and NaN are the value's alone
    value = sum;
  } else {
    value = a * value + b;
  }
}

// Rows [first, first + count) of one slab, count <= LANES: row r, step t lies at r * row_stride + t * step_stride.
// The strides of a reversed scan are negative and the pointers start at the last step.
struct Walk {
  int64_t length;
  int64_t step_stride;
  int64_t row_stride;
  int64_t count;
};

template <typename T, bool SIDE_BY_SIDE>
OPGRAFT_INLINE void forward_walk(const T* decay, const T* update, const T* initial, T* output, Walk walk) {
  using S = State<T>;
  S value[LANES], low[LANES];
  const int64_t row_stride = SIDE_BY_SIDE ? 1 : walk.row_stride;
  for (int64_t r = 0; r < walk.count; ++r) {
    value[r] = initial ? static_cast<S>(widen(initial[r])) : S(0);
    low[r] = S(0);
  }
  for (int64_t t = 0; t < walk.length; ++t) {
    const int64_t at = t * walk.step_stride;
    for (int64_t r = 0; r < walk.count; ++r) {
      const int64_t i = at + r * row_stride;
      multiply_add<COMPENSATED<T>, S>(widen(decay[i]), value[r], low[r], widen(update[i]));
      output[i] = narrow<T>(static_cast<Accumulate<T>>(COMPENSATED<T> ? value[r] + low[r] : value[r]));
    }
  }
}

// Walks against the forward direction. total = d loss / d h[t]; the decay of step t carries it to step t - 1.
template <typename T, bool SIDE_BY_SIDE>
OPGRAFT_INLINE void backward_walk(const T* grad, const T* decay, const T* output, const T* initial, T* grad_decay,
                                  T* grad_update, T* grad_initial, Walk walk) {
  using S = State<T>;
  using A = Accumulate<T>;
  S value[LANES], low[LANES], later[LANES];
  const int64_t row_stride = SIDE_BY_SIDE ? 1 : walk.row_stride;
  for (int64_t r = 0; r < walk.count; ++r) value[r] = low[r] = later[r] = S(0);
  for (int64_t t = walk.length - 1; t >= 0; --t) {
    const int64_t at = t * walk.step_stride;
    for (int64_t r = 0; r < walk.count; ++r) {
      const int64_t i = at + r * row_stride;
      multiply_add<COMPENSATED<T>, S>(later[r], value[r], low[r], widen(grad[i]));
      later[r] = widen(decay[i]);
      const S total = COMPENSATED<T> ? value[r] + low[r] : value[r];
      grad_update[i] = narrow<T>(static_cast<A>(total));
      const S before = t ? widen(output[i - walk.step_stride]) : (initial ? widen(initial[r]) : A(0));
      grad_decay[i] = narrow<T>(static_cast<A>(total * before));
    }
  }
  for (int64_t r = 0; r < walk.count; ++r) {
    grad_initial[r] = narrow<T>(static_cast<A>(later[r] * (value[r] + low[r])));
  }
}

// A full set of lanes is a constant trip count, so that states stay in vector registers.
template <typename T>
OPGRAFT_INLINE void forward_any(const T* decay, const T* update, const T* initial, T* output, Walk walk) {
  if (walk.row_stride == 1) {
    if (walk.count == LANES) {
      forward_walk<T, true>(decay, update, initial, output, {walk.length, walk.step_stride, 1, LANES});
    } else {
      forward_walk<T, true>(decay, update, initial, output, walk);
    }
  } else {
    forward_walk<T, false>(decay, update, initial, output, walk);
  }
}

template <typename T>
OPGRAFT_INLINE void backward_any(const T* grad, const T* decay, const T* output, const T* initial, T* grad_decay,
                                 T* grad_update, T* grad_initial, Walk walk) {
  if (walk.row_stride == 1) {
    if (walk.count == LANES) {
      backward_walk<T, true>(grad, decay, output, initial, grad_decay, grad_update, grad_initial,
                             {walk.length, walk.step_stride, 1, LANES});
    } else {
      backward_walk<T, true>(grad, decay, output, initial, grad_decay, grad_update, grad_initial, walk);
    }
  } else {
    backward_walk<T, false>(grad, decay, output, initial, grad_decay, grad_update, grad_initial, walk);
  }
}

// target_clones does not take templates: one plain function a dtype.
#define OPGRAFT_LINEAR_SCAN_WALKS(T)                                                                                 \
  OPGRAFT_CLONES void forward_rows(const T* decay, const T* update, const T* initial, T* output, Walk walk) {        \
    forward_any(decay, update, initial, output, walk);                                                               \
  }                                                                                                                  \
  OPGRAFT_CLONES void backward_rows(const T* grad, const T* decay, const T* output, const T* initial, T* grad_decay, \
                                    T* grad_update, T* grad_initial, Walk walk) {                                    \
    backward_any(grad, decay, output, initial, grad_decay, grad_update, grad_initial, walk);                         \
  }
OPGRAFT_LINEAR_SCAN_WALKS(float)
OPGRAFT_LINEAR_SCAN_WALKS(double)
OPGRAFT_LINEAR_SCAN_WALKS(Half)
OPGRAFT_LINEAR_SCAN_WALKS(BFloat16)

// Cuts the rows into groups of at most LANES that lie in one slab, and calls body(offset of the first step, first row,
// walk) for each. Where time is contiguous (inner == 1) a group spans slabs, with the slab's size as row stride.
template <typename Body>
void for_row_groups(const ScanShape& shape, bool reverse, const Body& body) {
  const bool time_contiguous = shape.inner == 1;
  const int64_t slabs = time_contiguous ? 1 : shape.outer;
  const int64_t rows = time_contiguous ? shape.outer : shape.inner;
  const int64_t groups = (rows + LANES - 1) / LANES;
  const int64_t elements_per_group = std::max<int64_t>(1, shape.length * std::min(LANES, rows));
  const int64_t grain = std::max<int64_t>(1, GRAIN_ELEMENTS / elements_per_group);
  parallel_for(0, slabs * groups, grain, [=](int64_t begin, int64_t end) {
    for (int64_t g = begin; g < end; ++g) {
      const int64_t slab = g / groups;
      const int64_t row = (g % groups) * LANES;
      Walk walk;
      walk.length = shape.length;
      walk.count = std::min(LANES, rows - row);
      walk.step_stride = reverse ? -shape.inner : shape.inner;
      walk.row_stride = time_contiguous ? shape.length : 1;
      const int64_t last = reverse && shape.length > 0 ? (shape.length - 1) * shape.inner : 0;
      const int64_t offset = slab * shape.length * shape.inner + row * walk.row_stride + last;
      body(offset, slab * shape.inner + row, walk);
    }
  });
}

template <typename T>
const T* at(const T* pointer, int64_t offset) {
  return pointer ? pointer + offset : nullptr;
}

}  // namespace

Tensor linear_scan(const Tensor& decay, const Tensor& update, const OptionalTensor& initial, int64_t dim,
                   bool reverse) {
  const ScanShape shape = check_linear_scan("linear_scan", decay, "update", update, initial, dim);
  const Tensor decays = as_contiguous(decay), updates = as_contiguous(update);
  const OptionalTensor start = as_contiguous(initial);
  Tensor output = new_contiguous_like(update);
  dispatch_floating("linear_scan", update, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T *a = decays.const_data_ptr<T>(), *b = updates.const_data_ptr<T>(), *h0 = optional_data<T>(start);
    T* h = output.mutable_data_ptr<T>();
    for_row_groups(shape, reverse, [=](int64_t offset, int64_t row, Walk walk) {
      forward_rows(a + offset, b + offset, at(h0, row), h + offset, walk);
    });
  });
  return output;
}

std::tuple<Tensor, Tensor, Tensor> linear_scan_backward(const Tensor& grad, const Tensor& decay, const Tensor& output,
                                                        const OptionalTensor& initial, int64_t dim, bool reverse) {
  const ScanShape shape = check_linear_scan("linear_scan_backward", decay, "output", output, initial, dim);
  check_alike("linear_scan_backward", "grad", grad, "output", output);
  const Tensor grads = as_contiguous(grad), decays = as_contiguous(decay), outputs = as_contiguous(output);
  const OptionalTensor start = as_contiguous(initial);
  Tensor grad_decay = new_contiguous_like(decay), grad_update = new_contiguous_like(decay);
  Tensor grad_initial = new_contiguous(decay, sizes_without(decay, dim));
  dispatch_floating("linear_scan_backward", decay, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T *up = grads.const_data_ptr<T>(), *a = decays.const_data_ptr<T>(), *h = outputs.const_data_ptr<T>();
    const T* h0 = optional_data<T>(start);
    T *da = grad_decay.mutable_data_ptr<T>(), *db = grad_update.mutable_data_ptr<T>();
    T* dh0 = grad_initial.mutable_data_ptr<T>();
    for_row_groups(shape, reverse, [=](int64_t offset, int64_t row, Walk walk) {
      backward_rows(up + offset, a + offset, h + offset, at(h0, row), da + offset, db + offset, dh0 + row, walk);
    });
  });
  return {grad_decay, grad_update, grad_initial};
}

}  // namespace opgraft::cpu

STABLE_TORCH_LIBRARY_IMPL(opgraft, CPU, m) {
  m.impl("linear_scan", TORCH_BOX(&opgraft::cpu::linear_scan));
  m.impl("linear_scan_backward", TORCH_BOX(&opgraft::cpu::linear_scan_backward));
}
