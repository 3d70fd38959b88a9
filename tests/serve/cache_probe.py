"""A worker extension for tests: looks into the KV cache, and poisons it. `--worker-extension-cls cache_probe.CacheProbe`."""

import math

import torch

from vllm_santa.reference import pq


class CacheProbe:
    """Methods that vLLM adds to its worker; /collective_rpc calls them."""

    def poison_cache(self) -> dict[str, int]:
        """Fill every page with bytes 0xFF: NaN as keys and values, 255 as codes. Only while no request runs and no prefix is kept."""
        layers = self._santa_layers()
        for layer in layers:
            memory = layer.kv_cache.untyped_storage()
            torch.tensor([], dtype=torch.uint8).set_(memory).fill_(255)
        return {"layers": len(layers)}

    def check_codes(self) -> dict[str, float]:
        """Compare the codes of every token in the cache with its key. Tokens not written since `poison_cache` are NaN, and have no codes.

        `written` and `unwritten` count (layer, token) pairs; `stray` the unwritten ones with codes or half a row; `excess` is the largest
        squared distance of a key to the centroid of its code, over that to the nearest one, minus 1.
        """
        result = {"written": 0, "unwritten": 0, "stray": 0, "excess": 0.0}
        for layer in self._santa_layers():
            kv, codes = layer.impl.santa.views(layer.kv_cache)
            rows = kv.transpose(1, 2).flatten(0, 1)  # [tokens, H, 2D]
            row_codes = codes.transpose(1, 2).flatten(0, 1)  # [tokens, H, M]
            finite = rows.isfinite().flatten(1)
            written, untouched = finite.all(1), ~finite.any(1) & (row_codes == 255).flatten(1).all(1)
            result["written"] += int(written.sum())
            result["unwritten"] += int(untouched.sum())
            result["stray"] += int((~written & ~untouched).sum())
            keys = rows[written][..., : rows.shape[-1] // 2]
            if len(keys):
                result["excess"] = max(result["excess"], _excess(keys, row_codes[written], layer.impl.santa.context.codebook))
        return result

    def _santa_layers(self) -> list:
        context = self.vllm_config.compilation_config.static_forward_context
        return [layer for layer in context.values() if hasattr(layer, "kv_cache")]


def _excess(keys: torch.Tensor, codes: torch.Tensor, codebook) -> float:
    points = pq.split_subspaces(pq.transform_keys(keys, codebook), codebook.subspaces)  # [H * M, n, d]
    centroids = codebook.centroids.flatten(0, 1)
    stored = codes.permute(1, 2, 0).flatten(0, 1).long()  # [H * M, n]
    distance = (points - centroids.gather(1, stored.unsqueeze(-1).expand(-1, -1, points.shape[-1]))).square().sum(-1)
    nearest = torch.cdist(points, centroids, compute_mode="donot_use_mm_for_euclid_dist").square().amin(-1)
    worst = (distance / nearest.clamp(min=1e-6) - 1).max().item()
    return worst if math.isfinite(worst) else float("inf")
