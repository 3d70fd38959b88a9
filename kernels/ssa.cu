// ssa, ssa_fixed, topk and uniform_tail as one call: tables, scan, mix, place, gather.
#include "ssa.cuh"

#include "bindings.cuh"

namespace santa {

void ssa(TensorView q, TensorView kv, TensorView code_plane, TensorView block_table, TensorView seq_lens, TensorView method, TensorView budget,
         TensorView seed, TensorView out, ffi::Optional<TensorView> lse, TensorView exp2, TensorView query_transform, TensorView query_offset,
         TensorView centroids, TensorView tables, TensorView broken, TensorView scores, TensorView norm, TensorView codes, TensorView histogram,
         TensorView rate, TensorView chunk_sum, TensorView chunk_taken, TensorView fine, TensorView low_weight, TensorView sample,
         TensorView count, TensorView read, TensorView partial, TensorView mass, TensorView done, double scale, double soft_cap, int64_t methods,
         int64_t layer, int64_t head_offset, int64_t sink, int64_t local, double heavy_fraction, double uniform_share) {
  const DLDevice device = q.device();
  ffi::CUDADeviceGuard guard(device.device_id);
  const cudaStream_t stream = get_stream(device);
  const int64_t kv_heads = kv.size(1);
  const Batch batch =
      make_batch(block_table, seq_lens, method, budget, seed, methods, kv_heads, layer, head_offset, codes.size(2) / kUnit);
  const Pages pages = make_pages(kv);
  const CodePages code_pages{data<const uint8_t>(code_plane), code_plane.stride(0), int(code_plane.size(2))};
  const Codebooks codebooks{data<const float>(query_transform), data<const float>(query_offset), data<const float>(centroids)};
  const Window window{int(sink), int(local)};
  const int chunks = int(chunk_sum.size(2));
  const ProxyBuffers proxies{data<uint2>(tables),
                             data<int>(broken),
                             data<uint2>(scores),
                             data<float2>(norm),
                             data<int16_t>(codes),
                             data<unsigned>(histogram),
                             data<int64_t>(chunk_sum),
                             data<int64_t>(chunk_taken),
                             data<int>(fine),
                             data<int64_t>(low_weight),
                             chunks,
                             int(norm.size(2))};
  const SelectBuffers select{data<const unsigned>(histogram),
                             data<const int16_t>(codes),
                             data<const int64_t>(exp2),
                             data<int>(rate),
                             data<int64_t>(chunk_sum),
                             data<int4>(sample),
                             data<int>(count),
                             chunks,
                             int(sample.size(2))};
  const SoftMerge merge{{data<float>(partial), data<int>(done), int(partial.size(2))}, data<float2>(mass)};
  const bool overlap = overlaps(device);
  check(proxy_tables(batch, codebooks, q.data_ptr(), float(scale), proxies, stream), "proxy_tables");
  check(proxy_scores(batch, code_pages, window, proxies, stream, overlap), "proxy_scores");
  check(proxy_mix(batch, window, float(uniform_share), proxies, multiprocessors(device), stream, overlap), "proxy_mix");
  Batch adaptive = batch, fixed = batch;
  adaptive.methods &= 1u << kSsa;
  fixed.methods &= ~(1u << kSsa);
  if (adaptive.methods) check(place_adaptive(adaptive, select, pages.block_size, stream, overlap), "place_adaptive");
  if (fixed.methods) check(place_fixed(fixed, select, heavy_fraction, pages.block_size, proxies, stream, overlap), "place_fixed");
  check(gather_rows(batch, pages, window, Scores::make(float(scale), float(soft_cap)), q.data_ptr(), select, proxies.broken, merge,
                    out.data_ptr(), data<float>(lse), data<int>(read), stream, overlap),
        "gather_rows");
}

}  // namespace santa

TVM_FFI_DLL_EXPORT_TYPED_FUNC(ssa, santa::ssa);
