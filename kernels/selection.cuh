// Integer selection over log-codes (docs/estimators.md, "Log-codes and selection").
#pragma once
#include "common.cuh"

namespace santa {

// 2^(z / 256) as an inclusion probability, at most 1. double_exp2: the table times two, so that z = 0 needs no case of its own.
__device__ __forceinline__ int64_t power(const int64_t* double_exp2, int z) {
  z = min(z, 0);
  return double_exp2[z & 255] >> min(-(z >> 8), 63);
}

}  // namespace santa
