// santa, strat, sys, prop, stage 2: every draw is a point on the prefix sums of the expected copies. A block finds its draws' tokens (run
// of units, unit, token), then reads their V rows. No pass over the tokens: the masses of the units are enough to find a unit.
#include "block_sum.cuh"
#include "philox.cuh"
#include "values.cuh"

namespace santa {

constexpr int kDraws = 64;                           // draws a block takes at a time

// The draw's point on [0, S * kOne).
__device__ int64_t draw_point(const Batch& batch, int row, int head, int n, int method, int64_t budget, int draw) {
  const bool shared_offset = method == kSys || method == kProp;
  const int64_t u = uniform44(batch.seed[row], n - 1, batch.layer, kValueStream, head, shared_offset ? 0 : draw);
  if (shared_offset) return draw * kOne + kOne - 1 - u;
  return method == kStrat ? draw * kOne + u : budget * u;
}

template <int THREADS>
__global__ void __launch_bounds__(THREADS) sample_points_kernel(Batch batch, Pages pages, Stash stash, Merge merge, Half* out, float* lse) {
  __shared__ int64_t upto[THREADS], scratch[THREADS / 32];
  __shared__ int top_scratch[THREADS / 32];
  __shared__ const Half* address[kDraws];
  __shared__ __align__(16) float parts[THREADS / 32 * kHeadDim];
  launch_next();
  const int split = blockIdx.x, head = blockIdx.y, row = blockIdx.z, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int method = batch.method[row];
  if (!(batch.methods >> method & 1)) { wait_previous(); return; }
  const int n = batch.seq_lens[row], budget = batch.budget[row];
  const int per_block = ceil_div(ceil_div(budget, merge.splits), kDraws) * kDraws;
  const int first = split * per_block, last = min(budget, first + per_block);
  const int64_t owner = int64_t(row) * gridDim.y + head;
  const int64_t point =
      threadIdx.x < kDraws ? draw_point(batch, row, batch.head_offset * kGroup + head, n, method, budget, first + threadIdx.x) : 0;
  wait_previous();
  if (split > 0 && first >= last) return;

  // Exponent and mass of the row. A thread's run of units is consecutive.
  const int units = ceil_div(n, kUnit), run = ceil_div(units, THREADS);
  const int begin = min(units, int(threadIdx.x) * run), end = min(units, begin + run);
  const int2* unit = stash.unit + owner * batch.max_units;
  int top = kNoExponent;
#pragma unroll 8
  for (int u = begin; u < end; ++u) top = max(top, unit[u].x);
  top = block_reduce<THREADS>(top, top_scratch, [](int a, int b) { return max(a, b); });
  int64_t mass = 0;
#pragma unroll 8
  for (int u = begin; u < end; ++u) mass += unit_share(unit[u], top);
  mass = block_reduce<THREADS>(mass, scratch, [](int64_t a, int64_t b) { return a + b; });
  const bool broken = top == kNotFinite;
  if (lse && split == 0 && threadIdx.x == 0) lse[owner] = broken ? NAN : mass > 0 ? log2f(float(mass)) + float(top - 36) : -INFINITY;
  if (broken || mass == 0) {                         // NaN or +inf somewhere; or nothing to attend to
    if (split == 0)
      for (int i = threadIdx.x; i < kHeadDim; i += THREADS) out[owner * kHeadDim + i] = Half(broken ? NAN : 0.f);
    return;
  }
  const double per_mass = double(budget) * 18446744073709551616.0 / double(mass);
  int64_t own = 0, sum;
  for (int u = begin; u < end; ++u) own += unit[u].y * copies_per_weight(per_mass, unit[u], top);
  __syncthreads();                                   // scratch is used again
  upto[threadIdx.x] = block_scan<THREADS>(own, scratch, &sum);
  __syncthreads();

  ValueSum<1> values;
  for (int draws = first; draws < last; draws += kDraws) {
    if (threadIdx.x < kDraws) {
      const int64_t x = draws == first ? point
                                       : draw_point(batch, row, batch.head_offset * kGroup + head, n, method, budget, draws + threadIdx.x);
      const Half* found = nullptr;
      if (draws + int(threadIdx.x) < last && x < sum) {
        int low = 0, high = THREADS - 1;      // the first run with upto > x
        while (low < high) { const int mid = (low + high) / 2; if (upto[mid] > x) high = mid; else low = mid + 1; }
        int64_t rest = x - (low > 0 ? upto[low - 1] : 0), rate = 0;
        int u = low * run;
        for (;; ++u) {
          rate = copies_per_weight(per_mass, unit[u], top);
          if (unit[u].y * rate > rest) break;
          rest -= unit[u].y * rate;
        }
        int threshold = int(double(rest) / double(rate));       // floor(rest / rate): the token's prefix sum of weights passes it
        if (threshold * rate > rest) --threshold;
        if ((threshold + 1) * rate <= rest) ++threshold;
        const uint4* weights = reinterpret_cast<const uint4*>(stash.weight + (owner * batch.max_units + u) * kUnit);
        uint4 eight[kUnit / 8];
#pragma unroll
        for (int i = 0; i < kUnit / 8; ++i) eight[i] = __ldcg(weights + i);
        int prefix = 0, token = 0;
#pragma unroll
        for (int i = 0; i < kUnit / 8; ++i) {
          const uint32_t words[4] = {eight[i].x, eight[i].y, eight[i].z, eight[i].w};
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            prefix += words[k] & 0xffff;
            token += prefix <= threshold;
            prefix += words[k] >> 16;
            token += prefix <= threshold;
          }
        }
        found = token_row(batch, pages, row, head / kGroup, u * kUnit + token) + kHeadDim;
      }
      address[threadIdx.x] = found;
    }
    __syncthreads();
    const float one = 1.f;
    if (lane < kRowLanes * kRowsAtOnce)
#pragma unroll
      for (int i = 0; i < kDraws; i += THREADS / 32 * kRowsAtOnce) {
        const int at = i + warp * kRowsAtOnce + lane / kRowLanes;
        const Half* found = at < kDraws ? address[at] : nullptr;
        if (found) values.add(load_row(found + lane % kRowLanes * 8), &one);
      }
    __syncthreads();
  }
  values.hand_in(parts);
  const int active = max(1, ceil_div(budget, per_block));
  const float scale = 1.f / budget;
  if (hand_in_split<kHeadDim, THREADS>(merge, owner, split, active, parts))
    finish_splits<kHeadDim, THREADS>(merge, owner, active, out + owner * kHeadDim, [&](int, int) { return scale; });
}

cudaError_t sample_points(const Batch& batch, const Pages& pages, const Stash& stash, const Merge& merge, void* out, float* lse,
                          cudaStream_t stream, bool overlap) {
  // Longer contexts take more threads, so that a thread's run of units stays short.
  const int threads = batch.max_units <= 1024 ? 256 : batch.max_units <= 4096 ? 512 : 1024;
  const auto kernel = threads == 256 ? sample_points_kernel<256> : threads == 512 ? sample_points_kernel<512> : sample_points_kernel<1024>;
  return launch(kernel, dim3(merge.splits, batch.kv_heads * kGroup, batch.rows), threads, 0, stream, overlap, batch, pages, stash, merge,
                static_cast<Half*>(out), lse);
}

}  // namespace santa
