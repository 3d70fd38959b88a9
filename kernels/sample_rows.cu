// pps, last stage: chooses a KV head's rows and sums them up, a cluster of blocks to a row and KV head, as soon as the scan is through with it.
//
// Each block turns its slice of the log-codes into inclusion probabilities, places the samples that fall into it (systematic sampling over
// the prefix sums), and reads their K and V: out = sum over the chosen rows of (p / pi) v. The scores are computed again from the keys; p
// uses the exact log2-sum-exp. The blocks exchange their sums through shared memory: before placement, and at the end. Where the exact sums
// show that the first look starved a head, q is mixed anew (remix.cuh) and all of it is done once more.
#include "block_sum.cuh"
#include "cluster.cuh"
#include "gather.cuh"
#include "rate.cuh"
#include "remix.cuh"
#include "slice.cuh"

namespace santa {

constexpr int kListed = 512;                         // a block's samples beyond these are read back from global memory
constexpr int kMaxCluster = 16, kMostBlocks = 512;
constexpr int kWideCluster = 8, kMostWideBlocks = 128;    // clusters of more blocks than this: the GPU holds eight of them beside the scan
constexpr int kTileRows = 8;                         // rows a warp reads at a time
constexpr int kValueLoads = kTileRows / kRowsAtOnce;
// Registers of a lane's keys, sums and queries: where they allow it, two blocks to a multiprocessor, so that one fits beside the scan's.
// And where V rows leave it at that, V is read beside K, not after it.
constexpr int kRowRegisters = 4 * kPieces + 8 * kGroup + 4 * kColumns * kPieces;
constexpr int kRowsBlocks = kRowRegisters <= 112 ? 2 : 1;
constexpr bool kValuesEarly = kRowRegisters + 4 * kValueLoads <= (kRowsBlocks == 2 ? 112 : 200);
constexpr int kOutSize = kGroup * kHeadDim, kQuads = kOutSize / 4;
constexpr int kPartsBytes = kRowsWarps * kOutSize * int(sizeof(float));
constexpr int kListBytes = kPartsBytes > kListed * 16 ? kPartsBytes : kListed * 16;
// Sums that the other blocks hand in, in shares that may be rounded up.
constexpr int kDynamicBytes = kListBytes + (kQuads + kMaxCluster) * 16;

using ByteSolver = BinSolver<kByteCodes, 32, -(kCodeZero << kBinShift)>;

// A sum of exponentials: sum * 2^top.
struct Mass {
  float top = -3e9f, sum = 0.f;

  __device__ __forceinline__ void add(float log2_mass) {
    if (log2_mass == -INFINITY) return;
    const float higher = fmaxf(top, log2_mass);
    sum = sum * exp2_fast(top - higher) + exp2_fast(log2_mass - higher);
    top = higher;
  }
  __device__ __forceinline__ void add_lanes() {
#pragma unroll
    for (int d = 16; d > 0; d /= 2) {
      const float other_top = __shfl_xor_sync(kAll, top, d), other_sum = __shfl_xor_sync(kAll, sum, d), higher = fmaxf(top, other_top);
      sum = sum * exp2_fast(top - higher) + other_sum * exp2_fast(other_top - higher);
      top = higher;
    }
  }
  // Log2 of it all: NaN if a score was NaN or +inf, -inf if none was finite.
  __device__ __forceinline__ float log2() const {
    const float value = top + log2f(sum);
    return value < INFINITY ? value : NAN;
  }
};

// 8 chosen rows: lane (r, c) holds pieces of the key of row r; kRowLanes lanes hold a V row.
struct RowTile {
  float pi;                       // of row r
  uint4 key[kPieces], values[kValueLoads];

  __device__ __forceinline__ void load_values(const Half* const* address, int valid) {
    const int lane = threadIdx.x % 32;
    if (lane < kRowLanes * kRowsAtOnce)
#pragma unroll
      for (int i = 0; i < kValueLoads; ++i) {
        const int row = i * kRowsAtOnce + lane / kRowLanes;
        if (row < valid) values[i] = load_row(address[row] + kHeadDim + lane % kRowLanes * 8);
      }
  }

  // sample: of row r; where there are fewer than 8, one that is there.
  __device__ __forceinline__ void load(const Pages& pages, int head, int4 sample, int valid, const Half** address) {
    const int lane = threadIdx.x % 32;
    pi = __int_as_float(sample.z);
    const Half* row = static_cast<const Half*>(pages.kv) + sample.y / pages.block_size * pages.page_stride +
                      (int64_t(head) * pages.block_size + sample.y % pages.block_size) * (2 * kHeadDim);
#pragma unroll
    for (int p = 0; p < kPieces; ++p) key[p] = load_row(row + lane % 4 * 8 + p * 32);
    if (lane % 4 == 0) address[lane / 4] = row;
    __syncwarp();
    if constexpr (kValuesEarly) load_values(address, valid);
  }
};

struct Shared {
  int64_t double_exp2[256], inclusion[kByteCodes], scratch[kRowsWarps];
  int64_t slice_sum[kMaxCluster];                    // of every block's slice: written by that block
  float2 slice_mass[kMaxCluster][kGroup];
  float lse[kGroup];
  const Half* address[kRowsWarps][kTileRows];
  float weight[kRowsWarps][kTileRows][kGroup];
  ByteSolver::Shared solver;
  int rate, starving;
};
extern __shared__ __align__(16) float parts[];       // [kRowsWarps, kOutSize]; before that, the list of samples

// Each head's mass in the slice, to all blocks of the cluster. By all warps but the first.
__device__ __forceinline__ void sum_masses(const Batch& batch, const PpsBuffers& buffers, const Slice& slice, Shared& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, blocks = gridDim.x;
  const int first_unit = slice.begin / kUnit, last_unit = ceil_div(slice.end, kUnit);
  for (int h = warp > 0 ? warp - 1 : kGroup; h < kGroup; h += kRowsWarps - 1) {
    const float* units = buffers.unit_mass + slice.pair * batch.max_units * kGroup + h;
    Mass mass;
    for (int u = first_unit + lane; u < last_unit; u += 4 * 32) {
      float part[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) part[i] = u + 32 * i < last_unit ? __ldcg(units + int64_t(u + 32 * i) * kGroup) : -INFINITY;
#pragma unroll
      for (int i = 0; i < 4; ++i) mass.add(part[i]);
    }
    mass.add_lanes();
    if (lane < blocks) *in_block(&shared.slice_mass[blockIdx.x][h], lane) = make_float2(mass.top, mass.sum);
  }
}

// Chooses the rows and sums them up. The first time, false and nothing written if a head turns out to be starved, for all blocks of the
// cluster alike.
template <bool AGAIN>
__device__ __forceinline__ bool sample_pair(const Batch& batch, const Pages& pages, const Scores& scores, const Half* q,
                                            const PpsBuffers& buffers, Slice& slice, Shared& shared, Half* out, float* lse_out) {
  const int rank = blockIdx.x, blocks = gridDim.x, head = blockIdx.y, row = blockIdx.z, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int &n = slice.n, &tiles = slice.tiles;
  const int64_t& pair = slice.pair;
  Run& run = slice.run;
  int4* list = reinterpret_cast<int4*>(parts);
  float4* incoming = reinterpret_cast<float4*>(parts) + kListBytes / 16;          // [blocks, share]

  uint2 words[kMaxPieces];
  run.load(slice.codes, n, words);
  if (warp == 0) {
    ByteSolver solver{shared.solver};
    solver.load(buffers.histogram + pair * kByteCodes);
    solver.solve(batch.budget[row], &shared.rate);
    __syncwarp();
    for (int code = lane; code < kByteCodes; code += 32)
      shared.inclusion[code] = code > 0 ? power(shared.double_exp2, (code - kCodeZero << kBinShift) + shared.rate) : 0;
  }
  if constexpr (!AGAIN) sum_masses(batch, buffers, slice, shared);
  __syncthreads();

  // The slice's sum of inclusion probabilities, and what lies before it. The probabilities of the only tile stay in registers.
  int64_t own = run.include(words, shared.inclusion), slice_own = own;
  for (int tile = 1; tile < tiles; ++tile) {
    slice.enter(tile);
    run.load(slice.codes, n, words);
    slice_own += run.include(words, shared.inclusion);
  }
  int64_t sum;
  int64_t upto = block_scan<kRowsThreads>(slice_own, shared.scratch, &sum);
  if (threadIdx.x < blocks) *in_block(&shared.slice_sum[rank], threadIdx.x) = sum;
  cluster_barrier();
  int64_t at = slice.offset, whole = slice.offset;   // prefix sums at the slice's start, and over the row
  for (int b = 0; b < blocks; ++b) {
    if (b < rank) at += shared.slice_sum[b];
    whole += shared.slice_sum[b];
  }
  Query query;
  query.load(q + pair * kOutSize, lane);

  // Placement: token i is sample number (prefix sum before it) >> 44 if the prefix sum passes the next multiple there.
  int4* sample = buffers.sample + pair * buffers.max_samples;
  const int first_slot = int(at >> 44), count = max(0, min(buffers.max_samples, int((at + sum) >> 44)) - first_slot);
  for (int tile = 0; tile < tiles; ++tile) {
    if (tiles > 1) {
      slice.enter(tile);
      run.load(slice.codes, n, words);
      own = run.include(words, shared.inclusion);
      __syncthreads();                               // scratch is used again
      upto = block_scan<kRowsThreads>(own, shared.scratch, &sum);
    }
    int64_t here = at + upto - own;
    at += sum;
    if (here >> 44 == (here + own) >> 44) continue;
#pragma unroll
    for (int p = 0; p < kMaxPieces; ++p)
      if (p < run.pieces) {
        const int token = run.first + p * kPieceTokens, cache_row = run.block[p] * pages.block_size + token % pages.block_size;
#pragma unroll
        for (int i = 0; i < kPieceTokens; ++i) {
          const int64_t pi = run.pi[p * kPieceTokens + i], slot = here >> 44;
          here += pi;
          if (here >> 44 > slot && slot < buffers.max_samples) {
            const int4 chosen = make_int4(token + i, cache_row + i, __float_as_int(float(pi) * (1.f / float(kOne))), 0);
            sample[slot] = chosen;
            if (slot - first_slot < kListed) list[slot - first_slot] = chosen;
          }
        }
      }
  }
  __syncthreads();

  // The rows; while the first are on their way, the heads' log2-sum-exps.
  RowTile rows;
  int tile = warp * kTileRows;
  const int r = lane / 4, c = lane % 4;
  const auto load = [&] {
    const int mine = min(tile + r, count - 1);
    if (tile < count)
      rows.load(pages, head, mine < kListed ? list[mine] : __ldcg(sample + first_slot + mine), count - tile, shared.address[warp]);
  };
  load();
  if constexpr (!AGAIN) {
    for (int h = warp; h < kGroup; h += kRowsWarps) {
      const float norm = look_norm(buffers.look + pair * kLookParts * kGroup + h, n);
      Mass mass;
      if (lane < blocks) mass = {shared.slice_mass[lane][h].x, shared.slice_mass[lane][h].y};
      mass.add_lanes();
      if (lane == 0) {
        shared.lse[h] = mass.log2();
        if (starved(shared.rate, shared.lse[h], norm, batch.budget[row])) shared.starving = true;
      }
    }
    __syncthreads();
    if (shared.starving) return false;
  }
  if (leaves_l2(batch, kUnit + kGroup * sizeof(float))) {
    const float* units = buffers.unit_mass + pair * batch.max_units * kGroup;
    give_up<kRowsThreads>(slice.codes + slice.begin, slice.codes + slice.end);
    give_up<kRowsThreads>(units + slice.begin / kUnit * kGroup, units + slice.end / kUnit * kGroup);
  }
  if (rank == 0) {
    if (threadIdx.x == 0) {
      buffers.rate[pair] = shared.rate;
      buffers.count[pair] = int(min(int64_t(buffers.max_samples), whole >> 44));
    }
    if (lse_out && threadIdx.x < kGroup) lse_out[pair * kGroup + threadIdx.x] = shared.lse[threadIdx.x];
  }
  ValueSum<kGroup> values;
  while (tile < count) {
    const int valid = count - tile;
    float acc[kColumns][4] = {};
    multiply<0, kPieces>(acc, rows.key, rows.key, query);
#pragma unroll
    for (int j = 0; j < kColumns; ++j)
#pragma unroll
      for (int k = 0; k < 2; ++k)
        if (const int h = 8 * j + 2 * c + k; h < kGroup)
          shared.weight[warp][r][h] = r < valid ? exp2_fast(scores(acc[j][k]) - shared.lse[h]) / rows.pi : 0.f;
    __syncwarp();
    if constexpr (!kValuesEarly) rows.load_values(shared.address[warp], valid);
    if (lane < kRowLanes * kRowsAtOnce)
#pragma unroll
      for (int i = 0; i < kValueLoads; ++i) {
        const int at = i * kRowsAtOnce + lane / kRowLanes;
        if (at < valid) values.add(rows.values[i], shared.weight[warp][at]);
      }
    __syncwarp();
    tile += kRowsWarps * kTileRows;
    load();
  }
  __syncthreads();                                   // the list makes way for the sums

  // Each block adds up a share of the output, from all blocks' sums in a fixed order.
  values.hand_in(parts);
  const int share = ceil_div(kQuads, blocks);
  for (int i = threadIdx.x; i < kQuads; i += kRowsThreads)
    in_block(incoming, i / share)[rank * share + i % share] = sum_warps<kRowsWarps, kOutSize>(parts, i);
  cluster_barrier();
  for (int i = rank * share + threadIdx.x; i < min(kQuads, (rank + 1) * share); i += kRowsThreads) {
    float4 total = {};
#pragma unroll 4
    for (int b = 0; b < blocks; ++b) {
      const float4 part = incoming[b * share + i % share];
      total.x += part.x; total.y += part.y; total.z += part.z; total.w += part.w;
    }
    if (isnan(shared.lse[4 * i / kHeadDim])) total = make_float4(NAN, NAN, NAN, NAN);
    store_half4(out + pair * kOutSize + 4 * i, total);
  }
  return true;
}

// With the exact log2-sum-exps as norms. Out of line: it is rare, and its registers are its own.
__device__ __noinline__ void sample_again(const Batch& batch, const Pages& pages, const Scores& scores, const Half* q, const PpsBuffers& buffers,
                                          Shared& shared, Half* out, float* lse_out) {
  const int rank = blockIdx.x, head = blockIdx.y, row = blockIdx.z;
  Slice slice(batch, pages, buffers, batch.seq_lens[row]);
  unsigned *counts = reinterpret_cast<unsigned*>(parts), *histogram = buffers.histogram + slice.pair * kByteCodes;
  float4* look = buffers.look + slice.pair * kLookParts * kGroup;
  for (int code = threadIdx.x; code < kByteCodes; code += kRowsThreads) {
    counts[code] = 0;
    if (rank == 0) histogram[code] = 0;
  }
  __threadfence();
  cluster_barrier();
  if (rank == 0 && threadIdx.x < kLookParts * kGroup)
    look[threadIdx.x] = threadIdx.x < kGroup ? make_float4(shared.lse[threadIdx.x], 1.f, -1e30f, 0.f) : make_float4(-1e30f, 0.f, -1e30f, 0.f);
  Query query;
  query.load(q + slice.pair * kOutSize, threadIdx.x % 32);
  remix<kRowsWarps>(batch, pages, scores, query, shared.lse, row, head, slice.begin, slice.end,
                    buffers.codes + slice.pair * batch.max_units * kUnit, counts);
  __syncthreads();
  for (int code = threadIdx.x; code < kByteCodes; code += kRowsThreads)
    if (counts[code]) atomicAdd(histogram + code, counts[code]);
  __threadfence();
  cluster_barrier();
  sample_pair<true>(batch, pages, scores, q, buffers, slice, shared, out, lse_out);
}

__global__ void __launch_bounds__(kRowsThreads, kRowsBlocks)
    sample_rows_kernel(const __grid_constant__ Batch batch, const __grid_constant__ Pages pages, const __grid_constant__ Scores scores,
                       const Half* q, const __grid_constant__ PpsBuffers buffers, Half* out, float* lse_out) {
  __shared__ Shared shared;
  const int rank = blockIdx.x, head = blockIdx.y, row = blockIdx.z, n = batch.length(row);
  const bool first_block = rank == 0 && head == 0 && row == 0;
  const int64_t pair = int64_t(row) * batch.kv_heads + head;
  if (n == 0) {                                      // of another method, or empty
    if (rank == 0 && (batch.methods >> batch.method[row] & 1)) {
      for (int i = threadIdx.x; i < kOutSize; i += kRowsThreads) out[pair * kOutSize + i] = Half(0.f);
      if (lse_out && threadIdx.x < kGroup) lse_out[pair * kGroup + threadIdx.x] = -INFINITY;
      if (threadIdx.x == 0) buffers.count[pair] = 0;
    }
    if (first_block) wait_previous();
    return;
  }
  cluster_arrive();
  Slice slice(batch, pages, buffers, n);
  for (int i = threadIdx.x; i < 256; i += kRowsThreads) shared.double_exp2[i] = 2 * buffers.exp2[i];
  if (threadIdx.x == 0) shared.starving = false;
  buffers.progress.wait(pair, ceil_div(n, kUnit));
  cluster_wait();                                    // the blocks' shared memory may be written to: all have started
  if (!sample_pair<false>(batch, pages, scores, q, buffers, slice, shared, out, lse_out))
    sample_again(batch, pages, scores, q, buffers, shared, out, lse_out);
  if (rank == 0 && threadIdx.x == 0) buffers.progress.leave(pair, 1);
  if (first_block) wait_previous();
}

// Blocks that share a row and KV head: as many as fill the GPU, and wide clusters only where all have room at once. The rows' lengths, of which
// the host knows only the limit, don't count.
int cluster_size(const Batch& batch, int most) {
  const int64_t pairs = int64_t(batch.rows) * batch.kv_heads;
  int size = 1;
  while (size < most && pairs * (2 * size) <= (2 * size > kWideCluster ? kMostWideBlocks : kMostBlocks)) size *= 2;
  return size;
}

cudaError_t sample_rows(const Batch& batch, const Pages& pages, const Scores& scores, const void* q, const PpsBuffers& buffers, void* out,
                        float* lse, cudaStream_t stream, bool overlap) {
  static const int most = overlap ? largest_cluster(sample_rows_kernel, kRowsThreads, kDynamicBytes, kMaxCluster) : 1;
  const int size = cluster_size(batch, most);
  return launch_clusters(sample_rows_kernel, dim3(size, batch.kv_heads, batch.rows), kRowsThreads, kDynamicBytes, size, stream, overlap, batch,
                         pages, scores, static_cast<const Half*>(q), buffers, static_cast<Half*>(out), lse);
}

}  // namespace santa
