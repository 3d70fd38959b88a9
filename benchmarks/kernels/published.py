"""The published SANTA kernels (github.com/OPUSLab/SANTA, MIT), built from a checkout beside the project, for comparison only.

They take one sequence at a time, out of a contiguous cache.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.cpp_extension import load

from vllm_santa.methods import Method

from .common import Case, Inputs


@dataclass(frozen=True)
class Published:
    """Extension modules by method."""

    modules: dict[Method, Any]

    @staticmethod
    def fits(case: Case) -> bool:
        """What both of their kernels were written for."""
        return (case.batch, case.head_dim, case.group) == (1, 128, 4)

    def decoder(self, method: Method, inputs: Inputs, budget: int) -> Callable[[], None]:
        """Their decode of the same query and context, copied out of the pages beforehand."""
        blocks = inputs.rows.block_table[0, : -(-int(inputs.rows.seq_lens[0]) // inputs.kv.shape[2])].long()
        context = inputs.kv[blocks].transpose(1, 2).flatten(0, 1)[: int(inputs.rows.seq_lens[0])]
        key, value = (half.contiguous() for half in context.chunk(2, -1))
        query: Tensor = inputs.query[0]
        return lambda: self.modules[method].decode_systematic_scalar(query, key, value, budget)


def build(folder: Path) -> Published:
    """Compiles a checkout for SM 9.0, with the flags of its own setup.py files; about a minute.

    Raises:
        FileNotFoundError: there are no such kernels in `folder`. RuntimeError: the compiler failed.
    """
    os.environ["TORCH_CUDA_ARCH_LIST"] = "9.0"
    parts = {
        Method.prop: ("santa_fused_proportional_tile_budgets", ["-O3", "-lineinfo"]),
        Method.flash: ("flash_style_fused_santa_fixed_tile_budgets", ["-O3", "--use_fast_math", "-lineinfo"]),
    }
    modules = {}
    for method, (part, flags) in parts.items():
        sources = [folder / part / "santa_cuda.cpp", folder / part / "santa_cuda_kernel.cu"]
        for source in sources:
            if not source.is_file():
                raise FileNotFoundError(f"--published {folder}: {source} is missing; must be a checkout of github.com/OPUSLab/SANTA")
        modules[method] = load(f"published_santa_{method.name}", [str(s) for s in sources], extra_cflags=["-O3"], extra_cuda_cflags=flags)
    return Published(modules)
