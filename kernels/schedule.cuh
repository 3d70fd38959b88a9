// Splits the batch's units (64 tokens of one row and KV head) evenly over a fixed grid, so that one long row and many short rows
// both fill the GPU. Context lengths are only known on the device: each block counts the units of all rows itself.
#pragma once
#include "common.cuh"

namespace santa {

struct Segment {       // consecutive units of one row and KV head
  int row, head, first, last, length;
};

// before[r] = units (per KV head) of the rows ahead of r; before[rows] = all. For blocks of THREADS threads; ends with a barrier.
template <int THREADS>
__device__ void count_units(const Batch& batch, int* before) {
  __shared__ int warp_sum[THREADS / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int base = 0;
  for (int start = 0; start < batch.rows; start += THREADS) {
    const int row = start + threadIdx.x;
    const int units = row < batch.rows ? ceil_div(batch.length(row), kUnit) : 0;
    int sum = units;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) { const int other = __shfl_up_sync(0xffffffffu, sum, d); if (lane >= d) sum += other; }
    if (lane == 31) warp_sum[warp] = sum;
    __syncthreads();
    int total = 0;
#pragma unroll
    for (int w = 0; w < THREADS / 32; ++w) { if (w < warp) sum += warp_sum[w]; total += warp_sum[w]; }
    if (row < batch.rows) before[row] = base + sum - units;
    base += total;
    __syncthreads();
  }
  if (threadIdx.x == 0) before[batch.rows] = base;
  __syncthreads();
}

// The segment that starts at global unit `at` and ends at `end` or where its row and head end. Units run head by head within a row.
__device__ inline Segment segment_at(const Batch& batch, const int* before, int64_t at, int64_t end) {
  int low = 0, high = batch.rows - 1;                // the last row that begins at or before `at`
  while (low < high) {
    const int mid = (low + high + 1) / 2;
    if (int64_t(before[mid]) * batch.kv_heads <= at) low = mid; else high = mid - 1;
  }
  const int units = before[low + 1] - before[low];
  const int64_t within = at - int64_t(before[low]) * batch.kv_heads;
  Segment s;
  s.row = low;
  s.head = int(within / units);
  s.first = int(within % units);
  s.last = int(min(int64_t(units), s.first + (end - at)));
  s.length = batch.seq_lens[low];
  return s;
}

}  // namespace santa
