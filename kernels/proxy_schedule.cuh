// Which blocks of the code scan hold a part of a row and KV head: the scan leaves one sum per block, the next stage adds them up.
#pragma once
#include "schedule.cuh"

namespace santa {

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
