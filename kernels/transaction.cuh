// Transaction barriers, in shared memory: a phase ends with one arrival and as many bytes as that announced. From compute capability 9.0 on;
// nothing before.
#pragma once
#include "common.cuh"

namespace santa {

// All by its address in shared memory. By one thread; for other blocks of a cluster to use it, a barrier of the cluster has to follow.
__device__ __forceinline__ void transaction_init(uint32_t barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(barrier) : "memory");
#endif
}

// The arrival. By one thread.
__device__ __forceinline__ void transaction_expect(uint32_t barrier, int bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
#endif
}

// Waits for the end of a phase, 0 and 1 in turns. CLUSTER: what arrives comes from other blocks.
template <bool CLUSTER>
__device__ __forceinline__ void transaction_wait(uint32_t barrier, int phase) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t done;
  do
    if constexpr (CLUSTER)
      asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                   : "=r"(done) : "r"(barrier), "r"(phase) : "memory");
    else
      asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                   : "=r"(done) : "r"(barrier), "r"(phase) : "memory");
  while (!done);
#endif
}

}  // namespace santa
