// pps, last stage: the tokens that a block has of its row and KV head, a slice of consecutive ones, and a thread's run of them in registers.
#pragma once
#include "philox.cuh"
#include "pps.cuh"

namespace santa {

constexpr int kRowsThreads = 256, kRowsWarps = kRowsThreads / 32;
constexpr int kPieceTokens = 8;                      // codes of one load
constexpr int kMaxPieces = 4;                        // of a thread at a time
constexpr int kTileTokens = kRowsThreads * kMaxPieces * kPieceTokens;

// A thread's consecutive tokens and their inclusion probabilities.
struct Run {
  int first, pieces;                                 // first token; tokens / kPieceTokens
  int block[kMaxPieces];                             // a piece lies in one block of the cache
  int64_t pi[kMaxPieces * kPieceTokens];

  __device__ __forceinline__ void locate(const int* table, int block_size, int n) {
#pragma unroll
    for (int p = 0; p < kMaxPieces; ++p) {
      const int token = first + p * kPieceTokens;
      block[p] = p < pieces && token < n ? table[token / block_size] : 0;
    }
  }
  // The scan wrote whole units: codes beyond n are 0.
  __device__ __forceinline__ void load(const uint8_t* codes, int n, uint2 (&words)[kMaxPieces]) const {
#pragma unroll
    for (int p = 0; p < kMaxPieces; ++p) {
      const int token = first + p * kPieceTokens;
      words[p] = p < pieces && token < n ? __ldcg(reinterpret_cast<const uint2*>(codes + token)) : uint2{};
    }
  }
  // inclusion: [kByteCodes] by code. Returns their sum.
  __device__ __forceinline__ int64_t include(const uint2 (&words)[kMaxPieces], const int64_t* inclusion) {
    int64_t sum = 0;
#pragma unroll
    for (int p = 0; p < kMaxPieces; ++p)
      if (p < pieces)
#pragma unroll
        for (int i = 0; i < kPieceTokens; ++i)
          sum += pi[p * kPieceTokens + i] = inclusion[(i < 4 ? words[p].x : words[p].y) >> 8 * (i % 4) & 0xff];
    return sum;
  }
};

// A block's slice: tokens begin .. end - 1, in tiles of which a thread holds one run at a time.
struct Slice {
  const int* table;
  const uint8_t* codes;
  int64_t pair, offset;
  int n, tiles, begin, end, tile_tokens, block_size;
  Run run;

  __device__ __forceinline__ Slice(const Batch& batch, const Pages& pages, const PpsBuffers& buffers, int n)
      : pair(int64_t(blockIdx.z) * batch.kv_heads + blockIdx.y), n(n), block_size(pages.block_size) {
    const int rank = blockIdx.x, blocks = gridDim.x;
    tiles = ceil_div(n, blocks * kTileTokens);
    run.pieces = tiles > 1 ? kMaxPieces : ceil_div(n, blocks * kRowsThreads * kPieceTokens);
    tile_tokens = kRowsThreads * run.pieces * kPieceTokens;
    begin = rank * tiles * tile_tokens;
    end = min(n, begin + tiles * tile_tokens);
    table = batch.block_table + blockIdx.z * batch.table_stride;
    codes = buffers.codes + pair * batch.max_units * kUnit;
    enter(0);
    offset = uniform44(batch.seed[blockIdx.z], n - 1, batch.layer, kSelectStream, batch.head_offset + blockIdx.y, 0);
  }
  // The thread's run is in this tile from here on.
  __device__ __forceinline__ void enter(int tile) {
    run.first = begin + tile * tile_tokens + threadIdx.x * run.pieces * kPieceTokens;
    run.locate(table, block_size, n);
  }
};

}  // namespace santa
