// pps, where the first look was far off: q mixed anew, with the heads' exact log2-sum-exps.
//
// q = sum over heads of 2^(x - norm) with lambda solving sum min(1, lambda q) = budget. With exact norms lambda is at least budget / group, so
// every head gets a fair share or more: pi >= lambda p. A look that misses what a head attends to (keys that only few tokens match) has far
// too small a norm for it, and the other heads' shares shrink by as much; one that met a rare heavy key has far too large a norm, and the
// head's own share shrinks. Both show once the exact sums are known. Rare, so simple rather than fast: the row's keys are read once more.
#pragma once
#include "pps.cuh"
#include "tile.cuh"

namespace santa {

constexpr float kStarved = 3.f;   // bits of a fair share that a head may lack

// The least that log2 lambda and a head's log2-sum-exp may come to together.
__device__ __forceinline__ float least_share(float norm, int budget) { return norm + log2_fast(float(budget) * (1.f / kGroup)) - kStarved; }

// Whether a head's share is too small, or not even tokens with the highest code are certain, which stands for all weights from there on.
// rate: lambda in log-codes.
__device__ __forceinline__ bool starved(int rate, float lse, float least) {
  return lse > -INFINITY && (rate * (1.f / 256.f) + lse < least || rate < -(kByteCodes - 1 - kCodeZero << kBinShift));
}

// Codes of tokens begin .. end - 1, and their histogram in shared memory. By all warps of a block; norm: [kGroup].
template <int WARPS>
__device__ void remix(const Batch& batch, const Pages& pages, const Scores& scores, const Query& query, const float* norm, int row, int head,
                      int begin, int end, uint8_t* codes, unsigned* histogram) {
  const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
  for (int tile = begin + int(threadIdx.x) / 32 * 16; tile < end; tile += WARPS * 16) {
    uint4 rows[2][kPieces];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const Half* key = token_row(batch, pages, row, head, min(tile + r + 8 * e, end - 1)) + c * 8;
#pragma unroll
      for (int p = 0; p < kPieces; ++p) rows[e][p] = load_row(key + p * 32);
    }
    float acc[kColumns][4] = {};
    multiply<0, kPieces>(acc, rows[0], rows[1], query);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float q = 0.f;
#pragma unroll
      for (int j = 0; j < kColumns; ++j)
#pragma unroll
        for (int k = 0; k < 2; ++k)
          if (const int h = 8 * j + 2 * c + k; h < kGroup) q += bounded_weight(scores(acc[j][2 * e + k]), norm[h]);
      q += __shfl_xor_sync(kAll, q, 1);
      q += __shfl_xor_sync(kAll, q, 2);
      const int token = tile + r + 8 * e;
      if (c != e || token >= end) continue;
      const int code = byte_code(q);
      codes[token] = uint8_t(code);
      if (code > 0) atomicAdd(&histogram[code], 1u);
    }
  }
}

}  // namespace santa
