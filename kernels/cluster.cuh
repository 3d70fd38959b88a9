// Blocks of a cluster: a barrier, and what they send each other. Before compute capability 9.0 a cluster is one block.
#pragma once
#include "transaction.cuh"

namespace santa {

__device__ __forceinline__ void cluster_arrive() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}
__device__ __forceinline__ void cluster_barrier() { cluster_arrive(); cluster_wait(); }

// What the blocks of a cluster send into each other's shared memory, counted in bytes where it arrives. A barrier of the cluster would have to
// wait for every store on its way first: half a microsecond. In shared memory; a phase takes one expect() and as many bytes. A block that is alone
// stores and meets its threads at its own barrier: outside of a cluster the counting store is an illegal instruction.
struct Mailbox {
  uint64_t barrier;

  __device__ __forceinline__ static bool alone() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    return gridDim.x == 1;
#else
    return true;
#endif
  }

  __device__ __forceinline__ static uint32_t at(const void* shared) { return uint32_t(__cvta_generic_to_shared(shared)); }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __device__ __forceinline__ static uint32_t in_block(const void* shared, int rank) {
    uint32_t remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(at(shared)), "r"(rank));
    return remote;
  }
#endif

  // By one thread, before a barrier of the cluster.
  __device__ __forceinline__ void init() {
    if (!alone()) transaction_init(at(&barrier));
  }
  // By one thread.
  __device__ __forceinline__ void expect(int bytes) {
    if (!alone()) transaction_expect(at(&barrier), bytes);
  }
  // Waits for the end of a phase, 0 and 1 in turns. By all threads.
  __device__ __forceinline__ void wait(int phase) {
    if (alone()) __syncthreads(); else transaction_wait<true>(at(&barrier), phase);
  }

  // To where `to` lies in block `rank`, from lanes that `really` do; a block that is alone may be written to by lanes that do not, with the same
  // value. nvcc makes a branch of the predicate; behind one, 13.0 once set a predicate that all lanes share before all lanes had read it.
  __device__ __forceinline__ void send(int rank, bool really, uint2* to, uint2 value) {
    if (alone()) {
      *to = value;
      return;
    }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; @p st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%3, %4}, [%1]; }" ::"r"(
                     in_block(to, rank)),
                 "r"(in_block(&barrier, rank)), "r"(int(really)), "r"(value.x), "r"(value.y)
                 : "memory");
#endif
  }
  __device__ __forceinline__ void send(int rank, float4* to, float4 value) {
    if (alone()) {
      *to = value;
      return;
    }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(in_block(to, rank)),
                 "r"(in_block(&barrier, rank)), "r"(__float_as_uint(value.x)), "r"(__float_as_uint(value.y)), "r"(__float_as_uint(value.z)),
                 "r"(__float_as_uint(value.w))
                 : "memory");
#endif
  }
};

struct ClusterLaunch {            // of blocks that share a cluster along x, of which the grid has a multiple
  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute attributes[2];

  ClusterLaunch(dim3 grid, int block, size_t smem, int size, cudaStream_t stream, bool overlap) {
    config.gridDim = grid;
    config.blockDim = dim3(block);
    config.dynamicSmemBytes = smem;
    config.stream = stream;
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = size;
    attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    config.attrs = attributes;
    config.numAttrs = overlap ? 2 : 1;
  }
};

// Clusters of more than 8 blocks, and large shared memory, must be asked for, on every device anew.
template <class... Params>
inline cudaError_t allow_clusters(void (*kernel)(Params...), size_t smem) {
  if (const cudaError_t status = ask_for_shared_memory(kernel)) return status;
  if (const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(smem))) return status;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
}

// The largest cluster of up to `most` blocks that the device can run; 1 where it knows no clusters.
template <class... Params>
inline int largest_cluster(void (*kernel)(Params...), int block, size_t smem, int most) {
  if (allow_clusters(kernel, smem) != cudaSuccess) most = 1;
  for (int size = most; size > 1; size /= 2) {
    ClusterLaunch launch(dim3(size), block, smem, size, nullptr, false);
    int clusters = 0;
    if (cudaOccupancyMaxActiveClusters(&clusters, kernel, &launch.config) == cudaSuccess && clusters > 0) return size;
  }
  cudaGetLastError();
  return 1;
}

template <class... Params, class... Args>
inline cudaError_t launch_clusters(void (*kernel)(Params...), dim3 grid, int block, size_t smem, int size, cudaStream_t stream, bool overlap,
                                   Args... args) {
  if (size == 1) return launch_side_by_side(kernel, grid, block, smem, stream, overlap, args...);
  if (const cudaError_t status = allow_clusters(kernel, smem)) return status;
  ClusterLaunch launch(grid, block, smem, size, stream, overlap);
  return cudaLaunchKernelEx(&launch.config, kernel, static_cast<Params>(args)...);
}

}  // namespace santa
