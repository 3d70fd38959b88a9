// The K scan: every warp takes units of 64 tokens of a segment, reads their keys once and hands the scores to a stage's epilogue.
//
// Keys come row by row, whole rows at a time, 16 consecutive tokens to a step, into a ring of the warp's own in shared memory, up to a
// unit ahead, also across segments.
#pragma once
#include "schedule.cuh"
#include "tile.cuh"

namespace santa {

// Few warps with deep rings: they reach the memory's speed and leave half of the registers to the next kernel's blocks, which then
// start while the scan ends.
constexpr int kScoreWarps = 4, kScoreThreads = 32 * kScoreWarps;
constexpr int kScoreBlocks = 2;                           // blocks a multiprocessor holds
// Of which its registers would do for: the half that these leave is what the next kernel's blocks take.
constexpr int kScoreBound = kHeadDim * kGroup <= 1024 ? 2 * kScoreBlocks : kScoreBlocks;
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

constexpr int kOneChunk = kHeadDim == 256 ? 32 : 64;      // units a block may have to do to do them in one go

struct UnitScores {
  float x[8][kHeadSlots];      // token token_of(i), head head_of(s); -inf beyond the row's length
};

// What a lane holds of a unit's scores: tokens 16 t + 2 r + {0, 1} of its four tiles, heads 8 j + 2 c + {0, 1}.
__device__ __forceinline__ int token_of(int i, int lane) { return i / 2 * 16 + lane / 4 * 2 + i % 2; }
__device__ __forceinline__ int head_of(int slot, int lane) { return slot / 2 * 8 + lane % 4 * 2 + slot % 2; }

// Dot products of a unit: mma's accumulators by tile and column block. remaining: tokens of the row from the unit's first on.
struct UnitDots {
  float acc[4][kColumns][4];
  int remaining;

  __device__ __forceinline__ float operator()(int i, int slot) const { return acc[i / 2][slot / 2][i % 2 * 2 + slot % 2]; }

  __device__ __forceinline__ void scores(const Scores& scores, int lane, UnitScores& u) const {
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
      for (int h = 0; h < kHeadSlots; ++h) u.x[i][h] = scores((*this)(i, h));
    if (remaining < kUnit)
#pragma unroll
      for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int h = 0; h < kHeadSlots; ++h)
          if (token_of(i, lane) >= remaining) u.x[i][h] = -INFINITY;
  }
};

// The group's queries as B operand in the natural order of features, as ldmatrix gives the keys.
struct StepQuery {
  uint32_t word[kColumns][kHeadDim / 16][2];

  __device__ void load(const Half* q, int lane) {    // q: [kGroup, head_dim] of this row and KV head
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const int head = 8 * j + lane / 4;
      const uint32_t* words = reinterpret_cast<const uint32_t*>(q + int64_t(head) * kHeadDim) + lane % 4;
#pragma unroll
      for (int k = 0; k < kHeadDim / 16; ++k)
#pragma unroll
        for (int i = 0; i < 2; ++i) word[j][k][i] = head < kGroup ? words[8 * k + 4 * i] : 0;
    }
  }
};

// The warp's ring of key steps. A step holds whole tiles of 16 tokens, or half of their features; 16-byte chunk k of row j lies in slot
// k ^ (j / 2 % 8), so that neither cp.async nor ldmatrix meets itself in a bank.
struct KeyRing {
  uint32_t base;
  uint64_t policy;
  int put = 0, get = 0;

  __device__ explicit KeyRing(char* shared) {
    base = uint32_t(__cvta_generic_to_shared(shared)) + threadIdx.x / 32 * (kStages * kStageBytes);
    policy = evict_first();
  }

  // tile_keys: of lane t, the first key of the unit's tile t.
  template <int STEP>
  __device__ __forceinline__ void request(const Half* tile_keys) {
    constexpr int tile = STEP / kRowParts * kStepTiles, part = STEP % kRowParts;
    constexpr int kPeriod = kStepChunks == 12 ? 3 : 1, kPeriodRows = kPeriod * 32 / kStepChunks;      // loads after which rows repeat
    const int lane = threadIdx.x % 32;
    const uint32_t to = base + put * kStageBytes;
#pragma unroll
    for (int t = 0; t < kStepTiles; ++t) {
      const Half* from = reinterpret_cast<const Half*>(__shfl_sync(kAll, reinterpret_cast<uint64_t>(tile_keys), tile + t)) +
                         part * kStepChunks * 8;
#pragma unroll
      for (int i = 0; i < kPeriod; ++i) {
        const int row = (i * 32 + lane) / kStepChunks, chunk = (i * 32 + lane) % kStepChunks;         // of the first load
        const Half* own = from + row * (2 * kHeadDim) + chunk * 8;
#pragma unroll
        for (int j = 0; j < 16 / kPeriodRows; ++j) {
          const uint32_t slot = chunk ^ (row + j * kPeriodRows) / 2 % 8;
          asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(
                           to + (16 * t + row) * (kRowSlots * 16) + slot * 16 + j * (kPeriodRows * kRowSlots * 16)),
                       "l"(own + j * (kPeriodRows * 2 * kHeadDim)), "l"(policy)
                       : "memory");
        }
      }
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
  __device__ __forceinline__ void multiply_into(float (&acc)[4][kColumns][4], const StepQuery& query) {
    constexpr int tile = STEP / kRowParts * kStepTiles, part = STEP % kRowParts;
    // ldmatrix: lane l names row i = l % 8 of matrix l / 8: even tokens, odd tokens, both again 8 features on.
    const int lane = threadIdx.x % 32, row = lane % 8 * 2 + lane / 8 % 2;
    const uint32_t from = base + get * kStageBytes + row * (kRowSlots * 16), flip = (lane / 16 ^ lane % 8) * 16;
    get = get + 1 == kStages ? 0 : get + 1;
#pragma unroll
    for (int t = 0; t < kStepTiles; ++t)
#pragma unroll
      for (int k = 0; k < kStepChunks / 2; ++k) {
        uint4 a;
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(a.x), "=r"(a.y), "=r"(a.z), "=r"(a.w)
                     : "r"(from + (k * 32 ^ flip) + 16 * t * (kRowSlots * 16))
                     : "memory");
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          const uint32_t(&b)[2] = query.word[j][part * (kStepChunks / 2) + k];
          mma(acc[tile + t][j], a.x, a.y, a.z, a.w, b[0], b[1]);
        }
      }
  }
};

template <int STEP>
__device__ __forceinline__ void first_requests(KeyRing& ring, const Half* tile_keys) {
  if constexpr (STEP < kAhead) {
    ring.request<STEP>(tile_keys);
    ring.close();
    first_requests<STEP + 1>(ring, tile_keys);
  }
}

template <int STEP, class Epilogue>
__device__ __forceinline__ void run_steps(KeyRing& ring, UnitDots& dots, const StepQuery& query, const Half* tile_keys, const Half* next,
                                          bool more, const Epilogue& epilogue, typename Epilogue::Unit& result) {
  if constexpr (STEP < kSteps) {
    constexpr int ahead = STEP + kAhead;
    ring.wait();
    if constexpr (ahead < kSteps) ring.request<ahead>(tile_keys);
    else if (more) ring.request<ahead - kSteps>(next);
    ring.close();
    ring.multiply_into<STEP>(dots.acc, query);
    if constexpr (STEP % kRowParts == kRowParts - 1)
#pragma unroll
      for (int t = 0; t < kStepTiles; ++t) epilogue.add(dots, STEP / kRowParts * kStepTiles + t, result);
    run_steps<STEP + 1>(ring, dots, query, tile_keys, next, more, epilogue, result);
  }
}

// The chunks a block is at work on, in shared memory; several, because its warps do not wait for each other. Of the first chunk every warp has
// a unit from the start. The first warp to take from a later one asks for the next; the last one out of a chunk tidies up after it.
struct ChunkSlots {
  static constexpr int kSlots = 8, kAheadOfTidy = 5;
  Segment segment[kSlots];     // of the block's chunk number i, in slot i % kSlots; row -1: there are no more
  int taken[kSlots];           // of its units
  int finished[kSlots];        // warps that are through with it
  int known, tidy;             // chunks asked for, and tidied up

  // By one thread.
  __device__ void put(const Chunks& chunks, int index, int chunk) {
    if (chunk < chunks.count) segment[index % kSlots] = chunks.at(chunk); else segment[index % kSlots].row = -1;
    store_release(&known, index + 1);
  }
};

struct Unit {                  // a warp's: the block's chunk, and the unit of its row, -1 for none
  int chunk, unit;
};

// A block's work, as one of its warps goes through it.
//
// Epilogue: begin(segment, parity) when a warp enters a chunk, parity 0 and 1 in turns; add(dots, tile, result) as a unit's tiles come, and
// (unit, dots, result) at its end; end(pair, parity) by one warp, once all are through with a chunk. What a chunk's warps share is kept
// twice: none enters a chunk before the one two before it is tidied up.
template <class Epilogue>
struct Scan {
  const Batch& batch;
  const Pages& pages;
  const Half* q;
  const Chunks& chunks;
  const Queue& queue;
  const Progress& progress;
  ChunkSlots& slots;
  Epilogue& epilogue;
  KeyRing ring;
  int open = 0, left = 0;      // the chunk this warp takes from, and the first it has not left

  __device__ __forceinline__ const Segment& segment(int chunk) const { return slots.segment[chunk % ChunkSlots::kSlots]; }

  // The next unit. None where there are no more, and where the block would run too far ahead of its slowest warp.
  __device__ __forceinline__ Unit take() {
    int unit = -1;
    if (threadIdx.x % 32 == 0)
#pragma unroll 1
      for (;; ++open) {
        while (load_acquire(&slots.known) <= open) {}
        const Segment& s = segment(open);
        if (s.row < 0 || load_acquire(&slots.tidy) < open - ChunkSlots::kAheadOfTidy) break;
        const int count = atomicAdd(&slots.taken[open % ChunkSlots::kSlots], 1);
        if (count == 0) slots.put(chunks, open + 1, queue.take(chunks.count));
        if (s.first + count < s.last) { unit = s.first + count; break; }
      }
    open = __shfl_sync(kAll, open, 0);
    return {open, __shfl_sync(kAll, unit, 0)};
  }

  // The warp's unit of the first chunk, if there are so many.
  __device__ __forceinline__ Unit first() const {
    const Segment& s = segment(0);
    const int unit = s.first + int(threadIdx.x) / 32;
    return {0, s.row >= 0 && unit < s.last ? unit : -1};
  }

  // First token of tile lane % 4, or of the row's last tile.
  __device__ __forceinline__ int tile_token(Unit u) const {
    return min(u.unit * kUnit + int(threadIdx.x % 4) * 16, (segment(u.chunk).length - 1) / 16 * 16);
  }
  __device__ __forceinline__ int block_of(Unit u) const {
    return u.unit < 0 ? 0 : batch.block_table[segment(u.chunk).row * batch.table_stride + tile_token(u) / pages.block_size];
  }
  __device__ __forceinline__ const Half* keys_of(Unit u, int block) const {
    return static_cast<const Half*>(pages.kv) + block * pages.page_stride +
           (int64_t(segment(u.chunk).head) * pages.block_size + tile_token(u) % pages.block_size) * (2 * kHeadDim);
  }

  __device__ void leave_chunks_before(int chunk) {
#pragma unroll 1
    for (; left < chunk; ++left) {
      const int slot = left % ChunkSlots::kSlots;
      int others = 0;
      __syncwarp();
      if (threadIdx.x % 32 == 0) others = add_acquire_release(&slots.finished[slot], 1);
      if (__shfl_sync(kAll, others, 0) < kScoreWarps - 1) continue;
      __syncwarp();
      const Segment s = slots.segment[slot];
      const int64_t pair = int64_t(s.row) * batch.kv_heads + s.head;
      epilogue.end(pair, left % 2);
      __syncwarp();
      if (threadIdx.x % 32 == 0) {
        progress.add(pair, s.last - s.first);
        slots.taken[slot] = slots.finished[slot] = 0;
        store_release(&slots.tidy, left + 1);
      }
      __syncwarp();
    }
  }

  __device__ void run() {
    Unit unit{0, -1}, next = first();
    const Half* keys = nullptr;
    int next_block = block_of(next), entered = -1;
    StepQuery query;
    bool launched = false;
#pragma unroll 1
    for (;;) {
      const bool restart = unit.unit < 0;            // at the start, at the end, and where others have to catch up
      if (restart) {
        unit = next.unit >= 0 ? next : take();
        if (next.unit < 0) next_block = block_of(unit);
      }
      leave_chunks_before(unit.unit >= 0 ? unit.chunk : open);
      if (unit.unit < 0) {
        if (unit.chunk == left && segment(left).row < 0) break;
        continue;
      }
      if (restart) {
        keys = keys_of(unit, next_block);
        first_requests<0>(ring, keys);
        if (entered < 0 && threadIdx.x == 0) slots.put(chunks, 1, queue.take(chunks.count));
        next = take();
        next_block = block_of(next);
      }
      const Segment& s = segment(unit.chunk);
      if (unit.chunk != entered) {
        entered = unit.chunk;
        while (load_acquire(&slots.tidy) < entered - 1) {}
        __syncwarp();
        query.load(q + (int64_t(s.row) * batch.kv_heads + s.head) * kGroup * kHeadDim, threadIdx.x % 32);
        epilogue.begin(s, entered % 2);
      }
      const Half* following = keys_of(next, next_block);
      const Unit after = take();
      next_block = block_of(after);
      UnitDots dots = {};
      dots.remaining = s.length - unit.unit * kUnit;
      typename Epilogue::Unit result;
      run_steps<0>(ring, dots, query, keys, following, next.unit >= 0, epilogue, result);
      epilogue(unit.unit, dots, result);
      // A launch makes every multiprocessor pause for some microseconds. Here keys are on their way meanwhile; earlier they would not be.
      if (!launched) launch_next();
      launched = true;
      keys = following;
      unit = next;
      next = after;
      if (unit.unit < 0) {
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        __syncwarp();
        ring.put = ring.get = 0;
      }
    }
  }
};

template <class Epilogue>
__device__ void scan_keys(const Batch& batch, const Pages& pages, const Half* q, const Chunks& chunks, char* shared, const Queue& queue,
                          const Progress& progress, Epilogue& epilogue) {
  __shared__ ChunkSlots slots;
  if (threadIdx.x < ChunkSlots::kSlots) {
    slots.taken[threadIdx.x] = threadIdx.x == 0 ? kScoreWarps : 0;
    slots.finished[threadIdx.x] = 0;
  }
  if (threadIdx.x == 0) {
    slots.tidy = 0;
    slots.put(chunks, 0, blockIdx.x);
  }
  __syncthreads();
  Scan<Epilogue>{batch, pages, q, chunks, queue, progress, slots, epilogue, KeyRing(shared)}.run();
  __syncthreads();
  if (threadIdx.x == 0) queue.leave();
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

}  // namespace santa
