// linear_scan with time contiguous: a warp owns a row and moves along it in tiles of 32 lanes x 16 bytes. A lane scans
// its own elements, the warp scans the lanes' (decay, update) pairs with shuffles, the last state is carried to the
// next tile. Loads are issued two tiles ahead (the backward: one). About 9 instructions an element in 16 bits (25 % of
// the issue slots at the copy rate), 40 in float, where the sums are compensated (support/twofold.h).
//
// The backward walk is the same scan the other way, e[t] = decay[t] (grad[t] + e[t+1]), whose result at the first step
// is the gradient of the initial state.
#include "cuda/linear_scan.cuh"
#include "support/pack.h"

namespace opgraft::cuda {
namespace {

constexpr int ROW_WARPS = 4;
// Tiles that the forward scan has on their way: as they are in memory, since values widened on arrival are waited for.
constexpr int TILES_AHEAD = 2;
// Warps an SM below which rows are cut into segments, and what is aimed at then.
constexpr int ENOUGH_WARPS = 10;
constexpr int WARPS_WANTED = 24;

// A segment of a row: one warp's work.
struct RowTask {
  int64_t row;
  int64_t segment;
  int64_t begin;
  int64_t end;
};

// The last block's last warps may be given rows that are not there.
__device__ __forceinline__ RowTask task_of_warp(Segments segments, int64_t length) {
  const int64_t task = static_cast<int64_t>(blockIdx.x) * ROW_WARPS + threadIdx.x / 32;
  const int64_t segment = task % segments.count;
  const int64_t begin = segment * segments.length;
  return {task / segments.count, segment, begin, min(begin + segments.length, length)};
}

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

// The vector of a lane as it is in memory; `fill` where there is none. Of rows that are no vectors, in walking order.
template <bool WIDE, bool REVERSE, typename T>
__device__ __forceinline__ Words<VECTOR_BYTES> load_pack(const T* row, int64_t length, int64_t first,
                                                         DeviceAccumulate<T> fill) {
  constexpr int WIDTH = VECTOR_WIDTH<T>;
  if (WIDE && first < length) return load_words<VECTOR_BYTES>(row + (REVERSE ? length - WIDTH - first : first));
  DeviceAccumulate<T> values[WIDTH];
#pragma unroll
  for (int i = 0; i < WIDTH; ++i) {
    const int64_t t = first + i;
    values[i] = !WIDE && t < length ? widen(row[REVERSE ? length - 1 - t : t]) : fill;
  }
  return pack<T, VECTOR_BYTES>(values);
}

template <bool FLIP, typename T>
__device__ __forceinline__ void unpack_steps(const Words<VECTOR_BYTES>& words,
                                             DeviceAccumulate<T> (&out)[VECTOR_WIDTH<T>]) {
  constexpr int WIDTH = VECTOR_WIDTH<T>;
  DeviceAccumulate<T> values[WIDTH];
  unpack<T>(words, values);
#pragma unroll
  for (int i = 0; i < WIDTH; ++i) out[i] = values[FLIP ? WIDTH - 1 - i : i];
}

// One warp a (row, segment). With `pairs_out` it only reduces the segment; else it scans and writes.
template <typename T, bool WIDE, bool REVERSE>
__global__ void __launch_bounds__(ROW_WARPS * 32)
    forward_rows(ScanForward<T> d, ScanPair<T>* __restrict__ pairs, bool reduce, int64_t rows, int64_t length,
                 Segments segments) {
  using A = DeviceAccumulate<T>;
  using S = Sum<T, A>;
  constexpr int WIDTH = VECTOR_WIDTH<T>;
  constexpr int TILE = 32 * WIDTH;
  const int lane = threadIdx.x % 32;
  const auto [row, segment, begin, end] = task_of_warp(segments, length);
  if (row >= rows) return;
  const T* decay = d.decay + row * length;
  const T* update = d.update + row * length;

  S state = S::of(d.initial ? A(widen(d.initial[row])) : A(0));
  Affine<S> whole{S::of(A(1)), S::of(A(0))};
  if (!reduce && segments.count > 1) state = entering_state(pairs, rows, row, segment, state, lane);

  Words<VECTOR_BYTES> decays[TILES_AHEAD], updates[TILES_AHEAD];
  int64_t first = begin + lane * WIDTH;
  auto fetch = [&](int which, int64_t from) {
    decays[which] = load_pack<WIDE, REVERSE>(decay, length, from, A(1));
    updates[which] = load_pack<WIDE, REVERSE>(update, length, from, A(0));
  };
#pragma unroll
  for (int k = 0; k < TILES_AHEAD; ++k) fetch(k, first + k * TILE);
  for (int64_t tile = begin; tile < end;) {
#pragma unroll
    for (int k = 0; k < TILES_AHEAD && tile < end; ++k) {
      A a[WIDTH], b[WIDTH];
      unpack_steps<WIDE && REVERSE, T>(decays[k], a);
      unpack_steps<WIDE && REVERSE, T>(updates[k], b);
      fetch(k, first + TILES_AHEAD * TILE);
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
        store_steps<T, WIDTH, WIDE, REVERSE>(d.output + row * length, length, first, out);
        state = shuffle(h, 31);
      }
      first += TILE;
      tile += TILE;
    }
  }
  if (reduce && lane == 0) pairs[segment * rows + row] = whole;
}

// Walks against the forward scan; REVERSE is this walk's own direction. e = d loss / d (state before the step).
template <typename T, bool WIDE, bool REVERSE>
__global__ void __launch_bounds__(ROW_WARPS * 32)
    backward_rows(ScanBackward<T> d, ScanPair<T>* __restrict__ pairs, bool reduce, int64_t rows, int64_t length,
                  Segments segments) {
  using A = DeviceAccumulate<T>;
  using S = Sum<T, A>;
  constexpr int WIDTH = VECTOR_WIDTH<T>;
  constexpr int TILE = 32 * WIDTH;
  const int lane = threadIdx.x % 32;
  const auto [row, segment, begin, end] = task_of_warp(segments, length);
  if (row >= rows) return;
  const T* grad = d.grad + row * length;
  const T* decay = d.decay + row * length;
  const T* output = d.output + row * length;

  S state = S::of(A(0));
  Affine<S> whole{S::of(A(1)), S::of(A(0))};
  if (!reduce && segments.count > 1) state = entering_state(pairs, rows, row, segment, state, lane);
  const A start = d.initial ? A(widen(d.initial[row])) : A(0);

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
      store_steps<T, WIDTH, WIDE, REVERSE>(d.grad_update + row * length, length, first, out_update);
      store_steps<T, WIDTH, WIDE, REVERSE>(d.grad_decay + row * length, length, first, out_decay);
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
      d.grad_initial[row] = narrow<T>(state.value());
    }
  }
}

template <typename Body>
void dispatch_flags(bool first, bool second, const Body& body) {
  if (first) {
    second ? body(std::true_type{}, std::true_type{}) : body(std::true_type{}, std::false_type{});
  } else {
    second ? body(std::false_type{}, std::true_type{}) : body(std::false_type{}, std::false_type{});
  }
}

// launch(wide, reverse, blocks, pairs, reduce, segments) for every pass over the rows.
template <typename T, typename Launcher>
void run_rows(const Launch& context, const Tensor& like, ScanShape shape, bool is_aligned, bool reverse,
              const Launcher& launch) {
  constexpr int WIDTH = VECTOR_WIDTH<T>;
  const bool wide = shape.length % WIDTH == 0 && is_aligned;
  const Segments segments =
      cut(shape.outer, shape.length, 32 * WIDTH, ENOUGH_WARPS, WARPS_WANTED, context.multiprocessors());
  const unsigned blocks = blocks_for(shape.outer * segments.count, ROW_WARPS);
  run_segments<T>(like, segments, shape.outer, [&](auto* pairs, bool reduce) {
    dispatch_flags(wide, reverse, [&](auto is_wide, auto is_reverse) {
      launch(is_wide, is_reverse, blocks, pairs, reduce, segments);
    });
    Launch::check();
  });
}

}  // namespace

template <typename T>
void scan_rows(const Launch& context, const Tensor& like, ScanShape shape, const ScanForward<T>& d, bool reverse) {
  const bool is_aligned = aligned(d.decay) && aligned(d.update) && aligned(d.output);
  run_rows<T>(context, like, shape, is_aligned, reverse,
              [&](auto wide, auto backwards, unsigned blocks, auto* pairs, bool reduce, Segments segments) {
                forward_rows<T, wide, backwards><<<blocks, ROW_WARPS * 32, 0, context.stream()>>>(
                    d, pairs, reduce, shape.outer, shape.length, segments);
              });
}

template <typename T>
void scan_rows(const Launch& context, const Tensor& like, ScanShape shape, const ScanBackward<T>& d, bool reverse) {
  const bool is_aligned =
      aligned(d.grad) && aligned(d.decay) && aligned(d.output) && aligned(d.grad_decay) && aligned(d.grad_update);
  run_rows<T>(context, like, shape, is_aligned, !reverse,
              [&](auto wide, auto backwards, unsigned blocks, auto* pairs, bool reduce, Segments segments) {
                backward_rows<T, wide, backwards><<<blocks, ROW_WARPS * 32, 0, context.stream()>>>(
                    d, pairs, reduce, shape.outer, shape.length, segments);
              });
}

template void scan_rows(const Launch&, const Tensor&, ScanShape, const ScanForward<float>&, bool);
template void scan_rows(const Launch&, const Tensor&, ScanShape, const ScanBackward<float>&, bool);
template void scan_rows(const Launch&, const Tensor&, ScanShape, const ScanForward<double>&, bool);
template void scan_rows(const Launch&, const Tensor&, ScanShape, const ScanBackward<double>&, bool);
template void scan_rows(const Launch&, const Tensor&, ScanShape, const ScanForward<__half>&, bool);
template void scan_rows(const Launch&, const Tensor&, ScanShape, const ScanBackward<__half>&, bool);
template void scan_rows(const Launch&, const Tensor&, ScanShape, const ScanForward<__nv_bfloat16>&, bool);
template void scan_rows(const Launch&, const Tensor&, ScanShape, const ScanBackward<__nv_bfloat16>&, bool);

}  // namespace opgraft::cuda
