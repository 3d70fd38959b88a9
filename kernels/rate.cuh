// lambda: the L, in log-codes, whose inclusion probabilities power(code + L) sum to the budget, every histogram bin counted at one
// code. A scan over the bins solves it: with the bins above b certain, lambda = (budget - their count) / (weight of the
// rest), for the first b that stays below one. In floating point but in a fixed order: the same histogram gives the same L everywhere.
#pragma once
#include "selection.cuh"

namespace santa {

constexpr int kTakeAll = 65535;                      // a rate that makes every inclusion probability one

// The first THREADS threads of a block, which meet at a barrier of their own. Bin b counts as log-code LOWEST + (b << kBinShift).
template <int BINS, int THREADS, int LOWEST>
struct BinSolver {
  static constexpr int kOwn = BINS / THREADS, kWarps = THREADS / 32;

  struct Shared {
    int count[kWarps];
    float weight[kWarps];
    int best;
  };
  Shared& shared;
  unsigned own[kOwn];                                // counts of bins kOwn * threadIdx.x ...

  __device__ __forceinline__ static void rate_barrier() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

  __device__ void load(const unsigned* histogram) {
#pragma unroll
    for (int i = 0; i < kOwn / 4; ++i)
      reinterpret_cast<uint4*>(own)[i] = __ldcg(reinterpret_cast<const uint4*>(histogram) + threadIdx.x * (kOwn / 4) + i);
    if (threadIdx.x == 0) shared.best = -1;
  }

  // One thread writes the rate. budget >= 1.
  __device__ void solve(int budget, int* rate) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // Weights beyond 2^96 are cut: they are certain anyway.
    const int first = LOWEST + (int(threadIdx.x) * kOwn << kBinShift);
    const auto weight_of = [&](int i) { return exp2_fast(fminf(float(first + (i << kBinShift)) * (1.f / 256.f), 96.f)); };
    int below = 0;
    float weight = 0.f;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) { weight = fmaf(float(own[i]), weight_of(i), weight); below += own[i]; }
    int count = below;                               // inclusive scan over threads
    float rest = weight;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int c = __shfl_up_sync(~0u, count, d);
      const float w = __shfl_up_sync(~0u, rest, d);
      if (lane >= d) { count += c; rest += w; }
    }
    if (lane == 31) { shared.count[warp] = count; shared.weight[warp] = rest; }
    const int lower_count = __shfl_up_sync(~0u, count, 1);
    const float lower_rest = __shfl_up_sync(~0u, rest, 1);
    count = lane > 0 ? lower_count : 0;              // of the bins below this thread's
    rest = lane > 0 ? lower_rest : 0.f;
    rate_barrier();
    int included = 0, warps_count = 0;
    float warps_rest = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) { warps_count += shared.count[w]; warps_rest += shared.weight[w]; }
      included += shared.count[w];
    }
    if (included <= budget) {
      if (threadIdx.x == 0) *rate = kTakeAll;
      return;
    }
    count += warps_count;
    rest += warps_rest;
    int best = -1;
    float best_left = 1.f, best_rest = 1.f;
    if (below > 0)
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const float own_weight = weight_of(i);
        count += own[i];
        rest = fmaf(float(own[i]), own_weight, rest);
        // What is left of the budget once the bins above are certain; a half where that is nothing, so that lambda stays positive.
        const float left = fmaxf(float(budget - (included - count)), 0.5f);
        if (own[i] && left * own_weight < rest) { best = threadIdx.x * kOwn + i; best_left = left; best_rest = rest; }
      }
    const int top = __reduce_max_sync(~0u, best);
    if (lane == 0 && top >= 0) atomicMax(&shared.best, top);
    rate_barrier();
    if (best >= 0 && best == shared.best)
      *rate = max(-kTakeAll, min(kTakeAll, __float2int_rd(256.f * (log2_fast(best_left) - log2_fast(best_rest)))));
  }
};

// Of 16-bit log-codes, every bin counted at its middle code.
constexpr int kRateThreads = 128;
using RateSolver = BinSolver<kBins, kRateThreads, -32768 + (1 << kBinShift) / 2>;

}  // namespace santa
