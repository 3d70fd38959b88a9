// The value samplers, stage 1: the K scan that leaves, per query head and 64 tokens, an exponent, a mass, and 16-bit weights: of every
// token for flash, else of every four tokens (who draws one of the four reads their keys again).
#include "score.cuh"
#include "values.cuh"

namespace santa {

struct ValueEpilogue {
  struct Chunk {
    bool tokens;                   // a weight for each token
  };

  const Batch& batch;
  const Scores& scores;
  const Stash& out;
  int lane;
  bool tokens;
  uint16_t* weight;
  int2* mass;

  __device__ bool work_ahead() const { return false; }
  __device__ bool available(const Segment&) const { return true; }
  __device__ void prepare(const Segment& s, Chunk& chunk) const { chunk.tokens = batch.method[s.row] == kFlash; }
  __device__ void tidy(int64_t, Chunk&) const {}

  __device__ __forceinline__ void enter(const Segment& s, const Chunk& chunk) {
    const int64_t pair = int64_t(s.row) * batch.kv_heads + s.head;
    tokens = chunk.tokens;
    weight = out.weight_of(pair, batch.max_units);
    mass = out.unit + pair * batch.max_units * kGroup;
  }

  struct Unit {};
  __device__ __forceinline__ void add(const UnitDots&, int, Unit&) const {}

  __device__ __forceinline__ void operator()(int unit, const UnitDots& dots, Unit&) {
    UnitScores u;
    dots.scores(scores, lane, u);
    const UnitExponents exponents(u);
#pragma unroll
    for (int h = 0; h < kHeadSlots; ++h) {
      const int head = head_of(h, lane), sum = tokens ? store_tokens(u, h, head, unit) : store_sums(u, h, head, unit);
      if (lane < 4 && head < kGroup) mass[int64_t(unit) * kGroup + head] = make_int2(exponents.e[h], sum);
    }
  }

  // Both return the sum of what they stored, for lanes 0 to 3. floor by adding 2^23: the integer is then in the lowest bits.
  __device__ __forceinline__ static uint32_t quantise(float x, int bits) {
    return __float_as_uint(__fadd_rd(fminf(x * float(1 << bits), 65535.f), 8388608.f)) & 0xffff;
  }

  __device__ __forceinline__ int store_tokens(const UnitScores& u, int h, int head, int unit) const {
    uint32_t words[4];
    int sum = 0;
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const uint32_t low = quantise(u.x[2 * t][h], kTokenBits), high = quantise(u.x[2 * t + 1][h], kTokenBits);
      words[t] = low | high << 16;
      sum += low + high;
    }
#pragma unroll
    for (int d = 4; d < 32; d *= 2) sum += __shfl_xor_sync(kAll, sum, d);
    uint32_t* to = reinterpret_cast<uint32_t*>(weight + out.token_at(head, unit, batch.max_units)) + lane / 4;
    if (head < kGroup)
#pragma unroll
      for (int t = 0; t < 4; ++t) to[8 * t] = words[t];
    return sum;
  }

  __device__ __forceinline__ int store_sums(const UnitScores& u, int h, int head, int unit) const {
    uint32_t four[4];              // of tile t, by lanes (2 m, c) and (2 m + 1, c): tokens 16 t + 4 m ...
    int sum = 0;
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const float two = u.x[2 * t][h] + u.x[2 * t + 1][h];
      four[t] = quantise(two + __shfl_xor_sync(kAll, two, 4), kSumBits);
      sum += four[t];
    }
    sum += __shfl_xor_sync(kAll, sum, 8);
    sum += __shfl_xor_sync(kAll, sum, 16);
    // Lane (4 b + 2 a + o, c) stores sums 2 b and 2 b + 1 of tile 2 a + o; it has one of them, lane ^ 8 the other.
    const bool a = lane & 8, o = lane & 4;
    const uint32_t pairs[2] = {four[0] | four[1] << 16, four[2] | four[3] << 16};
    const uint32_t others[2] = {__shfl_xor_sync(kAll, pairs[0], 8), __shfl_xor_sync(kAll, pairs[1], 8)};
    const uint32_t low = a ? others[1] : pairs[0], high = a ? pairs[1] : others[0];
    uint32_t* to = reinterpret_cast<uint32_t*>(weight + out.sums_at(head, unit));
    if (head < kGroup) to[2 * (lane / 4 % 4) + lane / 16] = __byte_perm(low, high, o ? 0x7632 : 0x5410);
    return sum;
  }
};

__global__ void __launch_bounds__(kScoreThreads, kScoreBound)
    score_values_kernel(Batch batch, Pages pages, Scores scores, const Half* q, Stash out) {
  extern __shared__ __align__(128) char shared[];
  int* before = reinterpret_cast<int*>(shared + kRingBytes);
  __shared__ ChunkSlots<ValueEpilogue> slots;
  const Chunks chunks = Chunks::make<kScoreThreads>(batch, before);
  launch_next();
  ValueEpilogue epilogue{batch, scores, out, int(threadIdx.x % 32)};
  scan_keys(batch, pages, q, chunks, shared, slots, out.queue, out.progress, epilogue);
}

cudaError_t score_values(const Batch& batch, const Pages& pages, const Scores& scores, const void* q, const Stash& out, int blocks,
                         cudaStream_t stream) {
  return launch_side_by_side(score_values_kernel, dim3(blocks), kScoreThreads, kRingBytes + (batch.rows + 1) * sizeof(int),
                             stream, false, batch, pages, scores, static_cast<const Half*>(q), out);
}

}  // namespace santa
