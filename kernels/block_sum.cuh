// Sums, maxima and scans over a block of THREADS threads. Each ends with every thread holding the result; scratch may be reused after
// the caller's next barrier.
#pragma once
#include <cstdint>

namespace santa {

template <int THREADS, class T, class Op>
__device__ T block_reduce(T value, T* scratch, Op op) {          // scratch: [THREADS / 32]
#pragma unroll
  for (int d = 16; d > 0; d /= 2) value = op(value, __shfl_xor_sync(~0u, value, d));
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  value = scratch[0];
#pragma unroll
  for (int w = 1; w < THREADS / 32; ++w) value = op(value, scratch[w]);
  return value;
}

template <int THREADS>
__device__ int64_t block_scan(int64_t value, int64_t* scratch, int64_t* total) {  // inclusive; scratch: [THREADS / 32]
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) { const int64_t other = __shfl_up_sync(~0u, value, d); if (lane >= d) value += other; }
  if (lane == 31) scratch[warp] = value;
  __syncthreads();
  int64_t sum = 0, ahead = 0;
#pragma unroll
  for (int w = 0; w < THREADS / 32; ++w) { if (w < warp) ahead += scratch[w]; sum += scratch[w]; }
  *total = sum;
  return value + ahead;
}

}  // namespace santa
