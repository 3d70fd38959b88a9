// ssa, stage 3: the heads' log-sum-exps, then one weight q per key and KV head: the mean over the heads of softmax(proxy), with its uniform
// share. Left behind: q's 16-bit log-code, excluded in the windows and beyond the row, and the histogram of the codes.
#include "proxy_schedule.cuh"
#include "ssa.cuh"

namespace santa {

constexpr int kMixThreads = 256;
constexpr int kMixWarps = kMixThreads / 32;
constexpr int kMixBlocks = kQuads <= 2 ? 4 : 2;                        // blocks a multiprocessor holds
constexpr int kMixTokens = 4;                        // tokens of a thread

// bias[h]: what is taken off a proxy of head h before it is raised to a power. By all warps.
__device__ void head_biases(const ProxyBuffers& in, const NormSlots& slots, int64_t pair, int64_t units, float uniform_share, float* bias) {
  const int lane = threadIdx.x % 32;
  for (int h = threadIdx.x / 32; h < kGroup; h += kMixWarps) {
    const float2* norm = in.norm + pair * in.norm_slots * kGroup + h;
    float top = -1e30f, sum = 0.f;
    for (int i = lane; i < slots.count; i += 32) {
      if (!slots.filled(i, units, in.norm_slots)) continue;
      const float2 part = __ldcg(norm + i * kGroup);
      const float higher = fmaxf(top, part.x);
      sum = sum * exp2_fast(top - higher) + part.y * exp2_fast(part.x - higher);
      top = higher;
    }
#pragma unroll
    for (int d = 16; d > 0; d /= 2) {
      const float other_top = __shfl_xor_sync(kAll, top, d), other_sum = __shfl_xor_sync(kAll, sum, d), higher = fmaxf(top, other_top);
      sum = sum * exp2_fast(top - higher) + other_sum * exp2_fast(other_top - higher);
      top = higher;
    }
    // In steps of 1/16 octave: how the scan was split over blocks moves the last bits of the sum, and should not move a sample.
    const float norm_of_head = rintf(16.f * (top + log2f(sum))) * (1.f / 16.f);
    const bool counts = sum > 0.f && !in.broken[pair * kGroup + h];
    if (lane == 0) bias[h] = counts ? norm_of_head - log2f((1.f - uniform_share) / kGroup) : INFINITY;
  }
}

__global__ void __launch_bounds__(kMixThreads, kMixBlocks) mix_kernel(Batch batch, Window window, float uniform_share, ProxyBuffers buffers) {
  extern __shared__ int before[];                    // [rows + 1]
  __shared__ __align__(16) unsigned histogram[kBins];
  __shared__ float shared_bias[4 * kQuads];
  for (int b = threadIdx.x; b < kBins; b += kMixThreads) histogram[b] = 0;
  if (threadIdx.x < 4 * kQuads) shared_bias[threadIdx.x] = INFINITY;    // heads past the group weigh nothing
  count_units<kMixThreads>(batch, before);
  launch_next();
  const int64_t units = int64_t(before[batch.rows]) * batch.kv_heads;
  int64_t at = units * blockIdx.x / gridDim.x;
  const int64_t end = units * (blockIdx.x + 1) / gridDim.x;
  wait_previous();
  while (at < end) {
    const Segment s = segment_at(batch, before, at, end);
    const int64_t pair = int64_t(s.row) * batch.kv_heads + s.head;
    const NormSlots slots(batch, before, s.row, s.head, units, buffers.norm_slots);
    const uint2* scores = buffers.scores + pair * kQuads * batch.max_units * kUnit;
    const int stop = s.last * kUnit;
    uint2 x[kQuads][kMixTokens], following[kQuads][kMixTokens];
    const auto load = [&](uint2 (&to)[kQuads][kMixTokens], int token) {
      if (token >= stop) return;
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad)
#pragma unroll
        for (int i = 0; i < kMixTokens / 2; ++i)
          reinterpret_cast<uint4*>(to[quad])[i] =
              __ldcg(reinterpret_cast<const uint4*>(scores + int64_t(quad) * batch.max_units * kUnit + token) + i);
    };
    int token = s.first * kUnit + threadIdx.x * kMixTokens;
    load(x, token);
    head_biases(buffers, slots, pair, units, uniform_share, shared_bias);
    __syncthreads();
    float bias[4 * kQuads];
#pragma unroll
    for (int h = 0; h < 4 * kQuads; ++h) bias[h] = shared_bias[h];
    const int begin = window.begin(s.length), selectable_end = window.end(s.length);
    const float uniform = uniform_share / float(max(1, selectable_end - begin));
    while (token < stop) {
      load(following, token + kMixThreads * kMixTokens);
      uint32_t packed[kMixTokens / 2] = {};
#pragma unroll
      for (int i = 0; i < kMixTokens; ++i) {
        float q = uniform;
#pragma unroll
        for (int quad = 0; quad < kQuads; ++quad) {
          const float2 low = __half22float2(*reinterpret_cast<const __half2*>(&x[quad][i].x));
          const float2 high = __half22float2(*reinterpret_cast<const __half2*>(&x[quad][i].y));
          q += exp2_fast(low.x - bias[4 * quad]) + exp2_fast(low.y - bias[4 * quad + 1]) + exp2_fast(high.x - bias[4 * quad + 2]) +
               exp2_fast(high.y - bias[4 * quad + 3]);
        }
        int code = kExcluded;
        if (unsigned(token + i - begin) < unsigned(selectable_end - begin)) {
          code = __float2int_rd(256.f * log2_fast(fmaxf(q, 1e-37f)));      // q is at most about 1: no code is out of range
          atomicAdd(&histogram[(code + 32768) >> kBinShift], 1u);
        }
        packed[i / 2] |= uint32_t(uint16_t(code)) << 16 * (i % 2);
      }
      *reinterpret_cast<uint2*>(buffers.codes + pair * batch.max_units * kUnit + token) = make_uint2(packed[0], packed[1]);
      token += kMixThreads * kMixTokens;
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad)
#pragma unroll
        for (int i = 0; i < kMixTokens; ++i) x[quad][i] = following[quad][i];
    }
    __syncthreads();
    unsigned* total = buffers.histogram + pair * kBins;
    for (int b = threadIdx.x * 4; b < kBins; b += kMixThreads * 4) {
      uint4& four = *reinterpret_cast<uint4*>(histogram + b);
      if ((four.x | four.y | four.z | four.w) == 0) continue;
      if (four.x) atomicAdd(total + b, four.x);
      if (four.y) atomicAdd(total + b + 1, four.y);
      if (four.z) atomicAdd(total + b + 2, four.z);
      if (four.w) atomicAdd(total + b + 3, four.w);
      four = uint4{0, 0, 0, 0};
    }
    __syncthreads();
    at += s.last - s.first;
  }
}

cudaError_t proxy_mix(const Batch& batch, const Window& window, float uniform_share, const ProxyBuffers& buffers, int blocks,
                      cudaStream_t stream, bool overlap) {
  return launch(mix_kernel, dim3(blocks * kMixBlocks), kMixThreads, (batch.rows + 1) * sizeof(int), stream, overlap, batch, window,
                uniform_share, buffers);
}

}  // namespace santa
