// How the backward kernel of selective_scan cuts its work, where things stand in shared memory, and what it writes.
#pragma once

#include "cuda/selective_scan.cuh"

namespace opgraft::cuda {

template <typename C, int STEPS_, int K_, int BLOCKS_>
struct BackCut : C {
  static constexpr int STEPS = STEPS_;
  static constexpr int K = K_;            // steps whose states are in registers at once
  static constexpr int BLOCKS = BLOCKS_;  // an SM
};

// Three planes of a warp's rows: going in, the step size, the step size times u, and the gradient of y before the gate;
// coming out, the gradient of (step size * u), the gradient of the step size by the decays, and y.
enum Plane { STEP, INPUT, OUTPUT, PLANES };

template <typename A, typename C>
struct BackShared {
  static constexpr int K = C::K;
  static constexpr int ORDERS = C::NS < C::GROUPS ? C::NS : C::GROUPS;
  static constexpr int KIND = ORDERS * C::PADDED;  // B or C of one step, in every order of a lane's states
  static constexpr int MATRIX = 2 * KIND + 4;
  static constexpr int PITCH = C::STEPS + 4;      // of a plane's row: 4 words modulo 16
  static constexpr int SUMS = 2 * C::PADDED + 1;  // of one step, dB then dC; odd, since it is read along time
  static constexpr int TILES = 2 * C::STEPS * MATRIX;
  static constexpr int WARP_SUMS = (C::STEPS * SUMS + 3) / 4 * 4;
  static constexpr int PLANE = C::WARP_ROWS * PITCH;
  static constexpr int STARTS = C::STEPS / K * C::VALUES * 32;
  static constexpr int WARP = PLANES * PLANE + STARTS;
  static constexpr size_t BYTES = sizeof(A) * (TILES + 2 * C::WARPS * WARP_SUMS + C::WARPS * WARP);
  static_assert(C::STEPS % K == 0);
};

template <typename T>
struct ScanGradients {
  using W = DeviceAccumulate<T>;
  const T* up;
  const W* up_final;
  const W* states;  // [mark][batch][channel][state]
  T *u, *delta, *z;
  W *a, *skip, *bias;  // [segment][batch][channel]...
  W* matrices;         // [block of channels][B or C][batch][group][state][step]
  W* initial;
};

}  // namespace opgraft::cuda
