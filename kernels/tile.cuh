// Scores of 16 or 64 keys for all query heads of a KV head, on tensor cores (mma.m16n8k16, keys as rows, heads as columns).
//
// Lane (r = lane / 4, c = lane % 4) reads 16-byte pieces c, c + 4, c + 8, ... of its key rows straight from global memory. The
// order of the feature dimension within a product is free as long as Q and K agree, so no shared memory and no shuffle is needed.
#pragma once
#include "common.cuh"

namespace santa {

constexpr int kPieces = kHeadDim / 32;               // 16-byte pieces of a row per lane
constexpr int kColumns = kGroup <= 8 ? 1 : 2;        // blocks of 8 query heads
constexpr int kHeadSlots = 2 * kColumns;             // query heads per lane: 8 * j + 2 * c + {0, 1}
constexpr unsigned kAll = 0xffffffffu;

__device__ __forceinline__ void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
#if SANTA_BF16
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The group's queries as B operand; heads past the group are zero.
struct Query {
  uint4 piece[kColumns][kPieces];

  __device__ void load(const Half* q, int lane) {    // q: [kGroup, head_dim] of this row and KV head
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const int head = 8 * j + lane / 4;
#pragma unroll
      for (int p = 0; p < kPieces; ++p)
        piece[j][p] =
            head < kGroup ? *reinterpret_cast<const uint4*>(q + int64_t(head) * kHeadDim + p * 32 + lane % 4 * 8) : uint4{0, 0, 0, 0};
    }
  }
};

// d[j] += two key rows (this lane's rows r and r + 8 of the tile) times the queries, over pieces FIRST .. FIRST + COUNT - 1.
template <int FIRST, int COUNT>
__device__ __forceinline__ void multiply(float (&d)[kColumns][4], const uint4* low, const uint4* high, const Query& q) {
#pragma unroll
  for (int p = 0; p < COUNT; ++p)
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const uint4 b = q.piece[j][FIRST + p];
      mma(d[j], low[p].x, high[p].x, low[p].y, high[p].y, b.x, b.y);
      mma(d[j], low[p].z, high[p].z, low[p].w, high[p].w, b.z, b.w);
    }
}

// Address of a KV head's row in a block of the cache: K at +0, V at +head_dim.
__device__ __forceinline__ const Half* row_at(const Pages& pages, int head, int block, int within) {
  return static_cast<const Half*>(pages.kv) + block * pages.page_stride + (int64_t(head) * pages.block_size + within) * (2 * kHeadDim);
}
// And of token `token` of a row.
__device__ __forceinline__ const Half* token_row(const Batch& batch, const Pages& pages, int row, int head, int token) {
  return row_at(pages, head, batch.block_table[row * batch.table_stride + token / pages.block_size], token % pages.block_size);
}

}  // namespace santa
