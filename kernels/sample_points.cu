// santa, strat, sys, prop, stage 2: every draw is a point on the prefix sums of the expected copies. A block finds its draws' tokens (run
// of units, unit, four tokens, token), then reads their V rows. No pass over the tokens: the masses of the units are enough to find a unit.
// Among the four the token is found by weights that are computed again from their keys. A block starts as soon as the scan is through with
// its row and KV head.
#include "block_sum.cuh"
#include "philox.cuh"
#include "values.cuh"

namespace santa {

constexpr int kPointThreads = 512, kPointWarps = kPointThreads / 32;
constexpr int kDrawThreads = 4;                      // threads that look for a draw's token; each has a quarter of the sums of its unit
constexpr int kDraws = kPointThreads / kDrawThreads;
static_assert(kSums == 4 * kDrawThreads && kFour == kDrawThreads);

// The draw's point on [0, S * kOne).
__device__ int64_t draw_point(const Batch& batch, int row, int head, int n, int method, int64_t budget, int draw) {
  const bool shared_offset = method == kSys || method == kProp;
  const int64_t u = uniform44(batch.seed[row], n - 1, batch.layer, kValueStream, head, shared_offset ? 0 : draw);
  if (shared_offset) return draw * kOne + kOne - 1 - u;
  return method == kStrat ? draw * kOne + u : budget * u;
}

constexpr int kHeldUnits = 4;

// A thread's consecutive units; the first few stay in registers.
struct UnitRun {
  static constexpr int kHeld = kHeldUnits;
  const int2* unit;                                  // of a head: every kGroup-th
  int begin, end;
  int2 held[kHeld];

  __device__ __forceinline__ UnitRun(const int2* unit, int begin, int end) : unit(unit), begin(begin), end(end) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) held[i] = begin + i < end ? at(begin + i) : make_int2(kNoExponent, 0);
  }
  __device__ __forceinline__ int2 at(int u) const { return __ldcg(unit + int64_t(u) * kGroup); }
  template <class Function>
  __device__ __forceinline__ void for_each(const Function& function) const {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) function(held[i]);
#pragma unroll 4
    for (int u = begin + kHeld; u < end; ++u) function(at(u));
  }
};

// Dot products of a head's query with the four tokens of each of a warp's 8 draws: thread 4 d + i gets that of draw d and token i.
// four: K of the first token of draw lane / 4. last: the highest of its tokens that may be read. query: in shared memory.
__device__ __forceinline__ float dots_of_fours(const Half* four, int last, const Half* query) {
  constexpr int kAtOnce = kPieces < 4 ? kPieces : 4;
  const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
  float dot = 0.f;
#pragma unroll
  for (int at = 0; at < kHeadDim; at += 64)          // all rows at once, as registers would not hold them
    asm volatile("prefetch.global.L2 [%0];" ::"l"(four + min(c, last) * (2 * kHeadDim) + at));
#pragma unroll 1
  for (int t = 0; t < 2; ++t) {                      // 16 keys: draws 4 t .. 4 t + 3
    const Half* row[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int source = (4 * t + 2 * k + r / 4) * 4;
      const uint64_t base = __shfl_sync(kAll, reinterpret_cast<uint64_t>(four), source);
      row[k] = reinterpret_cast<const Half*>(base) + min(r % 4, __shfl_sync(kAll, last, source)) * (2 * kHeadDim) + c * 8;
    }
    float d[4] = {};
#pragma unroll
    for (int first = 0; first < kPieces; first += kAtOnce) {
      uint4 key[2][kAtOnce];
#pragma unroll
      for (int k = 0; k < 2; ++k)
#pragma unroll
        for (int p = 0; p < kAtOnce; ++p) key[k][p] = load_row(row[k] + (first + p) * 32);
#pragma unroll
      for (int p = 0; p < kAtOnce; ++p) {            // one head: column 0
        const uint4 b = r == 0 ? *reinterpret_cast<const uint4*>(query + (first + p) * 32 + c * 8) : uint4{};
        mma(d, key[0][p].x, key[1][p].x, key[0][p].y, key[1][p].y, b.x, b.y);
        mma(d, key[0][p].z, key[1][p].z, key[0][p].w, key[1][p].w, b.z, b.w);
      }
    }
    const int source = (r % 2 * 4 + c) * 4;          // the lane with column 0 of draw lane / 4, token c
    const float low = __shfl_sync(kAll, d[0], source), high = __shfl_sync(kAll, d[2], source);
    if (r / 4 == t) dot = r / 2 % 2 ? high : low;
  }
  return dot;
}

// Draws first .. last - 1 of a query head, by split `split` of `active`. drawn_tokens: of the head.
__device__ void sample_head(const Batch& batch, const Pages& pages, const Scores& scores, const Half* q, const Stash& stash, const Merge& merge,
                            int active, int first, int last, int* drawn_tokens, int max_draws, Half* out, float* lse) {
  __shared__ int64_t upto[kPointThreads], scratch[kPointWarps];
  __shared__ int top_scratch[kPointWarps];
  __shared__ const Half* address[kDraws];
  __shared__ __align__(16) int2 copy[kPointThreads * kHeldUnits];        // of the units, where they all fit
  __shared__ __align__(16) float parts[kPointWarps * kHeadDim];
  __shared__ __align__(16) Half query[kHeadDim];
  const int split = blockIdx.x, head = blockIdx.y, row = blockIdx.z, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int method = batch.method[row], n = batch.seq_lens[row], budget = batch.budget[row], units = ceil_div(n, kUnit);
  const int64_t owner = int64_t(row) * gridDim.y + head;
  const int my_draw = threadIdx.x / kDrawThreads, part = threadIdx.x % kDrawThreads;
  int64_t point = draw_point(batch, row, batch.head_offset * kGroup + head, n, method, budget, first + my_draw);
  if (threadIdx.x < kHeadDim / 8) reinterpret_cast<uint4*>(query)[threadIdx.x] = reinterpret_cast<const uint4*>(q + owner * kHeadDim)[threadIdx.x];
  const int64_t pair = int64_t(row) * batch.kv_heads + head / kGroup;
  stash.progress.wait(pair, units);

  // Exponent and mass of the row.
  const int length = ceil_div(units, kPointThreads), begin = min(units, int(threadIdx.x) * length);
  const int2* unit = stash.unit + pair * batch.max_units * kGroup + head % kGroup;
  const UnitRun run(unit, begin, min(units, begin + length));
  int top = kNoExponent;
  run.for_each([&](int2 u) { top = max(top, u.x); });
  top = block_reduce<kPointThreads>(top, top_scratch, [](int a, int b) { return max(a, b); });
  int64_t mass = 0;
  run.for_each([&](int2 u) { mass += unit_share(u, top); });
  mass = block_reduce<kPointThreads>(mass, scratch, [](int64_t a, int64_t b) { return a + b; });
  const bool broken = top == kNotFinite;
  if (lse && split == 0 && threadIdx.x == 0) lse[owner] = broken ? NAN : mass > 0 ? log2f(float(mass)) + float(top - 20 - kSumBits) : -INFINITY;
  if (broken || mass == 0) {                         // NaN or +inf somewhere; or nothing to attend to
    if (split == 0)
      for (int i = threadIdx.x; i < kHeadDim; i += kPointThreads) out[owner * kHeadDim + i] = Half(broken ? NAN : 0.f);
    return;
  }
  const double per_mass = double(budget) * 18446744073709551616.0 / double(mass);
  int64_t own = 0, sum;
  run.for_each([&](int2 u) { own += u.y * copies_per_weight(per_mass, u, top); });
  __syncthreads();                                   // scratch is used again
  upto[threadIdx.x] = block_scan<kPointThreads>(own, scratch, &sum);
  const bool copied = length <= kHeldUnits;
  if (copied)
#pragma unroll
    for (int i = 0; i < kHeldUnits; ++i)
      if (i < length) copy[threadIdx.x * length + i] = run.held[i];
  __syncthreads();

  ValueSum<1> values;
  const uint16_t* weights = stash.weight_of(pair, batch.max_units);
  const int* table = batch.block_table + row * batch.table_stride;
  for (int draws = first; draws < last; draws += kDraws) {
    if (draws > first) point = draw_point(batch, row, batch.head_offset * kGroup + head, n, method, budget, draws + my_draw);
    const bool drawn = draws + my_draw < last && point < sum;      // the same for the threads of a draw
    int threshold = 0, u = 0, exponent = 0;
    int64_t rest = 0, rate = 1;
    uint2 words = {};
    if (drawn) {
      int low = 0, high = kPointThreads - 1;         // the first run with upto > point
      while (low < high) { const int mid = (low + high) / 2; if (upto[mid] > point) high = mid; else low = mid + 1; }
      rest = point - (low > 0 ? upto[low - 1] : 0);
      for (u = low * length;; ++u) {
        const int2 here = copied ? copy[u] : run.at(u);
        rate = copies_per_weight(per_mass, here, top);
        exponent = here.x;
        if (here.y * rate > rest) break;
        rest -= here.y * rate;
      }
      threshold = int(double(rest) / double(rate));  // floor(rest / rate): the prefix sum of weights of the token's four passes it
      if (threshold * rate > rest) --threshold;
      if ((threshold + 1) * rate <= rest) ++threshold;
      words = __ldcg(reinterpret_cast<const uint2*>(weights + stash.sums_at(head % kGroup, u)) + part);
    }
    const int block = drawn ? table[min(u * kUnit + part * 16, n - 1) / pages.block_size] : 0;
    const int sums[4] = {int(words.x & 0xffff), int(words.x >> 16), int(words.y & 0xffff), int(words.y >> 16)};
    const int own_sum = sums[0] + sums[1] + sums[2] + sums[3];
    int before = 0;                                  // weights of the threads ahead
#pragma unroll
    for (int d = 1; d < kDrawThreads; ++d) {
      const int other = __shfl_up_sync(kAll, own_sum, d, kDrawThreads);
      if (part >= d) before += other;
    }
    // The thread that has the four tells the others where it is, and how far into its copies the point falls.
    const bool mine = drawn && before <= threshold && threshold < before + own_sum;
    int within = 0;
    float fraction = 0.f;
    if (mine) {
#pragma unroll
      for (int k = 0; k < 3; ++k)
        if (within == k && before + sums[k] <= threshold) { before += sums[k]; ++within; }
      const int sum = within == 0 ? sums[0] : within == 1 ? sums[1] : within == 2 ? sums[2] : sums[3];
      fraction = fminf(float(double(rest - before * rate) / double(sum * rate)), 1.f - 0x1p-22f);
    }
    const unsigned holder = __ballot_sync(kAll, mine) >> (lane & ~3) & 0xf;
    const int source = (lane & ~3) + (holder ? __ffs(holder) - 1 : 0);
    within = __shfl_sync(kAll, within, source);
    fraction = __shfl_sync(kAll, fraction, source);
    const int first_token = u * kUnit + (source % 4) * 16 + within * kFour;
    const Half* four = static_cast<const Half*>(pages.kv) + __shfl_sync(kAll, block, source) * pages.page_stride +
                       (int64_t(head / kGroup) * pages.block_size + first_token % pages.block_size) * (2 * kHeadDim);
    const bool found = drawn && holder;
    const int last_token = found ? min(kFour - 1, n - 1 - first_token) : 0;
    const float dot = dots_of_fours(found ? four : static_cast<const Half*>(pages.kv), last_token, query);
    const float weight = part <= last_token ? exp2_fast(scores(dot) - float(exponent)) : 0.f;
    float weight_upto[kFour];                        // in order, so that a token of no weight is not drawn
    weight_upto[0] = __shfl_sync(kAll, weight, 0, kDrawThreads);
#pragma unroll
    for (int k = 1; k < kFour; ++k) weight_upto[k] = weight_upto[k - 1] + __shfl_sync(kAll, weight, k, kDrawThreads);
    int token = 0;
#pragma unroll
    for (int k = 0; k < kFour - 1; ++k) token += weight_upto[k] <= fraction * weight_upto[kFour - 1];
    token = min(token, last_token);
    if (part == 0) {
      address[my_draw] = found ? four + (2 * token + 1) * kHeadDim : nullptr;
      if (const int draw = draws + my_draw; draw < min(last, max_draws)) drawn_tokens[draw] = found ? first_token + token : -1;
    }
    __syncthreads();
    const float one = 1.f;
    if (lane < kRowLanes * kRowsAtOnce)
#pragma unroll
      for (int i = 0; i < kDraws; i += kPointWarps * kRowsAtOnce) {
        const int at = i + warp * kRowsAtOnce + lane / kRowLanes;
        const Half* value = at < kDraws ? address[at] : nullptr;
        if (value) values.add(load_row(value + lane % kRowLanes * 8), &one);
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
  }
}

__global__ void __launch_bounds__(kPointThreads, 2)
    sample_points_kernel(Batch batch, Pages pages, Scores scores, const Half* q, Stash stash, Merge merge, int* drawn, int max_draws, Half* out,
                         float* lse) {
  launch_next();
  const int split = blockIdx.x, head = blockIdx.y, row = blockIdx.z, budget = batch.budget[row];
  const int per_block = ceil_div(ceil_div(budget, merge.splits), kDraws) * kDraws, active = max(1, ceil_div(budget, per_block));
  if ((batch.methods >> batch.method[row] & 1) && split < active) {
    sample_head(batch, pages, scores, q, stash, merge, active, split * per_block, min(budget, (split + 1) * per_block),
                drawn + (int64_t(row) * gridDim.y + head) * max_draws, max_draws, out, lse);
    if (threadIdx.x == 0) stash.progress.leave(int64_t(row) * batch.kv_heads + head / kGroup, active * kGroup);
  }
  if (blockIdx.x + blockIdx.y + blockIdx.z == 0) wait_previous();          // ends after the scan, whatever its rows
}

cudaError_t sample_points(const Batch& batch, const Pages& pages, const Scores& scores, const void* q, const Stash& stash, const Merge& merge,
                          int* drawn, int max_draws, void* out, float* lse, cudaStream_t stream, bool overlap) {
  return launch_side_by_side(sample_points_kernel, dim3(merge.splits, batch.kv_heads * kGroup, batch.rows), kPointThreads, 0,
                             stream, overlap, batch, pages, scores, static_cast<const Half*>(q), stash, merge, drawn, max_draws, static_cast<Half*>(out),
                             lse);
}

}  // namespace santa
