// pps, stage 1: the K scan that leaves one 8-bit log-code per key and KV head, its histogram, and each head's exact mass.
//
// q = sum over heads of 2^(x - norm), norm a first estimate of the head's log2-sum-exp, which the schedulers of all blocks make together
// while the first keys are on their way. It only shapes the inclusion probabilities: any positive q is fair, and the exact
// log2-sum-exp is summed here, relative to the estimate.
#include "look.cuh"
#include "score.cuh"

namespace santa {

struct CodeEpilogue {
  struct Chunk {
    float norm[8 * kColumns];      // of the heads; +inf past the group: they weigh nothing
    unsigned histogram[kByteCodes];
  };

  const Batch& batch;
  const Pages& pages;
  const Scores& scores;
  const Half* q;
  const PpsBuffers& out;
  int lane;
  int task;                        // the next of this block's shares of the first looks: row, KV head, part
  float norm[kHeadSlots];
  uint8_t* codes;
  float* mass;
  unsigned* histogram;

  __device__ int64_t pair_of(const Segment& s) const { return int64_t(s.row) * batch.kv_heads + s.head; }

  __device__ __forceinline__ bool work_ahead() {
    const int tasks = batch.rows * batch.kv_heads * kLookParts;
    for (; task < tasks; task += gridDim.x) {
      const int pair = task / kLookParts, part = task % kLookParts, row = pair / batch.kv_heads, n = batch.length(row);
      if (part >= look_parts(n)) continue;
      look_at(batch, pages, scores, q, out, row, pair % batch.kv_heads, n, part);
      task += gridDim.x;
      break;
    }
    return task < tasks;
  }

  __device__ bool available(const Segment& s) const { return Progress::reached(&out.progress.pair[pair_of(s)].y, look_parts(s.length)); }

  __device__ void prepare(const Segment& s, Chunk& chunk) const {
    if (lane >= kGroup && lane < 8 * kColumns) chunk.norm[lane] = INFINITY;
    finish_look(out.look + pair_of(s) * (kLookParts * kGroup), s.length, chunk.norm);
  }

  __device__ void tidy(int64_t pair, Chunk& chunk) const {
    for (int b = lane; b < kByteCodes; b += 32) {
      const unsigned count = chunk.histogram[b];
      if (count) atomicAdd(out.histogram + pair * kByteCodes + b, count);
      chunk.histogram[b] = 0;
    }
  }

  __device__ __forceinline__ void enter(const Segment& s, Chunk& chunk) {
    histogram = chunk.histogram;
#pragma unroll
    for (int h = 0; h < kHeadSlots; ++h) norm[h] = chunk.norm[head_of(h, lane)];
    codes = out.codes + pair_of(s) * batch.max_units * kUnit;
    mass = out.unit_mass + pair_of(s) * batch.max_units * kGroup;
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
      const int code = mine > 0.f ? max(1, min(kByteCodes - 1, __float2int_rd(8.f * log2_fast(mine)) + kCodeZero)) : 0;
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
        if (head_of(h, lane) < kGroup) q[i] += exp2_fast(fminf(fmaxf(u.x[i][h] - norm[h], -INFINITY), 100.f));
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
};

__global__ void __launch_bounds__(kScoreThreads, kScoreBound)
    score_codes_kernel(Batch batch, Pages pages, Scores scores, const Half* q, PpsBuffers out) {
  extern __shared__ __align__(128) char shared[];
  int* before = reinterpret_cast<int*>(shared + kRingBytes);
  __shared__ ChunkSlots<CodeEpilogue> slots;
  for (auto& chunk : slots.chunk)
    for (int b = threadIdx.x; b < kByteCodes; b += kScoreThreads) chunk.histogram[b] = 0;
  const Chunks chunks = Chunks::make<kScoreThreads>(batch, before);
  launch_next();
  CodeEpilogue epilogue{batch, pages, scores, q, out, int(threadIdx.x % 32), int(blockIdx.x)};
  scan_keys(batch, pages, q, chunks, shared, slots, out.queue, out.progress, epilogue);
}

cudaError_t score_codes(const Batch& batch, const Pages& pages, const Scores& scores, const void* q, const PpsBuffers& out, int blocks,
                        cudaStream_t stream) {
  return launch_side_by_side(score_codes_kernel, dim3(blocks), kScoreThreads, kRingBytes + (batch.rows + 1) * sizeof(int),
                             stream, false, batch, pages, scores, static_cast<const Half*>(q), out);
}

}  // namespace santa
