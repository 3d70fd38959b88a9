// Sums, maxima and scans over a block of THREADS threads. Each ends with every thread holding the result; scratch may be reused after
// the caller's next barrier.
#pragma once
#include <cstdint>

namespace santa {

// value of every lane, summed; the warps' sums meet in scratch: [THREADS / 32].
template <int THREADS>
__device__ int64_t block_sum(int64_t value, int64_t* scratch) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) value += __shfl_xor_sync(~0u, value, d);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  value = scratch[threadIdx.x % (THREADS / 32)];
#pragma unroll
  for (int d = THREADS / 64; d > 0; d /= 2) value += __shfl_xor_sync(~0u, value, d);
  return value;
}

template <int THREADS>
__device__ int block_max(int value, int* scratch) {
  value = __reduce_max_sync(~0u, value);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  return __reduce_max_sync(~0u, scratch[threadIdx.x % (THREADS / 32)]);
}

// Over the lanes of a warp, inclusive; WIDTH: lanes that matter.
template <int WIDTH = 32, class T>
__device__ __forceinline__ T warp_scan(T value) {
#pragma unroll
  for (int d = 1; d < WIDTH; d *= 2) { const T other = __shfl_up_sync(~0u, value, d); if (threadIdx.x % 32 >= d) value += other; }
  return value;
}

template <int THREADS>
__device__ int64_t block_scan(int64_t value, int64_t* scratch, int64_t* total) {  // inclusive; scratch: [THREADS / 32]
  constexpr int kWarps = THREADS / 32;
  const int warp = threadIdx.x / 32;
  value = warp_scan(value);
  if (threadIdx.x % 32 == 31) scratch[warp] = value;
  __syncthreads();
  const int64_t upto = warp_scan<kWarps>(scratch[threadIdx.x % kWarps]);
  *total = __shfl_sync(~0u, upto, kWarps - 1);
  return value + (warp > 0 ? __shfl_sync(~0u, upto, warp - 1) : 0);
}

}  // namespace santa
