// ssa, stage 1: look-up tables. A block turns the group's queries into one subspace and multiplies them with its 256 centroids, in log2
// units; each head's largest entry is taken off (a constant of the row), so that fp16 is finest where scores are highest.
// Also clears what the later stages count in.
#include "block_sum.cuh"
#include "ssa.cuh"

namespace santa {

constexpr int kTableThreads = kCentroids;

__global__ void __launch_bounds__(kTableThreads)
    tables_kernel(Batch batch, Codebooks codebooks, const Half* q, float log2_scale, ProxyBuffers out) {
  constexpr int M = kSubspaces, S = kFeatures, kParts = kTableThreads / S < kHeadDim ? kTableThreads / S : kHeadDim, kPart = kHeadDim / kParts;
  __shared__ float query[kGroup][kHeadDim], part[kParts][kGroup][S], turned[kGroup][S];
  __shared__ float scratch[kGroup][kTableThreads / 32];
  __shared__ bool broken[kGroup];
  launch_next();
  const int m = blockIdx.x, head = blockIdx.y, row = blockIdx.z, t = threadIdx.x, lane = t % 32, warp = t / 32;
  const int n = batch.length(row);
  if (n == 0) return;
  const int64_t pair = int64_t(row) * batch.kv_heads + head;

  uint4* histogram = reinterpret_cast<uint4*>(out.histogram + pair * kBins);
  for (int i = m * kTableThreads + t; i < kBins / 4; i += M * kTableThreads) histogram[i] = uint4{0, 0, 0, 0};
  for (int i = m * kTableThreads + t; i < out.max_chunks; i += M * kTableThreads)
    out.chunk_sum[pair * out.max_chunks + i] = out.chunk_taken[pair * out.max_chunks + i] = 0;
  if (m == 0 && t < 32) out.fine[(pair * (out.max_chunks + 1) + out.max_chunks) * 32 + t] = 0;
  if (m == 0 && t == 0) out.low_weight[pair] = 0;

  const bool turns = t < kParts * S;                 // a thread takes kPart features to one of the subspace's S
  const float* transform = codebooks.query_transform + ((int64_t(head) * M + m) * kHeadDim + t / S * kPart) * S + t % S;
  float column[kPart];
#pragma unroll
  for (int i = 0; i < kPart; ++i) column[i] = turns ? transform[i * S] : 0.f;
  const float* centroid = codebooks.centroids + (int64_t(head) * M + m) * S * kCentroids + t;
  float own[S];
#pragma unroll
  for (int i = 0; i < S; ++i) own[i] = centroid[i * kCentroids];

  if (t < kGroup) broken[t] = false;
  __syncthreads();
  for (int i = t; i < kGroup * kHeadDim; i += kTableThreads) {
    const float x = float(q[pair * kGroup * kHeadDim + i]);
    query[i / kHeadDim][i % kHeadDim] = x * log2_scale;
    if (!(fabsf(x) < INFINITY)) broken[i / kHeadDim] = true;
  }
  __syncthreads();
  if (turns)
#pragma unroll
    for (int h = 0; h < kGroup; ++h) {
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < kPart; ++i) sum = fmaf(query[h][t / S * kPart + i], column[i], sum);
      part[t / S][h][t % S] = sum;
    }
  __syncthreads();
  for (int i = t; i < kGroup * S; i += kTableThreads) {
    float sum = codebooks.query_offset[head * kHeadDim + m * S + i % S];
#pragma unroll 8
    for (int p = 0; p < kParts; ++p) sum += part[p][i / S][i % S];
    turned[i / S][i % S] = broken[i / S] ? 0.f : sum;
  }
  if (m == 0 && t < kGroup) out.broken[pair * kGroup + t] = broken[t];
  __syncthreads();

  float x[4 * kQuads] = {};
#pragma unroll
  for (int h = 0; h < kGroup; ++h) {
#pragma unroll
    for (int i = 0; i < S; ++i) x[h] = fmaf(turned[h][i], own[i], x[h]);
    float top = x[h];
#pragma unroll
    for (int d = 16; d > 0; d /= 2) top = fmaxf(top, __shfl_xor_sync(kAll, top, d));
    if (lane == 0) scratch[h][warp] = top;
  }
  __syncthreads();
#pragma unroll
  for (int quad = 0; quad < kQuads; ++quad) {
    __half2 entry[2];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int h = 4 * quad + k;
      float top = x[h];
      if (h < kGroup)
#pragma unroll
        for (int w = 0; w < kTableThreads / 32; ++w) top = fmaxf(top, scratch[h][w]);
      // Far below fp16's range even when all subspaces are added up: such a key is nothing but its uniform share.
      const __half value = __float2half_rn(fmaxf(x[h] - top, -2000.f));
      if (k % 2) entry[k / 2].y = value; else entry[k / 2].x = value;
    }
    uint2* to = out.tables + ((pair * kQuads + quad) * kCentroids + t) * kSlots + m;
    const uint2 word = *reinterpret_cast<const uint2*>(entry);
#pragma unroll
    for (int copy = 0; copy < kSlots; copy += M) to[copy] = word;
  }
}

cudaError_t proxy_tables(const Batch& batch, const Codebooks& codebooks, const void* q, float scale, const ProxyBuffers& out,
                         cudaStream_t stream) {
  return launch(tables_kernel, dim3(kSubspaces, batch.kv_heads, batch.rows), kTableThreads, 0, stream, false, batch, codebooks,
                static_cast<const Half*>(q), scale * kLog2e, out);
}

}  // namespace santa
