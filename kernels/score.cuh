// The K scan: every warp takes units of 64 tokens of a segment, reads their keys once and hands the scores to a stage's epilogue.
//
// Keys come row by row, whole rows at a time, into a ring of the warp's own in shared memory, up to a unit ahead. Lane (r, c) owns
// tokens 8r .. 8r + 7 of the unit for the heads of its columns, so what it stores about them is one wide word.
#pragma once
#include "schedule.cuh"
#include "tile.cuh"

namespace santa {

// Few warps with deep rings: they reach the memory's speed and leave half of the registers to the next kernel's blocks, which then
// start while the scan ends.
constexpr int kScoreThreads = 128;
constexpr int kScoreWarps = kScoreThreads / 32;
constexpr int kScoreBlocks = 2;                           // blocks a multiprocessor holds
constexpr int kRowParts = kHeadDim == 256 ? 2 : 1;                          // steps a tile of 16 keys is read in
constexpr int kStepTiles = kHeadDim == 64 ? 2 : 1;                          // tiles read in one step
constexpr int kSteps = 4 * kRowParts / kStepTiles;                          // of a unit
constexpr int kStepPieces = kPieces / kRowParts;                            // 16-byte pieces of a row per lane and step
constexpr int kStepChunks = 4 * kStepPieces;                                // 16-byte chunks of a row per step
constexpr int kRowSlots = kStepChunks == 12 ? 16 : kStepChunks;             // the same in shared memory: a power of two
constexpr int kStageBytes = 4096;
constexpr int kStages = kSteps < 4 ? kSteps + 1 : 5;                         // steps of keys in shared memory
constexpr int kAhead = kStages - 1;                                         // of which are on their way
constexpr int kRingBytes = kScoreWarps * kStages * kStageBytes;
static_assert(kAhead <= kSteps && 16 * kStepTiles * kRowSlots * 16 == kStageBytes);

struct UnitScores {
  float x[8][kHeadSlots];      // token 8r + i, head 8 * (s / 2) + 2c + s % 2; -inf beyond the row's length
};

// A lane's share of a unit: the address of token 8r, and how many of its eight tokens exist.
struct LaneKeys {
  const Half* base;
  int valid;
};

// The warp's ring of key steps. A step holds rows 2r and 2r + 1 = tokens 8r + i, 8r + i + 1 of every r; chunk k of row j lies in slot
// k ^ 4 (j / 2 % 2), so that lanes reading a fragment meet in no bank.
struct KeyRing {
  uint32_t base;
  uint64_t policy;
  int put = 0, get = 0;

  __device__ explicit KeyRing(char* shared) {
    base = uint32_t(__cvta_generic_to_shared(shared)) + threadIdx.x / 32 * (kStages * kStageBytes);
    policy = evict_first();
  }

  template <int STEP>
  __device__ __forceinline__ void request(const LaneKeys& unit) {
    constexpr int tile = STEP / kRowParts * kStepTiles, part = STEP % kRowParts;
    const int lane = threadIdx.x % 32;
    const uint32_t to = base + put * kStageBytes;
#pragma unroll
    for (int j = 0; j < 16 * kStepTiles * kStepChunks / 32; ++j) {
      const int index = j * 32 + lane, row = index / kStepChunks, chunk = index % kStepChunks;
      const int within = row % 16, r = within / 2, i = 2 * (tile + row / 16) + within % 2;      // token 8r + i
      const Half* from = reinterpret_cast<const Half*>(__shfl_sync(kAll, reinterpret_cast<uint64_t>(unit.base), 4 * r));
      const int valid = __shfl_sync(kAll, unit.valid, 4 * r);
      asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(
                       to + (row * kRowSlots + (chunk ^ r % 2 * 4)) * 16),
                   "l"(from + i * (2 * kHeadDim) + (part * kStepChunks + chunk) * 8), "r"(i < valid ? 16 : 0), "l"(policy)
                   : "memory");
    }
    put = put + 1 == kStages ? 0 : put + 1;
  }
  __device__ __forceinline__ static void close() { asm volatile("cp.async.commit_group;" ::: "memory"); }

  // Wait for the oldest step; the slot of the one before it is free then.
  __device__ __forceinline__ static void wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kAhead - 1) : "memory");
    __syncwarp();
  }

  template <int STEP>
  __device__ __forceinline__ void multiply_into(float (&acc)[4][kColumns][4], const Query& query) {
    constexpr int tile = STEP / kRowParts * kStepTiles, part = STEP % kRowParts;
    const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
    const uint32_t from = base + get * kStageBytes + (2 * r * kRowSlots + c) * 16, flip = r % 2 * 64;
    get = get + 1 == kStages ? 0 : get + 1;
#pragma unroll
    for (int t = 0; t < kStepTiles; ++t) {
      uint4 piece[2][kStepPieces];
#pragma unroll
      for (int e = 0; e < 2; ++e)
#pragma unroll
        for (int p = 0; p < kStepPieces; ++p) {
          uint4& v = piece[e][p];
          const uint32_t at = from + (16 * t + e) * kRowSlots * 16 + (p * 64 ^ flip);
          asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
        }
      multiply<part * kStepPieces, kStepPieces>(acc[tile + t], piece[0], piece[1], query);
    }
  }
};

template <int STEP>
__device__ __forceinline__ void first_requests(KeyRing& ring, const LaneKeys& unit) {
  if constexpr (STEP < kAhead) {
    ring.request<STEP>(unit);
    ring.close();
    first_requests<STEP + 1>(ring, unit);
  }
}

template <int STEP>
__device__ __forceinline__ void run_steps(KeyRing& ring, float (&acc)[4][kColumns][4], const Query& query, const LaneKeys& unit,
                                          const LaneKeys& next, bool more) {
  if constexpr (STEP < kSteps) {
    constexpr int ahead = STEP + kAhead;
    ring.wait();
    if constexpr (ahead < kSteps) ring.request<ahead>(unit);
    else if (more) ring.request<ahead - kSteps>(next);
    ring.close();
    ring.multiply_into<STEP>(acc, query);
    run_steps<STEP + 1>(ring, acc, query, unit, next, more);
  }
}

// Calls epilogue.begin() once the first keys are on their way, then epilogue(unit, UnitScores) for each of the warp's units.
template <class Epilogue>
__device__ void score_segment(const Batch& batch, const Pages& pages, const Scores& scores, const Query& query, const Segment& s,
                              KeyRing& ring, Epilogue& epilogue) {
  const int r = threadIdx.x % 32 / 4;
  const int* table = batch.block_table + s.row * batch.table_stride;
  const Half* keys = static_cast<const Half*>(pages.kv) + int64_t(s.head) * pages.block_size * (2 * kHeadDim);
  const auto token_of = [&](int unit) { return min(min(unit, s.last - 1) * kUnit + r * 8, s.length - 1); };
  const auto block_of = [&](int unit) { return table[token_of(unit) / pages.block_size]; };
  const auto place = [&](int unit, int block) {
    return LaneKeys{keys + int64_t(block) * pages.page_stride + token_of(unit) % pages.block_size * (2 * kHeadDim),
                    s.length - unit * kUnit - r * 8};
  };

  // Warps take units as they get done with theirs.
  __shared__ int taken;
  __syncthreads();
  if (threadIdx.x == 0) taken = s.first + kScoreWarps;
  __syncthreads();
  const auto take = [&] {
    int unit = 0;
    if (threadIdx.x % 32 == 0) unit = atomicAdd(&taken, 1);
    return __shfl_sync(kAll, unit, 0);
  };

  int unit = s.first + threadIdx.x / 32;
  if (unit >= s.last) { epilogue.begin(s); return; }
  LaneKeys mine = place(unit, block_of(unit));
  first_requests<0>(ring, mine);
  int next = take(), next_block = block_of(next);
  epilogue.begin(s);
  while (unit < s.last) {
    const LaneKeys following = place(next, next_block);
    const int after = take();
    next_block = block_of(after);
    float acc[4][kColumns][4] = {};
    run_steps<0>(ring, acc, query, mine, following, next < s.last);
    UnitScores u;
#pragma unroll
    for (int t = 0; t < 4; ++t)
#pragma unroll
      for (int j = 0; j < kColumns; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) u.x[2 * t + e / 2][2 * j + e % 2] = 2 * t + e / 2 < mine.valid ? scores(acc[t][j][e]) : -INFINITY;
    epilogue(unit, u);
    mine = following;
    unit = next;
    next = after;
  }
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncwarp();
  ring.put = ring.get = 0;
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
