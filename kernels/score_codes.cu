// pps, stage 2: the K scan that leaves one 16-bit log-code per key and KV head, its histogram, and each head's exact mass.
//
// q = sum over heads of 2^(x - norm), norm a first estimate of the head's log2-sum-exp (look.cu). It only shapes the inclusion
// probabilities: any positive q is fair, and the exact log2-sum-exp is summed here.
#include "pps.cuh"
#include "score.cuh"

namespace santa {

struct CodeEpilogue {
  const Batch& batch;
  const PpsBuffers& out;
  unsigned* histogram;             // of this block's share of the segment, in shared memory
  int lane;
  float norm[kHeadSlots];
  int16_t* codes;
  float2* mass;

  __device__ void begin(const Segment& s) {
    wait_previous();
    const int64_t pair = int64_t(s.row) * batch.kv_heads + s.head;
#pragma unroll
    for (int h = 0; h < kHeadSlots; ++h) {
      norm[h] = 0.f;
      if (head_of(h, lane) >= kGroup) continue;
      const float2* look = out.look + pair * kLookParts * kGroup + head_of(h, lane);
      float top = -1e30f, sum = 0.f;
      float2 part[kLookParts];
#pragma unroll
      for (int p = 0; p < kLookParts; ++p) {
        part[p] = p < look_parts(s.length) ? __ldcg(look + p * kGroup) : float2{-1e30f, 0.f};
        top = fmaxf(top, part[p].x);
      }
#pragma unroll
      for (int p = 0; p < kLookParts; ++p) sum += part[p].y * exp2_fast(part[p].x - top);
      if (sum > 0.f && sum < INFINITY) norm[h] = top + log2_fast(sum);
    }
    codes = out.codes + pair * batch.max_units * kUnit;
    mass = out.unit_mass + pair * batch.max_units * kGroup;
  }

  __device__ __forceinline__ void operator()(int unit, UnitScores& u) {
    unsigned present = 0;          // bit i: token i may be taken
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
      for (int h = 0; h < kHeadSlots; ++h)
        if (head_of(h, lane) < kGroup && !(u.x[i][h] == -INFINITY)) present |= 1u << i;
    present |= __shfl_xor_sync(kAll, present, 1);
    present |= __shfl_xor_sync(kAll, present, 2);

    const UnitExponents exponents(u);
    float q[8] = {};
#pragma unroll
    for (int h = 0; h < kHeadSlots; ++h) {
      const bool ours = head_of(h, lane) < kGroup;
      const float shift = ours ? exp2_fast(fminf(float(exponents.e[h]) - norm[h], 120.f)) : 0.f;
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < 8; ++i) { q[i] = fmaf(u.x[i][h], shift, q[i]); sum += u.x[i][h]; }
#pragma unroll
      for (int d = 4; d < 32; d *= 2) sum += __shfl_xor_sync(kAll, sum, d);
      if (lane < 4 && ours) mass[unit * kGroup + head_of(h, lane)] = make_float2(float(exponents.e[h]), sum);
    }
    // Sum q over the four lanes of a row group; lane c keeps tokens 2c and 2c + 1.
    const bool upper = lane & 2, odd = lane & 1;
    float half[4], mine[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) half[i] = (upper ? q[4 + i] : q[i]) + __shfl_xor_sync(kAll, upper ? q[i] : q[4 + i], 2);
#pragma unroll
    for (int i = 0; i < 2; ++i) mine[i] = (odd ? half[2 + i] : half[i]) + __shfl_xor_sync(kAll, odd ? half[i] : half[2 + i], 1);
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool take = present >> (2 * (lane & 3) + i) & 1;
      const int code = take ? max(-32767, min(32767, __float2int_rd(256.f * log2_fast(fmaxf(mine[i], 1e-37f))))) : kExcluded;
      if (take) atomicAdd(&histogram[(code + 32768) >> kBinShift], 1u);
      word |= uint32_t(uint16_t(code)) << 16 * i;
    }
    reinterpret_cast<uint32_t*>(codes + int64_t(unit) * kUnit)[lane] = word;
  }
};

__global__ void __launch_bounds__(kScoreThreads, kScoreBlocks)
    score_codes_kernel(Batch batch, Pages pages, Scores scores, const Half* q, PpsBuffers out) {
  extern __shared__ __align__(128) char shared[];
  int* before = reinterpret_cast<int*>(shared + kRingBytes);
  __shared__ __align__(16) unsigned histogram[kBins];
  for (int b = threadIdx.x; b < kBins; b += kScoreThreads) histogram[b] = 0;
  count_units<kScoreThreads>(batch, before);
  launch_next();
  const int64_t units = int64_t(before[batch.rows]) * batch.kv_heads;
  int64_t at = units * blockIdx.x / gridDim.x;
  const int64_t end = units * (blockIdx.x + 1) / gridDim.x;
  CodeEpilogue epilogue{batch, out, histogram, int(threadIdx.x % 32)};
  if (at == end) wait_previous();
  KeyRing ring(shared);
  while (at < end) {
    const Segment s = segment_at(batch, before, at, end);
    const int64_t pair = int64_t(s.row) * batch.kv_heads + s.head;
    Query query;
    query.load(q + pair * kGroup * kHeadDim, threadIdx.x % 32);
    score_segment(batch, pages, scores, query, s, ring, epilogue);
    __syncthreads();
    unsigned* total = out.histogram + pair * kBins;
    for (int b = threadIdx.x * 4; b < kBins; b += kScoreThreads * 4) {
      uint4& four = *reinterpret_cast<uint4*>(histogram + b);
      if ((four.x | four.y | four.z | four.w) == 0) continue;
      if (four.x) atomicAdd(total + b, four.x);
      if (four.y) atomicAdd(total + b + 1, four.y);
      if (four.z) atomicAdd(total + b + 2, four.z);
      if (four.w) atomicAdd(total + b + 3, four.w);
      four = uint4{0, 0, 0, 0};
    }
    __syncthreads();
    at += s.last - s.first;
  }
}

cudaError_t score_codes(const Batch& batch, const Pages& pages, const Scores& scores, const void* q, const PpsBuffers& out, int blocks,
                        cudaStream_t stream, bool overlap) {
  return launch(score_codes_kernel, dim3(blocks), kScoreThreads, kRingBytes + (batch.rows + 1) * sizeof(int), stream, overlap, batch, pages,
                scores, static_cast<const Half*>(q), out);
}

}  // namespace santa
