"""Parts of a CUDA graph that run only where a flag on the device is set."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from vllm_santa.jit import kernel_folder


@cache
def conditional_module() -> Any:
    """The loaded module, compiled on first use.

    Raises:
        ImportError: FlashInfer is missing. RuntimeError: the compiler failed.
    """
    from flashinfer.jit import gen_jit_spec

    folder = kernel_folder()
    spec = gen_jit_spec(
        "vllm_santa_conditional",
        [folder / "conditional.cu"],
        extra_cuda_cflags=["-rdc=true"],
        extra_ldflags=["-lcudadevrt"],
        extra_include_paths=[folder],
        needs_device_linking=True,
    )
    return spec.build_and_load()


class Conditions:
    """Makes conditional parts of graphs while they are captured; `depth` of them can be nested."""

    def __init__(self, depth: int, device: torch.device):
        self._bodies = [torch.cuda.Stream(device) for _ in range(depth)]
        self._open = 0

    @contextmanager
    def when(self, flag: Tensor) -> Iterator[None]:
        """What is launched inside runs, at each replay, only if `flag` is not 0 then. Call it while the current stream is captured, and
        allocate nothing inside. flag: int32, one element, in a buffer that outlives the graph."""
        body = self._bodies[self._open]
        self._open += 1
        conditional_module().conditional_begin(flag, body.cuda_stream)
        try:
            with torch.cuda.stream(body):
                yield
        finally:
            conditional_module().conditional_end(body.cuda_stream)
            self._open -= 1
