"""SantaBackend: what vLLM asks an attention backend about itself."""

from typing import TYPE_CHECKING, ClassVar

import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_santa.codebook import CodebookError, check_subspaces
from vllm_santa.page import widened_spec
from vllm_santa.registration import NAME
from vllm_santa.runtime import current_runtime

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionImpl, AttentionMetadataBuilder
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec


class SantaBackend(AttentionBackend):
    """Dense prefill, stochastic sparse decode. What it does not declare here (MLA, sinks, FP8 KV, encoders) vLLM refuses at start."""

    forward_includes_kv_cache_update = False
    supports_kv_cache_update_bypass = False  # a fused write of K and V alone would leave stale codes behind
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> "type[AttentionImpl]":
        from vllm_santa.attention.cpu import SantaCpuImpl

        return SantaCpuImpl

    @staticmethod
    def get_builder_cls() -> "type[AttentionMetadataBuilder]":
        from vllm_santa.attention.cpu import SantaCpuMetadataBuilder

        return SantaCpuMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: "KVCacheSpec | None" = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """With one head slot a page, the layouts that keep a page in one piece are all the same to us."""
        return (KVCacheLayout.LBHNC, KVCacheLayout.LBNHC, KVCacheLayout.BLHNC, KVCacheLayout.BLNHC)

    @classmethod
    def customize_spec(cls, spec: "AttentionSpec") -> "AttentionSpec":
        """Make room for the codes: vLLM's allocator then accounts for them."""
        return widened_spec(spec, current_runtime().policy.subspaces)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Windowed layers are served, densely."""
        return True

    @classmethod
    def supports_combination(cls, head_size: int, *others: object, **named: object) -> str | None:
        """Not on CUDA yet; and head sizes that PQ codes cannot divide."""
        if not current_platform.is_cpu():
            return f"vllm-santa decodes on CPU only so far, this is {current_platform.device_name}"
        try:
            check_subspaces(head_size, 8)
        except CodebookError as error:
            return str(error)
        return None
