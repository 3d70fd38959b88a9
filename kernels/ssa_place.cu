// ssa, stage 4: systematic placement, given lambda. A block turns 16384 log-codes into inclusion probabilities, eight at a time, publishes
// their sum, waits for the sums of the chunks before it, and writes each chosen token at its own place in the sample: no compaction,
// sorted by token. Few runs of eight hold a sample: a warp lists those that do, and its lanes take one each to find it.
// A block waits only for blocks of lower index, which are started no later than it and wait for nobody before they publish.
#include "philox.cuh"
#include "ssa.cuh"

namespace santa {

constexpr int kPlaceThreads = 512, kPlaceWarps = kPlaceThreads / 32;
constexpr int kRun = 8;                              // log-codes of one 16-byte load
constexpr int kRuns = kPlaceChunk / kPlaceThreads / kRun;           // of a lane; run k of lane l is number 32 k + l of the warp
constexpr int kWarpTokens = kPlaceChunk / kPlaceWarps;

__device__ __forceinline__ int64_t inclusion(const int64_t* double_exp2, const uint4& codes, int i, int rate) {
  const uint32_t pairs[4] = {codes.x, codes.y, codes.z, codes.w};
  const int code = int16_t(pairs[i / 2] >> 16 * (i % 2));
  return code == kExcluded ? 0 : power(double_exp2, code + rate);
}

struct ListedRun {
  int64_t from;                   // prefix sum before the run, the random offset included
  int first;                      // its first token
  int unused;
};

__global__ void __launch_bounds__(kPlaceThreads, 2) place_adaptive_kernel(Batch batch, SelectBuffers select, int block_size) {
  __shared__ int64_t exp2[256];
  __shared__ int64_t warp_sum[kPlaceWarps], warp_start[kPlaceWarps];
  __shared__ ListedRun listed[kPlaceWarps][32 * kRuns];
  launch_next();
  const int chunk = blockIdx.x, head = blockIdx.y, row = blockIdx.z, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int n = batch.length(row);
  if (int64_t(chunk) * kPlaceChunk >= n) { wait_previous(); return; }
  if (threadIdx.x < 256) exp2[threadIdx.x] = 2 * select.exp2[threadIdx.x];
  const int64_t pair = int64_t(row) * batch.kv_heads + head;
  int64_t offset = 0;
  if (warp == 0) offset = uniform44(batch.seed[row], n - 1, batch.layer, kSelectStream, batch.head_offset + head, 0);
  wait_previous();

  constexpr uint32_t none = 0x80008000u;             // two excluded codes
  const int16_t* codes = select.codes + pair * batch.max_units * kUnit;
  const int first = chunk * kPlaceChunk + warp * kWarpTokens + lane * kRun;
  uint4 run[kRuns];
#pragma unroll
  for (int k = 0; k < kRuns; ++k) {                  // whole units were written: codes beyond n are excluded ones
    const int token = first + k * 32 * kRun;
    run[k] = token < n ? __ldcg(reinterpret_cast<const uint4*>(codes + token)) : uint4{none, none, none, none};
  }
  const int rate = __ldcg(select.rate + pair);
  __syncthreads();
  int64_t own[kRuns], upto[kRuns];
#pragma unroll
  for (int k = 0; k < kRuns; ++k) {
    own[k] = 0;
#pragma unroll
    for (int i = 0; i < kRun; ++i) own[k] += inclusion(exp2, run[k], i, rate);
    upto[k] = own[k];
  }
#pragma unroll
  for (int d = 1; d < 32; d *= 2)
#pragma unroll
    for (int k = 0; k < kRuns; ++k) { const int64_t other = __shfl_up_sync(~0u, upto[k], d); if (lane >= d) upto[k] += other; }
#pragma unroll
  for (int k = 1; k < kRuns; ++k) upto[k] += __shfl_sync(~0u, upto[k - 1], 31);
  if (lane == 31) warp_sum[warp] = upto[kRuns - 1];
  __syncthreads();

  // Warp 0: publish the chunk's sum (with its own flag, the top bit: no fence needed), add up the sums ahead of it.
  if (warp == 0) {
    int64_t sum = lane < kPlaceWarps ? warp_sum[lane] : 0, ahead = 0;
    const int64_t mine = sum;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) { const int64_t other = __shfl_up_sync(~0u, sum, d); if (lane >= d) sum += other; }
    volatile int64_t* sums = select.chunk_sum + pair * select.max_chunks;
    if (lane == 31) sums[chunk] = sum | INT64_MIN;
    for (int c = lane; c < chunk; c += 32) {
      int64_t other;
      while ((other = sums[c]) >= 0) {}
      ahead += other & INT64_MAX;
    }
#pragma unroll
    for (int d = 16; d > 0; d /= 2) ahead += __shfl_xor_sync(~0u, ahead, d);
    if (lane < kPlaceWarps) warp_start[lane] = offset + ahead + sum - mine;
    if (lane == 31 && (chunk + 1) * kPlaceChunk >= n) select.count[pair] = int(min(int64_t(select.max_samples), (offset + ahead + sum) >> 44));
  }
  __syncthreads();

  int count = 0;
#pragma unroll
  for (int k = 0; k < kRuns; ++k) {
    const int64_t from = warp_start[warp] + upto[k] - own[k];
    const bool holds = from >> 44 != (from + own[k]) >> 44;
    const unsigned votes = __ballot_sync(~0u, holds);
    if (holds) listed[warp][count + __popc(votes & ((1u << lane) - 1))] = {from, first + k * 32 * kRun, 0};
    count += __popc(votes);
  }
  __syncwarp();
  int4* sample = select.sample + pair * select.max_samples;
  for (int j = lane; j < count; j += 32) {
    int64_t at = listed[warp][j].from;
    const int token = listed[warp][j].first;
    const uint4 mine = __ldcg(reinterpret_cast<const uint4*>(codes + token));
    const int cache_row = batch.block_table[row * batch.table_stride + token / block_size] * block_size + token % block_size;
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      const int64_t slot = at >> 44, pi = inclusion(exp2, mine, i, rate);
      at += pi;
      if (at >> 44 > slot && slot < select.max_samples)
        sample[slot] = make_int4(token + i, cache_row + i, __float_as_int(float(pi) * (1.f / float(kOne))), 0);
    }
  }
}

cudaError_t place_adaptive(const Batch& batch, const SelectBuffers& select, int block_size, cudaStream_t stream, bool overlap) {
  return launch(place_adaptive_kernel, dim3(ceil_div(batch.max_units * kUnit, kPlaceChunk), batch.kv_heads, batch.rows), kPlaceThreads, 0, stream,
                overlap, batch, select, block_size);
}

}  // namespace santa
