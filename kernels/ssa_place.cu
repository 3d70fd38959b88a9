// ssa, stage 4: lambda, then systematic placement. A block turns 8192 log-codes into inclusion probabilities, eight at a time, publishes
// their sum, waits for the sums of the chunks before it, and writes each chosen token at its own place in the sample: no compaction,
// sorted by token. Few runs of eight hold a sample: a warp lists those that do, and its lanes take one each to find it.
// A block waits only for chunks before its own, and publishes before it waits; all blocks run at once, so none waits in vain.
// Solving for lambda in every block costs less than another launch, or than waiting for the last block of the stage before.
#include "philox.cuh"
#include "proxy_schedule.cuh"
#include "rate.cuh"
#include "ssa.cuh"

namespace santa {

constexpr int kPlaceThreads = 512, kPlaceWarps = kPlaceThreads / 32;
constexpr int kRun = 8;                              // log-codes of one 16-byte load
constexpr int kRuns = kChunk / kPlaceThreads / kRun;           // of a lane; run k of lane l is number 32 k + l of the warp
constexpr int kWarpTokens = kChunk / kPlaceWarps;

__device__ __forceinline__ int64_t inclusion(const int64_t* double_exp2, const uint4& codes, int i, int rate) {
  const uint32_t pairs[4] = {codes.x, codes.y, codes.z, codes.w};
  const int code = int16_t(pairs[i / 2] >> 16 * (i % 2));
  return code == kExcluded ? 0 : power(double_exp2, code + rate);
}

struct ListedRun {
  uint4 codes;
  int64_t from;                   // prefix sum before the run, the random offset included
  int token, cache_row;           // of the run's first
};

// The sum of the chunks before `chunk`, each published with its top bit set. By a warp.
__device__ int64_t sum_before(const int64_t* sums, int chunk) {
  constexpr int kAtOnce = 4;
  const volatile int64_t* all = sums;
  int64_t ahead = 0;
  for (int c = threadIdx.x % 32; c < chunk; c += 32 * kAtOnce) {
    int64_t other[kAtOnce];
    bool missing;
    do {
      missing = false;
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) other[k] = c + 32 * k < chunk ? all[c + 32 * k] : INT64_MIN;
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) missing |= other[k] >= 0;
    } while (missing);
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) ahead += other[k] & INT64_MAX;
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) ahead += __shfl_xor_sync(~0u, ahead, d);
  return ahead;
}

__global__ void __launch_bounds__(kPlaceThreads, 2) place_adaptive_kernel(Batch batch, SelectBuffers select, int block_size) {
  extern __shared__ int before[];                    // [rows + 1]
  __shared__ int64_t exp2[256];
  __shared__ int64_t warp_sum[kPlaceWarps], warp_start[kPlaceWarps];
  __shared__ ListedRun listed[kPlaceWarps][32 * kRuns];
  __shared__ RateSolver::Shared solver_shared;
  __shared__ int shared_rate;
  launch_next();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (threadIdx.x < 256) exp2[threadIdx.x] = 2 * select.exp2[threadIdx.x];
  const auto chunks = PlaceChunks::make<kPlaceThreads>(batch, before);
  if (int(blockIdx.x) >= chunks.count) wait_previous();                  // this kernel ends after the one before
  for (int at_chunk = blockIdx.x; at_chunk < chunks.count; at_chunk += gridDim.x) {
    const auto [row, head, chunk] = chunks[at_chunk];
    const int n = batch.length(row);
    const int64_t pair = int64_t(row) * batch.kv_heads + head;
    const int first = chunk * kChunk + warp * kWarpTokens + lane * kRun;
    int cache_row[kRuns];
#pragma unroll
    for (int k = 0; k < kRuns; ++k) {                  // a run lies in one block
      const int token = first + k * 32 * kRun;
      cache_row[k] = token < n ? batch.block_table[row * batch.table_stride + token / block_size] * block_size + token % block_size : 0;
    }
    int64_t offset = 0;
    if (warp == kPlaceWarps - 1) offset = uniform44(batch.seed[row], n - 1, batch.layer, kSelectStream, batch.head_offset + head, 0);
    if (at_chunk == int(blockIdx.x)) wait_previous();

    constexpr uint32_t none = 0x80008000u;             // two excluded codes
    const int16_t* codes = select.codes + pair * batch.max_units * kUnit;
    uint4 run[kRuns];
#pragma unroll
    for (int k = 0; k < kRuns; ++k) {                  // whole units were written: codes beyond n are excluded ones
      const int token = first + k * 32 * kRun;
      run[k] = token < n ? __ldcg(reinterpret_cast<const uint4*>(codes + token)) : uint4{none, none, none, none};
    }
    if (threadIdx.x < kRateThreads) {
      RateSolver solver{solver_shared};
      solver.load(select.histogram + pair * kBins);
      solver.solve(batch.budget[row], &shared_rate);
    }
    __syncthreads();
    const int rate = shared_rate;
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

    // The last warp: publish the chunk's sum (the flag travels with it: no fence needed), add up the sums ahead of it.
    if (warp == kPlaceWarps - 1) {
      const int64_t mine = lane < kPlaceWarps ? warp_sum[lane] : 0, sum = warp_scan(mine);
      int64_t* sums = select.chunk_sum + pair * select.max_chunks;
      if (lane == 31) *const_cast<volatile int64_t*>(sums + chunk) = sum | INT64_MIN;
      const int64_t ahead = sum_before(sums, chunk);
      if (lane < kPlaceWarps) warp_start[lane] = offset + ahead + sum - mine;
      if (lane == 31 && (chunk + 1) * kChunk >= n) {
        select.count[pair] = int(min(int64_t(select.max_samples), (offset + ahead + sum) >> 44));
        select.rate[pair] = rate;
      }
    }
    __syncthreads();

    int count = 0;
#pragma unroll
    for (int k = 0; k < kRuns; ++k) {
      const int64_t from = warp_start[warp] + upto[k] - own[k];
      const bool holds = from >> 44 != (from + own[k]) >> 44;
      const unsigned votes = __ballot_sync(~0u, holds);
      if (holds) listed[warp][count + __popc(votes & ((1u << lane) - 1))] = {run[k], from, first + k * 32 * kRun, cache_row[k]};
      count += __popc(votes);
    }
    __syncwarp();
    int4* sample = select.sample + pair * select.max_samples;
    for (int j = lane; j < count; j += 32) {
      const ListedRun mine = listed[warp][j];
      int64_t at = mine.from;
#pragma unroll
      for (int i = 0; i < kRun; ++i) {
        const int64_t slot = at >> 44, pi = inclusion(exp2, mine.codes, i, rate);
        at += pi;
        if (at >> 44 > slot && slot < select.max_samples)
          sample[slot] = make_int4(mine.token + i, mine.cache_row + i, __float_as_int(float(pi) * (1.f / float(kOne))), 0);
      }
    }
    __syncthreads();                                 // shared memory is for the next chunk
  }
}

cudaError_t place_adaptive(const Batch& batch, const SelectBuffers& select, int block_size, cudaStream_t stream, bool overlap) {
  const size_t shared = (batch.rows + 1) * sizeof(int);
  int blocks;
  if (const cudaError_t status = resident_blocks(place_adaptive_kernel, kPlaceThreads, shared, &blocks)) return status;
  return launch(place_adaptive_kernel, dim3(blocks), kPlaceThreads, shared, stream, overlap, batch, select, block_size);
}

}  // namespace santa
