"""SantaBackend, the class that vLLM resolves by name: that of the platform."""

from vllm.platforms import current_platform

if current_platform.is_cpu():
    from vllm_santa.attention.cpu import SantaCpuBackend as SantaBackend
elif current_platform.is_cuda():
    from vllm_santa.attention.cuda import SantaCudaBackend as SantaBackend
else:
    raise ImportError(
        f"--attention-backend santa runs on NVIDIA GPUs and on vLLM's CPU build; this platform is {current_platform.device_name}. "
        "Serve this model with another backend."
    )

__all__ = ["SantaBackend"]
