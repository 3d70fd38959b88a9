// The buffers the stages of pps share, and the stages in the order they run.
#pragma once
#include "schedule.cuh"
#include "selection.cuh"

namespace santa {

constexpr int kLookParts = 8, kLookTokens = 2048;     // blocks that share a first look, one for every so many tokens
constexpr int kLookKeys = 128, kLookFirst = 16, kLookLast = 48;     // keys a part looks at; of them all, at the row's start and end

__device__ __forceinline__ int look_parts(int n) { return n == 0 ? 0 : min(kLookParts, 1 + n / kLookTokens); }
// Keys that each of those between start and end stands for.
__device__ __forceinline__ float look_share(int n) {
  const int looks = look_parts(n) * kLookKeys, ends = kLookFirst + kLookLast;
  return n <= looks ? 1.f : float(n - ends) / float(looks - ends);
}

// The scan keeps 8 bits of a log-code: 0 excludes the token, c stands for 32 (c - kCodeZero), an eighth of an octave a step, from 2^-24
// to 2^8 times a head's whole mass. q only shapes the inclusion probabilities, so a coarse one is as fair.
constexpr int kByteCodes = 256, kCodeZero = 192;

struct PpsBuffers {               // P = rows * kv_heads pairs of a row and a KV head
  float4* look;                   // [P, kLookParts, group] (m, s, t, 0): what q was mixed with, a head's norm, is log2 of the parts' s * 2^m together,
                                  // less what look_norm() takes off for t, the highest score of a part's keys that stand for others
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

// Log2 of a head's estimate, 0 if that is no number. part: the head's first part, already complete.
//
// Of the keys that stand for others, the heaviest counts once: if it is one of a few that hold a head's mass, counting it for all the keys
// around it would make the head seem heavier than it is by as much, and starve it.
__device__ __forceinline__ float look_norm(const float4* part, int n) {
  float4 own[kLookParts];
  float top = -1e30f, sum = 0.f, heaviest = -1e30f;
#pragma unroll
  for (int p = 0; p < kLookParts; ++p) own[p] = p < look_parts(n) ? __ldcg(part + p * kGroup) : make_float4(-1e30f, 0.f, -1e30f, 0.f);
#pragma unroll
  for (int p = 0; p < kLookParts; ++p) { top = fmaxf(top, own[p].x); heaviest = fmaxf(heaviest, own[p].z); }
#pragma unroll
  for (int p = 0; p < kLookParts; ++p) sum += own[p].y * exp2_fast(own[p].x - top);
  const float rest = sum - (look_share(n) - 1.f) * exp2_fast(heaviest - top);
  return rest > 0.f && rest < INFINITY ? top + log2_fast(rest) : 0.f;
}

// What a head adds to q with a log2-domain score: 2^(score - norm), within what is finite; a NaN weighs nothing.
__device__ __forceinline__ float bounded_weight(float score, float norm) { return exp2_fast(fminf(fmaxf(score - norm, -INFINITY), 100.f)); }

// The byte of a token with this q.
__device__ __forceinline__ int byte_code(float q) {
  return q > 0.f ? max(1, min(kByteCodes - 1, __float2int_rd(8.f * log2_fast(q)) + kCodeZero)) : 0;
}

cudaError_t look(const Batch&, const Pages&, const Scores&, const void* q, const PpsBuffers&, cudaStream_t);
cudaError_t score_codes(const Batch&, const Pages&, const Scores&, const void* q, const PpsBuffers&, int blocks, cudaStream_t,
                        bool overlap);
cudaError_t sample_rows(const Batch&, const Pages&, const Scores&, const void* q, const PpsBuffers&, void* out, float* lse, cudaStream_t,
                        bool overlap);

}  // namespace santa
