"""Capture queries, keys and values, as attention sees them, from a Hugging Face model.

transformers sends every attention call through its registry, with RoPE, normalisation and the cache already applied; a registered function
that records and then runs SDPA works for every model that uses the registry (Llama, Qwen, Gemma, Mistral, ...).
"""

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_NAME = "santa_capture"
_records: dict[int, "Captured"] = {}
_wanted: Collection[int] | None = None


class Captured(NamedTuple):
    """One layer's tensors over the whole input, in the model's dtype and on its device."""

    queries: torch.Tensor  # [n, Hq, D]
    keys: torch.Tensor  # [n, H, D]
    values: torch.Tensor  # [n, H, D]
    scale: float

    def grouped_queries(self) -> torch.Tensor:
        """queries [n, H, G, D], the heads of one KV head together."""
        return self.queries.unflatten(1, (self.keys.shape[1], -1))


def capture_qkv(model: PreTrainedModel, input_ids: torch.Tensor, layers: Collection[int] | None = None) -> dict[int, Captured]:
    """Run `input_ids` [1, n] once, causally, and return what the attention of each of `layers` (default: all) was given.

    Raises ValueError for a batch other than 1, or if a wanted layer did not call attention through the registry.
    """
    global _wanted
    if input_ids.dim() != 2 or input_ids.shape[0] != 1:
        raise ValueError(f"input_ids has shape {tuple(input_ids.shape)}, expected [1, n]")
    before = model.config._attn_implementation
    model.set_attn_implementation(_NAME)
    _wanted = layers
    try:
        with torch.inference_mode():
            model.base_model(input_ids=input_ids.to(model.device), use_cache=False)
        captured = dict(sorted(_records.items()))
    finally:
        _records.clear()
        _wanted = None
        model.set_attn_implementation(before)
    missing = sorted(set(layers or ()) - captured.keys())
    if missing or not captured:
        raise ValueError(f"layers {missing or 'all'} of {type(model).__name__} made no attention call that transformers' registry sees")
    return captured


def _record_and_attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    layer = int(module.layer_idx)
    if _wanted is None or layer in _wanted:
        scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
        queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        _records[layer] = Captured(queries, keys, values, scale)
    return sdpa_attention_forward(module, query, key, value, mask, **kwargs)


ALL_ATTENTION_FUNCTIONS.register(_NAME, _record_and_attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, sdpa_mask)
