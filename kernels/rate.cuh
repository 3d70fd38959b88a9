// lambda: the L, in log-codes, whose inclusion probabilities power(code + L) sum to the budget, every histogram bin counted at its middle
// code. By one block. A scan over the bins solves it: with the bins above b certain, lambda = (budget - their count) / (weight of the
// rest), for the first b that stays below one. In floating point but in a fixed order: the same histogram gives the same L everywhere.
#pragma once
#include "selection.cuh"

namespace santa {

constexpr int kTakeAll = 65535;                      // a rate that makes every inclusion probability one

template <int THREADS>
struct RateSolver {
  static constexpr int kOwn = kBins / THREADS, kWarps = THREADS / 32;
  static_assert(kOwn == 4 && kWarps <= 32);

  struct Shared {
    int count[kWarps];
    float weight[kWarps];
    int best, rate;
  };
  Shared& shared;
  uint4 counts;                                      // of bins 4 * threadIdx.x ...

  __device__ void load(const unsigned* histogram) {
    counts = __ldcg(reinterpret_cast<const uint4*>(histogram) + threadIdx.x);
    if (threadIdx.x == 0) shared.best = -1;
  }

  // Every thread gets the rate. budget >= 1.
  __device__ int solve(int budget) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const unsigned own[kOwn] = {counts.x, counts.y, counts.z, counts.w};
    float weight[kOwn], below_weight = 0.f;          // the largest weights are cut at 2^96: they are certain anyway
    int below_count = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int middle = ((int(threadIdx.x) * kOwn + i) << kBinShift) - 32768 + (1 << kBinShift) / 2;
      weight[i] = exp2_fast(fminf(float(middle) * (1.f / 256.f), 96.f));
      below_weight = fmaf(float(own[i]), weight[i], below_weight);
      below_count += own[i];
    }
    int count = below_count;                         // inclusive scan over threads, then of the bins below this thread's
    float rest = below_weight;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int c = __shfl_up_sync(~0u, count, d);
      const float w = __shfl_up_sync(~0u, rest, d);
      if (lane >= d) { count += c; rest += w; }
    }
    if (lane == 31) { shared.count[warp] = count; shared.weight[warp] = rest; }
    const int lower_count = __shfl_up_sync(~0u, count, 1);
    const float lower_rest = __shfl_up_sync(~0u, rest, 1);
    count = lane > 0 ? lower_count : 0;
    rest = lane > 0 ? lower_rest : 0.f;
    __syncthreads();
    int included = 0, warps_count = 0;
    float warps_rest = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) { warps_count += shared.count[w]; warps_rest += shared.weight[w]; }
      included += shared.count[w];
    }
    if (included <= budget) return kTakeAll;
    count += warps_count;
    rest += warps_rest;
    int best = -1;
    float best_left = 1.f, best_rest = 1.f;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      count += own[i];
      rest = fmaf(float(own[i]), weight[i], rest);
      // What is left of the budget once the bins above are certain; a half where that is nothing, so that lambda stays positive.
      const float left = fmaxf(float(budget - (included - count)), 0.5f);
      if (own[i] && left * weight[i] < rest) { best = threadIdx.x * kOwn + i; best_left = left; best_rest = rest; }
    }
    const int top = __reduce_max_sync(~0u, best);
    if (lane == 0 && top >= 0) atomicMax(&shared.best, top);
    __syncthreads();
    if (best >= 0 && best == shared.best)
      shared.rate = max(-kTakeAll, min(kTakeAll, __float2int_rd(256.f * (log2_fast(best_left) - log2_fast(best_rest)))));
    __syncthreads();
    return shared.rate;
  }
};

}  // namespace santa
