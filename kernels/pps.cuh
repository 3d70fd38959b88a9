// The buffers the stages of pps share, and the stages in the order they run.
#pragma once
#include "gather.cuh"
#include "selection.cuh"

namespace santa {

constexpr int kLookParts = 4;     // blocks that share a first look; one for every 16K tokens

__device__ __forceinline__ int look_parts(int n) { return n == 0 ? 0 : min(kLookParts, 1 + n / 16384); }

struct PpsBuffers {               // P = rows * kv_heads pairs of a row and a KV head
  float2* look;                   // [P, kLookParts, group] (m, s): a part of the estimate is s * 2^m
  unsigned* histogram;            // [P, kBins] of the log-codes
  int16_t* codes;                 // [P, max_units * kUnit]
  float2* unit_mass;              // [P, max_units, group] (e, m): the unit's keys weigh m * 2^e
  int64_t* chunk_sum;             // [P, max_chunks] of the place kernel
  int max_chunks;
};

cudaError_t look(const Batch&, const Pages&, const Scores&, const void* q, const PpsBuffers&, cudaStream_t);
cudaError_t score_codes(const Batch&, const Pages&, const Scores&, const void* q, const PpsBuffers&, int blocks, cudaStream_t,
                        bool overlap);
// then place of selection.cuh
cudaError_t gather(const Batch&, const Pages&, const Scores&, const void* q, const SelectBuffers&, const Merge&, void* out, float* lse,
                   cudaStream_t, bool overlap);

}  // namespace santa
