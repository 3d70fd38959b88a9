// The value samplers (santa, strat, sys, prop, flash): the stash the K scan leaves, and what sampling makes of it.
#pragma once
#include <algorithm>

#include "gather.cuh"
#include "schedule.cuh"

namespace santa {

enum Method { kSanta = 1, kStrat = 2, kSys = 3, kProp = 4, kFlash = 5 };

constexpr int kTokenBits = 16;    // flash keeps u = floor(2^(x - e) * 2^16) of a token, at most 65535,
constexpr int kFour = 4, kSums = kUnit / kFour;
constexpr int kSumBits = 14;      // the others floor(2^14 * sum of 2^(x - e)) of four tokens

struct Stash {                    // P = rows * KV heads
  uint16_t* weight;               // [P, group * max_units * kUnit]: of tokens [group, max_units, kUnit], or of fours [max_units, group, kSums]
  int2* unit;                     // [P, max_units, group] (e, sum of the unit's weights)
  Queue queue;
  Progress progress;              // [P] of the scan

  __device__ uint16_t* weight_of(int64_t pair, int max_units) const { return weight + pair * max_units * (kGroup * kUnit); }
  __device__ static int64_t token_at(int head, int unit, int max_units) { return (int64_t(head) * max_units + unit) * kUnit; }
  __device__ static int64_t sums_at(int head, int unit) { return (int64_t(unit) * kGroup + head) * kSums; }
};

// Exactly 2^e as double for e <= 0, 0 below the normal range.
__device__ __forceinline__ double pow2(int e) { return e < -1022 ? 0.0 : __longlong_as_double(int64_t(e + 1023) << 52); }

// A unit's share of Z, in units of 2^(E - 20 - bits of its weights).
__device__ __forceinline__ int64_t unit_share(int2 unit, int top) { return int64_t(unit.y) << 20 >> min(top - unit.x, 63); }

// Expected copies per unit of weight: per_mass = S * 2^64 / Z.
__device__ __forceinline__ int64_t copies_per_weight(double per_mass, int2 unit, int top) { return int64_t(per_mass * pow2(unit.x - top)); }

cudaError_t score_values(const Batch&, const Pages&, const Scores&, const void* q, const Stash&, int blocks, cudaStream_t);
// Blocks that sample tiles share a row and KV head; each split's (exponent, mass) per head tells how much its part weighs.
struct TileMerge {
  Merge merge;                    // SIZE: group * head_dim
  int2* mass;                     // [P, splits, group] (exponent, mass as float)
};

// drawn: [rows, query heads, max_draws] the token of every draw, -1 for none.
cudaError_t sample_points(const Batch&, const Pages&, const Scores&, const void* q, const Stash&, const Merge&, int* drawn, int max_draws,
                          void* out, float* lse, cudaStream_t, bool overlap);

cudaError_t sample_tiles(const Batch&, const Pages&, const Stash&, const TileMerge&, void* out, float* lse, cudaStream_t, bool overlap);

}  // namespace santa
