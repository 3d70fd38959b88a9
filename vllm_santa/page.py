"""One KV page: dense K|V rows of every head, then the plane of PQ codes.

vLLM allocates a page as [1, N, C] elements of the cache's dtype, after `customize_spec` widened it; inside it we keep

    K|V    [H, N, 2D]   of the cache's dtype, D of K then D of V
    codes  [H, N, M]    uint8, M = subspaces

so K and V stay dense and aligned for FlashInfer, and the codes follow the block through prefix caching, preemption and copies.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import AttentionSpec


def widened_spec(spec: "AttentionSpec", subspaces: int) -> "AttentionSpec":
    """The spec of a layer's cache with a code plane of `subspaces` bytes per token and KV head. Widening twice changes nothing."""
    if spec.state_content_bytes is not None:
        return spec
    content = spec.num_kv_heads * ((spec.head_size + spec.head_size_v) * spec.dtype.itemsize + subspaces)
    return replace(spec, num_head_slots=1, state_content_bytes=content)


def page_views(cache: Tensor, num_kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """The two planes of a layer's cache as views.

    cache: [B, 1, N, H * (2D + M / itemsize)], as vLLM gives it to a layer. Returns kv [B, H, N, 2D] and codes uint8 [B, H, N, M].
    """
    blocks, _, block_size, content = cache.shape
    item = cache.element_size()
    subspaces = content * item // num_kv_heads - 2 * head_dim * item
    stride = cache.stride(0)
    kv_row = 2 * head_dim
    kv = torch.as_strided(
        cache, (blocks, num_kv_heads, block_size, kv_row), (stride, block_size * kv_row, kv_row, 1), cache.storage_offset()
    )
    raw = cache.view(torch.uint8)
    codes = torch.as_strided(
        raw,
        (blocks, num_kv_heads, block_size, subspaces),
        (stride * item, block_size * subspaces, subspaces, 1),
        raw.storage_offset() + num_kv_heads * block_size * kv_row * item,
    )
    return kv, codes
