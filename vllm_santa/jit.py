"""Compiles the CUDA kernels with FlashInfer's JIT: nvcc and ninja, cached on disk, one module per head shape and dtype.

FlashInfer is imported only when a kernel is first needed, so the rest of the package works without it.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

HEAD_DIMS = (64, 96, 128, 256)
MAX_GROUP = 16
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Shape:
    """What a module is compiled for: features per head, query heads per KV head, dtype of query and cache."""

    head_dim: int
    group: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim {self.head_dim} has no kernels; allowed: {', '.join(map(str, HEAD_DIMS))}")
        if not 1 <= self.group <= MAX_GROUP:
            raise ValueError(f"{self.group} query heads per KV head have no kernels; allowed: 1 to {MAX_GROUP}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype} has no kernels; allowed: {', '.join(map(str, DTYPES))}")

    @property
    def name(self) -> str:
        return f"{DTYPES[self.dtype]}_d{self.head_dim}_g{self.group}"

    @property
    def defines(self) -> list[str]:
        return [f"-DSANTA_HEAD_DIM={self.head_dim}", f"-DSANTA_GROUP={self.group}", f"-DSANTA_BF16={int(self.dtype == torch.bfloat16)}"]


def kernel_folder() -> Path:
    """Where the CUDA sources are: in the wheel beside this file, in a source tree at its top."""
    packaged = Path(__file__).with_name("kernels")
    return packaged if packaged.is_dir() else Path(__file__).parents[1] / "kernels"


SANTA_SOURCES = (
    "pps.cu", "look.cu", "score_codes.cu", "place.cu", "gather.cu", "values.cu", "score_values.cu", "sample_points.cu", "sample_tiles.cu",
)  # fmt: skip


def santa_spec(shape: Shape) -> Any:
    """FlashInfer's build specification of the SANTA-family module of a shape."""
    from flashinfer.jit import gen_jit_spec

    folder = kernel_folder()
    return gen_jit_spec(
        f"vllm_santa_{shape.name}",
        [folder / source for source in SANTA_SOURCES],
        extra_cuda_cflags=shape.defines,
        extra_include_paths=[folder],
        use_fast_math=False,
    )


@cache
def santa_module(shape: Shape) -> Any:
    """The loaded module of a shape; compiled on first use (about a minute), then from FlashInfer's cache.

    Raises:
        ImportError: FlashInfer is missing. RuntimeError: the compiler failed.
    """
    return santa_spec(shape).build_and_load()
