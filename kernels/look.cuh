// pps: a first estimate of every head's log2-sum-exp, so that the K scan can mix the heads in one pass: the first 16 keys, the last 48,
// and others spread evenly between them, each standing for its share.
#pragma once
#include "pps.cuh"
#include "tile.cuh"

namespace santa {

constexpr int kLookKeys = 16, kFirst = 16, kLast = 48;      // keys a warp looks at; of all: the first and last of the row

// Part `part` of the look at a row and KV head, by one warp. The first also clears the histogram.
__device__ __forceinline__ void look_at(const Batch& batch, const Pages& pages, const Scores& scores, const Half* q, const PpsBuffers& out, int row,
                                        int head, int n, int part) {
  const int64_t pair = int64_t(row) * batch.kv_heads + head;
  const int lane = threadIdx.x % 32, r = lane / 4;
  const int looks = look_parts(n) * kLookKeys, spread = looks - kFirst - kLast;
  const float share = n <= looks ? 1.f : float(n - kFirst - kLast) / spread;
  const auto token_of = [&](int i) -> int {          // the i-th key looked at, -1 if there is none
    if (n <= looks) return i < n ? i : -1;
    if (i < kFirst) return i;
    if (i >= kFirst + spread) return n - looks + i;
    return kFirst + min(int((float(i - kFirst) + 0.5f) * share), n - kFirst - kLast - 1);
  };
  const int mine = part * kLookKeys + r, tokens[2] = {token_of(mine), token_of(mine + 8)};
  uint4 rows[2][kPieces];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const Half* base = token_row(batch, pages, row, head, max(tokens[e], 0)) + lane % 4 * 8;
#pragma unroll
    for (int p = 0; p < kPieces; ++p) rows[e][p] = *reinterpret_cast<const uint4*>(base + p * 32);
  }
  Query query;
  query.load(q + pair * kGroup * kHeadDim, lane);
  if (part == 0)
    for (int i = lane; i < kByteCodes / 4; i += 32) reinterpret_cast<uint4*>(out.histogram + pair * kByteCodes)[i] = uint4{0, 0, 0, 0};
  float acc[kColumns][4] = {};
  multiply<0, kPieces>(acc, rows[0], rows[1], query);
#pragma unroll
  for (int j = 0; j < kColumns; ++j)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float x[2], weight[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int i = mine + 8 * e;
        x[e] = tokens[e] >= 0 ? scores(acc[j][2 * e + h]) : -INFINITY;
        weight[e] = i >= kFirst && i < kFirst + spread ? share : 1.f;
      }
      float m = fmaxf(fmaxf(x[0], x[1]), -1e30f);
#pragma unroll
      for (int d = 4; d < 32; d *= 2) m = fmaxf(m, __shfl_xor_sync(kAll, m, d));
      float sum = weight[0] * exp2_fast(x[0] - m) + weight[1] * exp2_fast(x[1] - m);
#pragma unroll
      for (int d = 4; d < 32; d *= 2) sum += __shfl_xor_sync(kAll, sum, d);
      const int own = 8 * j + 2 * lane + h;
      if (lane < 4 && own < kGroup) out.look[(pair * kLookParts + part) * kGroup + own] = make_float2(m, sum);
    }
  __syncwarp();
  if (lane == 0) {
    __threadfence();
    atomicAdd(&out.progress.pair[pair].y, 1);
  }
}

// The parts put together, by one warp: norm[kGroup].
__device__ __forceinline__ void finish_look(const float2* look, int n, float* norm) {
  const int lane = threadIdx.x % 32;
  float2 part[kGroup];
#pragma unroll
  for (int h = 0; h < kGroup; ++h) part[h] = lane < look_parts(n) ? __ldcg(look + lane * kGroup + h) : make_float2(-1e30f, 0.f);
#pragma unroll
  for (int h = 0; h < kGroup; ++h) {
    float top = part[h].x;
#pragma unroll
    for (int d = 16; d > 0; d /= 2) top = fmaxf(top, __shfl_xor_sync(kAll, top, d));
    float sum = part[h].y * exp2_fast(part[h].x - top);
#pragma unroll
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(kAll, sum, d);
    if (lane == h) norm[h] = sum > 0.f && sum < INFINITY ? top + log2_fast(sum) : 0.f;
  }
}

}  // namespace santa
