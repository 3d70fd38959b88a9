// How the scan, which leaves one sum per block, and the placement, which works in chunks, are divided over blocks.
#pragma once
#include "schedule.cuh"

namespace santa {

// The placement's chunks: kChunk tokens of one row and KV head, in order, one after the other for as many blocks as there are. The work is
// that of the rows as they are, whatever the longest row that buffers were made for.
struct PlaceChunks {
  struct Chunk { int row, head, index; };

  const Batch& batch;
  const int* before;                                 // chunks per KV head of the rows ahead
  int count;                                         // of the whole batch

  // before: [rows + 1], in shared memory. Ends with a barrier.
  template <int THREADS>
  __device__ static PlaceChunks make(const Batch& batch, int* before) {
    count_rows<THREADS>(batch.rows, before, [&](int row) { return ceil_div(batch.length(row), kChunk); });
    return {batch, before, before[batch.rows] * batch.kv_heads};
  }
  __device__ Chunk operator[](int at) const {
    const int row = row_of(batch, before, at), own = before[row + 1] - before[row], within = at - before[row] * batch.kv_heads;
    return {row, within / own, within % own};
  }
};

// Blocks of a kernel that wait for each other: no more than can run at once.
template <class... Params>
inline cudaError_t resident_blocks(void (*kernel)(Params...), int threads, size_t smem, int* blocks) {
  int device, multiprocessors, each;
  if (const cudaError_t status = allow_shared_memory(kernel, smem)) return status;
  if (const cudaError_t status = cudaGetDevice(&device)) return status;
  if (const cudaError_t status = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device)) return status;
  if (const cudaError_t status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, threads, smem)) return status;
  *blocks = multiprocessors * each;
  return each ? cudaSuccess : cudaErrorLaunchOutOfResources;
}

struct NormSlots {
  int first, count;                                  // blocks first .. first + count - 1 of the scan's grid

  // units: of the whole batch; blocks: of the scan, each with an equal share of the units.
  __device__ NormSlots(const Batch& batch, const int* before, int row, int head, int64_t units, int blocks) {
    const int64_t own = before[row + 1] - before[row], begin = int64_t(before[row]) * batch.kv_heads + head * own;
    first = block_of(begin, units, blocks);
    count = block_of(begin + own - 1, units, blocks) - first + 1;
  }
  // Whether block first + i has a share at all: with fewer units than blocks some have none.
  __device__ bool filled(int i, int64_t units, int blocks) const {
    return units * (first + i) / blocks < units * (first + i + 1) / blocks;
  }

 private:
  // The block b with units * b / blocks <= unit < units * (b + 1) / blocks.
  __device__ static int block_of(int64_t unit, int64_t units, int blocks) { return int(((unit + 1) * blocks - 1) / units); }
};

}  // namespace santa
