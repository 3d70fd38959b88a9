"""SantaBackend, the class that vLLM resolves by name: that of the platform."""

from vllm.platforms import current_platform

if current_platform.is_cpu():
    from vllm_santa.attention.cpu import SantaCpuBackend as SantaBackend
else:
    from vllm_santa.attention.cuda import SantaCudaBackend as SantaBackend  # type: ignore[assignment]

__all__ = ["SantaBackend"]
