// The value samplers (santa, strat, sys, prop, flash): the stash the K scan leaves, and what sampling makes of it.
#pragma once
#include <algorithm>

#include "gather.cuh"
#include "schedule.cuh"

namespace santa {

enum Method { kSanta = 1, kStrat = 2, kSys = 3, kProp = 4, kFlash = 5 };

struct Stash {                    // Q = rows * query heads
  uint16_t* weight;               // [Q, max_units * kUnit] u = floor(2^(x - e) * 65536)
  int2* unit;                     // [Q, max_units] (e, sum of the unit's u)
  Queue queue;
  Progress progress;              // [rows * KV heads] of the scan
};

// Exactly 2^e as double for e <= 0, 0 below the normal range.
__device__ __forceinline__ double pow2(int e) { return e < -1022 ? 0.0 : __longlong_as_double(int64_t(e + 1023) << 52); }

// A unit's share of Z, in units of 2^(E - 36).
__device__ __forceinline__ int64_t unit_share(int2 unit, int top) { return int64_t(unit.y) << 20 >> min(top - unit.x, 63); }

// Expected copies of a token per unit of its weight u: per_mass = S * 2^64 / Z.
__device__ __forceinline__ int64_t copies_per_weight(double per_mass, int2 unit, int top) { return int64_t(per_mass * pow2(unit.x - top)); }

cudaError_t score_values(const Batch&, const Pages&, const Scores&, const void* q, const Stash&, int blocks, cudaStream_t);
// Blocks that sample tiles share a row and KV head; each split's (exponent, mass) per head tells how much its part weighs.
struct TileMerge {
  Merge merge;                    // SIZE: group * head_dim
  int2* mass;                     // [P, splits, group] (exponent, mass as float)
};

cudaError_t sample_points(const Batch&, const Pages&, const Stash&, const Merge&, void* out, float* lse, cudaStream_t, bool overlap);

cudaError_t sample_tiles(const Batch&, const Pages&, const Stash&, const TileMerge&, void* out, float* lse, cudaStream_t, bool overlap);

}  // namespace santa
