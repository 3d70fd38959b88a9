// ssa, stage 2: the scan of the codes. A key's proxy is the sum of one table entry per subspace, for four heads with every look-up.
//
// Lane l looks up subspace (l + t) mod 16 of its own key at step t, so the 16 lanes of half a warp always read 16 different subspaces, which
// lie in different banks whatever the codes are. A centroid's row has every entry twice, so that l + t needs no modulo: an address is the
// code byte, a constant of the lane and a constant of the step. What is left behind: every key's proxies as fp16, and for each
// head (m, s): the keys outside the windows that a block has seen weigh s * 2^m.
#include "proxy_schedule.cuh"
#include "ssa.cuh"

namespace santa {

// In shared memory a row of 256 bytes for every centroid of 16 subspaces and a quad of heads: a table of 64 KB.
constexpr int kRow = 256, kTable = kCentroids * kRow;
constexpr int kHalves = kSubspaces == 32 ? 2 : 1;                                            // tables of a quad
constexpr int kAtOnce = kQuads > 1 && kHalves == 1 ? 2 : 1;                                  // quads scored in one go
constexpr int kTables = kAtOnce * kHalves;
constexpr int kScanBlocks = kTables == 1 ? 2 : 1;                                            // blocks a multiprocessor holds
constexpr int kScanThreads = 768 / kScanBlocks, kScanWarps = kScanThreads / 32;

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

  // Every 16 bytes (8, if there are no more) begin with byte `lane` of `from`.
  __device__ __forceinline__ void rotate(const KeyCode& from, int lane) {
    constexpr int kCycle = kWords < 4 ? kWords : 4;
#pragma unroll
    for (int first = 0; first < kWords; first += kCycle) {
      uint32_t now[kCycle];
#pragma unroll
      for (int i = 0; i < kCycle; ++i) now[i] = from.word[first + i];
#pragma unroll
      for (int s = 1; s < kCycle; s *= 2) {
        const bool turn = lane & 4 * s;
        uint32_t next[kCycle];
#pragma unroll
        for (int i = 0; i < kCycle; ++i) next[i] = turn ? now[(i + s) % kCycle] : now[i];
#pragma unroll
        for (int i = 0; i < kCycle; ++i) now[i] = next[i];
      }
#pragma unroll
      for (int i = 0; i < kCycle; ++i) word[first + i] = __funnelshift_r(now[i], now[(i + 1) % kCycle], lane % 4 * 8);
    }
  }
};

// Log-domain sums of QUADS * 4 heads that follow their maxima in large steps only: exact in float32, and rarely rescaled.
template <int QUADS>
struct LogSum {
  float top[4 * QUADS], sum[4 * QUADS];
  __half2 limit[2 * QUADS];                          // top + 40

  __device__ void clear() {
#pragma unroll
    for (int h = 0; h < 4 * QUADS; ++h) { top[h] = -1e30f; sum[h] = 0.f; }
#pragma unroll
    for (int k = 0; k < 2 * QUADS; ++k) limit[k] = __floats2half2_rn(-INFINITY, -INFINITY);
  }
  __device__ __forceinline__ void add(const __half2 (&pairs)[2 * QUADS]) {
    float x[4 * QUADS];
    bool within = true;
#pragma unroll
    for (int k = 0; k < 2 * QUADS; ++k) {
      const float2 two = __half22float2(pairs[k]);
      x[2 * k] = two.x; x[2 * k + 1] = two.y;
      within &= __hble2(pairs[k], limit[k]);
    }
    if (!within) {
#pragma unroll
      for (int h = 0; h < 4 * QUADS; ++h) {
        const float higher = fmaxf(top[h], x[h]);
        sum[h] *= exp2_fast(top[h] - higher);
        top[h] = higher;
      }
#pragma unroll
      for (int k = 0; k < 2 * QUADS; ++k) limit[k] = __floats2half2_rn(top[2 * k] + 40.f, top[2 * k + 1] + 40.f);
    }
#pragma unroll
    for (int h = 0; h < 4 * QUADS; ++h) sum[h] += exp2_fast(x[h] - top[h]);
  }
};

__global__ void __launch_bounds__(kScanThreads, kScanBlocks) scan_kernel(Batch batch, CodePages pages, Window window, ProxyBuffers out) {
  constexpr int M = kSubspaces, kHeads = 4 * kAtOnce;
  extern __shared__ __align__(16) char shared[];
  int* before = reinterpret_cast<int*>(shared + kTables * kTable);
  __shared__ float2 warp_norm[kScanWarps][kHeads];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  count_units<kScanThreads>(batch, before);
  launch_next();
  const int64_t units = int64_t(before[batch.rows]) * batch.kv_heads;
  int64_t at = units * blockIdx.x / gridDim.x;
  const int64_t end = units * (blockIdx.x + 1) / gridDim.x;
  const int per_block = pages.block_size / 16;
  const uint32_t reciprocal = uint32_t((uint64_t(1) << 32) / per_block) + 1, page_stride = uint32_t(pages.page_stride);
  const uint32_t lane_slot = lane % 16 * 8;

  if (at == end) wait_previous();
  while (at < end) {
    const Segment s = segment_at(batch, before, at, end);
    const int64_t pair = int64_t(s.row) * batch.kv_heads + s.head;
    const int* table = batch.block_table + s.row * batch.table_stride;
    asm("" : "+l"(table));                           // kept in registers, not computed again for every key
    const uint8_t* lane_codes = pages.codes + int64_t(s.head) * pages.block_size * M + lane % 16 * M;
    const int selectable = window.begin(s.length), selectable_tokens = window.end(s.length) - selectable;
    const int last_sixteen = (s.length - 1) / 16;    // tokens go by sixteens, which lie in one block; those beyond the row repeat its last
    const auto sixteen_of = [&](int unit, int i) { return min(unit * (kUnit / 16) + 2 * i + lane / 16, last_sixteen); };
    const auto column_of = [&](int sixteen) { return per_block == 1 ? sixteen : int(__umulhi(sixteen, reciprocal)); };
    const auto address_of = [&](int sixteen, int block) {
      return lane_codes + uint64_t(uint32_t(block)) * page_stride + (sixteen - column_of(sixteen) * per_block) * (16 * M);
    };
    for (int first = 0; first < kQuads; first += kAtOnce) {
      const int quads = min(kAtOnce, kQuads - first);
      KeyCode code[2];
      int block[2];
      const int last = s.last - 1;
      int unit = s.first + warp;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int sixteen = sixteen_of(min(unit, last), i);
        code[i].load(address_of(sixteen, __ldg(table + column_of(sixteen))));
        block[i] = __ldg(table + column_of(sixteen_of(min(unit + kScanWarps, last), i)));
      }
      wait_previous();                               // the codes do not depend on the stage before; the tables do
      __syncthreads();
      const uint4* from = reinterpret_cast<const uint4*>(out.tables + (pair * kQuads + first) * kCentroids * kSlots);
      constexpr int kParts = kSlots / 2;             // 16-byte parts of a centroid's entries
      for (int i = threadIdx.x; i < quads * kCentroids * kParts; i += kScanThreads) {
        const uint4 two = __ldcg(from + i);
        const int slot = i % kParts * 2, centroid = i / kParts % kCentroids, quad = i / (kParts * kCentroids);
        char* to = shared + (quad * kHalves + slot / 16) * kTable + centroid * kRow + slot % 16 * 8;
        *reinterpret_cast<uint4*>(to) = two;
        *reinterpret_cast<uint4*>(to + kRow / 2) = two;
      }
      __syncthreads();
      LogSum<kAtOnce> norm;
      norm.clear();
      uint2* lane_scores = out.scores + (pair * kQuads + first) * batch.max_units * kUnit + lane;
      asm("" : "+l"(lane_scores));
      for (; unit < s.last; unit += kScanWarps) {
        KeyCode rotated[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          rotated[i].rotate(code[i], lane);
          code[i].load(address_of(sixteen_of(min(unit + kScanWarps, last), i), block[i]));
          block[i] = __ldg(table + column_of(sixteen_of(min(unit + 2 * kScanWarps, last), i)));
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          __half2 sum[2 * kAtOnce];
#pragma unroll
          for (int t = 0; t < M; ++t) {
            // Bytes of the address: the lane's slot, the code, zero, zero.
            const uint32_t entry = __byte_perm(rotated[i].word[t / 4], lane_slot, 0x5504 | t % 4 << 4);
#pragma unroll
            for (int k = 0; k < kAtOnce; ++k) {
              const uint2 v = *reinterpret_cast<const uint2*>(shared + entry + (k * kHalves + t / 16) * kTable + t % 16 * 8);
              const __half2 low = *reinterpret_cast<const __half2*>(&v.x), high = *reinterpret_cast<const __half2*>(&v.y);
              sum[2 * k] = t ? __hadd2(sum[2 * k], low) : low;
              sum[2 * k + 1] = t ? __hadd2(sum[2 * k + 1], high) : high;
            }
          }
          const int token = unit * kUnit + 32 * i;
#pragma unroll
          for (int k = 0; k < kAtOnce; ++k)
            if (k < quads)
              __stcg(lane_scores + int64_t(k) * batch.max_units * kUnit + token,
                     make_uint2(*reinterpret_cast<const uint32_t*>(&sum[2 * k]), *reinterpret_cast<const uint32_t*>(&sum[2 * k + 1])));
          if (unsigned(token + lane - selectable) < unsigned(selectable_tokens)) norm.add(sum);
        }
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
  return launch(scan_kernel, dim3(out.norm_slots), kScanThreads, kTables * kTable + (batch.rows + 1) * sizeof(int), stream, overlap, batch,
                pages, window, out);
}

}  // namespace santa
