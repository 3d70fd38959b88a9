// How far off the output of pps, ssa, ssa_fixed and uniform_tail is, estimated from the rows they took (docs/estimators.md, "Error of an
// output"). Runs behind their kernels, on the list of samples, log-sum-exps and outputs that these leave; K and V come out of L2.
//
// A block takes up to 4 query heads of a row and KV head, and a share of its samples; a warp 8 of them at a time: scores on tensor cores, then
// c y and c |y|^2 of every row, summed. Blocks that share a row merge in a fixed order.
#include "bindings.cuh"
#include "gather.cuh"

namespace santa {

constexpr int kErrorThreads = 256, kErrorWarps = kErrorThreads / 32;
constexpr int kErrorHeads = kGroup < 4 ? kGroup : 4;
constexpr int kErrorChunks = ceil_div(kGroup, kErrorHeads);
constexpr int kErrorSize = kErrorHeads * kHeadDim;
constexpr int kErrorRows = 8;                        // samples a warp takes at a time
constexpr int kErrorLoads = kErrorRows / kRowsAtOnce;
constexpr int kErrorScalars = kErrorHeads + 2;       // sum of c |y|^2 by head, sum of c, rows with c > 0

struct Measure {
  const int* seq_lens;            // [rows]
  const int8_t* method;           // [rows]
  const int8_t* measured;         // [rows] 1 where the error is asked for
  uint32_t methods;               // bit m: rows of method m are ours
  const Half* q;                  // [rows, kv_heads * kGroup, kHeadDim]
  const Half* out;                // the same
  const float* lse;               // [rows, kv_heads * kGroup] log2; of the weights' sum
  const int4* sample;             // [rows * kv_heads, max_samples] (token, its row in the cache, inclusion probability as float, 0)
  const int* count;               // [rows * kv_heads]
  int max_samples;
  bool ratio;                     // the weights are normalised by their own sum
  float* scalars;                 // [owners, splits, kErrorScalars]
  float2* sums;                   // [rows, parts] (variance, |out|^2) of the block's heads, in the row's first parts
  int parts;
};

__global__ void __launch_bounds__(kErrorThreads) error_kernel(Measure measure, Pages pages, Scores scores, Merge merge) {
  __shared__ __align__(16) float parts[kErrorWarps * kErrorSize];
  __shared__ float warp_scalars[kErrorWarps][kErrorScalars];
  __shared__ float weight[kErrorWarps][kErrorRows][kErrorHeads], doubt[kErrorWarps][kErrorRows];
  __shared__ const Half* address[kErrorWarps][kErrorRows];
  __shared__ float2 head_sums[kErrorHeads];
  const int split = blockIdx.x, head = blockIdx.y / kErrorChunks, row = blockIdx.z, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (!measure.measured[row] || !(measure.methods >> measure.method[row] & 1)) return;
  const int first_head = blockIdx.y % kErrorChunks * kErrorHeads, heads = min(kErrorHeads, kGroup - first_head);
  const int64_t pair = int64_t(row) * (gridDim.y / kErrorChunks) + head, owner = int64_t(row) * gridDim.y + blockIdx.y;
  const int64_t query_head = pair * kGroup + first_head;
  const int count = measure.seq_lens[row] > 0 ? min(measure.count[pair], measure.max_samples) : 0;
  const int active = max(1, min(int(gridDim.x), ceil_div(count, kErrorWarps * kErrorRows)));
  if (split >= active) return;

  Query query;                                       // the block's heads in the first columns, zeros in the others
#pragma unroll
  for (int j = 0; j < kColumns; ++j)
#pragma unroll
    for (int p = 0; p < kPieces; ++p)
      query.piece[j][p] =
          j == 0 && lane / 4 < heads
              ? *reinterpret_cast<const uint4*>(measure.q + (query_head + lane / 4) * kHeadDim + p * 32 + lane % 4 * 8)
              : uint4{0, 0, 0, 0};
  const int r = lane / 4, c = lane % 4;
  float lse[2];
#pragma unroll
  for (int k = 0; k < 2; ++k) lse[k] = 2 * c + k < heads ? measure.lse[query_head + 2 * c + k] : 0.f;
  float centre[kErrorHeads][8] = {};                 // what a ratio's terms are taken from: the output, at this lane's features
  if (measure.ratio && lane < kRowLanes * kRowsAtOnce)
#pragma unroll
    for (int h = 0; h < kErrorHeads; ++h)
      if (h < heads)
#pragma unroll
        for (int k = 0; k < 8; ++k) centre[h][k] = float(measure.out[(query_head + h) * kHeadDim + lane % kRowLanes * 8 + k]);

  ValueSum<kErrorHeads> moved;                       // sum of c y
  float square[kErrorHeads] = {}, doubts = 0.f, unsure = 0.f;
  const int4* samples = measure.sample + pair * measure.max_samples;
  for (int tile = (split * kErrorWarps + warp) * kErrorRows; tile < count; tile += active * kErrorWarps * kErrorRows) {
    const int valid = min(kErrorRows, count - tile);
    const int4 sample = samples[tile + min(r, valid - 1)];
    const float pi = __int_as_float(sample.z);
    const Half* key = static_cast<const Half*>(pages.kv) + sample.y / pages.block_size * pages.page_stride +
                      (int64_t(head) * pages.block_size + sample.y % pages.block_size) * (2 * kHeadDim);
    uint4 pieces[kPieces];
#pragma unroll
    for (int p = 0; p < kPieces; ++p) pieces[p] = load_row(key + c * 8 + p * 32);
    if (c == 0) {
      address[warp][r] = key + kHeadDim;
      doubt[warp][r] = r < valid ? 1.f - pi : 0.f;
    }
    float acc[kColumns][4] = {};
    multiply<0, kPieces>(acc, pieces, pieces, query);
#pragma unroll
    for (int k = 0; k < 2; ++k)
      if (2 * c + k < kErrorHeads) weight[warp][r][2 * c + k] = 2 * c + k < heads ? exp2f(scores(acc[0][k]) - lse[k]) / pi : 0.f;
    __syncwarp();
    if (lane < kRowLanes * kRowsAtOnce)
#pragma unroll
      for (int i = 0; i < kErrorLoads; ++i) {
        const int at = i * kRowsAtOnce + lane / kRowLanes;
        const float unsureness = doubt[warp][at];
        if (unsureness <= 0.f) continue;             // taken for sure, or no row at all
        const uint4 v = load_row(address[warp][at] + lane % kRowLanes * 8);
        const uint32_t words[4] = {v.x, v.y, v.z, v.w};
        float value[8];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const float2 two = to_float2(words[k]);
          value[2 * k] = two.x;
          value[2 * k + 1] = two.y;
        }
#pragma unroll
        for (int h = 0; h < kErrorHeads; ++h) {
          const float a = weight[warp][at][h];
#pragma unroll
          for (int k = 0; k < 8; ++k) {
            const float y = a * (value[k] - centre[h][k]);
            moved.sum[h][k] = fmaf(unsureness, y, moved.sum[h][k]);
            square[h] = fmaf(unsureness * y, y, square[h]);
          }
        }
        if (lane % kRowLanes == 0) {
          doubts += unsureness;
          unsure += 1.f;
        }
      }
    __syncwarp();
  }

  // The warps' sums, the block's, and by the last block of the row the row's.
#pragma unroll
  for (int i = 0; i < kErrorScalars; ++i) {
    float x = i < kErrorHeads ? square[i < kErrorHeads ? i : 0] : i == kErrorHeads ? doubts : unsure;
#pragma unroll
    for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(kAll, x, d);
    if (lane == 0) warp_scalars[warp][i] = x;
  }
  moved.hand_in(parts);
  float* split_scalars = measure.scalars + owner * merge.splits * kErrorScalars;
  if (threadIdx.x < kErrorScalars) {
    float x = 0.f;
#pragma unroll
    for (int w = 0; w < kErrorWarps; ++w) x += warp_scalars[w][threadIdx.x];
    split_scalars[split * kErrorScalars + threadIdx.x] = x;
  }
  if (!hand_in_split<kErrorSize, kErrorThreads>(merge, owner, split, active, parts)) return;

  const float* partial = merge.partial + owner * merge.splits * kErrorSize;
  const auto total = [&](int which) {
    float x = 0.f;
    for (int s = 0; s < active; ++s) x += __ldcg(split_scalars + s * kErrorScalars + which);
    return x;
  };
  if (warp < heads) {
    float moved_square = 0.f, out_square = 0.f;
    for (int f = lane; f < kHeadDim; f += 32) {
      float x = 0.f;
      for (int s = 0; s < active; ++s) x += __ldcg(partial + s * kErrorSize + warp * kHeadDim + f);
      const float o = float(measure.out[(query_head + warp) * kHeadDim + f]);
      moved_square = fmaf(x, x, moved_square);
      out_square = fmaf(o, o, out_square);
    }
#pragma unroll
    for (int d = 16; d > 0; d /= 2) {
      moved_square += __shfl_xor_sync(kAll, moved_square, d);
      out_square += __shfl_xor_sync(kAll, out_square, d);
    }
    const float whole = total(warp), mass = total(kErrorHeads), rows = total(kErrorHeads + 1);
    float variance = whole;
    if (rows > 1.f) {
      variance = (whole - moved_square / mass) * (rows / (rows - 1.f));
      if (variance < 0.f) variance = 0.f;            // NaN stays
    }
    if (lane == 0) head_sums[warp] = make_float2(variance, out_square);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    float2 all = head_sums[0];
    for (int h = 1; h < heads; ++h) { all.x += head_sums[h].x; all.y += head_sums[h].y; }
    measure.sums[int64_t(row) * measure.parts + blockIdx.y] = all;
  }
}

void error(TensorView q, TensorView kv, TensorView seq_lens, TensorView method, TensorView measured, TensorView out, TensorView lse,
           TensorView sample, TensorView count, TensorView sums, TensorView partial, TensorView scalars, TensorView done, double scale,
           double soft_cap, int64_t methods, bool ratio, int64_t splits) {
  const DLDevice device = q.device();
  ffi::CUDADeviceGuard guard(device.device_id);
  const Measure measure{data<const int>(seq_lens),
                        data<const int8_t>(method),
                        data<const int8_t>(measured),
                        uint32_t(methods),
                        data<const Half>(q),
                        data<const Half>(out),
                        data<const float>(lse),
                        data<const int4>(sample),
                        data<const int>(count),
                        int(sample.size(2)),
                        ratio,
                        data<float>(scalars),
                        data<float2>(sums),
                        int(sums.size(1))};
  const Merge merge{data<float>(partial), data<int>(done), int(splits)};
  const dim3 grid(unsigned(splits), unsigned(kv.size(1)) * kErrorChunks, unsigned(seq_lens.size(0)));
  check(launch(error_kernel, grid, kErrorThreads, 0, get_stream(device), false, measure, make_pages(kv),
               Scores::make(float(scale), float(soft_cap)), merge),
        "error");
}

}  // namespace santa

TVM_FFI_DLL_EXPORT_TYPED_FUNC(error, santa::error);
