// pps, last stage: the tokens that a block has of its row and KV head, a slice of consecutive ones, of which every thread has a run.
#pragma once
#include "philox.cuh"
#include "pps.cuh"

namespace santa {

constexpr int kRowsThreads = 256, kRowsWarps = kRowsThreads / 32;
constexpr int kPieceTokens = 8;                      // codes of one load
constexpr int kHeldPieces = 8;                       // of a run, in shared memory at a time

// What a block holds of its slice. Thread t's pieces lie at [p][t], where no two threads meet in a bank: nobody but t looks at them.
struct Held {
  uint2 codes[kHeldPieces][kRowsThreads];
  int block[kHeldPieces / 2][kRowsThreads];          // of the cache, for two pieces
};

// Tokens begin .. end - 1, whole units but for the row's end. Loops over pieces are not unrolled: they run once, and then an instruction costs most
// when it is fetched.
struct Slice {
  Held& held;
  const int* table;
  const uint8_t* codes;
  int64_t pair, offset;
  int n, begin, end, block_size;
  int run, groups;                                   // pieces of a thread's run, 1 or even, so that two lie in one block; and how often `held` fills
  int first, count;                                  // first token and number of the pieces that are held

  __device__ __forceinline__ Slice(Held& held, const Batch& batch, const Pages& pages, const PpsBuffers& buffers, int n)
      : held(held), pair(int64_t(blockIdx.z) * batch.kv_heads + blockIdx.y), n(n), block_size(pages.block_size) {
    const int rank = blockIdx.x, blocks = gridDim.x;
    const int share = ceil_div(n, blocks * kUnit) * kUnit;
    run = ceil_div(share, kRowsThreads * kPieceTokens);
    run += run > 1 && run % 2;
    groups = ceil_div(run, kHeldPieces);
    begin = rank * share;                            // beyond the row, and then beyond `end`, if there is nothing left
    end = min(n, begin + share);
    table = batch.block_table + blockIdx.z * batch.table_stride;
    codes = buffers.codes + pair * batch.max_units * kUnit;
    enter(0);
    offset = uniform44(batch.seed[blockIdx.z], n - 1, batch.layer, kSelectStream, batch.head_offset + blockIdx.y, 0);
  }

  // The pieces are those of this group from here on.
  __device__ __forceinline__ void enter(int group) {
    first = begin + (int(threadIdx.x) * run + group * kHeldPieces) * kPieceTokens;
    count = min(kHeldPieces, run - group * kHeldPieces);
#pragma unroll 1
    for (int p = 0; p < count && first + p * kPieceTokens < end; p += 2)
      held.block[p / 2][threadIdx.x] = table[(first + p * kPieceTokens) / block_size];
  }
  // Asks for their codes; beyond the slice they are 0. The scan wrote whole units: beyond n they are 0 as well.
  __device__ __forceinline__ void load() const {
    const uint32_t to = uint32_t(__cvta_generic_to_shared(&held.codes[0][threadIdx.x]));
#pragma unroll 1
    for (int p = 0; p < count; ++p) {
      const int token = first + p * kPieceTokens;
      asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to + p * int(sizeof(held.codes[0]))), "l"(codes + (token < end ? token : 0)),
                   "r"(token < end ? 8 : 0)
                   : "memory");
    }
  }
  __device__ __forceinline__ static void wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

  __device__ __forceinline__ static int code(uint2 piece, int i) { return (i < 4 ? piece.x : piece.y) >> 8 * (i % 4) & 0xff; }

  // Sum of their inclusion probabilities, by inclusion: [kByteCodes] by code.
  __device__ __forceinline__ int64_t include(const int64_t* inclusion) const {
    int64_t sum = 0;
#pragma unroll 1
    for (int p = 0; p < count; ++p) {
      const uint2 piece = held.codes[p][threadIdx.x];
#pragma unroll
      for (int i = 0; i < kPieceTokens; ++i) sum += inclusion[code(piece, i)];
    }
    return sum;
  }

  // place(token, its block of the cache, row in the block, slot, inclusion probability) for every token with which the prefix sum passes a multiple of
  // 2^44, of which `slot` is the number. at: the prefix sum before the first piece; behind the last one afterwards.
  template <class Function>
  __device__ __forceinline__ void for_each_sample(int64_t& at, const int64_t* inclusion, const Function& place) const {
#pragma unroll 1
    for (int p = 0; p < count; ++p) {
      const uint2 piece = held.codes[p][threadIdx.x];
      int slot = int(at >> 44);
      unsigned found = 0;                            // first which tokens, then what to do about them, for all lanes at once
#pragma unroll
      for (int i = 0; i < kPieceTokens; ++i) {
        const int64_t next = at + inclusion[code(piece, i)];
        found |= unsigned((at ^ next) >> 44 != 0) << i;
        at = next;
      }
      if (found == 0) continue;
      const int token = first + p * kPieceTokens, block = held.block[p / 2][threadIdx.x], within = token % block_size;
#pragma unroll 1
      for (; found; found &= found - 1) {
        const int i = __ffs(found) - 1;
        place(token + i, block, within + i, slot++, inclusion[(i < 4 ? piece.x : piece.y) >> 8 * (i % 4) & 0xff]);
      }
    }
  }
};

}  // namespace santa
