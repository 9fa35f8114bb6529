// Boxes of a tensor moved between memory and shared memory by the copy engine of compute capability 9.0 (PTX's
// cp.async.bulk): one thread asks for a whole box, no address is computed a row, and what is outside of the tensor
// reads as zero and is not written.
#pragma once

#include <cudaTypedefs.h>

#include "support/check.h"
#include "support/cuda.h"
#include "support/twofold.h"

namespace opgraft::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define OPGRAFT_NO_BOXES
#endif

// Whether machine code with boxes was built for the current device; elsewhere such a kernel's body is empty.
template <typename Kernel>
bool has_boxes(Kernel kernel) {
  cudaFuncAttributes found;
  STD_CUDA_CHECK(cudaFuncGetAttributes(&found, kernel));
  return found.ptxVersion >= 90;
}

// How 16-byte vectors stand in a box in shared memory: in order, or in an order by rows in which threads that read the
// same vector of eight rows meet all banks. A box so swizzled begins at a multiple of 512 bytes.
enum class BoxOrder { PLAIN, ROWS_OF_64_BYTES };

// Of a contiguous tensor [sets][rows][steps] of 16-bit values. The steps are whole vectors of 16 bytes, as is the
// address of the first.
inline CUtensorMap box_map(const void* data, int64_t sets, int64_t rows, int64_t steps, uint32_t box_rows,
                           uint32_t box_steps, BoxOrder order) {
  static const auto encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    STD_CUDA_CHECK(
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result));
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found);
  }();
  check(encode != nullptr, "opgraft", "the CUDA driver has no cuTensorMapEncodeTiled: it is older than 12.0");
  constexpr uint64_t BYTES = 2;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(steps), static_cast<cuuint64_t>(rows),
                              static_cast<cuuint64_t>(sets)};
  const cuuint64_t strides[] = {sizes[0] * BYTES, sizes[0] * sizes[1] * BYTES};
  const cuuint32_t box[] = {box_steps, box_rows, 1}, every[] = {1, 1, 1};
  CUtensorMap map;
  const CUresult result =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 3, const_cast<void*>(data), sizes, strides, box, every,
             CU_TENSOR_MAP_INTERLEAVE_NONE,
             order == BoxOrder::ROWS_OF_64_BYTES ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_NONE,
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check(result == CUDA_SUCCESS, "opgraft", "cuTensorMapEncodeTiled refuses a tensor of ", sets, " x ", rows, " x ",
        steps, " (error ", static_cast<int>(result), ")");
  return map;
}

// The place of a vector in a box whose rows are 64 bytes, ROWS_OF_64_BYTES.
__device__ __forceinline__ int swizzled(int row, int vector) { return row * 4 + (vector ^ (row / 2 % 4)); }

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// True in one thread of a whole warp; the compiler knows then that the branch is one thread's.
__device__ __forceinline__ bool elected() {
  uint32_t mine = 0;
#ifndef OPGRAFT_NO_BOXES
  asm volatile("{\n .reg .pred mine;\n elect.sync _|mine, 0xffffffff;\n selp.b32 %0, 1, 0, mine;\n}" : "=r"(mine));
#endif
  return mine;
}

// Of a warp, where the compiler shall know that it is the same in all of its lanes: boxes' addresses are then computed
// once a warp.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(WHOLE_WARP, value, 0); }

// On which threads wait for boxes: the bytes that are to arrive are told by the thread that asks for them.
struct BoxBarrier {
  uint64_t word;

  __device__ __forceinline__ void init() {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&word)) : "memory");
  }
  // Once after init, by the thread that did it: the copy engine sees it then.
  static __device__ __forceinline__ void publish() {
#ifndef OPGRAFT_NO_BOXES
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }
  __device__ __forceinline__ void expect(uint32_t bytes) {
#ifndef OPGRAFT_NO_BOXES
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&word)), "r"(bytes)
                 : "memory");
#endif
  }
  // `turn`: how often it was waited for before.
  __device__ __forceinline__ void wait(uint32_t turn) {
#ifndef OPGRAFT_NO_BOXES
    asm volatile(
        "{\n .reg .pred done;\n AGAIN:\n mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        " @!done bra AGAIN;\n}" ::"r"(shared_address(&word)),
        "r"(turn & 1)
        : "memory");
#endif
  }
};

__device__ __forceinline__ void load_box(void* to, const CUtensorMap& map, int step, int row, int set,
                                         BoxBarrier& done) {
#ifndef OPGRAFT_NO_BOXES
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];" ::"r"(shared_address(to)),
      "l"(&map), "r"(step), "r"(row), "r"(set), "r"(shared_address(&done))
      : "memory");
#endif
}

// Consecutive bytes, a multiple of 16 at such an address.
__device__ __forceinline__ void load_bytes(void* to, const void* from, uint32_t bytes, BoxBarrier& done) {
#ifndef OPGRAFT_NO_BOXES
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(&done))
               : "memory");
#endif
}

// What threads wrote to shared memory is seen by store_box, where each of them calls this before it is asked for.
__device__ __forceinline__ void show_to_boxes() {
#ifndef OPGRAFT_NO_BOXES
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

__device__ __forceinline__ void store_box(const CUtensorMap& map, int step, int row, int set, const void* from) {
#ifndef OPGRAFT_NO_BOXES
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(&map),
               "r"(step), "r"(row), "r"(set), "r"(shared_address(from))
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}

// Waits until all boxes that this thread stored have left shared memory.
__device__ __forceinline__ void wait_for_stored_boxes() {
#ifndef OPGRAFT_NO_BOXES
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
}

}  // namespace opgraft::cuda
