"""Whether a server replays its decode steps, attention included, from CUDA graphs: those hold kernels only, never the reference."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_santa.policy import Policy


def captures_decodes(vllm_config: "VllmConfig", policy: "Policy") -> bool:
    """True on a GPU with the modes FULL, FULL_DECODE_ONLY and FULL_AND_PIECEWISE (vLLM's default), unless rules need the reference."""
    from vllm.config import CUDAGraphMode
    from vllm.platforms import current_platform

    mode = vllm_config.compilation_config.cudagraph_mode
    if mode is None or mode.decode_mode() != CUDAGraphMode.FULL or policy.needs_reference:
        return False
    return current_platform.is_cuda()
