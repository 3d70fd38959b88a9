// flash, stage 2: every tile of 256 tokens samples on its own, S / tiles draws with one offset, and counts by its share of the mass. A
// block works through a run of tiles: a warp a head finds the copies, then each row of V that any head drew is read once for the group.
#include "philox.cuh"
#include "values.cuh"

namespace santa {

constexpr int kTile = 256, kTileUnits = kTile / kUnit;
constexpr int kTileThreads = 128, kTileWarps = kTileThreads / 32;

struct TileState {                // of one head, held by the warp that samples it
  int reference;                  // largest exponent among the block's tiles
  float mass;                     // of the block's tiles so far, in units of 2^(reference - 36)
};

// Largest exponent of a run of units. By one warp.
__device__ int largest_exponent(const int2* unit, int first, int last) {
  int top = kNoExponent;
  for (int u = first + threadIdx.x % 32; u < last; u += 32) top = max(top, unit[u].x);
  return __reduce_max_sync(kAll, top);
}

// One head's copies in one tile, as weights of V rows relative to the block's reference. By one warp; lane l has tokens 8l .. 8l + 7.
__device__ void sample_tile(const Stash& stash, int64_t head_row, int max_units, int units, int tile, int draws, int64_t offset,
                            TileState& state, float* weight) {
  const int lane = threadIdx.x % 32, u = tile * kTileUnits + lane / 8;
  const int2 unit = u < units ? stash.unit[head_row * max_units + u] : make_int2(kNoExponent, 0);
  uint4 words = {};
  if (u < units) words = *reinterpret_cast<const uint4*>(stash.weight + (head_row * max_units + u) * kUnit + lane % 8 * 8);
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
  int64_t at = own;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) { const int64_t other = __shfl_up_sync(kAll, at, d); if (lane >= d) at += other; }
  at += offset - own;
  const float tile_mass = float(double(mass) * pow2(top - state.reference));
  const float each = tile_mass / draws;
  state.mass += tile_mass;
  float copies[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int64_t before = at >> 44;
    at += (i % 2 ? pairs[i / 2] >> 16 : pairs[i / 2] & 0xffff) * rate;
    copies[i] = float(int(at >> 44) - int(before)) * each;
  }
  float4* eight = reinterpret_cast<float4*>(weight + lane * 8);
  eight[0] = make_float4(copies[0], copies[1], copies[2], copies[3]);
  eight[1] = make_float4(copies[4], copies[5], copies[6], copies[7]);
}

__global__ void __launch_bounds__(kTileThreads, kGroup* kHeadDim <= 512 ? 6 : 1)
    sample_tiles_kernel(Batch batch, Pages pages, Stash stash, TileMerge tile_merge, Half* out, float* lse) {
  extern __shared__ __align__(16) float parts[];     // [kTileWarps, kGroup * kHeadDim]
  __shared__ __align__(16) float weight[kGroup][kTile];
  __shared__ const Half* address[kTile];
  __shared__ int16_t token_at[kTile];
  __shared__ int warp_count[kTileWarps];
  launch_next();
  const int split = blockIdx.x, head = blockIdx.y, row = blockIdx.z, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (!(batch.methods >> batch.method[row] & 1)) { wait_previous(); return; }
  const Merge& merge = tile_merge.merge;
  const int n = batch.seq_lens[row], units = ceil_div(n, kUnit), tiles = ceil_div(n, kTile);
  const int per_block = max(1, ceil_div(tiles, merge.splits)), active = max(1, ceil_div(tiles, per_block));
  const int first = split * per_block, last = min(tiles, first + per_block);
  const int draws = max(1, batch.budget[row] / max(tiles, 1));
  const int64_t pair = int64_t(row) * batch.kv_heads + head;
  wait_previous();
  if (split >= active) return;

  constexpr int kOwnHeads = (kGroup + kTileWarps - 1) / kTileWarps;   // heads a warp samples: warp, warp + kTileWarps, ...
  TileState state[kOwnHeads];
#pragma unroll
  for (int k = 0; k < kOwnHeads; ++k) {
    const int h = warp + k * kTileWarps;
    state[k] = {kNoExponent, 0.f};
    if (h < kGroup)
      state[k].reference =
          largest_exponent(stash.unit + (pair * kGroup + h) * batch.max_units, first * kTileUnits, min(units, last * kTileUnits));
  }
  ValueSum<kGroup> values;
  for (int tile = first; tile < last; ++tile) {
#pragma unroll
    for (int k = 0; k < kOwnHeads; ++k)
      if (const int h = warp + k * kTileWarps; h < kGroup)
        sample_tile(stash, pair * kGroup + h, batch.max_units, units, tile, draws,
                    uniform44(batch.seed[row], n - 1, batch.layer, kValueStream, (batch.head_offset + head) * kGroup + h, tile), state[k],
                    weight[h]);
    __syncthreads();
    int base = 0;                                    // list the tokens some head drew, in order
    for (int start = 0; start < kTile; start += kTileThreads) {
      const int t = start + threadIdx.x;
      bool any = false;
#pragma unroll
      for (int h = 0; h < kGroup; ++h) any |= weight[h][t] > 0.f;
      const unsigned votes = __ballot_sync(kAll, any);
      if (lane == 0) warp_count[warp] = __popc(votes);
      __syncthreads();
      int at = base;
      for (int w = 0; w < kTileWarps; ++w) { if (w < warp) at += warp_count[w]; base += warp_count[w]; }
      at += __popc(votes & ((1u << lane) - 1));
      if (any) {
        token_at[at] = int16_t(t);
        address[at] = token_row(batch, pages, row, head, tile * kTile + t) + kHeadDim;
      }
      __syncthreads();
    }
    if (lane < kRowLanes * kRowsAtOnce)
#pragma unroll 4
      for (int k = warp * kRowsAtOnce + lane / kRowLanes; k < base; k += kTileWarps * kRowsAtOnce) {
        float own[kGroup];
#pragma unroll
        for (int h = 0; h < kGroup; ++h) own[h] = weight[h][token_at[k]];
        values.add(load_row(address[k] + lane % kRowLanes * 8), own);
      }
    __syncthreads();
  }
#pragma unroll
  for (int k = 0; k < kOwnHeads; ++k)
    if (const int h = warp + k * kTileWarps; h < kGroup && lane == 0)
      tile_merge.mass[(pair * merge.splits + split) * kGroup + h] = make_int2(state[k].reference, __float_as_int(state[k].mass));
  values.hand_in(parts);
  constexpr int size = kGroup * kHeadDim;
  if (!hand_in_split<size, kTileThreads>(merge, pair, split, active, parts)) return;

  // What a split's part weighs: 2^(its reference - the largest) over the whole mass. NaN where a score was not finite.
  __shared__ int top[kGroup];
  __shared__ float inverse[kGroup];
  const int2* mass = tile_merge.mass + pair * merge.splits * kGroup;
  if (threadIdx.x < kGroup) {
    int highest = kNoExponent;
    for (int s = 0; s < active; ++s) highest = max(highest, __ldcg(mass + s * kGroup + threadIdx.x).x);
    double sum = 0;
    for (int s = 0; s < active; ++s) {
      const int2 part = __ldcg(mass + s * kGroup + threadIdx.x);
      sum += __int_as_float(part.y) * pow2(part.x - highest);
    }
    top[threadIdx.x] = highest;
    inverse[threadIdx.x] = highest == kNotFinite ? NAN : sum > 0 ? float(1 / sum) : 0.f;
    if (lse) lse[pair * kGroup + threadIdx.x] = highest == kNotFinite ? NAN : sum > 0 ? log2f(float(sum)) + float(highest - 36) : -INFINITY;
  }
  __syncthreads();
  finish_splits<size, kTileThreads>(merge, pair, active, out + pair * size, [&](int s, int i) {
    const int h = i / kHeadDim;
    return exp2_fast(float(__ldcg(mass + s * kGroup + h).x - top[h])) * inverse[h];
  });
}

cudaError_t sample_tiles(const Batch& batch, const Pages& pages, const Stash& stash, const TileMerge& merge, void* out, float* lse,
                         cudaStream_t stream, bool overlap) {
  return launch(sample_tiles_kernel, dim3(merge.merge.splits, batch.kv_heads, batch.rows), kTileThreads,
                kTileWarps * kGroup * kHeadDim * sizeof(float), stream, overlap, batch, pages, stash, merge, static_cast<Half*>(out), lse);
}

}  // namespace santa
