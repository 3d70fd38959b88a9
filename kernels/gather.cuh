// Weighted sums of gathered V rows, and their merge over the blocks that share a head: in a fixed order, so runs repeat bit for bit.
#pragma once
#include "tile.cuh"

namespace santa {

constexpr int kRowLanes = kHeadDim / 8;              // lanes that hold one V row, 8 features each
constexpr int kRowsAtOnce = 32 / kRowLanes;          // V rows a warp reads with one load

__device__ __forceinline__ float2 to_float2(uint32_t word) {
#if SANTA_BF16
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&word));
#else
  return __half22float2(*reinterpret_cast<const __half2*>(&word));
#endif
}

template <int HEADS>
struct ValueSum {
  float sum[HEADS][8] = {};

  __device__ __forceinline__ void add(const uint4& v, const float* weight) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float2 pair = to_float2(words[k]);
#pragma unroll
      for (int h = 0; h < HEADS; ++h) {
        sum[h][2 * k] = fmaf(weight[h], pair.x, sum[h][2 * k]);
        sum[h][2 * k + 1] = fmaf(weight[h], pair.y, sum[h][2 * k + 1]);
      }
    }
  }

  // Each warp's sum, in shared memory: parts[WARPS][HEADS * kHeadDim]. Ends with a barrier.
  __device__ void hand_in(float* parts) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
#pragma unroll
      for (int k = 0; k < 8; ++k)
#pragma unroll
        for (int d = kRowsAtOnce / 2; d > 0; d /= 2) sum[h][k] += __shfl_down_sync(kAll, sum[h][k], d * kRowLanes);
      float4* slot = reinterpret_cast<float4*>(parts + (warp * HEADS + h) * kHeadDim + lane * 8);
      if (lane < kRowLanes) {
        slot[0] = make_float4(sum[h][0], sum[h][1], sum[h][2], sum[h][3]);
        slot[1] = make_float4(sum[h][4], sum[h][5], sum[h][6], sum[h][7]);
      }
    }
    __syncthreads();
  }
};

// Element i (of SIZE / 4) of the warps' parts, summed in a fixed order.
template <int WARPS, int SIZE>
__device__ __forceinline__ float4 sum_warps(const float* parts, int i) {
  const float4* all = reinterpret_cast<const float4*>(parts);
  float4 sum = all[i];
#pragma unroll
  for (int w = 1; w < WARPS; ++w) {
    const float4 part = all[w * (SIZE / 4) + i];
    sum.x += part.x; sum.y += part.y; sum.z += part.z; sum.w += part.w;
  }
  return sum;
}

__device__ __forceinline__ void store_half4(Half* out, float4 v) {
  const Half four[4] = {Half(v.x), Half(v.y), Half(v.z), Half(v.w)};
  *reinterpret_cast<uint2*>(out) = *reinterpret_cast<const uint2*>(four);
}

struct Merge {                    // of the blocks ("splits") that share an owner: a row and a query head, or a row and a KV head
  float* partial;                 // [owners, splits, SIZE]
  int* done;                      // [owners], zero before and after
  int splits;
};

// Blocks 0 .. active - 1 hand in the sum over their warps' parts[SIZE]. True for the one block that has to finish the owner.
template <int SIZE, int THREADS>
__device__ bool hand_in_split(const Merge& merge, int64_t owner, int split, int active, const float* parts) {
  static_assert(SIZE % 4 == 0);
  float4* mine = reinterpret_cast<float4*>(merge.partial + (owner * merge.splits + split) * SIZE);
  for (int i = threadIdx.x; i < SIZE / 4; i += THREADS) mine[i] = sum_warps<THREADS / 32, SIZE>(parts, i);
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    last = true;
    if (active > 1) {
      __threadfence();
      last = atomicAdd(merge.done + owner, 1) == active - 1;
      __threadfence();
      if (last) merge.done[owner] = 0;
    }
  }
  __syncthreads();
  return last;
}

// out = sum of the splits' partial sums, each times factor(split, index); the factor is the same for four neighbours.
template <int SIZE, int THREADS, class Factor>
__device__ void finish_splits(const Merge& merge, int64_t owner, int active, Half* out, const Factor& factor) {
  const float4* all = reinterpret_cast<const float4*>(merge.partial + owner * merge.splits * SIZE);
  for (int i = threadIdx.x; i < SIZE / 4; i += THREADS) {
    float4 sum = {};
    for (int s = 0; s < active; s += 8) {
      float4 part[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) part[k] = s + k < active ? __ldcg(all + int64_t(s + k) * (SIZE / 4) + i) : float4{};
#pragma unroll
      for (int k = 0; k < 8; ++k)
        if (s + k < active) {
          const float f = factor(s + k, 4 * i);
          sum.x = fmaf(part[k].x, f, sum.x); sum.y = fmaf(part[k].y, f, sum.y);
          sum.z = fmaf(part[k].z, f, sum.z); sum.w = fmaf(part[k].w, f, sum.w);
        }
    }
    store_half4(out + 4 * i, sum);
  }
}

}  // namespace santa
