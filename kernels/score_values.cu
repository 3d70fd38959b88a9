// The value samplers, stage 1: the K scan that leaves 16-bit weights per query head, an exponent and a mass for every 64 tokens.
#include "score.cuh"
#include "values.cuh"

namespace santa {

struct ValueEpilogue {
  const Batch& batch;
  const Stash& out;
  int lane;
  int64_t first_head;              // row * query heads + first query head of the group

  __device__ void begin(const Segment& s) { first_head = (int64_t(s.row) * batch.kv_heads + s.head) * kGroup; }

  __device__ __forceinline__ void operator()(int unit, UnitScores& u) {
    const UnitExponents exponents(u);
#pragma unroll
    for (int h = 0; h < kHeadSlots; ++h) {
      uint32_t words[4];
      int mass = 0;
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        const int low = min(65535, int(u.x[i][h] * 65536.f)), high = min(65535, int(u.x[i + 1][h] * 65536.f));
        words[i / 2] = uint32_t(low) | uint32_t(high) << 16;
        mass += low + high;
      }
#pragma unroll
      for (int d = 4; d < 32; d *= 2) mass += __shfl_xor_sync(kAll, mass, d);
      if (head_of(h, lane) >= kGroup) continue;
      const int64_t head = (first_head + head_of(h, lane)) * batch.max_units + unit;
      store16(out.weight + head * kUnit + lane / 4 * 8, uint4{words[0], words[1], words[2], words[3]});
      if (lane < 4) out.unit[head] = make_int2(exponents.e[h], mass);
    }
  }
};

__global__ void __launch_bounds__(kScoreThreads, kScoreBlocks)
    score_values_kernel(Batch batch, Pages pages, Scores scores, const Half* q, Stash out) {
  extern __shared__ __align__(128) char shared[];
  int* before = reinterpret_cast<int*>(shared + kRingBytes);
  count_units<kScoreThreads>(batch, before);
  launch_next();
  const int64_t units = int64_t(before[batch.rows]) * batch.kv_heads;
  int64_t at = units * blockIdx.x / gridDim.x;
  const int64_t end = units * (blockIdx.x + 1) / gridDim.x;
  ValueEpilogue epilogue{batch, out, int(threadIdx.x % 32)};
  KeyRing ring(shared);
  while (at < end) {
    const Segment s = segment_at(batch, before, at, end);
    Query query;
    query.load(q + (int64_t(s.row) * batch.kv_heads + s.head) * kGroup * kHeadDim, threadIdx.x % 32);
    score_segment(batch, pages, scores, query, s, ring, epilogue);
    at += s.last - s.first;
  }
}

cudaError_t score_values(const Batch& batch, const Pages& pages, const Scores& scores, const void* q, const Stash& out, int blocks,
                         cudaStream_t stream) {
  return launch(score_values_kernel, dim3(blocks), kScoreThreads, kRingBytes + (batch.rows + 1) * sizeof(int), stream, false, batch, pages,
                scores, static_cast<const Half*>(q), out);
}

}  // namespace santa
