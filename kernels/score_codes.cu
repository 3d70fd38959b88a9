// pps, stage 2: the K scan that leaves one 8-bit log-code per key and KV head, its histogram, and each head's exact mass.
//
// q = sum over heads of 2^(x - norm), norm a first estimate of the head's log2-sum-exp (look.cu). It only shapes the inclusion
// probabilities: any positive q is fair, and the exact log2-sum-exp is summed here, relative to the estimate.
#include "pps.cuh"
#include "score.cuh"

namespace santa {

constexpr int kLeastChunk = 24, kChunkEntry = 2;     // units: a chunk has to load the first look's sums, and to add its histogram

struct CodeEpilogue {
  const Batch& batch;
  const Scores& scores;
  const PpsBuffers& out;
  unsigned* histograms;            // [2, kByteCodes] in shared memory: of this block's share of the segment
  int lane;
  float norm[kHeadSlots];          // +inf for heads past the group: they weigh nothing
  uint8_t* codes;
  float* mass;
  unsigned* histogram;

  __device__ void begin(const Segment& s, int parity) {
    histogram = histograms + parity * kByteCodes;
    const int64_t pair = int64_t(s.row) * batch.kv_heads + s.head;
    Progress::wait_for(&out.progress.pair[pair].y, look_parts(s.length));
    const float4* look = out.look + pair * kLookParts * kGroup;
#pragma unroll
    for (int h = 0; h < kHeadSlots; ++h)
      norm[h] = head_of(h, lane) < kGroup ? look_norm(look + head_of(h, lane), s.length) : INFINITY;
    codes = out.codes + pair * batch.max_units * kUnit;
    mass = out.unit_mass + pair * batch.max_units * kGroup;
  }

  struct Unit {                    // of this lane's tokens: q so far, and per head the sum of 2^(x - norm)
    float q[8], sum[kHeadSlots] = {};
  };

  __device__ __forceinline__ void add(const UnitDots& dots, int tile, Unit& result) const {
#pragma unroll
    for (int i = 2 * tile; i < 2 * tile + 2; ++i) {
      result.q[i] = 0.f;
#pragma unroll
      for (int h = 0; h < kHeadSlots; ++h) {
        float weight = scores.cap > 0.f ? exp2_fast(scores(dots(i, h)) - norm[h]) : exp2_fast(fmaf(dots(i, h), scores.log2_scale, -norm[h]));
        if (token_of(i, lane) >= dots.remaining) weight = 0.f;
        result.q[i] += weight;
        result.sum[h] += weight;
      }
    }
  }

  __device__ __forceinline__ void operator()(int unit, const UnitDots& dots, Unit& result) {
    auto& [q, sum] = result;
    bool usual = true;
#pragma unroll
    for (int h = 0; h < kHeadSlots; ++h) usual &= sum[h] < 1e30f;
    float exponent[kHeadSlots];
#pragma unroll
    for (int h = 0; h < kHeadSlots; ++h) exponent[h] = norm[h];
    if (!__all_sync(kAll, usual)) careful(dots, q, exponent, sum);
#pragma unroll
    for (int h = 0; h < kHeadSlots; ++h) {
#pragma unroll
      for (int d = 4; d < 32; d *= 2) sum[h] += __shfl_xor_sync(kAll, sum[h], d);
      if (lane < 4 && head_of(h, lane) < kGroup) mass[int64_t(unit) * kGroup + head_of(h, lane)] = exponent[h] + log2_fast(sum[h]);
    }

    // q summed over the four lanes of a row group; lane c keeps the two tokens of tile c.
    const bool upper = lane & 2, odd = lane & 1;
    float half[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) half[i] = (upper ? q[4 + i] : q[i]) + __shfl_xor_sync(kAll, upper ? q[i] : q[4 + i], 2);
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float mine = (odd ? half[2 + i] : half[i]) + __shfl_xor_sync(kAll, odd ? half[i] : half[2 + i], 1);
      const int code = byte_code(mine);
      if (mine > 0.f) atomicAdd(&histogram[code], 1u);
      word |= uint32_t(code) << 8 * i;
    }
    reinterpret_cast<uint16_t*>(codes + int64_t(unit) * kUnit)[lane % 4 * 8 + lane / 4] = uint16_t(word);
  }

  // Scores that are not finite, or far above the first look: masses with an exponent of their own, and q without what is NaN.
  __device__ void careful(const UnitDots& dots, float (&q)[8], float (&exponent)[kHeadSlots], float (&sum)[kHeadSlots]) const {
    UnitScores u;
    dots.scores(scores, lane, u);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      q[i] = 0.f;
#pragma unroll
      for (int h = 0; h < kHeadSlots; ++h)
        if (head_of(h, lane) < kGroup) q[i] += bounded_weight(u.x[i][h], norm[h]);
    }
    const UnitExponents exponents(u);
#pragma unroll
    for (int h = 0; h < kHeadSlots; ++h) {
      exponent[h] = float(exponents.e[h]);
      sum[h] = 0.f;
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[h] += u.x[i][h];
    }
  }

  __device__ void end(int64_t pair, int parity) const {
#pragma unroll 1
    for (int b = lane; b < kByteCodes; b += 32) {
      unsigned& count = histograms[parity * kByteCodes + b];
      if (count) atomicAdd(out.histogram + pair * kByteCodes + b, count);
      count = 0;
    }
  }
};

__global__ void __launch_bounds__(kScoreThreads, kScoreBound)
    score_codes_kernel(Batch batch, Pages pages, Scores scores, const Half* q, PpsBuffers out) {
  extern __shared__ __align__(128) char shared[];
  __shared__ unsigned histograms[2 * kByteCodes];
  for (int b = threadIdx.x; b < 2 * kByteCodes; b += kScoreThreads) histograms[b] = 0;
  const Chunks chunks = Chunks::make<kScoreThreads>(batch, reinterpret_cast<int*>(shared + kRingBytes), kOneChunk, kLeastChunk, kChunkEntry);
  CodeEpilogue epilogue{batch, scores, out, histograms, int(threadIdx.x % 32)};
  scan_keys(batch, pages, q, chunks, shared, out.queue, out.progress, epilogue);
  if (blockIdx.x == 0) wait_previous();              // this kernel ends after the one before
}

cudaError_t score_codes(const Batch& batch, const Pages& pages, const Scores& scores, const void* q, const PpsBuffers& out, int blocks,
                        cudaStream_t stream, bool overlap) {
  return launch_side_by_side(score_codes_kernel, dim3(blocks), kScoreThreads, kRingBytes + Chunks::bytes(batch),
                             stream, overlap, batch, pages, scores, static_cast<const Half*>(q), out);
}

}  // namespace santa
