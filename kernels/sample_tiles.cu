// flash, stage 2: every tile of 256 tokens samples on its own, S / tiles draws with one offset, and counts by its share of the mass. A
// warp takes a tile: it finds the copies of every head, then reads each row of V that any head drew once for the group. A block starts as
// soon as the scan is through with its row and KV head.
#include "block_sum.cuh"
#include "philox.cuh"
#include "values.cuh"

namespace santa {

constexpr int kTile = 256, kTileUnits = kTile / kUnit;
constexpr int kTileWarps = kGroup <= 4 ? 8 : kGroup <= 8 ? 4 : 2, kTileThreads = 32 * kTileWarps;
constexpr int kOutSize = kGroup * kHeadDim;
constexpr int kRowLoads = kGroup <= 8 ? 8 : 4;       // V rows a lane has on their way
constexpr int kPartsBytes = kTileWarps * kOutSize * int(sizeof(float));

// What a warp knows of its tile.
struct WarpTile {
  float weight[kGroup][kTile];                       // of V rows, relative to the block's reference
  const Half* row[kTile];                            // V rows that some head drew, in order
  uint8_t token[kTile];
};
constexpr int kTileBytes = kTileWarps * int(sizeof(WarpTile));

// Largest exponent of a run of units. By one warp.
__device__ int largest_exponent(const int2* unit, int first, int last) {
  int top = kNoExponent;
  for (int u = first + threadIdx.x % 32; u < last; u += 32) top = max(top, __ldcg(unit + u).x);
  return __reduce_max_sync(kAll, top);
}

// One head's stash in a tile: lane l has tokens 8l .. 8l + 7.
struct HeadTile {
  int2 unit;
  uint4 words;

  __device__ __forceinline__ void load(const Stash& stash, int64_t head_row, int max_units, int units, int tile) {
    const int lane = threadIdx.x % 32, u = tile * kTileUnits + lane / 8;
    unit = u < units ? __ldcg(stash.unit + head_row * max_units + u) : make_int2(kNoExponent, 0);
    words = u < units ? __ldcg(reinterpret_cast<const uint4*>(stash.weight + (head_row * max_units + u) * kUnit + lane % 8 * 8)) : uint4{};
  }

  // The head's copies, as weights relative to 2^reference. Returns the tokens drawn as bits; adds the tile's mass, in units of
  // 2^(reference - 36).
  __device__ __forceinline__ unsigned sample(int draws, int64_t offset, int reference, float* weight, float& mass_sum) const {
    const int lane = threadIdx.x % 32;
    const int top = __reduce_max_sync(kAll, unit.x);
    int64_t mass = unit_share(unit, top);
    mass += __shfl_xor_sync(kAll, mass, 8);
    mass += __shfl_xor_sync(kAll, mass, 16);
    const int64_t rate = mass > 0 ? copies_per_weight(double(draws) * 18446744073709551616.0 / double(mass), unit, top) : 0;
    const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
    int sum = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) sum += (pairs[k] & 0xffff) + (pairs[k] >> 16);
    const int64_t own = sum * rate;
    int64_t at = warp_scan(own) + offset - own;
    const float tile_mass = float(double(mass) * pow2(top - reference));
    const float each = tile_mass / draws;
    mass_sum += tile_mass;
    float copies[8];
    unsigned drawn = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int64_t before = at >> 44;
      at += (i % 2 ? pairs[i / 2] >> 16 : pairs[i / 2] & 0xffff) * rate;
      const int count = int(at >> 44) - int(before);
      copies[i] = float(count) * each;
      drawn |= unsigned(count > 0) << i;
    }
    float4* eight = reinterpret_cast<float4*>(weight + lane * 8);
    eight[0] = make_float4(copies[0], copies[1], copies[2], copies[3]);
    eight[1] = make_float4(copies[4], copies[5], copies[6], copies[7]);
    return drawn;
  }
};

// Tiles first .. last - 1 of a row and KV head, by split `split` of `active`.
__device__ void sample_pair(const Batch& batch, const Pages& pages, const Stash& stash, const TileMerge& tile_merge, int active, int first,
                            int last, Half* out, float* lse) {
  extern __shared__ __align__(16) char shared[];     // [kTileWarps] WarpTile; then parts [kTileWarps, kOutSize]
  __shared__ int reference[kGroup];
  __shared__ float warp_mass[kTileWarps][kGroup];
  const int split = blockIdx.x, head = blockIdx.y, row = blockIdx.z, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Merge& merge = tile_merge.merge;
  const int n = batch.seq_lens[row], units = ceil_div(n, kUnit), tiles = ceil_div(n, kTile);
  const int draws = max(1, batch.budget[row] / max(tiles, 1));
  const int64_t pair = int64_t(row) * batch.kv_heads + head;
  const int* table = batch.block_table + row * batch.table_stride;
  stash.progress.wait(pair, units);

  for (int h = warp; h < kGroup; h += kTileWarps) {
    const int top = largest_exponent(stash.unit + (pair * kGroup + h) * batch.max_units, first * kTileUnits, min(units, last * kTileUnits));
    if (lane == 0) reference[h] = top;
  }
  __syncthreads();
  WarpTile& mine = reinterpret_cast<WarpTile*>(shared)[warp];
  float mass[kGroup] = {};
  ValueSum<kGroup> values;
  for (int tile = first + warp; tile < last; tile += kTileWarps) {
    constexpr int kAtOnce = kGroup <= 4 ? kGroup : kGroup % 4 == 0 ? 4 : 1;      // heads whose stash is on its way together
    const int token = tile * kTile + lane * 8;
    const int block = token < n ? table[token / pages.block_size] : 0;
    unsigned drawn = 0;                              // bit i: some head drew token 8 * lane + i
#pragma unroll
    for (int start = 0; start < kGroup; start += kAtOnce) {
      HeadTile heads[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) heads[k].load(stash, pair * kGroup + start + k, batch.max_units, units, tile);
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int h = start + k;
        const int64_t offset =
            uniform44(batch.seed[row], n - 1, batch.layer, kValueStream, (batch.head_offset + head) * kGroup + h, tile);
        drawn |= heads[k].sample(draws, offset, reference[h], mine.weight[h], mass[h]);
      }
    }
    const int upto = warp_scan(__popc(drawn));       // list the tokens some head drew, in order
    const int count = __shfl_sync(kAll, upto, 31);
    const Half* base = static_cast<const Half*>(pages.kv) + block * pages.page_stride +
                       (int64_t(head) * pages.block_size + token % pages.block_size) * (2 * kHeadDim) + kHeadDim;
    int at = upto - __popc(drawn);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (drawn >> i & 1) {
        mine.token[at] = uint8_t(lane * 8 + i);
        mine.row[at++] = base + i * (2 * kHeadDim);
      }
    __syncwarp();
    if (lane < kRowLanes * kRowsAtOnce)
      for (int k = 0; k < count; k += kRowLoads * kRowsAtOnce) {
        uint4 rows[kRowLoads];
#pragma unroll
        for (int i = 0; i < kRowLoads; ++i) {
          const int at = k + i * kRowsAtOnce + lane / kRowLanes;
          if (at < count) rows[i] = load_row(mine.row[at] + lane % kRowLanes * 8);
        }
#pragma unroll
        for (int i = 0; i < kRowLoads; ++i) {
          const int at = k + i * kRowsAtOnce + lane / kRowLanes;
          if (at < count) {
            float own[kGroup];
#pragma unroll
            for (int h = 0; h < kGroup; ++h) own[h] = mine.weight[h][mine.token[at]];
            values.add(rows[i], own);
          }
        }
      }
    __syncwarp();
  }
  if (lane == 0)
#pragma unroll
    for (int h = 0; h < kGroup; ++h) warp_mass[warp][h] = mass[h];
  __syncthreads();
  if (threadIdx.x < kGroup) {
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < kTileWarps; ++w) sum += warp_mass[w][threadIdx.x];
    tile_merge.mass[(pair * merge.splits + split) * kGroup + threadIdx.x] = make_int2(reference[threadIdx.x], __float_as_int(sum));
  }
  float* parts = reinterpret_cast<float*>(shared);
  values.hand_in(parts);
  if (!hand_in_split<kOutSize, kTileThreads>(merge, pair, split, active, parts)) return;

  // What a split's part weighs: 2^(its reference - the largest) over the whole mass. NaN where a score was not finite.
  __shared__ int top[kGroup];
  __shared__ float inverse[kGroup];
  const int2* split_mass = tile_merge.mass + pair * merge.splits * kGroup;
  for (int h = warp; h < kGroup; h += kTileWarps) {
    int highest = kNoExponent;
    for (int s = lane; s < active; s += 32) highest = max(highest, __ldcg(split_mass + s * kGroup + h).x);
    highest = __reduce_max_sync(kAll, highest);
    double sum = 0;
    for (int s = lane; s < active; s += 32) {
      const int2 part = __ldcg(split_mass + s * kGroup + h);
      sum += __int_as_float(part.y) * pow2(part.x - highest);
    }
#pragma unroll
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(kAll, sum, d);
    if (lane == 0) {
      top[h] = highest;
      inverse[h] = highest == kNotFinite ? NAN : sum > 0 ? float(1 / sum) : 0.f;
      if (lse) lse[pair * kGroup + h] = highest == kNotFinite ? NAN : sum > 0 ? log2f(float(sum)) + float(highest - 36) : -INFINITY;
    }
  }
  __syncthreads();
  finish_splits<kOutSize, kTileThreads>(merge, pair, active, out + pair * kOutSize, [&](int s, int i) {
    const int h = i / kHeadDim;
    return exp2_fast(float(__ldcg(split_mass + s * kGroup + h).x - top[h])) * inverse[h];
  });
}

__global__ void __launch_bounds__(kTileThreads, kOutSize <= 512 ? 2 : 1)
    sample_tiles_kernel(Batch batch, Pages pages, Stash stash, TileMerge tile_merge, Half* out, float* lse) {
  const int split = blockIdx.x, head = blockIdx.y, row = blockIdx.z, tiles = ceil_div(batch.seq_lens[row], kTile);
  const int per_block = max(1, ceil_div(ceil_div(tiles, tile_merge.merge.splits), kTileWarps)) * kTileWarps;
  const int active = max(1, ceil_div(tiles, per_block));
  if ((batch.methods >> batch.method[row] & 1) && split < active) {
    sample_pair(batch, pages, stash, tile_merge, active, split * per_block, min(tiles, (split + 1) * per_block), out, lse);
    if (threadIdx.x == 0) stash.progress.leave(int64_t(row) * batch.kv_heads + head, active);
  }
  if (blockIdx.x + blockIdx.y + blockIdx.z == 0) wait_previous();          // ends after the scan, whatever its rows
}

cudaError_t sample_tiles(const Batch& batch, const Pages& pages, const Stash& stash, const TileMerge& merge, void* out, float* lse,
                         cudaStream_t stream, bool overlap) {
  return launch_side_by_side(sample_tiles_kernel, dim3(merge.merge.splits, batch.kv_heads, batch.rows), kTileThreads,
                             std::max(kTileBytes, kPartsBytes), stream, overlap, batch, pages, stash, merge, static_cast<Half*>(out), lse);
}

}  // namespace santa
