"""KV pages: sizes, and planes that stay inside their own page in every layout vLLM may choose."""

import pytest
import torch

from vllm_santa.page import page_views, widened_spec

pytest.importorskip("vllm")
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheTensor, compute_layout_strides, create_kv_cache_views  # noqa: E402
from vllm.v1.kv_cache_layout import KVCacheLayout  # noqa: E402

from vllm_santa.attention.traits import SantaTraits  # noqa: E402

BLOCKS, LAYERS = 5, 3


def page_spec(block_size: int, heads: int, head_dim: int, dtype: torch.dtype, subspaces: int) -> FullAttentionSpec:
    return widened_spec(FullAttentionSpec(block_size=block_size, num_kv_heads=heads, head_size=head_dim, dtype=dtype), subspaces)


def caches(spec: FullAttentionSpec, layout: KVCacheLayout, kernel_block: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The allocator's buffer, and each layer's cache in it, as vLLM's runners make them."""
    outermost = spec.page_size_bytes * LAYERS if layout.is_block_outermost else None
    layer_stride, block_stride, *_ = compute_layout_strides(spec, BLOCKS, LAYERS, layout, fixed_strides=(None, outermost, None, None, None))
    size = spec.page_size_bytes * LAYERS * BLOCKS
    layers = KVCacheTensor(
        size=size, layers=[str(i) for i in range(LAYERS)], layer_stride=layer_stride, block_stride=block_stride, offset=0
    )
    buffer = torch.zeros(size, dtype=torch.int8)
    return buffer, create_kv_cache_views(buffer, spec, BLOCKS, layout, layers, kernel_block)


@pytest.mark.parametrize("layout", SantaTraits.supported_kv_cache_layouts(), ids=lambda layout: layout.name)
@pytest.mark.parametrize(("block_size", "kernel_block"), [(16, 16), (64, 64), (64, 32), (64, 16), (128, 128), (48, 48)])
@pytest.mark.parametrize(
    ("heads", "head_dim", "dtype", "subspaces"),
    [(8, 128, torch.bfloat16, 16), (1, 64, torch.float32, 8), (2, 96, torch.float16, 32), (3, 256, torch.float16, 16)],
)
def test_planes_fill_every_page_once(
    layout: KVCacheLayout, block_size: int, kernel_block: int, heads: int, head_dim: int, dtype: torch.dtype, subspaces: int
) -> None:
    spec = page_spec(block_size, heads, head_dim, dtype, subspaces)
    if layout.is_block_outermost and kernel_block != block_size:
        with pytest.raises(ValueError, match="cannot be split"):
            caches(spec, layout, kernel_block)
        return
    buffer, layers = caches(spec, layout, kernel_block)
    writes = torch.zeros(buffer.numel(), dtype=torch.int32)
    for cache in layers:
        kv, codes = page_views(cache, heads, head_dim)
        assert kv.shape == (cache.shape[0], heads, kernel_block, 2 * head_dim) and kv.dtype == dtype
        assert codes.shape == (cache.shape[0], heads, kernel_block, subspaces) and codes.dtype == torch.uint8
        for plane in (kv, codes):
            buffer.zero_()
            plane.view(torch.uint8).fill_(255)
            writes += buffer != 0
    assert (writes == 1).all()


def test_a_block_stays_in_its_page() -> None:
    spec = page_spec(64, 2, 128, torch.bfloat16, 16)
    buffer, (cache, *_) = caches(spec, KVCacheLayout.BLHNC, 64)
    for plane in page_views(cache, 2, 128):
        plane[3].view(torch.uint8).fill_(255)
    assert (cache[3].view(torch.uint8) == 255).all()
    assert (buffer != 0).sum() == spec.page_size_bytes


def test_planes_are_dense_rows() -> None:
    """What FlashInfer and the kernels count on: HND, each head's rows in one piece."""
    _, (cache, *_) = caches(page_spec(32, 4, 64, torch.float16, 16), KVCacheLayout.LBHNC, 32)
    kv, codes = page_views(cache, 4, 64)
    assert kv.stride()[1:] == (32 * 128, 128, 1) and codes.stride()[1:] == (32 * 16, 16, 1)


def test_the_page_is_k_v_and_codes() -> None:
    spec = page_spec(64, 8, 128, torch.bfloat16, 16)
    assert spec.page_size_bytes == 64 * 8 * (2 * 128 * 2 + 16)
    assert widened_spec(spec, 16) == spec
