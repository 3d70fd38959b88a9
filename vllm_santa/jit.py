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
    "pps.cu", "look.cu", "score_codes.cu", "sample_rows.cu", "values.cu", "score_values.cu", "sample_points.cu", "sample_tiles.cu",
)  # fmt: skip
SSA_SOURCES = (
    "ssa.cu", "ssa_tables.cu", "ssa_score.cu", "ssa_mix.cu", "ssa_place.cu", "ssa_fixed.cu", "ssa_gather.cu",
)  # fmt: skip


def _spec(name: str, sources: tuple[str, ...], defines: list[str]) -> Any:
    from flashinfer.jit import gen_jit_spec

    folder = kernel_folder()
    return gen_jit_spec(
        f"vllm_santa_{name}",
        [folder / source for source in sources],
        extra_cuda_cflags=defines,
        extra_include_paths=[folder],
        use_fast_math=False,
    )


def santa_spec(shape: Shape) -> Any:
    """FlashInfer's build specification of the SANTA-family module of a shape."""
    return _spec(shape.name, SANTA_SOURCES, shape.defines)


def _subspaces(count: int) -> list[str]:
    return [f"-DSANTA_SUBSPACES={count}"]


def ssa_spec(shape: Shape, subspaces: int) -> Any:
    """FlashInfer's build specification of the SSA-family module of a shape."""
    return _spec(f"ssa_{shape.name}_m{subspaces}", SSA_SOURCES, shape.defines + _subspaces(subspaces))


def error_spec(shape: Shape) -> Any:
    """FlashInfer's build specification of the module that estimates errors."""
    return _spec(f"error_{shape.name}", ("error.cu",), shape.defines)


def encode_spec(head_dim: int, dtype: torch.dtype, subspaces: int) -> Any:
    """FlashInfer's build specification of the module that writes keys, values and codes."""
    shape = Shape(head_dim, 1, dtype)  # it knows nothing of query heads
    return _spec(f"encode_{shape.name}_m{subspaces}", ("encode.cu",), shape.defines + _subspaces(subspaces))


@cache
def santa_module(shape: Shape) -> Any:
    """The loaded module of a shape; compiled on first use (about a minute), then from FlashInfer's cache.

    Raises:
        ImportError: FlashInfer is missing. RuntimeError: the compiler failed.
    """
    return santa_spec(shape).build_and_load()


@cache
def ssa_module(shape: Shape, subspaces: int) -> Any:
    """As `santa_module`, of the SSA family."""
    return ssa_spec(shape, subspaces).build_and_load()


@cache
def encode_module(head_dim: int, dtype: torch.dtype, subspaces: int) -> Any:
    """As `santa_module`, of `encode_spec`."""
    return encode_spec(head_dim, dtype, subspaces).build_and_load()


@cache
def error_module(shape: Shape) -> Any:
    """As `santa_module`, of `error_spec`."""
    return error_spec(shape).build_and_load()
