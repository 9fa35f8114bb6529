// linear_scan with channels contiguous: a thread owns 4 bytes of channels (8 of double) and walks time serially. Of
// 16-bit types that is 4 warps an SM at 4096 channels and batch 8, and HBM's latency at the copy rate wants 32 KB in
// flight an SM: what is read travels through a ring in shared memory, AHEAD groups of STEPS steps long, which costs no
// registers. In the forward scan eight lanes copy 128 bytes of a warp's step together, where addresses allow it; else
// no thread reads what another one copied.
//
// Channels that are no whole words (an odd number of 16 bits, or a view off 4 bytes) go through the same ring one by
// one, by plain loads.
#include "cuda/linear_scan.cuh"
#include "support/pack.h"

namespace opgraft::cuda {
namespace {

constexpr int THREADS = 64;
constexpr int STEPS = 8;
// Warps an SM below which rows are cut into segments, and what is aimed at then.
constexpr int ENOUGH_WARPS = 3;
constexpr int WARPS_WANTED = 6;

// Where a thread stands: WIDTH channels of one slab, one segment of time.
struct Column {
  int64_t row;     // index of the first channel among all rows
  int64_t offset;  // of the segment's first step, in walking order
  int64_t stride;  // from step to step, signed
  int64_t segment;
  int64_t begin;
  int64_t end;
};

template <int WIDTH>
__device__ __forceinline__ bool find_column(ScanShape shape, Segments segments, bool reverse, Column& column) {
  const int64_t packs = shape.inner / WIDTH;
  int64_t index = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  if (index >= packs * shape.outer * segments.count) return false;
  const int64_t pack = index % packs;
  index /= packs;
  const int64_t slab = index % shape.outer;
  column.segment = index / shape.outer;
  column.row = slab * shape.inner + pack * WIDTH;
  column.begin = column.segment * segments.length;
  column.end = min(column.begin + segments.length, shape.length);
  column.stride = reverse ? -shape.inner : shape.inner;
  column.offset = (slab * shape.length + (reverse ? shape.length - 1 : 0)) * shape.inner + pack * WIDTH +
                  column.begin * column.stride;
  return true;
}

// One tensor's ring: AHEAD groups, one of which is computed while the others are in flight. TOGETHER: a warp's lanes
// have channels that follow each other, 128 bytes on a boundary of 16, and copy them 16 bytes at a time for each other.
template <typename T, int WIDTH, int AHEAD, bool TOGETHER = false>
struct Ring {
  static constexpr int BYTES = WIDTH * static_cast<int>(sizeof(T));
  static_assert(!TOGETHER || BYTES == 4);
  Vector<T, WIDTH> group[AHEAD][STEPS][THREADS];

  // The next STEPS steps, of which `left` are there. A whole group needs no test a step.
  __device__ __forceinline__ void fetch(int which, const char*& from, int64_t stride, int left) {
    if (left >= STEPS) {
      fetch_steps<true>(which, from, stride, left);
    } else {
      fetch_steps<false>(which, from, stride, left);
    }
  }

  template <bool WHOLE>
  __device__ __forceinline__ void fetch_steps(int which, const char*& from, int64_t stride, int left) {
    if constexpr (TOGETHER && WHOLE) {
      const int lane = threadIdx.x % 32, step = lane / 8, first = lane % 8 * 4;
      const char* at = from + step * stride + (first - lane) * BYTES;
#pragma unroll
      for (int u = 0; u < STEPS; u += 4) {
        copy_async<16>(&group[which][u + step][threadIdx.x - lane + first], at, true);
        at += 4 * stride;
      }
      from += STEPS * stride;
      return;
    }
#pragma unroll
    for (int u = 0; u < STEPS; ++u) {
      Vector<T, WIDTH>* to = &group[which][u][threadIdx.x];
      if constexpr (BYTES >= 4) {
        copy_async<BYTES>(to, from, WHOLE || u < left);
      } else {
        if (WHOLE || u < left) *to = *reinterpret_cast<const Vector<T, WIDTH>*>(from);
      }
      from += stride;
    }
  }

  template <typename A>
  __device__ __forceinline__ void read(int which, int step, A (&out)[WIDTH]) const {
    if constexpr (BYTES >= 4) {
      unpack<T, BYTES>(load_words<BYTES>(&group[which][step][threadIdx.x]), out);
    } else {
      out[0] = widen(group[which][step][threadIdx.x].lane[0]);
    }
  }
};

template <typename T, int WIDTH, typename A>
__device__ __forceinline__ void store(T* to, const A (&values)[WIDTH]) {
  constexpr int BYTES = WIDTH * static_cast<int>(sizeof(T));
  if constexpr (BYTES >= 4) {
    store_words(to, pack<T, BYTES>(values));
  } else {
    *to = narrow<T>(values[0]);
  }
}

template <typename S, int WIDTH>
__device__ __forceinline__ void enter_column(const Affine<S>* pairs, int64_t rows, const Column& column,
                                             S (&state)[WIDTH]) {
  for (int64_t s = 0; s < column.segment; ++s) {
#pragma unroll
    for (int w = 0; w < WIDTH; ++w) {
      const Affine<S> pair = pairs[s * rows + column.row + w];
      state[w] = multiply_add(pair.decay, state[w], pair.update);
    }
  }
}

template <int AHEAD>
__device__ __forceinline__ void advance(int& which) {
  which = which + 1 == AHEAD ? 0 : which + 1;
}

template <typename T, int WIDTH, int AHEAD, bool REDUCE, bool TOGETHER>
__global__ void __launch_bounds__(THREADS)
    forward(ScanForward<T> d, ScanPair<T>* __restrict__ pairs, ScanShape shape, Segments segments, bool reverse) {
  using A = DeviceAccumulate<T>;
  using S = Sum<T, A>;
  __shared__ struct {
    Ring<T, WIDTH, AHEAD, TOGETHER> decay;
    Ring<T, WIDTH, AHEAD, TOGETHER> update;
  } ring;
  Column column;
  if (!find_column<WIDTH>(shape, segments, reverse, column)) return;
  const int64_t stride = column.stride * static_cast<int64_t>(sizeof(T));
  const char* decay = reinterpret_cast<const char*>(d.decay + column.offset);
  const char* update = reinterpret_cast<const char*>(d.update + column.offset);
  const int count = static_cast<int>(column.end - column.begin);
  int left = count;  // steps that are not asked for yet
  auto fetch = [&](int which) {
    ring.decay.fetch(which, decay, stride, left);
    ring.update.fetch(which, update, stride, left);
    left -= STEPS;
    commit_copies();
  };
#pragma unroll
  for (int group = 0; group < AHEAD; ++group) fetch(group);

  S state[WIDTH], product[WIDTH];
#pragma unroll
  for (int w = 0; w < WIDTH; ++w) {
    state[w] = S::of(!REDUCE && d.initial ? A(widen(d.initial[column.row + w])) : A(0));
    product[w] = S::of(A(1));
  }
  if (!REDUCE) enter_column(pairs, shape.rows(), column, state);
  char* output = reinterpret_cast<char*>(d.output + column.offset);
  int which = 0;
  auto walk = [&](auto whole, int steps) {
#pragma unroll
    for (int u = 0; u < STEPS; ++u) {
      if (whole || u < steps) {
        A a[WIDTH], b[WIDTH], out[WIDTH];
        ring.decay.read(which, u, a);
        ring.update.read(which, u, b);
#pragma unroll
        for (int w = 0; w < WIDTH; ++w) {
          state[w] = step(a[w], state[w], b[w]);
          if (REDUCE) product[w] = multiply(S::of(a[w]), product[w]);
          out[w] = state[w].value();
        }
        if (!REDUCE) store<T, WIDTH>(reinterpret_cast<T*>(output), out);
        output += stride;
      }
    }
  };
  int steps = count;
#pragma unroll 1
  for (; steps >= STEPS; steps -= STEPS) {
    wait_for_copies<AHEAD - 1>();
    if (TOGETHER) __syncwarp();  // the others' copies are there
    walk(std::true_type{}, STEPS);
    if (TOGETHER) __syncwarp();  // the others have read
    fetch(which);
    advance<AHEAD>(which);
  }
  wait_for_copies<0>();
  if (TOGETHER) __syncwarp();
  walk(std::false_type{}, steps);
  if (REDUCE) {
#pragma unroll
    for (int w = 0; w < WIDTH; ++w) pairs[column.segment * shape.rows() + column.row + w] = {product[w], state[w]};
  }
}

// e[t] = decay[t] (grad[t] + e[t+1]): the same walk the other way. `reverse` is this walk's own direction.
template <typename T, int WIDTH, int AHEAD, bool REDUCE>
__global__ void __launch_bounds__(THREADS)
    backward(ScanBackward<T> d, ScanPair<T>* __restrict__ pairs, ScanShape shape, Segments segments, bool reverse) {
  using A = DeviceAccumulate<T>;
  using S = Sum<T, A>;
  __shared__ struct {
    Ring<T, WIDTH, AHEAD> decay;
    Ring<T, WIDTH, AHEAD> grad;
    Ring<T, WIDTH, REDUCE ? 1 : AHEAD> output;
  } ring;
  Column column;
  if (!find_column<WIDTH>(shape, segments, reverse, column)) return;
  const int64_t stride = column.stride * static_cast<int64_t>(sizeof(T));
  const char* decay = reinterpret_cast<const char*>(d.decay + column.offset);
  const char* grad = reinterpret_cast<const char*>(d.grad + column.offset);
  // The states one step further on in this walk: what entered the step. The last of them is the initial state.
  const char* output = reinterpret_cast<const char*>(d.output + column.offset) + stride;
  const int count = static_cast<int>(column.end - column.begin);
  const int states = column.end == shape.length ? count - 1 : count;
  int asked = 0;  // steps that are asked for
  auto fetch = [&](int which) {
    ring.decay.fetch(which, decay, stride, count - asked);
    ring.grad.fetch(which, grad, stride, count - asked);
    if (!REDUCE) ring.output.fetch(which, output, stride, states - asked);
    asked += STEPS;
    commit_copies();
  };
#pragma unroll
  for (int group = 0; group < AHEAD; ++group) fetch(group);

  S e[WIDTH], product[WIDTH];
  A start[WIDTH];
#pragma unroll
  for (int w = 0; w < WIDTH; ++w) {
    e[w] = S::of(A(0));
    product[w] = S::of(A(1));
    start[w] = d.initial ? A(widen(d.initial[column.row + w])) : A(0);
  }
  if (!REDUCE) enter_column(pairs, shape.rows(), column, e);
  char* grad_decay = reinterpret_cast<char*>(d.grad_decay + column.offset);
  char* grad_update = reinterpret_cast<char*>(d.grad_update + column.offset);
  int which = 0;
  auto walk = [&](auto whole, int steps, int walked) {
#pragma unroll
    for (int u = 0; u < STEPS; ++u) {
      if (whole || u < steps) {
        A a[WIDTH], g[WIDTH], out_decay[WIDTH], out_update[WIDTH];
        ring.decay.read(which, u, a);
        ring.grad.read(which, u, g);
        if (!REDUCE) {
          ring.output.read(which, u, out_decay);
          if (walked + u == states) {
#pragma unroll
            for (int w = 0; w < WIDTH; ++w) out_decay[w] = start[w];
          }
        }
#pragma unroll
        for (int w = 0; w < WIDTH; ++w) {
          const S total = step(A(1), e[w], g[w]);
          if (REDUCE) product[w] = multiply(S::of(a[w]), product[w]);
          e[w] = multiply(S::of(a[w]), total);
          if (!REDUCE) {
            out_update[w] = total.value();
            out_decay[w] *= out_update[w];
          }
        }
        if (!REDUCE) {
          store<T, WIDTH>(reinterpret_cast<T*>(grad_update), out_update);
          store<T, WIDTH>(reinterpret_cast<T*>(grad_decay), out_decay);
        }
        grad_decay += stride;
        grad_update += stride;
      }
    }
  };
  int walked = 0;
#pragma unroll 1
  for (; walked + STEPS <= count; walked += STEPS) {
    wait_for_copies<AHEAD - 1>();
    walk(std::true_type{}, STEPS, walked);
    fetch(which);
    advance<AHEAD>(which);
  }
  wait_for_copies<0>();
  walk(std::false_type{}, count - walked, walked);
#pragma unroll
  for (int w = 0; w < WIDTH; ++w) {
    if (REDUCE) {
      pairs[column.segment * shape.rows() + column.row + w] = {product[w], e[w]};
    } else if (column.end == shape.length) {
      d.grad_initial[column.row + w] = narrow<T>(e[w].value());
    }
  }
}

// launch(width, reduce, blocks, pairs, segments) for every pass; width is that of a word where all is made of words.
template <typename T, typename Launcher>
void run_columns(const Launch& context, const Tensor& like, ScanShape shape, uintptr_t addresses,
                 const Launcher& launch) {
  // A walk counts its steps in 32 bits.
  auto run = [&](auto width) {
    const int64_t threads = shape.outer * (shape.inner / width);
    const Segments segments =
        cut((threads + 31) / 32, shape.length, 4 * STEPS, ENOUGH_WARPS, WARPS_WANTED, context.multiprocessors());
    const unsigned blocks = blocks_for(threads * segments.count, THREADS);
    run_segments<T>(like, segments, shape.rows(), [&](auto* pairs, bool reduce) {
      reduce ? launch(width, std::true_type{}, blocks, pairs, segments)
             : launch(width, std::false_type{}, blocks, pairs, segments);
      Launch::check();
    });
  };
  if constexpr (sizeof(T) == 2) {
    if (shape.inner % 2 == 0 && addresses % 4 == 0) return run(std::integral_constant<int, 2>{});
  }
  run(std::integral_constant<int, 1>{});
}

template <typename... Pointers>
uintptr_t any_of(const Pointers*... pointers) {
  return (reinterpret_cast<uintptr_t>(pointers) | ...);
}

// Groups ahead: 64 KB an SM in 16 bits, and no more than the 48 KB a block may have.
template <typename T>
inline constexpr int FORWARD_AHEAD = sizeof(T) == 8 ? 4 : 8;
inline constexpr int TOGETHER_AHEAD = 5;
template <typename T>
inline constexpr int BACKWARD_AHEAD = sizeof(T) == 8 ? 3 : 6;

}  // namespace

template <typename T>
void scan_columns(const Launch& context, const Tensor& like, ScanShape shape, const ScanForward<T>& d, bool reverse) {
  const uintptr_t addresses = any_of(d.decay, d.update, d.output);
  run_columns<T>(context, like, shape, addresses,
                 [&](auto width, auto reduce, unsigned blocks, auto* pairs, Segments segments) {
                   auto start = [&](auto kernel) {
                     kernel<<<blocks, THREADS, 0, context.stream()>>>(d, pairs, shape, segments, reverse);
                   };
                   if constexpr (width * sizeof(T) == 4) {
                     if (shape.inner % (32 * width) == 0 && addresses % 16 == 0) {
                       return start(forward<T, width, TOGETHER_AHEAD, reduce, true>);
                     }
                   }
                   start(forward<T, width, FORWARD_AHEAD<T>, reduce, false>);
                 });
}

template <typename T>
void scan_columns(const Launch& context, const Tensor& like, ScanShape shape, const ScanBackward<T>& d, bool reverse) {
  run_columns<T>(context, like, shape, any_of(d.grad, d.decay, d.output, d.grad_decay, d.grad_update),
                 [&](auto width, auto reduce, unsigned blocks, auto* pairs, Segments segments) {
                   backward<T, width, BACKWARD_AHEAD<T>, reduce>
                       <<<blocks, THREADS, 0, context.stream()>>>(d, pairs, shape, segments, !reverse);
                 });
}

template void scan_columns(const Launch&, const Tensor&, ScanShape, const ScanForward<float>&, bool);
template void scan_columns(const Launch&, const Tensor&, ScanShape, const ScanBackward<float>&, bool);
template void scan_columns(const Launch&, const Tensor&, ScanShape, const ScanForward<double>&, bool);
template void scan_columns(const Launch&, const Tensor&, ScanShape, const ScanBackward<double>&, bool);
template void scan_columns(const Launch&, const Tensor&, ScanShape, const ScanForward<__half>&, bool);
template void scan_columns(const Launch&, const Tensor&, ScanShape, const ScanBackward<__half>&, bool);
template void scan_columns(const Launch&, const Tensor&, ScanShape, const ScanForward<__nv_bfloat16>&, bool);
template void scan_columns(const Launch&, const Tensor&, ScanShape, const ScanBackward<__nv_bfloat16>&, bool);

}  // namespace opgraft::cuda
