// The K scan: every warp takes units of 64 tokens of a segment, reads their keys once and hands the scores to a stage's epilogue.
//
// Lane (r, c) owns tokens 8r .. 8r + 7 of the unit for the heads of its columns: they lie in one block, so one address and constant
// offsets serve all loads, and what a lane stores about its tokens is one wide word. The next step's keys are always in flight.
#pragma once
#include "schedule.cuh"
#include "tile.cuh"

namespace santa {

constexpr int kScoreThreads = 256;
constexpr int kScoreWarps = kScoreThreads / 32;
constexpr int kScoreBlocks = kHeadDim <= 128 && kColumns == 1 ? 2 : 1;      // blocks a multiprocessor holds
constexpr int kRowParts = kHeadDim == 256 ? 2 : 1;                          // steps a tile of 16 keys is read in
constexpr int kStepTiles = kHeadDim == 64 ? 2 : 1;                          // tiles read in one step
constexpr int kSteps = 4 * kRowParts / kStepTiles;
constexpr int kStepPieces = kPieces / kRowParts;

struct UnitScores {
  float x[8][kHeadSlots];      // token 8r + i, head 8 * (s / 2) + 2c + s % 2; -inf beyond the row's length
};

struct KeyStep {
  uint4 piece[2 * kStepTiles][kStepPieces];

  // `valid`: how many of the lane's eight tokens exist.
  template <int STEP>
  __device__ __forceinline__ void load(const Half* base, int valid, uint64_t policy) {
    constexpr int tile = STEP / kRowParts * kStepTiles, part = STEP % kRowParts;
#pragma unroll
    for (int t = 0; t < 2 * kStepTiles; ++t)
#pragma unroll
      for (int p = 0; p < kStepPieces; ++p)
        if (2 * tile + t < valid) piece[t][p] = load_once(base + (2 * tile + t) * (2 * kHeadDim) + (part * kStepPieces + p) * 32, policy);
  }

  template <int STEP>
  __device__ __forceinline__ void multiply_into(float (&acc)[4][kColumns][4], const Query& query) const {
    constexpr int tile = STEP / kRowParts * kStepTiles, part = STEP % kRowParts;
#pragma unroll
    for (int t = 0; t < kStepTiles; ++t) multiply<part * kStepPieces, kStepPieces>(acc[tile + t], piece[2 * t], piece[2 * t + 1], query);
  }
};

template <int STEP, class Load>
__device__ __forceinline__ void run_steps(KeyStep (&keys)[2], float (&acc)[4][kColumns][4], const Query& query, const Half* base, int valid,
                                          uint64_t policy, const Load& load_next_unit) {
  if constexpr (STEP + 1 < kSteps) keys[(STEP + 1) % 2].template load<STEP + 1>(base, valid, policy);
  else load_next_unit();
  keys[STEP % 2].template multiply_into<STEP>(acc, query);
  if constexpr (STEP + 1 < kSteps) run_steps<STEP + 1>(keys, acc, query, base, valid, policy, load_next_unit);
}

// Calls epilogue.begin() once the first keys are on their way, then epilogue(unit, UnitScores) for each of the warp's units.
template <class Epilogue>
__device__ void score_segment(const Batch& batch, const Pages& pages, const Scores& scores, const Query& query, const Segment& s,
                              Epilogue& epilogue) {
  const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
  const int* table = batch.block_table + s.row * batch.table_stride;
  const int64_t head_offset = int64_t(s.head) * pages.block_size * (2 * kHeadDim) + c * 8;
  const auto token_of = [&](int unit) { return min(unit * kUnit + r * 8, s.length - 1); };
  const auto block_of = [&](int unit) { return table[token_of(min(unit, s.last - 1)) / pages.block_size]; };
  const auto address = [&](int block, int unit) {
    return static_cast<const Half*>(pages.kv) + int64_t(block) * pages.page_stride + head_offset + token_of(unit) % pages.block_size * (2 * kHeadDim);
  };

  int unit = s.first + threadIdx.x / 32;
  if (unit >= s.last) { epilogue.begin(s); return; }
  KeyStep keys[2];
#pragma unroll
  for (int t = 0; t < 2 * kStepTiles; ++t)
#pragma unroll
    for (int p = 0; p < kStepPieces; ++p) keys[0].piece[t][p] = keys[1].piece[t][p] = uint4{0, 0, 0, 0};
  const uint64_t policy = evict_first();
  const Half* base = address(block_of(unit), unit);
  int next_block = block_of(unit + kScoreWarps);
  keys[0].load<0>(base, s.length - unit * kUnit - r * 8, policy);
  epilogue.begin(s);

  for (; unit < s.last; unit += kScoreWarps) {
    const int valid = s.length - unit * kUnit - r * 8;
    float acc[4][kColumns][4] = {};
    const Half* next_base = base;
    run_steps<0>(keys, acc, query, base, valid, policy, [&] {
      const int next = unit + kScoreWarps;
      if (next < s.last) {
        next_base = address(next_block, next);
        keys[0].load<0>(next_base, s.length - next * kUnit - r * 8, policy);
        next_block = block_of(next + kScoreWarps);
      }
    });
    base = next_base;
    UnitScores u;
#pragma unroll
    for (int t = 0; t < 4; ++t)
#pragma unroll
      for (int j = 0; j < kColumns; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) u.x[2 * t + e / 2][2 * j + e % 2] = 2 * t + e / 2 < valid ? scores(acc[t][j][e]) : -INFINITY;
    epilogue(unit, u);
  }
}

// A unit's exponent per head: floor(max) + 1, kNotFinite if a score is NaN or +inf, kNoExponent if all are -inf. Scores become 2^(x - e).
struct UnitExponents {
  int e[kHeadSlots];

  __device__ __forceinline__ explicit UnitExponents(UnitScores& u) {
#pragma unroll
    for (int h = 0; h < kHeadSlots; ++h) {
      float m = u.x[0][h];
#pragma unroll
      for (int i = 1; i < 8; ++i) m = max_nan(m, u.x[i][h]);
#pragma unroll
      for (int d = 4; d < 32; d *= 2) m = max_nan(m, __shfl_xor_sync(kAll, m, d));
      const bool finite = m < INFINITY, empty = m == -INFINITY;
      const float exponent = empty ? 0.f : floorf(fminf(fmaxf(m, -1e9f), 1e9f)) + 1.f;
      e[h] = !finite ? kNotFinite : empty ? kNoExponent : int(exponent);
#pragma unroll
      for (int i = 0; i < 8; ++i) u.x[i][h] = exp2_fast(u.x[i][h] - exponent);
    }
  }
};

__device__ __forceinline__ int head_of(int slot, int lane) { return slot / 2 * 8 + lane % 4 * 2 + slot % 2; }

}  // namespace santa
