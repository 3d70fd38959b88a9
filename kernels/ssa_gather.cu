// ssa, last stage: attention over the rows taken. Windows first, then the sample; exact scores of those rows only, weights e^score / pi.
//
// A warp takes 16 rows at a time, copied whole into shared memory (K, then V, while the other is worked on), and runs an online softmax of
// score - log2 pi: rows x heads on tensor cores for the scores, features x heads for the output. The copies are bulk copies, one
// instruction a row, from compute capability 9.0 on. Blocks that share a row and KV head merge in a fixed order.
#include <algorithm>

#include "ssa.cuh"
#include "transaction.cuh"

namespace santa {

// As many warps as registers and shared memory hold: it takes that many to have enough rows on their way.
constexpr int kRowWarps = kHeadDim == 256 && kColumns == 1 ? 12 : 8, kRowThreads = 32 * kRowWarps;
constexpr int kRowBlocks = kHeadDim == 256 ? 1 : kColumns == 1 ? 3 : 2;
constexpr int kChunks = kHeadDim / 8;                // 16-byte chunks of a row of K or of V
constexpr int kStagedRow = kHeadDim * 2 + 16;        // in shared memory: eight rows' same chunk lie in eight different bank groups
constexpr int kTileBytes = 16 * kStagedRow;          // 16 rows of K or of V
constexpr int kFeatureTiles = kHeadDim / 16;         // tiles of 16 features
constexpr int kSize = kGroup * kHeadDim;

__device__ __forceinline__ uint32_t tile_at(uint32_t tile, int row, int chunk) { return tile + row * kStagedRow + chunk * 16; }

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define SANTA_BULK_COPY 1
#else
#define SANTA_BULK_COPY 0
#endif

// 16 rows of K or of V on their way to a warp. Stages of a warp are issued and awaited in turns, two of them.
struct RowStage {
  uint32_t tile, barrier;         // in shared memory
  uint32_t phase = 0;

  __device__ __forceinline__ void start() const {
#if SANTA_BULK_COPY
    if (threadIdx.x % 32 == 0) {
      transaction_init(barrier);
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncwarp();
#endif
  }

  // own: where the row of lanes 0 .. 15 is. Rows from `valid` on become zeros. After a __syncwarp behind the last read of the tile.
  __device__ __forceinline__ void issue(const Half* own, int valid) const {
    const int lane = threadIdx.x % 32, rows = max(0, min(valid, 16));
#if SANTA_BULK_COPY
    if (lane == 0) transaction_expect(barrier, rows * kHeadDim * 2);
    __syncwarp();
    if (lane < rows)
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(tile_at(tile, lane, 0)),
                   "l"(own), "n"(kHeadDim * 2), "r"(barrier)
                   : "memory");
#else
    constexpr int kLanes = kChunks < 32 ? kChunks : 32, kAtOnce = 32 / kLanes;
#pragma unroll
    for (int i = 0; i < 16 / kAtOnce; ++i) {
      const int row = i * kAtOnce + lane / kLanes, chunk = lane % kLanes;
      const Half* from = reinterpret_cast<const Half*>(__shfl_sync(kAll, reinterpret_cast<uint64_t>(own), row));
      if (row < rows)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(tile_at(tile, row, chunk)), "l"(from + chunk * 8) : "memory");
    }
    skip();
#endif
    for (int i = lane; i < (16 - rows) * kChunks; i += 32)
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(tile_at(tile, rows + i / kChunks, i % kChunks)), "r"(0) : "memory");
  }
  // Instead of issue, where there is nothing left to come.
  __device__ __forceinline__ static void skip() {
#if !SANTA_BULK_COPY
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
  }

  __device__ __forceinline__ void wait() {
#if SANTA_BULK_COPY
    transaction_wait<false>(barrier, phase);
    phase ^= 1;
#else
    asm volatile("cp.async.wait_group 1;" ::: "memory");
#endif
    __syncwarp();
  }
};

template <bool TRANSPOSE>
__device__ __forceinline__ void load_matrices(uint32_t (&a)[4], uint32_t at) {
  if constexpr (TRANSPOSE)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(at) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(at) : "memory");
}

__device__ __forceinline__ uint32_t pack(float low, float high) {
#if SANTA_BF16
  const __nv_bfloat162 two = __floats2bfloat162_rn(low, high);
#else
  const __half2 two = __floats2half2_rn(low, high);
#endif
  return *reinterpret_cast<const uint32_t*>(&two);
}

// Rows x heads to heads x rows, 8 by 8.
__device__ __forceinline__ uint32_t transpose8(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

struct Entry {
  int cache_row;                  // block * block_size + offset
  float log2_pi;
};

// Which rows a row and KV head reads: `forced` of the windows, then the sample.
struct RowList {
  const int4* samples;
  const int* table;
  int n, begin, end, forced, total, block_size;

  __device__ __forceinline__ Entry at(int i) const {
    if (i >= forced) {
      const int4 sample = __ldcg(samples + i - forced);
      return {sample.y, log2_fast(__int_as_float(sample.z))};
    }
    const int token = i < begin ? i : end + i - begin;
    return {table[token / block_size] * block_size + token % block_size, 0.f};
  }
};

__global__ void __launch_bounds__(kRowThreads, kRowBlocks)
    rows_kernel(Batch batch, Pages pages, Window window, Scores scores, const Half* q, SelectBuffers select, const int* broken, SoftMerge merge,
                Half* out, float* lse_out, int* read) {
  extern __shared__ __align__(16) char shared[];     // tiles of K and V per warp; the warps' outputs afterwards
  __shared__ __align__(8) uint64_t barrier[kRowWarps][2];
  __shared__ float2 warp_mass[kRowWarps][kGroup];
  launch_next();
  const int split = blockIdx.x, head = blockIdx.y, row = blockIdx.z, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (!(batch.methods >> batch.method[row] & 1)) { wait_previous(); return; }
  const int n = batch.seq_lens[row];
  const int64_t pair = int64_t(row) * batch.kv_heads + head;
  RowList list{select.sample + pair * select.max_samples, batch.block_table + row * batch.table_stride, n, window.begin(n), window.end(n), 0, 0,
               pages.block_size};
  list.forced = n - (list.end - list.begin);

  uint32_t query[kColumns][kFeatureTiles][2];            // B operand: heads as columns
#pragma unroll
  for (int j = 0; j < kColumns; ++j)
#pragma unroll
    for (int k = 0; k < kFeatureTiles; ++k)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int h = 8 * j + lane / 4;
        query[j][k][e] = h < kGroup ? *reinterpret_cast<const uint32_t*>(q + (pair * kGroup + h) * kHeadDim + k * 16 + e * 8 + lane % 4 * 2) : 0;
      }
  wait_previous();

  // Every warp takes an equal share of the rows, 16 at a time.
  const int count = n > 0 ? __ldcg(select.count + pair) : 0, total = list.forced + count;
  const int active = max(1, min(int(gridDim.x), ceil_div(total, 16 * kRowWarps))), worker = split * kRowWarps + warp;
  if (split >= active) return;
  if (split == 0 && threadIdx.x == 0) read[pair] = total;
  int at = int(int64_t(total) * worker / (active * kRowWarps));
  const int end = int(int64_t(total) * (worker + 1) / (active * kRowWarps));
  const uint32_t tiles_at = uint32_t(__cvta_generic_to_shared(shared)) + warp * 2 * kTileBytes;
  const uint32_t barriers = uint32_t(__cvta_generic_to_shared(barrier[warp]));
  RowStage keys{tiles_at, barriers}, values{tiles_at + kTileBytes, barriers + 8};
  keys.start();
  values.start();
  const auto entry_of = [&](int first) { return lane < 16 && first + lane < end ? list.at(first + lane) : Entry{0, 0.f}; };
  const auto key_of = [&](int cache_row) {
    return static_cast<const Half*>(pages.kv) + cache_row / pages.block_size * pages.page_stride +
           (int64_t(head) * pages.block_size + cache_row % pages.block_size) * (2 * kHeadDim);
  };
  Entry entry = entry_of(at);
  if (at < end) {
    const Half* own = key_of(entry.cache_row);
    keys.issue(own, end - at);
    values.issue(own + kHeadDim, end - at);
  }

  const int r = lane / 4, c = lane % 4;
  float acc[kColumns][kFeatureTiles][4] = {};            // features 16 f + r, + 8; heads 8 j + 2 c, + 1
  float top[kColumns][2], sum[kColumns][2] = {};
#pragma unroll
  for (int j = 0; j < kColumns; ++j) top[j][0] = top[j][1] = -1e30f;
  while (at < end) {
    const int valid = end - at, next = at + 16;
    const Entry following = entry_of(next);
    const float log2_pi[2] = {__shfl_sync(kAll, entry.log2_pi, r), __shfl_sync(kAll, entry.log2_pi, r + 8)};
    keys.wait();
    float x[kColumns][4], odd[kColumns][4] = {};     // rows r, r + 8; heads 8 j + 2 c, + 1
#pragma unroll
    for (int j = 0; j < kColumns; ++j) x[j][0] = x[j][1] = x[j][2] = x[j][3] = 0.f;
#pragma unroll
    for (int k = 0; k < kFeatureTiles; ++k) {
      uint32_t a[4];
      load_matrices<false>(a, tile_at(keys.tile, lane % 16, 2 * k + lane / 16));
#pragma unroll
      for (int j = 0; j < kColumns; ++j) mma(k % 2 ? odd[j] : x[j], a[0], a[1], a[2], a[3], query[j][k][0], query[j][k][1]);
    }
    __syncwarp();
    const Half* next_key = key_of(following.cache_row);
    if (next < end) keys.issue(next_key, end - next);
    else RowStage::skip();

    uint32_t weight[kColumns][2];                    // B operand: rows by heads
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      float factor[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& low = x[j][e];
        float& high = x[j][2 + e];
        low = r < valid ? scores(low + odd[j][e]) - log2_pi[0] : -INFINITY;
        high = r + 8 < valid ? scores(high + odd[j][2 + e]) - log2_pi[1] : -INFINITY;
        float higher = fmaxf(low, high);
#pragma unroll
        for (int d = 4; d < 32; d *= 2) higher = fmaxf(higher, __shfl_xor_sync(kAll, higher, d));
        higher = fmaxf(higher, top[j][e]);
        factor[e] = exp2_fast(top[j][e] - higher);
        top[j][e] = higher;
        low = exp2_fast(low - higher);
        high = exp2_fast(high - higher);
        sum[j][e] = fmaf(sum[j][e], factor[e], low + high);
      }
      weight[j][0] = transpose8(pack(x[j][0], x[j][1]));
      weight[j][1] = transpose8(pack(x[j][2], x[j][3]));
      if (__any_sync(kAll, factor[0] != 1.f || factor[1] != 1.f))
#pragma unroll
        for (int f = 0; f < kFeatureTiles; ++f)
#pragma unroll
          for (int e = 0; e < 4; ++e) acc[j][f][e] *= factor[e % 2];
    }
    values.wait();
#pragma unroll
    for (int f = 0; f < kFeatureTiles; ++f) {
      uint32_t a[4];
      load_matrices<true>(a, tile_at(values.tile, lane % 8 + lane / 16 * 8, 2 * f + lane / 8 % 2));
#pragma unroll
      for (int j = 0; j < kColumns; ++j) mma(acc[j][f], a[0], a[1], a[2], a[3], weight[j][0], weight[j][1]);
    }
    __syncwarp();
    if (next < end) values.issue(next_key + kHeadDim, end - next);
    else RowStage::skip();
    entry = following;
    at = next;
  }

  // The warps' outputs, each at the block's maximum, in shared memory: [kRowWarps, kSize].
#pragma unroll
  for (int j = 0; j < kColumns; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
      for (int d = 4; d < 32; d *= 2) sum[j][e] += __shfl_xor_sync(kAll, sum[j][e], d);
      const int h = 8 * j + 2 * c + e;
      if (r == 0 && h < kGroup) warp_mass[warp][h] = make_float2(top[j][e], sum[j][e]);
    }
  __syncthreads();
  float* parts = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int j = 0; j < kColumns; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int h = 8 * j + 2 * c + e;
      if (h >= kGroup) continue;
      float block_top = -1e30f;
#pragma unroll
      for (int w = 0; w < kRowWarps; ++w) block_top = fmaxf(block_top, warp_mass[w][h].x);
      const float factor = exp2_fast(top[j][e] - block_top);
      float* slot = parts + (warp * kGroup + h) * kHeadDim;
#pragma unroll
      for (int f = 0; f < kFeatureTiles; ++f) {
        slot[f * 16 + r] = acc[j][f][e] * factor;
        slot[f * 16 + r + 8] = acc[j][f][2 + e] * factor;
      }
    }
  float2* mass = merge.mass + pair * merge.merge.splits * kGroup;
  if (threadIdx.x < kGroup) {
    float block_top = -1e30f, block_sum = 0.f;
#pragma unroll
    for (int w = 0; w < kRowWarps; ++w) block_top = fmaxf(block_top, warp_mass[w][threadIdx.x].x);
#pragma unroll
    for (int w = 0; w < kRowWarps; ++w) block_sum += warp_mass[w][threadIdx.x].y * exp2_fast(warp_mass[w][threadIdx.x].x - block_top);
    mass[split * kGroup + threadIdx.x] = make_float2(block_top, block_sum);
  }
  __syncthreads();
  if (!hand_in_split<kSize, kRowThreads>(merge.merge, pair, split, active, parts)) return;

  // What each split's part is to be multiplied by, where the warps' outputs were.
  float* factor = parts;                             // [splits, kGroup]
  for (int h = warp; h < kGroup; h += kRowWarps) {
    float all_top = -1e30f, all_sum = 0.f;
    for (int s = lane; s < active; s += 32) all_top = fmaxf(all_top, __ldcg(mass + s * kGroup + h).x);
#pragma unroll
    for (int d = 16; d > 0; d /= 2) all_top = fmaxf(all_top, __shfl_xor_sync(kAll, all_top, d));
    for (int s = lane; s < active; s += 32) {
      const float2 part = __ldcg(mass + s * kGroup + h);
      const float weight = exp2_fast(part.x - all_top);
      factor[s * kGroup + h] = weight;
      all_sum += part.y * weight;
    }
#pragma unroll
    for (int d = 16; d > 0; d /= 2) all_sum += __shfl_xor_sync(kAll, all_sum, d);
    const bool spoiled = n > 0 && broken[pair * kGroup + h];
    const float inverse = spoiled ? NAN : all_sum == 0.f ? 0.f : 1.f / all_sum;
    for (int s = lane; s < active; s += 32) factor[s * kGroup + h] *= inverse;
    if (lane == 0 && lse_out) lse_out[pair * kGroup + h] = spoiled ? NAN : all_sum == 0.f ? -INFINITY : all_top + log2f(all_sum);
  }
  __syncthreads();
  finish_splits<kSize, kRowThreads>(merge.merge, pair, active, out + pair * kSize,
                                    [&](int s, int i) { return factor[s * kGroup + i / kHeadDim]; });
}

cudaError_t gather_rows(const Batch& batch, const Pages& pages, const Window& window, const Scores& scores, const void* q,
                        const SelectBuffers& select, const int* broken, const SoftMerge& merge, void* out, float* lse, int* read,
                        cudaStream_t stream, bool overlap) {
  const size_t tiles = size_t(kRowWarps) * 2 * kTileBytes, outputs = size_t(kRowWarps) * kSize * sizeof(float);
  return launch(rows_kernel, dim3(merge.merge.splits, batch.kv_heads, batch.rows), kRowThreads, std::max(tiles, outputs), stream, overlap,
                batch, pages, window, scores, static_cast<const Half*>(q), select, broken, merge, static_cast<Half*>(out), lse, read);
}

}  // namespace santa
