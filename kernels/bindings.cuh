// Host side: tensors in, the kernels' argument structs out.
#pragma once
#include <algorithm>

#include "common.cuh"
#include "ffi.cuh"

namespace santa {

inline int multiprocessors(DLDevice device) {
  int count = 0;
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device.device_id), "device query");
  return count;
}

// Dependent launch needs compute capability 9.0.
inline bool overlaps(DLDevice device) {
  int major = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device.device_id), "device query");
  return major >= 9;
}

inline Batch make_batch(TensorView block_table, TensorView seq_lens, TensorView method, TensorView budget, TensorView seed, int64_t methods,
                        int64_t kv_heads, int64_t layer, int64_t head_offset, int64_t max_units) {
  Batch batch;
  batch.seq_lens = data<const int>(seq_lens);
  batch.method = data<const int8_t>(method);
  batch.budget = data<const int>(budget);
  batch.seed = data<const int64_t>(seed);
  batch.block_table = data<const int>(block_table);
  batch.table_stride = block_table.stride(0);
  batch.rows = int(seq_lens.size(0));
  batch.kv_heads = int(kv_heads);
  batch.methods = uint32_t(methods);
  batch.layer = int(layer);
  batch.head_offset = int(head_offset);
  batch.max_units = int(max_units);
  return batch;
}

// kv: [blocks, kv_heads, block_size, 2 * head_dim], dense within a block.
inline Pages make_pages(TensorView kv) { return Pages{kv.data_ptr(), kv.stride(0), int(kv.size(2))}; }

}  // namespace santa
