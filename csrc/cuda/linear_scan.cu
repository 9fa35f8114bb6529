// h[t] = decay[t] h[t-1] + update[t] along one dimension, forward and backward on CUDA. Two layouts, one plan each.
//
// Bytes: two reads and one write an element forward, three reads and two writes backward; every input is read once, so
// the copy rate is the limit. The backward walk is the same scan the other way, e[t] = decay[t] (grad[t] + e[t+1]),
// whose result at the first step is the gradient of the initial state.
//
// Time contiguous (nothing after it): a warp owns a row and moves along it in tiles of 32 lanes x 16 bytes. A lane
// scans its own elements, the warp scans the lanes' (decay, update) pairs with shuffles, the last state is carried to
// the next tile, whose loads are issued before this tile's arithmetic. About 9 instructions an element in 16 bits
// (25 % of the issue slots at the copy rate), 40 in float, where the sums are compensated (support/twofold.h).
//
// Time strided (channels contiguous): a thread owns one channel (two 16-bit ones) and walks time serially with UNROLL
// steps loaded ahead: at 4 bytes a load, 4 warps an SM and two tensors that is 32 KB in flight an SM, what HBM's
// latency needs at the copy rate.
//
// Few rows: the row is cut into segments. A first launch reduces every segment to its (decay, update) pair; the second
// folds the pairs before its own segment in their order, and scans. That reads the inputs twice, from L2 as a rule,
// since few rows are few bytes; the order of every sum is fixed, so results do not depend on timing.
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "ops.h"
#include "support/check.h"
#include "support/cuda.h"
#include "support/scan_shape.h"
#include "support/tensor.h"
#include "support/twofold.h"

namespace opgraft::cuda {
namespace {

constexpr int ROW_WARPS = 4;
constexpr int COLUMN_THREADS = 64;
constexpr int PREFETCH = 4;  // batches of UNROLL steps ahead
// Warps an SM below which rows are cut into segments, and what is aimed at then.
constexpr int ENOUGH_ROW_WARPS = 10;
constexpr int ROW_WARPS_WANTED = 24;
constexpr int ENOUGH_COLUMN_WARPS = 3;
constexpr int COLUMN_WARPS_WANTED = 6;

struct Segments {
  int64_t count;   // segments a row
  int64_t length;  // steps a segment, the last may be shorter
};

// Workspace of the segments' pairs: [segment][row], two sums each.
template <typename S>
struct Pairs {
  Affine<S>* data;
};

// Everything before `segment`, in fixed order, applied to the state that enters the row. Every lane gets the result.
template <typename S>
__device__ __forceinline__ S entering_state(const Affine<S>* pairs, int64_t rows, int64_t row, int64_t segment, S state,
                                            int lane) {
  using A = decltype(state.high);
  for (int64_t first = 0; first < segment; first += 32) {
    Affine<S> own{S::of(A(1)), S::of(A(0))};
    if (first + lane < segment) own = pairs[(first + lane) * rows + row];
    own = warp_scan(own, lane);
    const Affine<S> all{shuffle(own.decay, 31), shuffle(own.update, 31)};
    state = multiply_add(all.decay, state, all.update);
  }
  return state;
}

// WIDTH consecutive elements in walking order. Vectors lie wholly inside the row when WIDE (its length is a multiple).
template <typename T, int WIDTH, bool WIDE, bool REVERSE, typename A>
__device__ __forceinline__ void load_steps(const T* row, int64_t length, int64_t first, A fill, A (&out)[WIDTH]) {
  if constexpr (WIDE) {
    if (first < length) {
      const int64_t at = REVERSE ? length - WIDTH - first : first;
      const auto pack = *reinterpret_cast<const Vector<T, WIDTH>*>(row + at);
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) out[i] = widen(pack.lane[REVERSE ? WIDTH - 1 - i : i]);
    } else {
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) out[i] = fill;
    }
  } else {
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
      const int64_t t = first + i;
      out[i] = t < length ? A(widen(row[REVERSE ? length - 1 - t : t])) : fill;
    }
  }
}

template <typename T, int WIDTH, bool WIDE, bool REVERSE, typename A>
__device__ __forceinline__ void store_steps(T* row, int64_t length, int64_t first, const A (&values)[WIDTH]) {
  if constexpr (WIDE) {
    if (first < length) {
      Vector<T, WIDTH> pack;
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) pack.lane[REVERSE ? WIDTH - 1 - i : i] = narrow<T>(values[i]);
      *reinterpret_cast<Vector<T, WIDTH>*>(row + (REVERSE ? length - WIDTH - first : first)) = pack;
    }
  } else {
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
      const int64_t t = first + i;
      if (t < length) row[REVERSE ? length - 1 - t : t] = narrow<T>(values[i]);
    }
  }
}

// One warp a (row, segment). With `pairs_out` it only reduces the segment; else it scans and writes.
template <typename T, bool WIDE, bool REVERSE>
__global__ void __launch_bounds__(ROW_WARPS * 32)
    forward_rows(const T* __restrict__ decay, const T* __restrict__ update, const T* __restrict__ initial,
                 T* __restrict__ output, Affine<Sum<T, DeviceAccumulate<T>>>* __restrict__ pairs, bool reduce,
                 int64_t rows, int64_t length, Segments segments) {
  using A = DeviceAccumulate<T>;
  using S = Sum<T, A>;
  constexpr int WIDTH = VECTOR_WIDTH<T>;
  constexpr int TILE = 32 * WIDTH;
  const int lane = threadIdx.x % 32;
  const int64_t task = static_cast<int64_t>(blockIdx.x) * ROW_WARPS + threadIdx.x / 32;
  if (task >= rows * segments.count) return;
  const int64_t row = task / segments.count;
  const int64_t segment = task % segments.count;
  const int64_t begin = segment * segments.length;
  const int64_t end = min(begin + segments.length, length);
  decay += row * length;
  update += row * length;

  S state = S::of(initial ? A(widen(initial[row])) : A(0));
  Affine<S> whole{S::of(A(1)), S::of(A(0))};
  if (!reduce && segments.count > 1) state = entering_state(pairs, rows, row, segment, state, lane);

  A a[WIDTH], b[WIDTH], next_a[WIDTH], next_b[WIDTH];
  int64_t first = begin + lane * WIDTH;
  load_steps<T, WIDTH, WIDE, REVERSE>(decay, length, first, A(1), a);
  load_steps<T, WIDTH, WIDE, REVERSE>(update, length, first, A(0), b);
  for (int64_t tile = begin; tile < end; tile += TILE) {
    const int64_t next = first + TILE;
    load_steps<T, WIDTH, WIDE, REVERSE>(decay, length, next, A(1), next_a);
    load_steps<T, WIDTH, WIDE, REVERSE>(update, length, next, A(0), next_b);
    Affine<S> own{S::of(a[0]), S::of(b[0])};
#pragma unroll
    for (int i = 1; i < WIDTH; ++i) own = {multiply(S::of(a[i]), own.decay), step(a[i], own.update, b[i])};
    own = warp_scan(own, lane);
    if (reduce) {
      whole = compose(Affine<S>{shuffle(own.decay, 31), shuffle(own.update, 31)}, whole);
    } else {
      Affine<S> before{shuffle_up(own.decay, 1), shuffle_up(own.update, 1)};
      if (lane == 0) before = {S::of(A(1)), S::of(A(0))};
      S h = multiply_add(before.decay, state, before.update);
      A out[WIDTH];
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) {
        h = step(a[i], h, b[i]);
        out[i] = h.value();
      }
      store_steps<T, WIDTH, WIDE, REVERSE>(output + row * length, length, first, out);
      state = shuffle(h, 31);
    }
    first = next;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
      a[i] = next_a[i];
      b[i] = next_b[i];
    }
  }
  if (reduce && lane == 0) pairs[segment * rows + row] = whole;
}

// Walks against the forward scan; REVERSE is this walk's own direction. e = d loss / d (state before the step).
template <typename T, bool WIDE, bool REVERSE>
__global__ void __launch_bounds__(ROW_WARPS * 32)
    backward_rows(const T* __restrict__ grad, const T* __restrict__ decay, const T* __restrict__ output,
                  const T* __restrict__ initial, T* __restrict__ grad_decay, T* __restrict__ grad_update,
                  T* __restrict__ grad_initial, Affine<Sum<T, DeviceAccumulate<T>>>* __restrict__ pairs, bool reduce,
                  int64_t rows, int64_t length, Segments segments) {
  using A = DeviceAccumulate<T>;
  using S = Sum<T, A>;
  constexpr int WIDTH = VECTOR_WIDTH<T>;
  constexpr int TILE = 32 * WIDTH;
  const int lane = threadIdx.x % 32;
  const int64_t task = static_cast<int64_t>(blockIdx.x) * ROW_WARPS + threadIdx.x / 32;
  if (task >= rows * segments.count) return;
  const int64_t row = task / segments.count;
  const int64_t segment = task % segments.count;
  const int64_t begin = segment * segments.length;
  const int64_t end = min(begin + segments.length, length);
  grad += row * length;
  decay += row * length;
  output += row * length;

  S state = S::of(A(0));
  Affine<S> whole{S::of(A(1)), S::of(A(0))};
  if (!reduce && segments.count > 1) state = entering_state(pairs, rows, row, segment, state, lane);
  const A start = initial ? A(widen(initial[row])) : A(0);

  A a[WIDTH], g[WIDTH], h[WIDTH], next_a[WIDTH], next_g[WIDTH], next_h[WIDTH];
  int64_t first = begin + lane * WIDTH;
  load_steps<T, WIDTH, WIDE, REVERSE>(decay, length, first, A(1), a);
  load_steps<T, WIDTH, WIDE, REVERSE>(grad, length, first, A(0), g);
  if (!reduce) load_steps<T, WIDTH, WIDE, REVERSE>(output, length, first, A(0), h);
  for (int64_t tile = begin; tile < end; tile += TILE) {
    const int64_t next = first + TILE;
    load_steps<T, WIDTH, WIDE, REVERSE>(decay, length, next, A(1), next_a);
    load_steps<T, WIDTH, WIDE, REVERSE>(grad, length, next, A(0), next_g);
    if (!reduce) load_steps<T, WIDTH, WIDE, REVERSE>(output, length, next, A(0), next_h);
    // A step maps e to a (g + e).
    Affine<S> own{S::of(a[0]), multiply(S::of(a[0]), S::of(g[0]))};
#pragma unroll
    for (int i = 1; i < WIDTH; ++i) {
      const S total = step(A(1), own.update, g[i]);
      own = {multiply(S::of(a[i]), own.decay), multiply(S::of(a[i]), total)};
    }
    own = warp_scan(own, lane);
    if (reduce) {
      whole = compose(Affine<S>{shuffle(own.decay, 31), shuffle(own.update, 31)}, whole);
    } else {
      Affine<S> before{shuffle_up(own.decay, 1), shuffle_up(own.update, 1)};
      if (lane == 0) before = {S::of(A(1)), S::of(A(0))};
      S e = multiply_add(before.decay, state, before.update);
      // The state that entered a step is the element after it in this walk: the next lane's first, or the next tile's.
      A entered = __shfl_down_sync(WHOLE_WARP, h[0], 1);
      const A following = __shfl_sync(WHOLE_WARP, next_h[0], 0);
      if (lane == 31) entered = following;
      A out_decay[WIDTH], out_update[WIDTH];
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) {
        const S total = step(A(1), e, g[i]);
        A state_before = i + 1 < WIDTH ? h[i + 1] : entered;
        if (first + i == length - 1) state_before = start;
        out_update[i] = total.value();
        out_decay[i] = total.value() * state_before;
        e = multiply(S::of(a[i]), total);
      }
      store_steps<T, WIDTH, WIDE, REVERSE>(grad_update + row * length, length, first, out_update);
      store_steps<T, WIDTH, WIDE, REVERSE>(grad_decay + row * length, length, first, out_decay);
      state = shuffle(e, 31);
    }
    first = next;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
      a[i] = next_a[i];
      g[i] = next_g[i];
      h[i] = next_h[i];
    }
  }
  if (lane == 0) {
    if (reduce) {
      pairs[segment * rows + row] = whole;
    } else if (end == length) {
      grad_initial[row] = narrow<T>(state.value());
    }
  }
}

// Where a thread of the strided layout stands: WIDTH channels of one slab, one segment of time.
struct Column {
  int64_t row;     // index of the first channel among all rows
  int64_t offset;  // of its first step, in walking order
  int64_t stride;  // from step to step, signed
  int64_t segment;
  int64_t begin;
  int64_t end;
};

template <int WIDTH>
__device__ __forceinline__ bool find_column(ScanShape shape, Segments segments, bool reverse, Column& column) {
  const int64_t packs = shape.inner / WIDTH;
  int64_t index = static_cast<int64_t>(blockIdx.x) * COLUMN_THREADS + threadIdx.x;
  if (index >= packs * shape.outer * segments.count) return false;
  const int64_t pack = index % packs;
  index /= packs;
  const int64_t slab = index % shape.outer;
  column.segment = index / shape.outer;
  column.row = slab * shape.inner + pack * WIDTH;
  column.begin = column.segment * segments.length;
  column.end = min(column.begin + segments.length, shape.length);
  column.offset = (slab * shape.length + (reverse ? shape.length - 1 : 0)) * shape.inner + pack * WIDTH;
  column.stride = reverse ? -shape.inner : shape.inner;
  return true;
}

template <typename T, int WIDTH, int UNROLL>
__device__ __forceinline__ void load_column(const T* base, const Column& column, int64_t first,
                                            Vector<T, WIDTH> (&out)[UNROLL]) {
#pragma unroll
  for (int u = 0; u < UNROLL; ++u) {
    if (first + u < column.end) {
      out[u] = *reinterpret_cast<const Vector<T, WIDTH>*>(base + column.offset + (first + u) * column.stride);
    }
  }
}

// Asks for the cache lines of `UNROLL` steps, a lane a step: what is in flight to L2 needs no registers, and four warps
// an SM with 64 registers each of loads do not cover the latency of HBM.
template <typename T, int UNROLL>
__device__ __forceinline__ void prefetch_column(const T* base, const Column& column, int64_t first) {
  if constexpr (sizeof(T) > 2) return;  // wider types have twice as many warps, and lose by it
  static_assert(UNROLL <= 32);
  const int lane = threadIdx.x % 32;
  const int64_t offset = __shfl_sync(__activemask(), column.offset, 0);
  if (lane < UNROLL && first + lane < column.end) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(base + offset + (first + lane) * column.stride));
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

template <typename T, int WIDTH, int UNROLL>
__global__ void __launch_bounds__(COLUMN_THREADS)
    forward_columns(const T* __restrict__ decay, const T* __restrict__ update, const T* __restrict__ initial,
                    T* __restrict__ output, Affine<Sum<T, DeviceAccumulate<T>>>* __restrict__ pairs, bool reduce,
                    ScanShape shape, Segments segments, bool reverse) {
  using A = DeviceAccumulate<T>;
  using S = Sum<T, A>;
  Column column;
  if (!find_column<WIDTH>(shape, segments, reverse, column)) return;
  S state[WIDTH], product[WIDTH];
#pragma unroll
  for (int w = 0; w < WIDTH; ++w) {
    state[w] = S::of(initial && !reduce ? A(widen(initial[column.row + w])) : A(0));
    product[w] = S::of(A(1));
  }
  if (!reduce) enter_column(pairs, shape.rows(), column, state);

  Vector<T, WIDTH> a[UNROLL], b[UNROLL], next_a[UNROLL], next_b[UNROLL];
  load_column(decay, column, column.begin, a);
  load_column(update, column, column.begin, b);
  for (int batch = 2; batch < PREFETCH; ++batch) {
    prefetch_column<T, UNROLL>(decay, column, column.begin + batch * UNROLL);
    prefetch_column<T, UNROLL>(update, column, column.begin + batch * UNROLL);
  }
  for (int64_t first = column.begin; first < column.end; first += UNROLL) {
    load_column(decay, column, first + UNROLL, next_a);
    load_column(update, column, first + UNROLL, next_b);
    prefetch_column<T, UNROLL>(decay, column, first + PREFETCH * UNROLL);
    prefetch_column<T, UNROLL>(update, column, first + PREFETCH * UNROLL);
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      if (first + u < column.end) {
        Vector<T, WIDTH> out;
#pragma unroll
        for (int w = 0; w < WIDTH; ++w) {
          const A d = widen(a[u].lane[w]);
          state[w] = step(d, state[w], A(widen(b[u].lane[w])));
          if (reduce) product[w] = multiply(S::of(d), product[w]);
          out.lane[w] = narrow<T>(state[w].value());
        }
        if (!reduce) {
          *reinterpret_cast<Vector<T, WIDTH>*>(output + column.offset + (first + u) * column.stride) = out;
        }
      }
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      a[u] = next_a[u];
      b[u] = next_b[u];
    }
  }
  if (reduce) {
#pragma unroll
    for (int w = 0; w < WIDTH; ++w) pairs[column.segment * shape.rows() + column.row + w] = {product[w], state[w]};
  }
}

template <typename T, int WIDTH, int UNROLL>
__global__ void __launch_bounds__(COLUMN_THREADS)
    backward_columns(const T* __restrict__ grad, const T* __restrict__ decay, const T* __restrict__ output,
                     const T* __restrict__ initial, T* __restrict__ grad_decay, T* __restrict__ grad_update,
                     T* __restrict__ grad_initial, Affine<Sum<T, DeviceAccumulate<T>>>* __restrict__ pairs, bool reduce,
                     ScanShape shape, Segments segments, bool reverse) {
  using A = DeviceAccumulate<T>;
  using S = Sum<T, A>;
  Column column;
  if (!find_column<WIDTH>(shape, segments, reverse, column)) return;
  S e[WIDTH], product[WIDTH];
  A start[WIDTH];
#pragma unroll
  for (int w = 0; w < WIDTH; ++w) {
    e[w] = S::of(A(0));
    product[w] = S::of(A(1));
    start[w] = initial ? A(widen(initial[column.row + w])) : A(0);
  }
  if (!reduce) enter_column(pairs, shape.rows(), column, e);

  // h holds the states one step further on in this walk: what entered the step.
  Column ahead = column;
  ahead.offset += column.stride;
  ahead.end = min(column.end, shape.length - 1);
  Vector<T, WIDTH> a[UNROLL], g[UNROLL], h[UNROLL], next_a[UNROLL], next_g[UNROLL], next_h[UNROLL];
  load_column(decay, column, column.begin, a);
  load_column(grad, column, column.begin, g);
  if (!reduce) load_column(output, ahead, column.begin, h);
  for (int64_t first = column.begin; first < column.end; first += UNROLL) {
    load_column(decay, column, first + UNROLL, next_a);
    load_column(grad, column, first + UNROLL, next_g);
    if (!reduce) load_column(output, ahead, first + UNROLL, next_h);
    prefetch_column<T, UNROLL>(decay, column, first + PREFETCH * UNROLL);
    prefetch_column<T, UNROLL>(grad, column, first + PREFETCH * UNROLL);
    if (!reduce) prefetch_column<T, UNROLL>(output, ahead, first + PREFETCH * UNROLL);
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      if (first + u < column.end) {
        Vector<T, WIDTH> out_decay, out_update;
#pragma unroll
        for (int w = 0; w < WIDTH; ++w) {
          const A d = widen(a[u].lane[w]);
          const S total = step(A(1), e[w], A(widen(g[u].lane[w])));
          if (reduce) product[w] = multiply(S::of(d), product[w]);
          e[w] = multiply(S::of(d), total);
          if (!reduce) {
            const A before = first + u == shape.length - 1 ? start[w] : A(widen(h[u].lane[w]));
            out_update.lane[w] = narrow<T>(total.value());
            out_decay.lane[w] = narrow<T>(total.value() * before);
          }
        }
        if (!reduce) {
          const int64_t at = column.offset + (first + u) * column.stride;
          *reinterpret_cast<Vector<T, WIDTH>*>(grad_update + at) = out_update;
          *reinterpret_cast<Vector<T, WIDTH>*>(grad_decay + at) = out_decay;
        }
      }
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      a[u] = next_a[u];
      g[u] = next_g[u];
      h[u] = next_h[u];
    }
  }
#pragma unroll
  for (int w = 0; w < WIDTH; ++w) {
    if (reduce) {
      pairs[column.segment * shape.rows() + column.row + w] = {product[w], e[w]};
    } else if (column.end == shape.length) {
      grad_initial[column.row + w] = narrow<T>(e[w].value());
    }
  }
}

// Cuts `length` so that `warps` warps a whole row become about `wanted` an SM. Segments are whole `unit`s.
Segments cut(int64_t warps, int64_t length, int64_t unit, int enough, int wanted, int sms) {
  if (warps >= static_cast<int64_t>(enough) * sms || length <= 2 * unit) return {1, length};
  const int64_t aim = (static_cast<int64_t>(wanted) * sms + warps - 1) / warps;
  const int64_t most = (length + unit - 1) / unit;
  const int64_t count = std::min(aim, most);
  const int64_t per_segment = ((length + count - 1) / count + unit - 1) / unit * unit;
  return {(length + per_segment - 1) / per_segment, per_segment};
}

// The pairs of all segments, as raw bytes.
template <typename S>
Tensor workspace(const Tensor& like, Segments segments, int64_t rows) {
  const int64_t count = segments.count > 1 ? segments.count * rows * static_cast<int64_t>(sizeof(Affine<S>)) : 0;
  return new_contiguous(like, {&count, 1}, ScalarType::Byte);
}

template <typename Body>
void dispatch_flags(bool first, bool second, const Body& body) {
  if (first) {
    second ? body(std::true_type{}, std::true_type{}) : body(std::true_type{}, std::false_type{});
  } else {
    second ? body(std::false_type{}, std::true_type{}) : body(std::false_type{}, std::false_type{});
  }
}

unsigned blocks_for(int64_t tasks, int64_t per_block) {
  return static_cast<unsigned>((tasks + per_block - 1) / per_block);
}

// Launches once to reduce the segments, where there are several, and once to scan.
template <typename T, typename Launcher>
void run(const Tensor& like, Segments segments, int64_t rows, const Launcher& launch) {
  using S = Sum<T, DeviceAccumulate<T>>;
  Tensor space = workspace<S>(like, segments, rows);
  auto* pairs = static_cast<Affine<S>*>(space.mutable_data_ptr());
  if (segments.count > 1) launch(pairs, true);
  launch(pairs, false);
}

template <typename T>
void forward(const Tensor& like, ScanShape shape, const T* decay, const T* update, const T* initial, T* output,
             bool reverse) {
  Launch context(like);
  const int sms = context.multiprocessors();
  if (shape.inner == 1) {
    constexpr int WIDTH = VECTOR_WIDTH<T>;
    const bool wide = shape.length % WIDTH == 0 && aligned(decay) && aligned(update) && aligned(output);
    const int64_t rows = shape.outer;
    const Segments segments = cut(rows, shape.length, 32 * WIDTH, ENOUGH_ROW_WARPS, ROW_WARPS_WANTED, sms);
    run<T>(like, segments, rows, [&](auto* pairs, bool reduce) {
      dispatch_flags(wide, reverse, [&](auto is_wide, auto is_reverse) {
        forward_rows<T, is_wide, is_reverse>
            <<<blocks_for(rows * segments.count, ROW_WARPS), ROW_WARPS * 32, 0, context.stream()>>>(
                decay, update, initial, output, pairs, reduce, rows, shape.length, segments);
      });
      Launch::check();
    });
    return;
  }
  auto columns = [&](auto width, auto unroll) {
    const int64_t threads = shape.outer * (shape.inner / width);
    const Segments segments =
        cut((threads + 31) / 32, shape.length, 2 * unroll, ENOUGH_COLUMN_WARPS, COLUMN_WARPS_WANTED, sms);
    run<T>(like, segments, shape.rows(), [&](auto* pairs, bool reduce) {
      forward_columns<T, width, unroll>
          <<<blocks_for(threads * segments.count, COLUMN_THREADS), COLUMN_THREADS, 0, context.stream()>>>(
              decay, update, initial, output, pairs, reduce, shape, segments, reverse);
      Launch::check();
    });
  };
  const uintptr_t address =
      reinterpret_cast<uintptr_t>(decay) | reinterpret_cast<uintptr_t>(update) | reinterpret_cast<uintptr_t>(output);
  if constexpr (sizeof(T) == 2) {
    if (shape.inner % 2 == 0 && address % 4 == 0) {
      columns(std::integral_constant<int, 2>{}, std::integral_constant<int, 16>{});
      return;
    }
  }
  columns(std::integral_constant<int, 1>{}, std::integral_constant<int, (sizeof(T) == 8 ? 8 : 24)>{});
}

template <typename T>
void backward(const Tensor& like, ScanShape shape, const T* grad, const T* decay, const T* output, const T* initial,
              T* grad_decay, T* grad_update, T* grad_initial, bool reverse) {
  Launch context(like);
  const int sms = context.multiprocessors();
  if (shape.inner == 1) {
    constexpr int WIDTH = VECTOR_WIDTH<T>;
    const bool wide = shape.length % WIDTH == 0 && aligned(grad) && aligned(decay) && aligned(output) &&
                      aligned(grad_decay) && aligned(grad_update);
    const int64_t rows = shape.outer;
    const Segments segments = cut(rows, shape.length, 32 * WIDTH, ENOUGH_ROW_WARPS, ROW_WARPS_WANTED, sms);
    run<T>(like, segments, rows, [&](auto* pairs, bool reduce) {
      dispatch_flags(wide, !reverse, [&](auto is_wide, auto is_reverse) {
        backward_rows<T, is_wide, is_reverse>
            <<<blocks_for(rows * segments.count, ROW_WARPS), ROW_WARPS * 32, 0, context.stream()>>>(
                grad, decay, output, initial, grad_decay, grad_update, grad_initial, pairs, reduce, rows, shape.length,
                segments);
      });
      Launch::check();
    });
    return;
  }
  auto columns = [&](auto width, auto unroll) {
    const int64_t threads = shape.outer * (shape.inner / width);
    const Segments segments =
        cut((threads + 31) / 32, shape.length, 2 * unroll, ENOUGH_COLUMN_WARPS, COLUMN_WARPS_WANTED, sms);
    run<T>(like, segments, shape.rows(), [&](auto* pairs, bool reduce) {
      backward_columns<T, width, unroll>
          <<<blocks_for(threads * segments.count, COLUMN_THREADS), COLUMN_THREADS, 0, context.stream()>>>(
              grad, decay, output, initial, grad_decay, grad_update, grad_initial, pairs, reduce, shape, segments,
              !reverse);
      Launch::check();
    });
  };
  const uintptr_t address = reinterpret_cast<uintptr_t>(grad) | reinterpret_cast<uintptr_t>(decay) |
                            reinterpret_cast<uintptr_t>(output) | reinterpret_cast<uintptr_t>(grad_decay) |
                            reinterpret_cast<uintptr_t>(grad_update);
  if constexpr (sizeof(T) == 2) {
    if (shape.inner % 2 == 0 && address % 4 == 0) {
      columns(std::integral_constant<int, 2>{}, std::integral_constant<int, 20>{});
      return;
    }
  }
  columns(std::integral_constant<int, 1>{}, std::integral_constant<int, (sizeof(T) == 8 ? 6 : 16)>{});
}

}  // namespace

Tensor linear_scan(const Tensor& decay, const Tensor& update, const OptionalTensor& initial, int64_t dim,
                   bool reverse) {
  const ScanShape shape = check_linear_scan("linear_scan", decay, "update", update, initial, dim);
  const Tensor decays = as_contiguous(decay), updates = as_contiguous(update);
  const OptionalTensor start = as_contiguous(initial);
  Tensor output = new_contiguous_like(update);
  if (output.numel() == 0) return output;
  dispatch_floating("linear_scan", update, [&](auto tag) {
    using T = typename DeviceType<typename decltype(tag)::type>::type;
    forward<T>(update, shape, static_cast<const T*>(decays.const_data_ptr()),
               static_cast<const T*>(updates.const_data_ptr()), optional_data<T>(start),
               static_cast<T*>(output.mutable_data_ptr()), reverse);
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
  if (decay.numel() == 0) {
    torch::stable::zero_(grad_initial);
    return {grad_decay, grad_update, grad_initial};
  }
  dispatch_floating("linear_scan_backward", decay, [&](auto tag) {
    using T = typename DeviceType<typename decltype(tag)::type>::type;
    backward<T>(decay, shape, static_cast<const T*>(grads.const_data_ptr()),
                static_cast<const T*>(decays.const_data_ptr()), static_cast<const T*>(outputs.const_data_ptr()),
                optional_data<T>(start), static_cast<T*>(grad_decay.mutable_data_ptr()),
                static_cast<T*>(grad_update.mutable_data_ptr()), static_cast<T*>(grad_initial.mutable_data_ptr()),
                reverse);
  });
  return {grad_decay, grad_update, grad_initial};
}

}  // namespace opgraft::cuda

STABLE_TORCH_LIBRARY_IMPL(opgraft, CUDA, m) {
  m.impl("linear_scan", TORCH_BOX(&opgraft::cuda::linear_scan));
  m.impl("linear_scan_backward", TORCH_BOX(&opgraft::cuda::linear_scan_backward));
}
