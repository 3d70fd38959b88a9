// pps, stage 1: a first estimate of every head's log2-sum-exp, so that the K scan can mix the heads in one pass: the first 16 keys, the
// last 48, and others spread evenly between them, each standing for its share. Also clears the histogram.
#include "pps.cuh"
#include "tile.cuh"

namespace santa {

constexpr int kLookThreads = 256;

__global__ void __launch_bounds__(kLookThreads) look_kernel(Batch batch, Pages pages, Scores scores, const Half* q, PpsBuffers out) {
  launch_next();
  const int part = blockIdx.x, head = blockIdx.y, row = blockIdx.z, n = batch.length(row), parts = look_parts(n);
  if (part >= parts) return;
  const int64_t pair = int64_t(row) * batch.kv_heads + head;
  uint4* histogram = reinterpret_cast<uint4*>(out.histogram + pair * kByteCodes);
  for (int i = part * kLookThreads + threadIdx.x; i < kByteCodes / 4; i += parts * kLookThreads) histogram[i] = uint4{0, 0, 0, 0};

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, r = lane / 4;
  const int looks = parts * kLookKeys, spread = looks - kLookFirst - kLookLast;
  const float share = look_share(n);
  const auto token_of = [&](int i) -> int {          // the i-th key looked at, -1 if there is none
    if (n <= looks) return i < n ? i : -1;
    if (i < kLookFirst) return i;
    if (i >= kLookFirst + spread) return n - looks + i;
    return kLookFirst + min(int((float(i - kLookFirst) + 0.5f) * share), n - kLookFirst - kLookLast - 1);
  };
  const int mine = part * kLookKeys + warp * 16 + r, tokens[2] = {token_of(mine), token_of(mine + 8)};
  uint4 rows[2][kPieces];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const Half* base = token_row(batch, pages, row, head, max(tokens[e], 0)) + lane % 4 * 8;
#pragma unroll
    for (int p = 0; p < kPieces; ++p) rows[e][p] = *reinterpret_cast<const uint4*>(base + p * 32);
  }
  Query query;
  query.load(q + pair * kGroup * kHeadDim, lane);
  float acc[kColumns][4] = {};
  multiply<0, kPieces>(acc, rows[0], rows[1], query);

  __shared__ float warp_max[8][16], warp_sum[8][16], warp_heaviest[8][16];
#pragma unroll
  for (int j = 0; j < kColumns; ++j)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float x[2], weight[2], heaviest = -1e30f;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int i = mine + 8 * e;
        x[e] = tokens[e] >= 0 ? scores(acc[j][2 * e + h]) : -INFINITY;
        const bool others = i >= kLookFirst && i < kLookFirst + spread;
        weight[e] = others ? share : 1.f;
        if (others) heaviest = fmaxf(heaviest, x[e]);
      }
      float m = fmaxf(fmaxf(x[0], x[1]), -1e30f);
#pragma unroll
      for (int d = 4; d < 32; d *= 2) {
        m = fmaxf(m, __shfl_xor_sync(kAll, m, d));
        heaviest = fmaxf(heaviest, __shfl_xor_sync(kAll, heaviest, d));
      }
      float sum = weight[0] * exp2_fast(x[0] - m) + weight[1] * exp2_fast(x[1] - m);
#pragma unroll
      for (int d = 4; d < 32; d *= 2) sum += __shfl_xor_sync(kAll, sum, d);
      if (lane < 4) {
        const int slot = 8 * j + 2 * lane + h;
        warp_max[warp][slot] = m;
        warp_sum[warp][slot] = sum;
        warp_heaviest[warp][slot] = heaviest;
      }
    }
  __syncthreads();
  if (threadIdx.x < kGroup) {
    float m = -1e30f, sum = 0.f, heaviest = -1e30f;
#pragma unroll
    for (int w = 0; w < 8; ++w) {
      m = fmaxf(m, warp_max[w][threadIdx.x]);
      heaviest = fmaxf(heaviest, warp_heaviest[w][threadIdx.x]);
    }
#pragma unroll
    for (int w = 0; w < 8; ++w) sum += warp_sum[w][threadIdx.x] * exp2_fast(warp_max[w][threadIdx.x] - m);
    out.look[(pair * kLookParts + part) * kGroup + threadIdx.x] = make_float4(m, sum, heaviest, 0.f);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(&out.progress.pair[pair].y, 1);
  }
}

cudaError_t look(const Batch& batch, const Pages& pages, const Scores& scores, const void* q, const PpsBuffers& out, cudaStream_t stream) {
  return launch_side_by_side(look_kernel, dim3(kLookParts, batch.kv_heads, batch.rows), kLookThreads, 0,
                             stream, false, batch, pages, scores, static_cast<const Half*>(q), out);
}

}  // namespace santa
