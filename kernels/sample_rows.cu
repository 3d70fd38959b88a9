// pps, last stage: chooses a KV head's rows and sums them up, a cluster of blocks to a row and KV head, as soon as the scan is through with it.
//
// Each block turns its slice of the log-codes into inclusion probabilities, places the samples that fall into it (systematic sampling over
// the prefix sums), and reads their K and V: out = sum over the chosen rows of (p / pi) v. The scores are computed again from the keys; p
// uses the exact log2-sum-exp. The blocks exchange their sums through shared memory: before placement, and at the end. Where the exact sums
// show that the first look starved a head, q is mixed anew (remix.cuh) and all of it is done once more.
//
// Nothing here is much work: it is latency, at the end of every layer, when nothing else is left to do. Every instruction runs once or twice, from
// a cold cache, at five cycles each: so little code counts, and what can be done by those who wait.
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
constexpr int kWarpHeads = ceil_div(kGroup, kRowsWarps - 1);      // heads whose masses a warp adds up
constexpr int kValueLoads = kTileRows / kRowsAtOnce;
// Registers of a lane's keys, sums and queries: where they allow it, two blocks to a multiprocessor, so that one fits beside the scan's.
// And where V rows leave it at that, V is read beside K, not after it.
constexpr int kRowRegisters = 4 * kPieces + 8 * kGroup + 4 * kColumns * kPieces;
constexpr int kRowsBlocks = kRowRegisters <= 112 ? 2 : 1;
constexpr bool kValuesEarly = kRowRegisters + 4 * kValueLoads <= (kRowsBlocks == 2 ? 112 : 200);
constexpr int kOutSize = kGroup * kHeadDim, kQuads = kOutSize / 4;
constexpr int kPartsBytes = kRowsWarps * kOutSize * int(sizeof(float));
// Dynamic shared memory: what is held of the slice, which makes way for the sums; the list of samples; sums that the other blocks hand in, in shares
// that may be rounded up.
constexpr int kHeldBytes = kPartsBytes > int(sizeof(Held)) ? kPartsBytes : int(sizeof(Held)), kListBytes = kListed * 16;
constexpr int kDynamicBytes = kHeldBytes + kListBytes + (kQuads + kMaxCluster) * 16;

using ByteSolver = BinSolver<kByteCodes, 32, -(kCodeZero << kBinShift)>;

// A sum of exponentials: sum * 2^top.
struct Mass {
  float top = -3e9f, sum = 0.f;

  __device__ __forceinline__ void add(const float (&log2_mass)[4]) {
    float higher = top, more = 0.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) higher = fmaxf(higher, log2_mass[i]);
#pragma unroll
    for (int i = 0; i < 4; ++i) more += exp2_fast(log2_mass[i] - higher);
    sum = sum * exp2_fast(top - higher) + more;
    top = higher;
  }
  __device__ __forceinline__ void add_lanes() {
    float highest = top;
#pragma unroll
    for (int d = 16; d > 0; d /= 2) highest = fmaxf(highest, __shfl_xor_sync(kAll, highest, d));
    sum *= exp2_fast(top - highest);
#pragma unroll
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(kAll, sum, d);
    top = highest;
  }
  // Log2 of it all: NaN if a score was NaN or +inf, -inf if none was finite.
  __device__ __forceinline__ float log2() const {
    const float value = top + log2_fast(sum);
    return value < INFINITY ? value : NAN;
  }
};

// 8 chosen rows: lane (r, c) holds pieces of the key of row r; kRowLanes lanes hold a V row.
struct RowTile {
  float inverse;                  // 1 / pi of row r
  uint4 key[kPieces], values[kValueLoads];

  __device__ __forceinline__ void load_values(const Half* const* address, int valid) {
    const int lane = threadIdx.x % 32;
    if (lane < kRowLanes * kRowsAtOnce)
#pragma unroll
      for (int i = 0; i < kValueLoads; ++i) {
        const int row = i * kRowsAtOnce + lane / kRowLanes;
        if (row < valid) values[i] = load_row_near(address[row] + kHeadDim + lane % kRowLanes * 8);
      }
  }

  // row: K of row r; where there are fewer than 8, one that is there.
  __device__ __forceinline__ void load(const Half* row, int valid, const Half** address) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int p = 0; p < kPieces; ++p) key[p] = load_row_near(row + lane % 4 * 8 + p * 32);
    if (lane % 4 == 0) address[lane / 4] = row;
    __syncwarp();
    if constexpr (kValuesEarly) load_values(address, valid);
    else
#pragma unroll
      for (int line = 0; line < kHeadDim / 64; line += 4)        // into L2 at least
        asm volatile("prefetch.global.L2 [%0];" ::"l"(row + kHeadDim + (line + lane % 4) * 64));
  }
};

struct Shared {
  int64_t double_exp2[256], inclusion[kByteCodes], scratch[kRowsWarps];
  int64_t slice_sum[kMaxCluster];                    // of every block's slice: written by that block
  float2 slice_mass[kMaxCluster][kGroup];
  float least[kGroup], lse[kGroup];
  Mailbox sums_box, output_box;                      // slice_mass and slice_sum; incoming
  const Half* address[kRowsWarps][kTileRows];
  float weight[kRowsWarps][kTileRows][kGroup];
  ByteSolver::Shared solver;
  int rate, starving;
};
extern __shared__ __align__(16) float parts[];       // [kRowsWarps, kOutSize]; before that, the slice

// Each head's mass in the slice, to all blocks of the cluster. By all warps but the first.
__device__ __forceinline__ void sum_masses(const Batch& batch, const PpsBuffers& buffers, const Slice& slice, Shared& shared) {
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 - 1, blocks = gridDim.x;
  if (first < 0 || first >= kGroup) return;
  const int first_unit = slice.begin / kUnit, last_unit = ceil_div(slice.end, kUnit);
  const auto head_of = [&](int i) { return min(first + i * (kRowsWarps - 1), kGroup - 1); };
  Mass mass[kWarpHeads];
#pragma unroll
  for (int i = 0; i < kWarpHeads; ++i) {
    const float* units = buffers.unit_mass + slice.pair * batch.max_units * kGroup + head_of(i);
    for (int u = first_unit + lane; u < last_unit; u += 4 * 32) {
      float part[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) part[k] = u + 32 * k < last_unit ? __ldcg(units + int64_t(u + 32 * k) * kGroup) : -INFINITY;
      mass[i].add(part);
    }
  }
#pragma unroll
  for (int i = 0; i < kWarpHeads; ++i) {
    mass[i].add_lanes();
    const bool own = first + i * (kRowsWarps - 1) < kGroup && lane < blocks;
    shared.sums_box.send(lane & blocks - 1, own, reinterpret_cast<uint2*>(&shared.slice_mass[blockIdx.x][head_of(i)]),
                         make_uint2(__float_as_uint(mass[i].top), __float_as_uint(mass[i].sum)));
  }
}

// Chooses the rows and sums them up. The first time, false and nothing written if a head turns out to be starved, for all blocks of the
// cluster alike.
template <bool AGAIN>
__device__ __forceinline__ bool sample_pair(const Batch& batch, const Pages& pages, const Scores& scores, const Half* q,
                                            const PpsBuffers& buffers, Slice& slice, Shared& shared, Half* out, float* lse_out) {
  const int rank = blockIdx.x, blocks = gridDim.x, head = blockIdx.y, row = blockIdx.z, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t pair = slice.pair;
  int4* list = reinterpret_cast<int4*>(parts) + kHeldBytes / 16;                  // (block of the cache, row in it, inclusion probability as float, 0)
  float4* incoming = reinterpret_cast<float4*>(list) + kListed;                   // [blocks, share]

  ByteSolver solver{shared.solver};
  if (warp == 0) solver.load(buffers.histogram + pair * kByteCodes);
  slice.load();
  if (warp == 0) solver.solve(batch.budget[row], &shared.rate);
  if constexpr (!AGAIN) sum_masses(batch, buffers, slice, shared);
  __syncthreads();
  static_assert(kByteCodes == kRowsThreads);
  const int code = threadIdx.x;
  shared.inclusion[code] = code > 0 ? power(shared.double_exp2, (code - kCodeZero << kBinShift) + shared.rate) : 0;
  slice.wait();
  __syncthreads();

  // The slice's sum of inclusion probabilities, and what lies before it.
  int64_t own = 0, sum;
#pragma unroll 1
  for (int group = 0; group < slice.groups; ++group) {
    if (group > 0) slice.enter(group), slice.load(), slice.wait();
    own += slice.include(shared.inclusion);
  }
  const int64_t upto = block_scan<kRowsThreads>(own, shared.scratch, &sum);
  if (warp == 0) shared.sums_box.send(lane & blocks - 1, lane < blocks, reinterpret_cast<uint2*>(&shared.slice_sum[rank]), make_uint2(uint32_t(sum), uint32_t(uint64_t(sum) >> 32)));
  Query query;
  query.load(q + pair * kOutSize, lane);
  shared.sums_box.wait(AGAIN);
  const int64_t sums = warp_scan<kMaxCluster>(lane < blocks ? shared.slice_sum[lane] : 0);
  const int64_t whole = slice.offset + __shfl_sync(kAll, sums, blocks - 1);                // prefix sums over the row, and at the slice's start
  const int64_t at = slice.offset + __shfl_sync(kAll, sums, rank) - sum;

  // Placement.
  int4* sample = buffers.sample + pair * buffers.max_samples;
  const int first_slot = int(at >> 44), count = max(0, min(buffers.max_samples, int((at + sum) >> 44)) - first_slot);
  int64_t here = at + upto - own;
  if (here >> 44 != (here + own) >> 44)
#pragma unroll 1
    for (int group = 0; group < slice.groups; ++group) {
      if (slice.groups > 1) slice.enter(group), slice.load(), slice.wait();
      slice.for_each_sample(here, shared.inclusion, [&](int token, int block, int within, int slot, int64_t pi) {
        if (slot >= buffers.max_samples) return;
        const float probability = float(pi) * (1.f / float(kOne));
        sample[slot] = make_int4(token, block * pages.block_size + within, __float_as_int(probability), 0);
        if (slot - first_slot < kListed) list[slot - first_slot] = make_int4(block, within, __float_as_int(probability), 0);
      });
    }
  __syncthreads();

  // The rows; while the first are on their way, the heads' log2-sum-exps.
  RowTile rows;
  const int warp_rows = min(kTileRows, ceil_div(count, kRowsWarps));             // of a warp, at a time
  int tile = warp * warp_rows;
  const int r = lane / 4, c = lane % 4;
  const auto load = [&] {
    if (tile >= count) return;
    const int mine = min(tile + min(r, warp_rows - 1), count - 1);
    int4 chosen;
    if (mine < kListed) {
      chosen = list[mine];
    } else {
      const int4 written = __ldcg(sample + first_slot + mine);
      chosen = make_int4(written.y / pages.block_size, written.y % pages.block_size, written.z, 0);
    }
    rows.load(row_at(pages, head, chosen.x, chosen.y), min(warp_rows, count - tile), shared.address[warp]);
    rows.inverse = 1.f / __int_as_float(chosen.z);
  };
  load();
  if constexpr (!AGAIN) {
    for (int h = kRowsWarps - 1 - warp; h < kGroup; h += kRowsWarps) {           // the last warps have no rows if some have none
      Mass mass;
      if (lane < blocks) mass = {shared.slice_mass[lane][h].x, shared.slice_mass[lane][h].y};
      mass.add_lanes();
      const float lse = shared.lse[h] = mass.log2();
      if (starved(shared.rate, lse, shared.least[h])) shared.starving = true;
    }
    __syncthreads();
    if (shared.starving) return false;
  }
  ValueSum<kGroup> values;
  while (tile < count) {
    const int valid = min(warp_rows, count - tile);
    float acc[kColumns][4] = {};
    multiply<0, kPieces>(acc, rows.key, rows.key, query);
#pragma unroll
    for (int j = 0; j < kColumns; ++j)
#pragma unroll
      for (int k = 0; k < 2; ++k)
        if (const int h = 8 * j + 2 * c + k; h < kGroup)
          shared.weight[warp][r][h] = r < valid ? exp2_fast(scores(acc[j][k]) - shared.lse[h]) * rows.inverse : 0.f;
    __syncwarp();
    if constexpr (!kValuesEarly) rows.load_values(shared.address[warp], valid);
    if (lane < kRowLanes * kRowsAtOnce)
#pragma unroll
      for (int i = 0; i < kValueLoads; ++i) {
        if (i * kRowsAtOnce >= valid) break;
        const int at = i * kRowsAtOnce + lane / kRowLanes;
        if (at < valid) values.add(rows.values[i], shared.weight[warp][at]);
      }
    __syncwarp();
    tile += kRowsWarps * warp_rows;
    load();
  }

  // Each block adds up a share of the output, from all blocks' sums in a fixed order: every so many quads of four elements.
  values.hand_in(parts);
  const int log2_blocks = __ffs(blocks) - 1, share = ceil_div(kQuads, blocks);
  for (int i = threadIdx.x; i < kQuads; i += kRowsThreads)
    shared.output_box.send(i & blocks - 1, &incoming[rank * share + (i >> log2_blocks)], sum_warps<kRowsWarps, kOutSize>(parts, i));
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
  shared.output_box.wait(0);
  // As many threads to a quad as there are blocks.
#pragma unroll 1
  for (int i = threadIdx.x & ~(blocks - 1) | rank; i < ceil_div(kQuads, kRowsThreads) * kRowsThreads; i += kRowsThreads) {
    float4 total = i < kQuads ? incoming[(threadIdx.x & blocks - 1) * share + (i >> log2_blocks)] : float4{};
#pragma unroll 1
    for (int d = blocks / 2; d > 0; d /= 2) {
      total.x += __shfl_xor_sync(kAll, total.x, d);
      total.y += __shfl_xor_sync(kAll, total.y, d);
      total.z += __shfl_xor_sync(kAll, total.z, d);
      total.w += __shfl_xor_sync(kAll, total.w, d);
    }
    if (i >= kQuads || (threadIdx.x & blocks - 1) != 0) continue;
    if (isnan(shared.lse[4 * i / kHeadDim])) total = make_float4(NAN, NAN, NAN, NAN);
    store_half4(out + pair * kOutSize + 4 * i, total);
  }
  return true;
}

// With the exact log2-sum-exps as norms. Out of line: it is rare, and its registers are its own.
__device__ __noinline__ void sample_again(const Batch& batch, const Pages& pages, const Scores& scores, const Half* q, const PpsBuffers& buffers,
                                          Shared& shared, Half* out, float* lse_out) {
  const int rank = blockIdx.x, head = blockIdx.y, row = blockIdx.z;
  Slice slice(*reinterpret_cast<Held*>(parts), batch, pages, buffers, batch.seq_lens[row]);
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
  if (threadIdx.x == 0) shared.sums_box.expect(gridDim.x * sizeof(int64_t));
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
  if (threadIdx.x == 0) {
    const int blocks = gridDim.x;
    shared.sums_box.init();
    shared.output_box.init();
    shared.sums_box.expect(blocks * int(sizeof(int64_t) + kGroup * sizeof(float2)));
    shared.output_box.expect(blocks * ceil_div(kQuads - rank, blocks) * int(sizeof(float4)));
  }
  __syncwarp();
  cluster_arrive();
  Slice slice(*reinterpret_cast<Held*>(parts), batch, pages, buffers, n);
  for (int i = threadIdx.x; i < 256; i += kRowsThreads) shared.double_exp2[i] = 2 * buffers.exp2[i];
  if (threadIdx.x == 0) shared.starving = false;
  if (threadIdx.x < kGroup) {
    Progress::wait_for(&buffers.progress.pair[pair].y, look_parts(n));
    shared.least[threadIdx.x] = least_share(look_norm(buffers.look + pair * kLookParts * kGroup + threadIdx.x, n), batch.budget[row]);
  }
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
