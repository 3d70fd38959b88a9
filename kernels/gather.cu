// pps, last stage: out = sum over the chosen rows of (p / pi) v. The rows' scores are computed again from their keys, exactly as the K
// scan computed them; p uses the exact log2-sum-exp. A warp takes 16 rows at a time.
#include "gather.cuh"
#include "pps.cuh"
#include "selection.cuh"

namespace santa {

constexpr int kGatherWarps = 4, kGatherThreads = 32 * kGatherWarps;
constexpr int kValueLoads = 16 / kRowsAtOnce;
// Registers of a lane's keys, V rows, sums and queries: where they allow it, V is read beside K, not after it.
constexpr int kRowRegisters = 8 * kPieces + 4 * kValueLoads + 8 * kGroup + 4 * kColumns * kPieces;
constexpr bool kValuesEarly = kRowRegisters <= 200;

// Exact log2-sum-exp of the head, NaN if a score was NaN or +inf, -inf if none was finite. By one warp.
__device__ float log_sum_exp(const float2* mass, int chunks) {
  const int lane = threadIdx.x % 32;
  float top = -3e9f, sum = 0.f;
  for (int c = lane; c < chunks; c += 32) {          // one chunk a lane up to 256K tokens
    const float2 m = __ldcg(mass + c * kGroup);
    const float higher = fmaxf(top, m.x);
    sum = sum * exp2_fast(top - higher) + m.y * exp2_fast(m.x - higher);
    top = higher;
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) {
    const float other_top = __shfl_xor_sync(kAll, top, d), other_sum = __shfl_xor_sync(kAll, sum, d), higher = fmaxf(top, other_top);
    sum = sum * exp2_fast(top - higher) + other_sum * exp2_fast(other_top - higher);
    top = higher;
  }
  const float lse = top + log2f(sum);
  return lse < INFINITY ? lse : NAN;
}

// 16 chosen rows: lane (r, c) holds pieces of the keys of rows r and r + 8; kRowLanes lanes hold a V row.
struct RowTile {
  float pi;                       // of row `lane`, 0 if there is none
  uint4 keys[2][kPieces], values[kValueLoads];

  __device__ __forceinline__ void load_values(const Half* const* address, int valid) {
    const int lane = threadIdx.x % 32;
    if (lane < kRowLanes * kRowsAtOnce)
#pragma unroll
      for (int i = 0; i < kValueLoads; ++i) {
        const int row = i * kRowsAtOnce + lane / kRowLanes;
        if (row < valid) values[i] = load_row(address[row] + kHeadDim + lane % kRowLanes * 8);
      }
  }

  // sample: of row `lane`; rows from `valid` on repeat the first.
  __device__ __forceinline__ void load(const Pages& pages, int head, int4 sample, int valid, const Half** address) {
    const int lane = threadIdx.x % 32;
    pi = __int_as_float(sample.z);
    const int first_row = __shfl_sync(kAll, sample.y, 0), cache_row = lane < valid ? sample.y : first_row;
    if (lane < 16)
      address[lane] = static_cast<const Half*>(pages.kv) + cache_row / pages.block_size * pages.page_stride +
                      (int64_t(head) * pages.block_size + cache_row % pages.block_size) * (2 * kHeadDim);
    __syncwarp();
#pragma unroll
    for (int e = 0; e < 2; ++e)
#pragma unroll
      for (int p = 0; p < kPieces; ++p) keys[e][p] = load_row(address[lane / 4 + 8 * e] + lane % 4 * 8 + p * 32);
    if constexpr (kValuesEarly) load_values(address, valid);
  }
};

__global__ void __launch_bounds__(kGatherThreads, kRowRegisters <= 112 ? 4 : 2)
    gather_kernel(Batch batch, Pages pages, Scores scores, const Half* q, SelectBuffers select, Merge merge, Half* out, float* lse_out) {
  __shared__ float lse[kGroup];
  __shared__ const Half* address[kGatherWarps][16];
  __shared__ float weight[kGatherWarps][16][kGroup];
  extern __shared__ __align__(16) float parts[];     // [kGatherWarps, kGroup * kHeadDim]
  const int split = blockIdx.x, head = blockIdx.y, row = blockIdx.z, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (!(batch.methods >> batch.method[row] & 1)) { wait_previous(); return; }
  const int n = batch.seq_lens[row];
  const int64_t pair = int64_t(row) * batch.kv_heads + head;
  Query query;
  query.load(q + pair * kGroup * kHeadDim, lane);
  const int4* samples = select.sample + pair * select.max_samples;
  int tile = split * kGatherWarps + warp;
  wait_previous();

  const int4 first = lane < 16 && tile * 16 + lane < select.max_samples ? __ldcg(samples + tile * 16 + lane) : int4{};
  const int count = n > 0 ? __ldcg(select.count + pair) : 0, tiles = ceil_div(count, 16);
  const int active = max(1, min(int(gridDim.x), ceil_div(tiles, kGatherWarps)));
  if (split >= active) return;
  RowTile rows;
  if (tile < tiles) rows.load(pages, head, first, count - tile * 16, address[warp]);
  for (int h = warp; h < kGroup; h += kGatherWarps) {
    const float value = n > 0 ? log_sum_exp(select.chunk_mass + pair * select.max_chunks * kGroup + h, ceil_div(n, kChunk)) : -INFINITY;
    if (lane == 0) lse[h] = value;
    if (lane == 0 && split == 0 && lse_out) lse_out[pair * kGroup + h] = value;
  }
  __syncthreads();

  ValueSum<kGroup> sum;
  const int r = lane / 4, c = lane % 4;
  while (tile < tiles) {
    const int valid = count - tile * 16;
    float acc[kColumns][4] = {};
    multiply<0, kPieces>(acc, rows.keys[0], rows.keys[1], query);
    const float pi[2] = {__shfl_sync(kAll, rows.pi, r), __shfl_sync(kAll, rows.pi, r + 8)};
#pragma unroll
    for (int j = 0; j < kColumns; ++j)
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const int h = 8 * j + 2 * c + k % 2, e = k / 2;
        if (h < kGroup) weight[warp][r + 8 * e][h] = r + 8 * e < valid ? exp2_fast(scores(acc[j][k]) - lse[h]) / pi[e] : 0.f;
      }
    __syncwarp();
    if constexpr (!kValuesEarly) rows.load_values(address[warp], valid);
    if (lane < kRowLanes * kRowsAtOnce)
#pragma unroll
      for (int i = 0; i < kValueLoads; ++i) {
        const int at = i * kRowsAtOnce + lane / kRowLanes;
        if (at < valid) sum.add(rows.values[i], weight[warp][at]);
      }
    __syncwarp();
    tile += active * kGatherWarps;
    if (tile < tiles)
      rows.load(pages, head, __ldcg(samples + min(tile * 16 + lane, count - 1)), count - tile * 16, address[warp]);
  }
  sum.hand_in(parts);
  constexpr int size = kGroup * kHeadDim;
  if (hand_in_split<size, kGatherThreads>(merge, pair, split, active, parts))
    finish_splits<size, kGatherThreads>(merge, pair, active, out + pair * size, [](int, int) { return 1.f; });
}

cudaError_t gather(const Batch& batch, const Pages& pages, const Scores& scores, const void* q, const SelectBuffers& select,
                   const Merge& merge, void* out, float* lse, cudaStream_t stream, bool overlap) {
  return launch(gather_kernel, dim3(merge.splits, batch.kv_heads, batch.rows), kGatherThreads,
                kGatherWarps * kGroup * kHeadDim * sizeof(float), stream, overlap, batch, pages, scores,
                static_cast<const Half*>(q), select, merge, static_cast<Half*>(out), lse);
}

}  // namespace santa
