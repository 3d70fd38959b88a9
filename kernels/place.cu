// Selection: lambda, then systematic placement. A block turns 8192 log-codes into inclusion probabilities, publishes their sum, waits for
// the sums of the chunks before it, and writes each chosen token at its own place in the sample: no compaction, sorted by token.
// A block waits only for blocks of lower index, which are started no later than it and wait for nobody before they publish.
// Solving for lambda in every block costs less than another launch.
#include "philox.cuh"
#include "rate.cuh"

namespace santa {

constexpr int kPlaceThreads = 512;
constexpr int kPlaceWarps = kPlaceThreads / 32;
constexpr int kPerThread = kChunk / kPlaceThreads;
constexpr int kChunkUnits = kChunk / kUnit;
static_assert(kPerThread == 16 && kChunkUnits == 128);

// Exact mass of the chunk, per head: units' (e, m) summed at the largest exponent. By the warps that do not solve for lambda.
__device__ void sum_masses(const float2* units, int count, int group, float2* out) {
  const int lane = threadIdx.x % 32;
  for (int h = threadIdx.x / 32 - RateSolver::kWarps; h < group; h += kPlaceWarps - RateSolver::kWarps) {
    float2 mass[kChunkUnits / 32];
    float top = -3e9f, sum = 0.f;
#pragma unroll
    for (int i = 0; i < kChunkUnits / 32; ++i) {
      const int unit = lane + 32 * i;
      mass[i] = unit < count ? __ldcg(units + unit * group + h) : float2{-3e9f, 0.f};
      if (mass[i].y != 0.f) top = fmaxf(top, mass[i].x);
    }
#pragma unroll
    for (int d = 16; d > 0; d /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
#pragma unroll
    for (int i = 0; i < kChunkUnits / 32; ++i) sum += mass[i].y * exp2_fast(fminf(mass[i].x - top, 0.f));
#pragma unroll
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
    if (lane == 0) out[h] = make_float2(top, sum);
  }
}

__global__ void __launch_bounds__(kPlaceThreads, 2) place_kernel(Batch batch, SelectBuffers select, int block_size) {
  __shared__ int64_t exp2[256];
  __shared__ int64_t warp_sum[kPlaceWarps], warp_start[kPlaceWarps];
  __shared__ RateSolver::Shared solver_shared;
  __shared__ int shared_rate;
  launch_next();
  const int chunk = blockIdx.x, head = blockIdx.y, row = blockIdx.z, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int n = batch.length(row);
  if (int64_t(chunk) * kChunk >= n) { wait_previous(); return; }
  if (threadIdx.x < 256) exp2[threadIdx.x] = 2 * select.exp2[threadIdx.x];
  const int first = chunk * kChunk + threadIdx.x * kPerThread;        // this thread's tokens lie in one block
  const int block = first < n ? batch.block_table[row * batch.table_stride + first / block_size] : 0;
  const int64_t pair = int64_t(row) * batch.kv_heads + head;
  int64_t offset = 0;
  if (warp == 0) offset = uniform44(batch.seed[row], n - 1, batch.layer, kSelectStream, batch.head_offset + head, 0);
  wait_previous();

  constexpr uint32_t none = 0x80008000u;             // two excluded codes
  uint4 codes[2] = {{none, none, none, none}, {none, none, none, none}};
  if (first < n) {                                   // the scan wrote whole units: codes beyond n are excluded ones
    const uint4* source = reinterpret_cast<const uint4*>(select.codes + pair * batch.max_units * kUnit + first);
    codes[0] = __ldcg(source);
    codes[1] = __ldcg(source + 1);
  }
  if (threadIdx.x < kRateThreads) {
    RateSolver solver{solver_shared};
    solver.load(select.histogram + pair * kBins);
    solver.solve(batch.budget[row], &shared_rate);
  } else if (select.unit_mass) {
    sum_masses(select.unit_mass + (pair * batch.max_units + chunk * kChunkUnits) * select.group,
               min(kChunkUnits, ceil_div(n, kUnit) - chunk * kChunkUnits), select.group,
               select.chunk_mass + (pair * select.max_chunks + chunk) * select.group);
  }
  __syncthreads();
  const int rate = shared_rate;

  int64_t pi[kPerThread], own = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const uint32_t pairs[4] = {codes[i / 8].x, codes[i / 8].y, codes[i / 8].z, codes[i / 8].w};
    const int code = int16_t(pairs[i % 8 / 2] >> 16 * (i % 2));
    pi[i] = power(exp2, code == kExcluded ? 4 * kExcluded : code + rate);
    own += pi[i];
  }
  int64_t upto = own;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) { const int64_t other = __shfl_up_sync(~0u, upto, d); if (lane >= d) upto += other; }
  if (lane == 31) warp_sum[warp] = upto;
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
    if (lane == 31 && (chunk + 1) * kChunk >= n) {
      select.count[pair] = int(min(int64_t(select.max_samples), offset + ahead + sum >> 44));
      select.rate[pair] = rate;
    }
  }
  __syncthreads();

  int64_t at = warp_start[warp] + upto - own;
  if (at >> 44 != (at + own) >> 44) {
    int4* sample = select.sample + pair * select.max_samples;
    const int cache_row = block * block_size + first % block_size;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int64_t slot = at >> 44;
      at += pi[i];
      if (at >> 44 > slot && slot < select.max_samples)
        sample[slot] = make_int4(first + i, cache_row + i, __float_as_int(float(pi[i]) * (1.f / float(kOne))), 0);
    }
  }
}

cudaError_t place(const Batch& batch, const SelectBuffers& select, int block_size, cudaStream_t stream, bool overlap) {
  return launch(place_kernel, dim3(select.max_chunks, batch.kv_heads, batch.rows), kPlaceThreads, 0, stream, overlap, batch, select,
                block_size);
}

}  // namespace santa
