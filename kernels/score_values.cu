// The value samplers, stage 1: the K scan that leaves 16-bit weights per query head, an exponent and a mass for every 64 tokens.
#include "score.cuh"
#include "values.cuh"

namespace santa {

constexpr int kLeastChunk = 12, kChunkEntry = 0;     // units: a chunk has only its queries to load

struct ValueEpilogue {
  const Batch& batch;
  const Scores& scores;
  const Stash& out;
  int lane;
  uint64_t policy = evict_last();
  int64_t first_head;              // row * query heads + first query head of the group

  __device__ void begin(const Segment& s, int) { first_head = (int64_t(s.row) * batch.kv_heads + s.head) * kGroup; }

  struct Unit {};
  __device__ __forceinline__ void add(const UnitDots&, int, Unit&) const {}

  __device__ __forceinline__ void operator()(int unit, const UnitDots& dots, Unit&) {
    UnitScores u;
    dots.scores(scores, lane, u);
    const UnitExponents exponents(u);
#pragma unroll
    for (int h = 0; h < kHeadSlots; ++h) {
      uint32_t words[4];
      int mass = 0;
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        // floor by adding 2^23: the integer is then in the lowest bits
        const uint32_t low = __float_as_uint(__fadd_rd(fminf(u.x[i][h] * 65536.f, 65535.f), 8388608.f));
        const uint32_t high = __float_as_uint(__fadd_rd(fminf(u.x[i + 1][h] * 65536.f, 65535.f), 8388608.f));
        words[i / 2] = __byte_perm(low, high, 0x5410);
        mass += (low & 0xffff) + (high & 0xffff);
      }
#pragma unroll
      for (int d = 4; d < 32; d *= 2) mass += __shfl_xor_sync(kAll, mass, d);
      if (head_of(h, lane) >= kGroup) continue;
      const int64_t head = (first_head + head_of(h, lane)) * batch.max_units + unit;
      uint32_t* weights = reinterpret_cast<uint32_t*>(out.weight + head * kUnit) + lane / 4;
#pragma unroll
      for (int t = 0; t < 4; ++t)
        asm volatile("st.global.L2::cache_hint.u32 [%0], %1, %2;" ::"l"(weights + 8 * t), "r"(words[t]), "l"(policy) : "memory");
      if (lane < 4) out.unit[head] = make_int2(exponents.e[h], mass);
    }
  }

  __device__ void end(int64_t, int) const {}
};

__global__ void __launch_bounds__(kScoreThreads, kScoreBound)
    score_values_kernel(Batch batch, Pages pages, Scores scores, const Half* q, Stash out) {
  extern __shared__ __align__(128) char shared[];
  const Chunks chunks = Chunks::make<kScoreThreads>(batch, reinterpret_cast<int*>(shared + kRingBytes), kOneChunk, kLeastChunk, kChunkEntry);
  ValueEpilogue epilogue{batch, scores, out, int(threadIdx.x % 32)};
  scan_keys(batch, pages, q, chunks, shared, out.queue, out.progress, epilogue);
}

cudaError_t score_values(const Batch& batch, const Pages& pages, const Scores& scores, const void* q, const Stash& out, int blocks,
                         cudaStream_t stream) {
  return launch_side_by_side(score_values_kernel, dim3(blocks), kScoreThreads, kRingBytes + Chunks::bytes(batch),
                             stream, false, batch, pages, scores, static_cast<const Half*>(q), out);
}

}  // namespace santa
