"""Every CUDA source compiles for every GPU generation we name. Needs nvcc and FlashInfer's headers, no GPU."""

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from vllm_santa.jit import Shape, kernel_folder

ARCHITECTURES = ("80", "90a", "100a")
FOLDER = kernel_folder()


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")


def include_folders() -> list[Path]:
    flashinfer, tvm_ffi = (Path(importlib.util.find_spec(name).origin).parent for name in ("flashinfer", "tvm_ffi"))
    return [FOLDER, flashinfer / "data/csrc", flashinfer / "data/include", tvm_ffi / "include"]


pytestmark = [
    pytest.mark.skipif(find_nvcc() is None, reason="nvcc is not installed"),
    pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed"),
]


def compile_source(source: Path, shape: Shape, output: Path, subspaces: int = 16) -> None:
    targets = [f"-gencode=arch=compute_{sm},code=sm_{sm}" for sm in ARCHITECTURES]
    includes = [f"-I{folder}" for folder in include_folders()]
    command = [
        find_nvcc(),
        "-std=c++17",
        "-O1",
        "--threads=3",
        "-rdc=true",
        "-c",
        *targets,
        *includes,
        *shape.defines,
        f"-DSANTA_SUBSPACES={subspaces}",
        str(source),
        "-o",
        str(output),
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]


@pytest.mark.parametrize("source", sorted(FOLDER.glob("*.cu")), ids=lambda source: source.name)
def test_source_compiles(source: Path, tmp_path: Path) -> None:
    compile_source(source, Shape(128, 4, torch.bfloat16), tmp_path / "object.o")


OTHER_SHAPES = [Shape(64, 1, torch.float16), Shape(96, 3, torch.bfloat16), Shape(256, 16, torch.float16)]


@pytest.mark.parametrize("shape", OTHER_SHAPES, ids=lambda shape: shape.name)
def test_score_pass_compiles_for_other_shapes(shape: Shape, tmp_path: Path) -> None:
    compile_source(FOLDER / "score_codes.cu", shape, tmp_path / "object.o")


@pytest.mark.parametrize("name", ["ssa_tables.cu", "ssa_score.cu", "ssa_gather.cu", "encode.cu"])
@pytest.mark.parametrize(("shape", "subspaces"), [(OTHER_SHAPES[0], 32), (OTHER_SHAPES[2], 8)], ids=["narrow", "wide"])
def test_code_kernels_compile_for_other_shapes(name: str, shape: Shape, subspaces: int, tmp_path: Path) -> None:
    compile_source(FOLDER / name, shape, tmp_path / "object.o", subspaces)
