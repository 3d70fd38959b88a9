// pps as one call: look, score, place, gather.
#include "pps.cuh"

#include "bindings.cuh"
#include "score.cuh"

namespace santa {

void pps(TensorView q, TensorView kv, TensorView block_table, TensorView seq_lens, TensorView method, TensorView budget, TensorView seed,
         TensorView out, ffi::Optional<TensorView> lse, TensorView exp2, TensorView look_parts, TensorView histogram, TensorView codes,
         TensorView unit_mass, TensorView rate, TensorView chunk_sum, TensorView chunk_mass, TensorView sample,
         TensorView count, TensorView partial, TensorView done, double scale, double soft_cap, int64_t methods, int64_t layer,
         int64_t head_offset) {
  const DLDevice device = q.device();
  ffi::CUDADeviceGuard guard(device.device_id);
  const cudaStream_t stream = get_stream(device);
  const int64_t kv_heads = kv.size(1);
  const Batch batch = make_batch(block_table, seq_lens, method, budget, seed, methods, kv_heads, layer, head_offset, unit_mass.size(2));
  const Pages pages = make_pages(kv);
  const Scores scores = Scores::make(float(scale), float(soft_cap));
  const int chunks = int(chunk_sum.size(2));
  const PpsBuffers scan{data<float2>(look_parts), data<unsigned>(histogram), data<int16_t>(codes),
                        data<float2>(unit_mass),  data<int64_t>(chunk_sum),  chunks};
  const SelectBuffers select{data<const unsigned>(histogram),
                             data<const int16_t>(codes),
                             data<const float2>(unit_mass),
                             data<const int64_t>(exp2),
                             data<int>(rate),
                             data<int64_t>(chunk_sum),
                             data<float2>(chunk_mass),
                             data<int4>(sample),
                             data<int>(count),
                             chunks,
                             int(sample.size(2)),
                             kGroup};
  const Merge merge{data<float>(partial), data<int>(done), int(partial.size(2))};
  const bool overlap = overlaps(device);
  check(look(batch, pages, scores, q.data_ptr(), scan, stream), "look");
  check(score_codes(batch, pages, scores, q.data_ptr(), scan, multiprocessors(device) * kScoreBlocks, stream, overlap), "score_codes");
  check(place(batch, select, pages.block_size, stream, overlap), "place");
  check(gather(batch, pages, scores, q.data_ptr(), select, merge, out.data_ptr(), data<float>(lse), stream, overlap), "gather");
}

}  // namespace santa

TVM_FFI_DLL_EXPORT_TYPED_FUNC(pps, santa::pps);
