"""What the SANTA backend says of itself on every platform."""

from typing import TYPE_CHECKING, ClassVar

from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_santa.codebook import CodebookError, check_subspaces
from vllm_santa.page import widened_spec
from vllm_santa.registration import NAME
from vllm_santa.runtime import current_runtime

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import AttentionSpec


class SantaTraits:
    """Mixed into each platform's backend class, before vLLM's base class. What is not declared here or there (MLA, sinks, FP8 KV,
    encoders), vLLM refuses at start."""

    forward_includes_kv_cache_update: ClassVar[bool] = False
    supports_kv_cache_update_bypass: ClassVar[bool] = False  # a fused write of K and V alone would leave stale codes behind
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return NAME

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
    def supports_sink(cls) -> bool:
        """The estimators have no sink term."""
        return False

    @classmethod
    def supports_combination(cls, head_size: int, *others: object, **named: object) -> str | None:
        """Head sizes that PQ codes cannot divide are refused."""
        try:
            check_subspaces(head_size, 8)
        except CodebookError as error:
            return str(error)
        return None
