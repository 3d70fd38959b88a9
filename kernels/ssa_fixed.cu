// ssa_fixed, topk, uniform_tail: a heavy set by exact threshold, and a tail. The histogram gives the bin of the largest code outside the
// heavy set; count_kernel counts that bin's codes one by one and weighs the bins below it; place_kernel then knows threshold, ties and
// weights, and writes the rows taken in order. Blocks wait for each other as in ssa_place.cu.
#include "block_sum.cuh"
#include "philox.cuh"
#include "proxy_schedule.cuh"
#include "ssa.cuh"

namespace santa {

constexpr int kFixedThreads = 512;
constexpr int kFixedWarps = kFixedThreads / 32;
constexpr int kOwnCodes = kChunk / kFixedThreads;
constexpr int kBinCodes = 1 << kBinShift;
static_assert(kOwnCodes == 16 && kBinCodes == 32 && kBins == 4 * kFixedThreads);

// The heavy set takes all bins above `bin` and part of that one; bin -1: it takes everything.
struct Threshold {
  int heavy;                      // size asked for
  int included, bin, above;       // codes in the histogram; the bin; codes in the bins above it
};

__device__ int heavy_count(int method, int budget, double heavy_fraction) {
  return method == kTopk ? budget : int(double(budget) * heavy_fraction);
}

// By the whole block; ends with a barrier. The bin is the highest with more than `heavy` codes in it and above.
__device__ Threshold find_threshold(const unsigned* histogram, int heavy) {
  __shared__ int64_t scratch[kFixedWarps];
  __shared__ int shared_bin, shared_above;
  const uint4 own = __ldcg(reinterpret_cast<const uint4*>(histogram) + threadIdx.x);
  const int count[4] = {int(own.x), int(own.y), int(own.z), int(own.w)};
  if (threadIdx.x == 0) { shared_bin = -1; shared_above = 0; }
  int64_t total;
  const int64_t upto = block_scan<kFixedThreads>(count[0] + count[1] + count[2] + count[3], scratch, &total);
  int above = int(total - upto);
#pragma unroll
  for (int i = 3; i >= 0; --i) {
    if (above <= heavy && above + count[i] > heavy) { shared_bin = 4 * threadIdx.x + i; shared_above = above; }
    above += count[i];
  }
  __syncthreads();
  return {heavy, int(total), shared_bin, shared_above};
}

// Weight of a code of the tail, relative to the upper edge of the threshold's bin.
__device__ __forceinline__ int64_t tail_weight(const int64_t* double_exp2, int code, int bin) {
  return power(double_exp2, code - (((bin << kBinShift) | (kBinCodes - 1)) - 32768)) >> 12;
}

struct OwnCodes {
  uint4 word[2];

  __device__ __forceinline__ void load(const int16_t* codes, int first, int n) {
    constexpr uint32_t none = 0x80008000u;           // two excluded codes
    word[0] = word[1] = uint4{none, none, none, none};
    if (first < n) {
      word[0] = __ldcg(reinterpret_cast<const uint4*>(codes + first));
      word[1] = __ldcg(reinterpret_cast<const uint4*>(codes + first) + 1);
    }
  }
  __device__ __forceinline__ int operator[](int i) const {
    const uint32_t pairs[4] = {word[i / 8].x, word[i / 8].y, word[i / 8].z, word[i / 8].w};
    return int16_t(pairs[i % 8 / 2] >> 16 * (i % 2));
  }
};

__global__ void __launch_bounds__(kFixedThreads)
    count_kernel(Batch batch, SelectBuffers select, double heavy_fraction, ProxyBuffers buffers) {
  extern __shared__ int before[];                    // [rows + 1]
  __shared__ int64_t exp2[256], scratch[kFixedWarps];
  __shared__ int fine[kBinCodes];
  launch_next();
  wait_previous();
  if (threadIdx.x < 256) exp2[threadIdx.x] = 2 * select.exp2[threadIdx.x];
  const auto chunks = PlaceChunks::make<kFixedThreads>(batch, before);
  for (int item = blockIdx.x; item < chunks.count; item += gridDim.x) {
    const auto [row, head, chunk] = chunks[item];
    const int n = batch.length(row);
    __syncthreads();                                   // shared memory may still be read for the chunk before
    if (threadIdx.x < kBinCodes) fine[threadIdx.x] = 0;
    const int64_t pair = int64_t(row) * batch.kv_heads + head;
    OwnCodes codes;
    codes.load(select.codes + pair * batch.max_units * kUnit, chunk * kChunk + threadIdx.x * kOwnCodes, n);
    const Threshold threshold =
        find_threshold(select.histogram + pair * kBins, heavy_count(batch.method[row], batch.budget[row], heavy_fraction));
    if (threshold.bin < 0) continue;
    int64_t weight = 0;
#pragma unroll
    for (int i = 0; i < kOwnCodes; ++i) {
      const int code = codes[i], bin = (code + 32768) >> kBinShift;
      if (code == kExcluded || bin > threshold.bin) continue;
      if (bin == threshold.bin) atomicAdd(&fine[code & (kBinCodes - 1)], 1);
      else weight += tail_weight(exp2, code, threshold.bin);
    }
    int64_t total;
    block_scan<kFixedThreads>(weight, scratch, &total);
    if (threadIdx.x == 0 && total)
      atomicAdd(reinterpret_cast<unsigned long long*>(buffers.low_weight + pair), static_cast<unsigned long long>(total));
    if (threadIdx.x < kBinCodes) {
      int* all = buffers.fine + pair * (buffers.max_chunks + 1) * kBinCodes;
      all[chunk * kBinCodes + threadIdx.x] = fine[threadIdx.x];
      if (fine[threadIdx.x]) atomicAdd(all + buffers.max_chunks * kBinCodes + threadIdx.x, fine[threadIdx.x]);
    }
  }
}

// Publishes the block's sum in sums[chunk], with its own flag (the top bit), and returns the sum of those before it. By warp 0.
__device__ int64_t sum_ahead(int64_t* sums, int chunk, int64_t own) {
  const int lane = threadIdx.x;
  volatile int64_t* all = sums;
  if (lane == 0) all[chunk] = own | INT64_MIN;
  int64_t ahead = 0;
  for (int c = lane; c < chunk; c += 32) {
    int64_t other;
    while ((other = all[c]) >= 0) {}
    ahead += other & INT64_MAX;
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) ahead += __shfl_xor_sync(~0u, ahead, d);
  return ahead;
}

__global__ void __launch_bounds__(kFixedThreads)
    place_fixed_kernel(Batch batch, SelectBuffers select, double heavy_fraction, int block_size, ProxyBuffers buffers) {
  extern __shared__ int64_t upto_token[];            // [kChunk] prefix sums of the tail's rates, this token's included
  __shared__ int64_t exp2[256], scratch[kFixedWarps], ahead;
  __shared__ unsigned drawn[kChunk / 32];
  __shared__ int tie_index, tie_heavy, ties_ahead;   // the threshold's code within its bin; how many of its tokens are heavy
  __shared__ int64_t tail_mass;
  int* before = reinterpret_cast<int*>(upto_token + kChunk);             // [rows + 1]
  launch_next();
  wait_previous();
  const int t = threadIdx.x;
  if (t < 256) exp2[t] = 2 * select.exp2[t];
  const auto chunks = PlaceChunks::make<kFixedThreads>(batch, before);
  for (int item = blockIdx.x; item < chunks.count; item += gridDim.x) {
    const auto [row, head, chunk] = chunks[item];
    const int n = batch.length(row);
    __syncthreads();                                   // shared memory may still be read for the chunk before
    if (t < kChunk / 32) drawn[t] = 0;
    if (t == 0) tail_mass = 0, ties_ahead = 0;
    const int64_t pair = int64_t(row) * batch.kv_heads + head;
    const int first = chunk * kChunk + t * kOwnCodes, method = batch.method[row], budget = batch.budget[row];
    OwnCodes codes;
    codes.load(select.codes + pair * batch.max_units * kUnit, first, n);
    const Threshold threshold = find_threshold(select.histogram + pair * kBins, heavy_count(method, budget, heavy_fraction));
    const int* fine = buffers.fine + pair * (buffers.max_chunks + 1) * kBinCodes;
    const int base = (threshold.bin << kBinShift) - 32768;

    if (t < 32) {                                      // warp 0: from the bin's highest code down, the first that is not all heavy
      const int code = kBinCodes - 1 - t, count = threshold.bin >= 0 ? __ldcg(fine + buffers.max_chunks * kBinCodes + code) : 0;
      int upto = count;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) { const int other = __shfl_up_sync(~0u, upto, d); if (t >= d) upto += other; }
      const int wanted = threshold.heavy - threshold.above;
      const unsigned over = __ballot_sync(~0u, upto > wanted);
      const int at = over ? __ffs(over) - 1 : 31;
      const int light = t < at || !over ? 0 : t == at ? upto - wanted : count;      // of this code, left to the tail
      int64_t mass = light ? light * tail_weight(exp2, base + code, threshold.bin) : 0;
#pragma unroll
      for (int d = 16; d > 0; d /= 2) mass += __shfl_xor_sync(~0u, mass, d);
      if (t == at) {
        tie_index = code;
        tie_heavy = wanted - (upto - count);
        tail_mass = threshold.bin >= 0 ? mass + __ldcg(buffers.low_weight + pair) : 0;
      }
    }
    __syncthreads();
    const int tie = threshold.bin < 0 ? kExcluded : base + tie_index;                // bin -1: every included code is above it
    if (t < 32 && threshold.bin >= 0) {
      int ties = 0;
      for (int c = t; c < chunk; c += 32) ties += __ldcg(fine + c * kBinCodes + tie_index);
      ties = __reduce_add_sync(~0u, ties);
      if (t == 0) ties_ahead = ties;
    }
    int own_ties = 0;
#pragma unroll
    for (int i = 0; i < kOwnCodes; ++i) own_ties += codes[i] == tie && tie != kExcluded;
    int64_t total;
    __syncthreads();
    int tie_rank = ties_ahead + int(block_scan<kFixedThreads>(own_ties, scratch, &total)) - own_ties;
    unsigned heavy = 0, rest = 0;                      // bit i: own token i
#pragma unroll
    for (int i = 0; i < kOwnCodes; ++i) {
      const int code = codes[i];
      if (code == kExcluded) continue;
      const bool ties = code == tie;
      if (code > tie || (ties && tie_rank < tie_heavy)) heavy |= 1u << i; else rest |= 1u << i;
      tie_rank += ties;
    }

    // The tail's rates, their prefix sums, and who is drawn.
    const int heavies = min(threshold.heavy, threshold.included), draws = budget - heavies, others = threshold.included - heavies;
    const double share = __ddiv_rn(__dmul_rn(double(draws), double(kOne)), double(max(tail_mass, int64_t(1))));
    const int64_t uniform_rate = min(kOne, int64_t(draws) * kOne / max(others, 1));
    const auto rate_of = [&](int i) -> int64_t {
      if (!(rest >> i & 1) || draws <= 0) return 0;
      return method == kUniformTail ? uniform_rate
             : method == kSsaFixed  ? int64_t(__dmul_rn(double(tail_weight(exp2, codes[i], threshold.bin)), share))
                                    : 0;
    };
    int64_t own = 0;
#pragma unroll
    for (int i = 0; i < kOwnCodes; ++i) own += rate_of(i);
    __syncthreads();
    int64_t upto = block_scan<kFixedThreads>(own, scratch, &total) - own;
    if (t < 32) { const int64_t sum = sum_ahead(select.chunk_sum + pair * select.max_chunks, chunk, total); if (t == 0) ahead = sum; }
    __syncthreads();
    unsigned taken = heavy;
    const int global_head = batch.head_offset + head;
    if (method == kUniformTail) {
      int64_t at = ahead + upto + uniform44(batch.seed[row], n - 1, batch.layer, kSelectStream, global_head, 0);
#pragma unroll
      for (int i = 0; i < kOwnCodes; ++i) {
        const int64_t next = at + rate_of(i);
        if (next >> 44 > at >> 44) taken |= 1u << i;
        at = next;
      }
    } else if (method == kSsaFixed) {
#pragma unroll
      for (int i = 0; i < kOwnCodes; ++i) { upto += rate_of(i); upto_token[t * kOwnCodes + i] = upto; }
      __syncthreads();
      for (int j = t; j < draws; j += kFixedThreads) {
        const int64_t point = draws * uniform44(batch.seed[row], n - 1, batch.layer, kSelectStream, global_head, j) - ahead;
        if (point < 0 || point >= total) continue;
        int low = 0, high = kChunk - 1;                // the first token whose prefix sum is beyond the point
        while (low < high) { const int mid = (low + high) / 2; if (upto_token[mid] > point) high = mid; else low = mid + 1; }
        atomicOr(&drawn[low / 32], 1u << low % 32);
      }
      __syncthreads();
      taken |= drawn[t / 2] >> t % 2 * kOwnCodes & 0xffffu;
    }

    const int own_taken = __popc(taken);
    __syncthreads();
    int64_t slot = block_scan<kFixedThreads>(own_taken, scratch, &total) - own_taken;
    if (t < 32) {
      const int64_t sum = sum_ahead(buffers.chunk_taken + pair * select.max_chunks, chunk, total);
      if (t == 0) {
        ahead = sum;
        if ((chunk + 1) * kChunk >= n) select.count[pair] = int(min(int64_t(select.max_samples), sum + total));
      }
    }
    __syncthreads();
    slot += ahead;
    if (!taken) continue;
    const int cache_row = batch.block_table[row * batch.table_stride + first / block_size] * block_size + first % block_size;
    int4* sample = select.sample + pair * select.max_samples;
    for (int i = 0; i < kOwnCodes; ++i) {
      if (!(taken >> i & 1) || slot >= select.max_samples) continue;
      float pi = 1.f;
      if (rest >> i & 1) {
        const float p = float(rate_of(i)) * (1.f / float(kOne));
        // p is the expected number of draws of the token: of `draws` draws each takes it with probability p / draws.
        pi = method == kUniformTail ? p : -expm1f(float(draws) * log1pf(-p / float(draws)));
      }
      sample[slot++] = make_int4(first + i, cache_row + i, __float_as_int(pi), 0);
    }
  }
}

cudaError_t place_fixed(const Batch& batch, const SelectBuffers& select, double heavy_fraction, int block_size, const ProxyBuffers& buffers,
                        cudaStream_t stream, bool overlap) {
  const size_t before = (batch.rows + 1) * sizeof(int), shared = kChunk * sizeof(int64_t) + before;
  int blocks;
  if (const cudaError_t status = resident_blocks(place_fixed_kernel, kFixedThreads, shared, &blocks)) return status;
  if (const cudaError_t status = launch(count_kernel, dim3(blocks), kFixedThreads, before, stream, overlap, batch, select, heavy_fraction, buffers))
    return status;
  return launch(place_fixed_kernel, dim3(blocks), kFixedThreads, shared, stream, overlap, batch, select, heavy_fraction, block_size, buffers);
}

}  // namespace santa
