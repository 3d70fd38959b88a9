// The buffers the stages of pps share, and the stages in the order they run.
#pragma once
#include "schedule.cuh"
#include "selection.cuh"

namespace santa {

constexpr int kLookParts = 4;     // blocks that share a first look; one for every 16K tokens

__device__ __forceinline__ int look_parts(int n) { return n == 0 ? 0 : min(kLookParts, 1 + n / 16384); }

// The scan keeps 8 bits of a log-code: 0 excludes the token, c stands for 32 (c - kCodeZero), an eighth of an octave a step, from 2^-24
// to 2^8 times a head's whole mass. q only shapes the inclusion probabilities, so a coarse one is as fair.
constexpr int kByteCodes = 256, kCodeZero = 192;

struct PpsBuffers {               // P = rows * kv_heads pairs of a row and a KV head
  float2* look;                   // [P, kLookParts, group] (m, s): a part of the estimate is s * 2^m
  unsigned* histogram;            // [P, kByteCodes] of the codes
  uint8_t* codes;                 // [P, max_units * kUnit]
  float* unit_mass;               // [P, max_units, group] log2 of what the unit's keys weigh
  Queue queue;
  Progress progress;              // [P] of the scan and, second, the blocks of the first look that are done
  const int64_t* exp2;            // [256] round(2^43 * 2^(f / 256))
  int* rate;                      // [P] lambda in log-codes (written for whoever wants to know)
  int4* sample;                   // [P, max_samples] (token, its row in the cache, inclusion probability as float, 0)
  int* count;                     // [P]
  int max_samples;
};

cudaError_t look(const Batch&, const Pages&, const Scores&, const void* q, const PpsBuffers&, cudaStream_t);
cudaError_t score_codes(const Batch&, const Pages&, const Scores&, const void* q, const PpsBuffers&, int blocks, cudaStream_t,
                        bool overlap);
cudaError_t sample_rows(const Batch&, const Pages&, const Scores&, const void* q, const PpsBuffers&, void* out, float* lse, cudaStream_t,
                        bool overlap);

}  // namespace santa
