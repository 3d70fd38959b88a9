"""SantaBackend, the class that vLLM resolves by name: that of the platform."""

from vllm.platforms import current_platform

if not current_platform.is_cpu():
    raise ImportError(
        f"--attention-backend santa runs on vLLM's CPU build only so far; this platform is {current_platform.device_name}. "
        "Serve this model with another backend."
    )

from vllm_santa.attention.cpu import SantaCpuBackend as SantaBackend

__all__ = ["SantaBackend"]
