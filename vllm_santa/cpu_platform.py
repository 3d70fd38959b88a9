"""vLLM's CPU platform answers CPU_ATTN whatever backend is asked for; this makes it honour SANTA, and only SANTA."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import DeviceCapability

from vllm_santa.registration import NAME
from vllm_santa.wrapping import wrap_once

if TYPE_CHECKING:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig


def accept_santa() -> None:
    """Wrap CpuPlatform.get_attn_backend_cls, once per process."""

    def get_attn_backend_cls(
        original: Callable[..., str],
        cls: type[CpuPlatform],
        selected_backend: "AttentionBackendEnum | None",
        attn_selector_config: "AttentionSelectorConfig",
        num_heads: int | None = None,
        **others: Any,
    ) -> str:
        if selected_backend is None or selected_backend.name != NAME:
            return original(cls, selected_backend, attn_selector_config, num_heads=num_heads, **others)
        backend = selected_backend.get_class()
        reasons = backend.validate_configuration(device_capability=DeviceCapability(0, 0), **attn_selector_config._asdict())
        if reasons:
            raise ValueError(f"Selected backend {NAME} is not valid for this configuration. Reason: {reasons}")
        return selected_backend.get_path()

    wrap_once(CpuPlatform, "get_attn_backend_cls", get_attn_backend_cls)
