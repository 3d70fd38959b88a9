// ssa, stage 2: the scan of the codes. A key's proxy is the sum of one table entry per subspace, for four heads with every look-up.
//
// Lane l looks up subspace (t xor l) of its own key at step t, so the 16 lanes of half a warp always read 16 different subspaces, which
// lie in different banks whatever the codes are. What is left behind: every key's proxies as fp16, and for each head (m, s): the keys
// outside the windows that a block has seen weigh s * 2^m.
#include "proxy_schedule.cuh"
#include "ssa.cuh"

namespace santa {

constexpr int kScanThreads = 384;
constexpr int kScanWarps = kScanThreads / 32;
constexpr int kScanBlocks = 2;                       // blocks a multiprocessor holds
constexpr int kAtOnce = 2 * kTableBytes <= 65536 && kQuads > 1 ? 2 : 1;     // quads of heads scored in one go

struct KeyCode {
  static constexpr int M = kSubspaces, kWords = M / 4;
  uint32_t word[kWords];

  __device__ __forceinline__ void load(const uint8_t* p) {
    if constexpr (M == 8) {
      const uint2 v = __ldcs(reinterpret_cast<const uint2*>(p));
      word[0] = v.x; word[1] = v.y;
    } else {
#pragma unroll
      for (int i = 0; i < M / 16; ++i) {
        const uint4 v = __ldcs(reinterpret_cast<const uint4*>(p) + i);
        word[4 * i] = v.x; word[4 * i + 1] = v.y; word[4 * i + 2] = v.z; word[4 * i + 3] = v.w;
      }
    }
  }

  // Byte t becomes byte (t xor lane % M).
  __device__ __forceinline__ void permute(int lane, uint32_t within_word) {
#pragma unroll
    for (int s = kWords / 2; s > 0; s /= 2)
#pragma unroll
      for (int i = 0; i < kWords; ++i)
        if (!(i & s)) {
          const bool swap = lane & 4 * s;
          const uint32_t low = swap ? word[i | s] : word[i], high = swap ? word[i] : word[i | s];
          word[i] = low; word[i | s] = high;
        }
#pragma unroll
    for (int i = 0; i < kWords; ++i) word[i] = __byte_perm(word[i], 0, within_word);
  }
};

// Log-domain sum that follows its maximum in large steps only: exact in float32, and rarely rescaled.
template <int HEADS>
struct LogSum {
  float top[HEADS], sum[HEADS];

  __device__ void clear() {
#pragma unroll
    for (int h = 0; h < HEADS; ++h) { top[h] = -1e30f; sum[h] = 0.f; }
  }
  __device__ __forceinline__ void add(const float (&x)[HEADS]) {
    float above = x[0] - top[0];
#pragma unroll
    for (int h = 1; h < HEADS; ++h) above = fmaxf(above, x[h] - top[h]);
    if (above > 40.f)
#pragma unroll
      for (int h = 0; h < HEADS; ++h) {
        const float higher = fmaxf(top[h], x[h]);
        sum[h] *= exp2_fast(top[h] - higher);
        top[h] = higher;
      }
#pragma unroll
    for (int h = 0; h < HEADS; ++h) sum[h] += exp2_fast(x[h] - top[h]);
  }
};

__global__ void __launch_bounds__(kScanThreads, kScanBlocks) scan_kernel(Batch batch, CodePages pages, Window window, ProxyBuffers out) {
  constexpr int M = kSubspaces, kHeads = 4 * kAtOnce;
  extern __shared__ __align__(16) char shared[];
  int* before = reinterpret_cast<int*>(shared + kAtOnce * kTableBytes);
  __shared__ float2 warp_norm[kScanWarps][kHeads];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  count_units<kScanThreads>(batch, before);
  launch_next();
  const int64_t units = int64_t(before[batch.rows]) * batch.kv_heads;
  int64_t at = units * blockIdx.x / gridDim.x;
  const int64_t end = units * (blockIdx.x + 1) / gridDim.x;
  const uint32_t selector = 0x3210u ^ (lane & 3) * 0x1111u;
  const int per_block = pages.block_size / 16;
  const uint32_t reciprocal = uint32_t((uint64_t(1) << 32) / per_block) + 1;
  uint32_t base[M];
#pragma unroll
  for (int t = 0; t < M; ++t) base[t] = uint32_t(__cvta_generic_to_shared(shared)) + ((lane & (kSlots - 1)) ^ t) * 8;
  wait_previous();

  while (at < end) {
    const Segment s = segment_at(batch, before, at, end);
    const int64_t pair = int64_t(s.row) * batch.kv_heads + s.head;
    const int* table = batch.block_table + s.row * batch.table_stride;
    const uint8_t* head_codes = pages.codes + int64_t(s.head) * pages.block_size * M;
    const int selectable = window.begin(s.length), selectable_end = window.end(s.length);
    // Tokens beyond the row repeat its last one.
    const auto sixteen_of = [&](int unit, int i) { return min(unit * kUnit + 32 * i + lane, s.length - 1) / 16; };
    const auto column_of = [&](int sixteen) { return per_block == 1 ? sixteen : int(__umulhi(sixteen, reciprocal)); };
    const auto address_of = [&](int unit, int i, int block) {
      const int token = min(unit * kUnit + 32 * i + lane, s.length - 1), sixteen = token / 16;
      return head_codes + block * pages.page_stride + ((sixteen - column_of(sixteen) * per_block) * 16 + token % 16) * M;
    };
    for (int first = 0; first < kQuads; first += kAtOnce) {
      const int quads = min(kAtOnce, kQuads - first);
      __syncthreads();
      const uint4* from = reinterpret_cast<const uint4*>(out.tables + (pair * kQuads + first) * kCentroids * kSlots);
      for (int i = threadIdx.x; i < quads * kTableBytes / 16; i += kScanThreads) reinterpret_cast<uint4*>(shared)[i] = __ldcg(from + i);

      int unit = s.first + warp;
      KeyCode code[2], following[2];
      int block[2];
      const int last = s.last - 1;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int now = min(unit, last);
        code[i].load(address_of(now, i, table[column_of(sixteen_of(now, i))]));
        block[i] = table[column_of(sixteen_of(min(unit + kScanWarps, last), i))];
      }
      __syncthreads();
      LogSum<kHeads> norm;
      norm.clear();
      for (; unit < s.last; unit += kScanWarps) {
        const int next = min(unit + kScanWarps, last), after = min(unit + 2 * kScanWarps, last);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          following[i].load(address_of(next, i, block[i]));
          block[i] = table[column_of(sixteen_of(after, i))];
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          code[i].permute(lane, selector);
          __half2 sum[2 * kAtOnce];
#pragma unroll
          for (int k = 0; k < 2 * kAtOnce; ++k) sum[k] = __half2{};
#pragma unroll
          for (int t = 0; t < M; ++t) {
            constexpr int kShift = kSlots == 32 ? 8 : 7;         // bytes of a centroid's entries, as a power of two
            const uint32_t word = code[i].word[t / 4];
            const int up = kShift - t % 4 * 8;
            const uint32_t offset = (up >= 0 ? word << up : word >> -up) & (255u << kShift);
            const uint32_t entry = base[t] + offset;
#pragma unroll
            for (int k = 0; k < kAtOnce; ++k) {
              uint2 v;
              asm("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(entry + k * kTableBytes));
              sum[2 * k] = __hadd2(sum[2 * k], *reinterpret_cast<const __half2*>(&v.x));
              sum[2 * k + 1] = __hadd2(sum[2 * k + 1], *reinterpret_cast<const __half2*>(&v.y));
            }
          }
          const int token = unit * kUnit + 32 * i + lane;
#pragma unroll
          for (int k = 0; k < kAtOnce; ++k)
            if (k < quads)
              out.scores[(pair * kQuads + first + k) * batch.max_units * kUnit + token] =
                  make_uint2(*reinterpret_cast<const uint32_t*>(&sum[2 * k]), *reinterpret_cast<const uint32_t*>(&sum[2 * k + 1]));
          if (token >= selectable && token < selectable_end) {
            float x[kHeads];
#pragma unroll
            for (int k = 0; k < 2 * kAtOnce; ++k) { const float2 two = __half22float2(sum[k]); x[2 * k] = two.x; x[2 * k + 1] = two.y; }
            norm.add(x);
          }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) code[i] = following[i];
      }

#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        float top = norm.top[h];
#pragma unroll
        for (int d = 16; d > 0; d /= 2) top = fmaxf(top, __shfl_xor_sync(kAll, top, d));
        float sum = norm.sum[h] * exp2_fast(norm.top[h] - top);
#pragma unroll
        for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(kAll, sum, d);
        if (lane == 0) warp_norm[warp][h] = make_float2(top, sum);
      }
      __syncthreads();
      if (threadIdx.x < 4 * quads && 4 * first + threadIdx.x < kGroup) {
        float top = -1e30f, sum = 0.f;
#pragma unroll
        for (int w = 0; w < kScanWarps; ++w) top = fmaxf(top, warp_norm[w][threadIdx.x].x);
#pragma unroll
        for (int w = 0; w < kScanWarps; ++w) sum += warp_norm[w][threadIdx.x].y * exp2_fast(warp_norm[w][threadIdx.x].x - top);
        const NormSlots slots(batch, before, s.row, s.head, units, gridDim.x);
        out.norm[(pair * out.norm_slots + int(blockIdx.x) - slots.first) * kGroup + 4 * first + threadIdx.x] = make_float2(top, sum);
      }
    }
    at += s.last - s.first;
  }
}

cudaError_t proxy_scores(const Batch& batch, const CodePages& pages, const Window& window, const ProxyBuffers& out, cudaStream_t stream,
                         bool overlap) {
  return launch(scan_kernel, dim3(out.norm_slots), kScanThreads, kAtOnce * kTableBytes + (batch.rows + 1) * sizeof(int), stream, overlap, batch,
                pages, window, out);
}

}  // namespace santa
