// Integer selection over log-codes (docs/estimators.md, "Log-codes and selection").
#pragma once
#include "common.cuh"

namespace santa {

struct SelectBuffers {            // P = rows * kv_heads pairs of a row and a KV head
  const unsigned* histogram;      // [P, kBins] of the included log-codes
  const int16_t* codes;           // [P, max_units * kUnit]
  const float2* unit_mass;        // [P, max_units, group] exact mass of every unit, or null
  const int64_t* exp2;            // [256] round(2^43 * 2^(f / 256))
  int* rate;                      // [P] lambda in log-codes (written for whoever wants to know)
  int64_t* chunk_sum;             // [P, max_chunks] zero before the place kernel runs
  float2* chunk_mass;             // [P, max_chunks, group] as unit_mass
  int4* sample;                   // [P, max_samples] (token, its row in the cache, inclusion probability as float, 0)
  int* count;                     // [P]
  int max_chunks, max_samples, group;
};

// 2^(z / 256) as an inclusion probability, at most 1. double_exp2: the table times two, so that z = 0 needs no case of its own.
__device__ __forceinline__ int64_t power(const int64_t* double_exp2, int z) {
  z = min(z, 0);
  return double_exp2[z & 255] >> min(-(z >> 8), 63);
}

cudaError_t place(const Batch&, const SelectBuffers&, int block_size, cudaStream_t, bool overlap);

}  // namespace santa
