// Splits the batch's units (64 tokens of one row and KV head) evenly over a fixed grid, so that one long row and many short rows
// both fill the GPU. Context lengths are only known on the device: each block counts the units of all rows itself.
#pragma once
#include "block_sum.cuh"
#include "common.cuh"

namespace santa {

struct Segment {       // consecutive units of one row and KV head
  int row, head, first, last, length;
};

// before[r] = sum over the rows ahead of r of count_of(row); before[rows] = all. For blocks of THREADS threads; ends with a barrier.
template <int THREADS, class Function>
__device__ void count_rows(int rows, int* before, const Function& count_of) {
  __shared__ int warp_sum[THREADS / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int base = 0;
  for (int start = 0; start < rows; start += THREADS) {
    const int row = start + threadIdx.x;
    const int count = row < rows ? count_of(row) : 0;
    int sum = warp_scan(count);
    if (lane == 31) warp_sum[warp] = sum;
    __syncthreads();
    int total = 0;
#pragma unroll
    for (int w = 0; w < THREADS / 32; ++w) { if (w < warp) sum += warp_sum[w]; total += warp_sum[w]; }
    if (row < rows) before[row] = base + sum - count;
    if (row == rows - 1) before[rows] = base + sum;
    base += total;
    __syncthreads();
  }
}

// Units (per KV head) of the rows.
template <int THREADS>
__device__ void count_units(const Batch& batch, int* before) {
  count_rows<THREADS>(batch.rows, before, [&](int row) { return ceil_div(batch.length(row), kUnit); });
}

// The row that global item `at` belongs to, the last that begins at or before it, where each row has before[row + 1] - before[row] items per
// KV head.
__device__ inline int row_of(const Batch& batch, const int* before, int64_t at) {
  int low = 0, high = batch.rows - 1;
  while (low < high) {
    const int mid = (low + high + 1) / 2;
    if (int64_t(before[mid]) * batch.kv_heads <= at) low = mid; else high = mid - 1;
  }
  return low;
}

// The segment that starts at global unit `at` and ends at `end` or where its row and head end. Units run head by head within a row.
__device__ inline Segment segment_at(const Batch& batch, const int* before, int64_t at, int64_t end) {
  const int low = row_of(batch, before, at);
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

constexpr int kMinChunk = 4;                       // units

// A scan's work in chunks: consecutive units of one row and KV head, in order, so that rows get done one after the other and the stage behind
// works on a row, as Progress tells it, while the scan reads the next ones. Blocks take chunks as they get done with theirs: some
// multiprocessors reach the memory a fifth faster than others. A chunk's start costs a warp more than a
// microsecond, so where there is little to do, up to `alone` units a block, every block gets one chunk, else several of at least `least` units.
struct Chunks {
  const Batch& batch;
  const int *before, *lengths;       // chunks per KV head of the rows ahead; tokens of the rows that are ours, else 0
  int size, count;                   // units of a chunk; chunks

  static size_t bytes(const Batch& batch) { return (2 * batch.rows + 1) * sizeof(int); }

  // shared: bytes() of it. entry: what a chunk's start costs, in units.
  template <int THREADS>
  __device__ static Chunks make(const Batch& batch, int* shared, int alone, int least, int entry) {
    int *before = shared, *lengths = shared + batch.rows + 1;
    count_rows<THREADS>(batch.rows, before, [&](int row) { return ceil_div(lengths[row] = batch.length(row), kUnit); });
    const int even = ceil_div(before[batch.rows] * batch.kv_heads, gridDim.x);
    const int size = fitting_size(batch, lengths, even > alone ? least : max(kMinChunk, even), entry);
    count_rows<THREADS>(batch.rows, before, [&](int row) { return ceil_div(ceil_div(lengths[row], kUnit), size); });
    return {batch, before, lengths, size, before[batch.rows] * batch.kv_heads};
  }

  // The size, from `least` on and below twice that, with which the blocks are done first: rows are cut into whole chunks and blocks take whole
  // ones, so that 16 rows and KV heads of 469 units on 264 blocks, say, take twice as long in chunks of 29 units (272) as in chunks of 30 (256).
  // The last chunk to start keeps its block alone, on average for half a chunk.
  __device__ static int fitting_size(const Batch& batch, const int* lengths, int least, int entry) {
    const int size = least + min(int(threadIdx.x % 32), least - 1);
    const float inverse = __frcp_rn(float(size));
    int chunks = 0;
#pragma unroll 4
    for (int row = 0; row < batch.rows; ++row) chunks += __float2int_ru(fmaf(float(ceil_div(lengths[row], kUnit)), inverse, -1e-3f));
    const unsigned rounds = ceil_div(chunks * batch.kv_heads, gridDim.x), cost = 2 * rounds * (size + entry) + size;
    return least + __reduce_min_sync(0xffffffffu, cost * 32 + size - least) % 32;
  }

  __device__ Segment at(int chunk) const {
    const int low = row_of(batch, before, chunk);
    const int per_head = before[low + 1] - before[low], within = chunk - before[low] * batch.kv_heads;
    Segment s;
    s.row = low;
    s.head = within / per_head;
    s.length = lengths[low];
    s.first = within % per_head * size;
    s.last = min(ceil_div(s.length, kUnit), s.first + size);
    return s;
  }
};

// Hands out chunks beyond every block's first. Zero before and after.
struct Queue {
  int* next;                         // [2]: chunks handed out; blocks that are done

  // The next of `count` chunks.
  __device__ int take(int count) const { return count > int(gridDim.x) ? int(gridDim.x) + atomicAdd(next, 1) : count; }
  // By one thread of every block, after its last take().
  __device__ void leave() const {
    if (atomicAdd(next + 1, 1) == int(gridDim.x) - 1) next[0] = next[1] = 0;
  }
};

// How far the scan is: for every row and KV head, units done, and blocks that have reported or read. Zero before and after.
struct Progress {
  int2* pair;

  __device__ __forceinline__ static void wait_for(const int* counter, int value) {
    int seen;
    do asm volatile("ld.acquire.gpu.s32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory"); while (seen < value);
  }

  // By one thread that knows of the others' stores.
  __device__ void add(int64_t which, int units) const {
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(&pair[which].x), "r"(units) : "memory");
  }
  // Waits until all units are done. By all threads; needs every block of the scan to be running.
  __device__ void wait(int64_t which, int units) const {
    if (threadIdx.x == 0) wait_for(&pair[which].x, units);
    __syncthreads();
  }
  // By one thread of each of the `readers` blocks that have waited.
  __device__ void leave(int64_t which, int readers) const {
    if (readers == 1 || atomicAdd(&pair[which].y, 1) == readers - 1) pair[which] = make_int2(0, 0);
  }
};

}  // namespace santa
