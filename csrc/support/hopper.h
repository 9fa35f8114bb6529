// Bulk copies into shared memory, the barriers that they complete on, and clusters of blocks: compute capability 9.0
// on. (PTX ISA 8.0, cp.async.bulk, mbarrier and barrier.cluster.) Where the compiler's target is older nothing is
// defined.
#pragma once

#include <cstdint>

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define OPGRAFT_HOPPER 1
#endif

#ifdef OPGRAFT_HOPPER
namespace opgraft::cuda::hopper {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void barrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Makes initialised barriers known to the copy engine and to the cluster.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Orders own writes to shared memory before bulk copies that are issued later.
__device__ __forceinline__ void fence_shared_writes() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// One arrival, and `bytes` that bulk copies will bring.
__device__ __forceinline__ void arrive_expecting(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

// A warp that waits sleeps, and leaves the issue slots to those that work.
constexpr uint32_t SLEEP_NANOSECONDS = 1000000;

__device__ __forceinline__ void wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n\t.reg .pred done;\n\t"
      "again:\n\t"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, %2;\n\t"
      "@done bra over;\n\t"
      "bra again;\n\t"
      "over:\n\t}" ::"r"(shared_address(barrier)),
      "r"(parity), "r"(SLEEP_NANOSECONDS)
      : "memory");
}

// Both addresses and the size are multiples of 16.
__device__ __forceinline__ void bulk_copy(void* to_shared, const void* from_global, uint32_t bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to_shared)),
               "l"(from_global), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of all blocks of the cluster.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The address of the same variable in another block of the cluster.
__device__ __forceinline__ uint32_t address_in(const void* own, uint32_t rank) {
  uint32_t found;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(found) : "r"(shared_address(own)), "r"(rank));
  return found;
}

// Stores into a block of the cluster and counts its bytes on a barrier of that block. A plain store with a releasing
// arrival would first wait for all stores to global memory that the thread has under way.
__device__ __forceinline__ void send(uint32_t address, float value, uint32_t barrier_address) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(address), "f"(value),
               "r"(barrier_address)
               : "memory");
}

__device__ __forceinline__ void send(uint32_t address, double value, uint32_t barrier_address) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f64 [%0], %1, [%2];" ::"r"(address), "d"(value),
               "r"(barrier_address)
               : "memory");
}

__device__ __forceinline__ void send(uint32_t address, int64_t value, uint32_t barrier_address) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(address), "l"(value),
               "r"(barrier_address)
               : "memory");
}

}  // namespace opgraft::cuda::hopper
#endif
