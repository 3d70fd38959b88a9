// pps as one call: look, score, sample.
#include "pps.cuh"

#include "bindings.cuh"
#include "score.cuh"

namespace santa {

void pps(TensorView q, TensorView kv, TensorView block_table, TensorView seq_lens, TensorView method, TensorView budget, TensorView seed,
         TensorView out, ffi::Optional<TensorView> lse, TensorView exp2, TensorView look_parts, TensorView histogram, TensorView codes,
         TensorView unit_mass, TensorView queue, TensorView progress, TensorView rate, TensorView sample, TensorView count, double scale,
         double soft_cap, int64_t methods, int64_t layer, int64_t head_offset) {
  const DLDevice device = q.device();
  ffi::CUDADeviceGuard guard(device.device_id);
  const cudaStream_t stream = get_stream(device);
  const Batch batch = make_batch(block_table, seq_lens, method, budget, seed, methods, kv.size(1), layer, head_offset, unit_mass.size(2));
  const Pages pages = make_pages(kv);
  const Scores scores = Scores::make(float(scale), float(soft_cap));
  const PpsBuffers buffers{data<float4>(look_parts),
                           data<unsigned>(histogram),
                           data<uint8_t>(codes),
                           data<float>(unit_mass),
                           {data<int>(queue)},
                           {data<int2>(progress)},
                           data<const int64_t>(exp2),
                           data<int>(rate),
                           data<int4>(sample),
                           data<int>(count),
                           int(sample.size(2))};
  const bool overlap = overlaps(device);
  check(look(batch, pages, scores, q.data_ptr(), buffers, stream), "look");
  check(score_codes(batch, pages, scores, q.data_ptr(), buffers, multiprocessors(device) * kScoreBlocks, stream, overlap), "score_codes");
  check(sample_rows(batch, pages, scores, q.data_ptr(), buffers, out.data_ptr(), data<float>(lse), stream, overlap), "sample_rows");
}

}  // namespace santa

TVM_FFI_DLL_EXPORT_TYPED_FUNC(pps, santa::pps);
