// Blocks of a cluster: a barrier, and each other's shared memory. Before compute capability 9.0 a cluster is one block.
#pragma once
#include "common.cuh"

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

// Where a shared variable of this block lies in block `rank` of the cluster.
template <class T>
__device__ __forceinline__ T* in_block(T* shared, int rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  T* remote;
  asm("mapa.u64 %0, %1, %2;" : "=l"(remote) : "l"(shared), "r"(rank));
  return remote;
#else
  return shared;
#endif
}

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
