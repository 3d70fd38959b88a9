// santa, strat, sys, prop, stage 2: every draw is a point on the prefix sums of the expected copies. A block finds its draws' tokens (run
// of units, unit, token), then reads their V rows. No pass over the tokens: the masses of the units are enough to find a unit. A block
// starts as soon as the scan is through with its row and KV head.
#include "block_sum.cuh"
#include "philox.cuh"
#include "values.cuh"

namespace santa {

constexpr int kPointThreads = 512, kPointWarps = kPointThreads / 32;
constexpr int kDrawThreads = 4;                      // threads that look for a draw's token among the 64 of its unit
constexpr int kDraws = kPointThreads / kDrawThreads;
constexpr int kDrawTokens = kUnit / kDrawThreads;
constexpr int kDrawRows = kDraws / (kPointWarps * kRowsAtOnce);      // V rows a lane reads
static_assert(kDrawTokens == 16);                    // in one block of the cache

// The draw's point on [0, S * kOne).
__device__ int64_t draw_point(const Batch& batch, int row, int head, int n, int method, int64_t budget, int draw) {
  const bool shared_offset = method == kSys || method == kProp;
  const int64_t u = uniform44(batch.seed[row], n - 1, batch.layer, kValueStream, head, shared_offset ? 0 : draw);
  if (shared_offset) return draw * kOne + kOne - 1 - u;
  return method == kStrat ? draw * kOne + u : budget * u;
}

// A thread's units: up to four runs of `length` consecutive ones. Where a run is one unit, which it is up to 131,072 tokens, they stay in
// registers.
constexpr int kRuns = 4;

struct UnitRuns {
  const int2* unit;
  int length, runs, begin, units;
  int2 held[kRuns];

  __device__ __forceinline__ UnitRuns(const int2* unit, int units) : unit(unit), units(units) {
    length = ceil_div(units, kPointThreads * kRuns);
    runs = ceil_div(units, kPointThreads * length);
    begin = threadIdx.x * runs * length;
#pragma unroll
    for (int i = 0; i < kRuns; ++i) held[i] = i < runs && begin + i < units ? __ldcg(unit + begin + i) : make_int2(kNoExponent, 0);
  }
  // function(run, unit)
  template <class Function>
  __device__ __forceinline__ void for_each(const Function& function) const {
    if (length == 1) {
#pragma unroll
      for (int i = 0; i < kRuns; ++i) function(i, held[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kRuns; ++i)
#pragma unroll 4
        for (int u = begin + i * length; u < min(units, begin + min(runs, i + 1) * length); ++u) function(i, __ldcg(unit + u));
    }
  }
};

// Draws first .. last - 1 of a query head, by split `split` of `active`.
__device__ void sample_head(const Batch& batch, const Pages& pages, const Stash& stash, const Merge& merge, int active, int first, int last,
                            Half* out, float* lse) {
  __shared__ __align__(16) int64_t upto[kPointThreads * kRuns], scratch[kPointWarps];      // upto: prefix sums over the runs
  __shared__ int top_scratch[kPointWarps];
  __shared__ const Half* address[kDraws];
  __shared__ __align__(16) int2 copy[kPointThreads * kRuns];             // of the units, where a run is one
  float* parts = reinterpret_cast<float*>(copy);     // afterwards: [kPointWarps, kHeadDim]
  static_assert(kPointWarps * kHeadDim * sizeof(float) <= sizeof(copy));
  const int split = blockIdx.x, head = blockIdx.y, row = blockIdx.z, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int method = batch.method[row], n = batch.seq_lens[row], budget = batch.budget[row], units = ceil_div(n, kUnit);
  const int64_t owner = int64_t(row) * gridDim.y + head;
  const int my_draw = threadIdx.x / kDrawThreads, part = threadIdx.x % kDrawThreads;
  int64_t point = draw_point(batch, row, batch.head_offset * kGroup + head, n, method, budget, first + my_draw);
  stash.progress.wait(int64_t(row) * batch.kv_heads + head / kGroup, units);

  // Exponent and mass of the row.
  const int2* unit = stash.unit + owner * batch.max_units;
  const UnitRuns mine(unit, units);
  const int length = mine.length, runs = mine.runs;
  int top = kNoExponent;
  mine.for_each([&](int, int2 u) { top = max(top, u.x); });
  top = block_max<kPointThreads>(top, top_scratch);
  int64_t mass = 0;
  mine.for_each([&](int, int2 u) { mass += unit_share(u, top); });
  mass = block_sum<kPointThreads>(mass, scratch);
  const bool broken = top == kNotFinite;
  if (lse && split == 0 && threadIdx.x == 0) lse[owner] = broken ? NAN : mass > 0 ? log2f(float(mass)) + float(top - 36) : -INFINITY;
  if (broken || mass == 0) {                         // NaN or +inf somewhere; or nothing to attend to
    if (split == 0)
      for (int i = threadIdx.x; i < kHeadDim; i += kPointThreads) out[owner * kHeadDim + i] = Half(broken ? NAN : 0.f);
    return;
  }
  const double per_mass = double(budget) * 18446744073709551616.0 / double(mass);
  int64_t own[kRuns] = {}, sum;
  mine.for_each([&](int i, int2 u) { own[i] += u.y * copies_per_weight(per_mass, u, top); });
#pragma unroll
  for (int i = 1; i < kRuns; ++i) own[i] += own[i - 1];
  __syncthreads();                                   // scratch is used again
  const int64_t ahead = block_scan<kPointThreads>(own[kRuns - 1], scratch, &sum) - own[kRuns - 1];
#pragma unroll
  for (int i = 0; i < kRuns; ++i)
    if (i < runs) {
      upto[threadIdx.x * runs + i] = ahead + own[i];
      if (length == 1) copy[threadIdx.x * runs + i] = mine.held[i];
    }
  __syncthreads();

  ValueSum<1> values;
  const int* table = batch.block_table + row * batch.table_stride;
  for (int draws = first; draws < last; draws += kDraws) {
    if (draws > first) point = draw_point(batch, row, batch.head_offset * kGroup + head, n, method, budget, draws + my_draw);
    const bool drawn = draws + my_draw < last && point < sum;      // the same for the threads of a draw
    // The first run with upto > point: the threads of a draw look at four places at a time.
    const int64_t at = drawn ? point : 0;
    int run = 0;
#pragma unroll 1
    for (int stride = kPointThreads / 4 * (runs > 2 ? 4 : runs); stride > 0; stride = stride == 2 ? 1 : stride / 4) {
      const int place = run + stride * (part + 1) - 1;
      const unsigned before = __ballot_sync(kAll, place < kPointThreads * runs && upto[place] <= at);
      run += stride * __popc(before >> lane / kDrawThreads * kDrawThreads & (1 << kDrawThreads) - 1);
    }
    int threshold = 0, token = 0, block = 0;
    uint4 weights[2] = {};
    if (drawn) {
      int64_t rest = at - (run > 0 ? upto[run - 1] : 0), rate = 0;
      int u = run * length;
      for (;; ++u) {
        const int2 here = length == 1 ? copy[u] : __ldcg(unit + u);
        rate = copies_per_weight(per_mass, here, top);
        if (here.y * rate > rest) break;
        rest -= here.y * rate;
      }
      threshold = int(double(rest) / double(rate));  // floor(rest / rate): the token's prefix sum of weights passes it
      if (threshold * rate > rest) --threshold;
      if ((threshold + 1) * rate <= rest) ++threshold;
      token = u * kUnit + part * kDrawTokens;
      const uint4* source = reinterpret_cast<const uint4*>(stash.weight + owner * batch.max_units * kUnit + token);
      weights[0] = __ldcg(source);
      weights[1] = __ldcg(source + 1);
      block = table[min(token, n - 1) / pages.block_size];
    }
    int count = 0;
    const uint32_t pairs[8] = {weights[0].x, weights[0].y, weights[0].z, weights[0].w, weights[1].x, weights[1].y, weights[1].z, weights[1].w};
#pragma unroll
    for (int k = 0; k < 8; ++k) count += (pairs[k] & 0xffff) + (pairs[k] >> 16);
    int before = 0;                                  // weights of the threads ahead
#pragma unroll
    for (int d = 1; d < kDrawThreads; ++d) {
      const int other = __shfl_up_sync(kAll, count, d, kDrawThreads);
      if (part >= d) before += other;
    }
    if (!drawn) {
      if (part == 0) address[my_draw] = nullptr;
    } else if (before <= threshold && threshold < before + count) {
      int within = 0;
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        before += pairs[k] & 0xffff;
        within += before <= threshold;
        before += pairs[k] >> 16;
        within += before <= threshold;
      }
      address[my_draw] = static_cast<const Half*>(pages.kv) + block * pages.page_stride +
                         (int64_t(head / kGroup) * pages.block_size + (token + within) % pages.block_size) * (2 * kHeadDim) + kHeadDim;
    }
    __syncthreads();
    uint4 rows[kDrawRows];                           // all on their way before the first is added
    const float one = 1.f;
    const int first_row = warp * kRowsAtOnce + lane / kRowLanes;
    if (lane < kRowLanes * kRowsAtOnce) {
#pragma unroll
      for (int i = 0; i < kDrawRows; ++i) {
        const Half* found = address[first_row + i * (kPointWarps * kRowsAtOnce)];
        rows[i] = found ? load_row(found + lane % kRowLanes * 8) : uint4{};
      }
#pragma unroll
      for (int i = 0; i < kDrawRows; ++i) values.add(rows[i], &one);
    }
    __syncthreads();
  }
  values.hand_in(parts);
  const float scale = 1.f / budget;
  if (active == 1) {
    for (int i = threadIdx.x; i < kHeadDim / 4; i += kPointThreads) {
      const float4 all = sum_warps<kPointWarps, kHeadDim>(parts, i);
      store_half4(out + owner * kHeadDim + 4 * i, make_float4(all.x * scale, all.y * scale, all.z * scale, all.w * scale));
    }
  } else if (hand_in_split<kHeadDim, kPointThreads>(merge, owner, split, active, parts)) {
    finish_splits<kHeadDim, kPointThreads>(merge, owner, active, out + owner * kHeadDim, [&](int, int) { return scale; });
  } else {
    return;
  }
  if (leaves_l2(batch, kGroup * (kUnit * sizeof(uint16_t) + sizeof(int2)))) {          // by the last block that has read it
    const uint16_t* weights = stash.weight + owner * batch.max_units * kUnit;
    give_up<kPointThreads>(weights, weights + units * kUnit);
    give_up<kPointThreads>(unit, unit + units);
  }
}

__global__ void __launch_bounds__(kPointThreads, 2)
    sample_points_kernel(Batch batch, Pages pages, Stash stash, Merge merge, Half* out, float* lse) {
  launch_next();
  const int split = blockIdx.x, head = blockIdx.y, row = blockIdx.z, budget = batch.budget[row];
  const int per_block = ceil_div(ceil_div(budget, merge.splits), kDraws) * kDraws, active = max(1, ceil_div(budget, per_block));
  if ((batch.methods >> batch.method[row] & 1) && split < active) {
    sample_head(batch, pages, stash, merge, active, split * per_block, min(budget, (split + 1) * per_block), out, lse);
    if (threadIdx.x == 0) stash.progress.leave(int64_t(row) * batch.kv_heads + head / kGroup, active * kGroup);
  }
  if (blockIdx.x + blockIdx.y + blockIdx.z == 0) wait_previous();          // ends after the scan, whatever its rows
}

cudaError_t sample_points(const Batch& batch, const Pages& pages, const Stash& stash, const Merge& merge, void* out, float* lse,
                          cudaStream_t stream, bool overlap) {
  return launch_side_by_side(sample_points_kernel, dim3(merge.splits, batch.kv_heads * kGroup, batch.rows), kPointThreads, 0,
                             stream, overlap, batch, pages, stash, merge, static_cast<Half*>(out), lse);
}

}  // namespace santa
