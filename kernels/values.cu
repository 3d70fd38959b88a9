// The value samplers as one call: score, sample and gather.
#include "values.cuh"

#include "bindings.cuh"
#include "score.cuh"

namespace santa {

void values(TensorView q, TensorView kv, TensorView block_table, TensorView seq_lens, TensorView method, TensorView budget, TensorView seed,
            TensorView out, ffi::Optional<TensorView> lse, TensorView weight, TensorView unit, TensorView queue, TensorView progress,
            TensorView partial, TensorView done, TensorView tile_partial, TensorView tile_done, TensorView tile_mass, double scale,
            double soft_cap, int64_t methods, int64_t layer, int64_t head_offset) {
  const DLDevice device = q.device();
  ffi::CUDADeviceGuard guard(device.device_id);
  const cudaStream_t stream = get_stream(device);
  const Batch batch = make_batch(block_table, seq_lens, method, budget, seed, methods, kv.size(1), layer, head_offset, unit.size(2));
  const Pages pages = make_pages(kv);
  const Scores scores = Scores::make(float(scale), float(soft_cap));
  const Stash stash{data<uint16_t>(weight), data<int2>(unit), {data<int>(queue)}, {data<int2>(progress)}};
  const Merge merge{data<float>(partial), data<int>(done), int(partial.size(2))};
  check(score_values(batch, pages, scores, q.data_ptr(), stash, multiprocessors(device) * kScoreBlocks, stream), "score_values");
  Batch points = batch, tiles = batch;
  points.methods &= ~(1u << kFlash);
  tiles.methods &= 1u << kFlash;
  if (points.methods)
    check(sample_points(points, pages, stash, merge, out.data_ptr(), data<float>(lse), stream, overlaps(device)), "sample_points");
  if (tiles.methods) {
    const TileMerge tile_merge{{data<float>(tile_partial), data<int>(tile_done), int(tile_partial.size(2))}, data<int2>(tile_mass)};
    check(sample_tiles(tiles, pages, stash, tile_merge, out.data_ptr(), data<float>(lse), stream, overlaps(device)), "sample_tiles");
  }
}

}  // namespace santa

TVM_FFI_DLL_EXPORT_TYPED_FUNC(values, santa::values);
