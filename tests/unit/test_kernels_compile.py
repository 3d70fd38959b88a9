"""Every CUDA source compiles for every GPU generation we name. Needs nvcc and FlashInfer's headers, no GPU."""

import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
import torch

from vllm_santa.doctor.compilers import find_nvcc
from vllm_santa.jit import Shape, kernel_folder

ARCHITECTURES = ("80", "90a", "100a")
FOLDER = kernel_folder()


def package_folder(name: str) -> Path | None:
    """Where a package lies: installed, or in the folder where `make test` keeps FlashInfer for its headers alone, out of vLLM's sight."""
    spec = PathFinder.find_spec(name, [*sys.path, f"{sys.prefix}/cuda-headers"])
    return Path(spec.origin).parent if spec and spec.origin else None


FLASHINFER, TVM_FFI = package_folder("flashinfer"), package_folder("tvm_ffi")


def include_folders() -> list[Path]:
    return [FOLDER, FLASHINFER / "data/csrc", FLASHINFER / "data/include", TVM_FFI / "include"]


pytestmark = [
    pytest.mark.skipif(find_nvcc() is None, reason="nvcc is not installed"),
    pytest.mark.skipif(FLASHINFER is None or TVM_FFI is None, reason="FlashInfer's headers are missing; `make test` fetches them"),
]


def compile_source(source: Path, shape: Shape, output: Path, subspaces: int = 16) -> None:
    targets = [f"-gencode=arch=compute_{sm},code=sm_{sm}" for sm in ARCHITECTURES]
    includes = [f"-I{folder}" for folder in include_folders()]
    command = [
        find_nvcc(),
        "-std=c++17",
        "-O1",
        "--threads=3",
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


@pytest.mark.parametrize("name", ["ssa_tables.cu", "ssa_score.cu", "ssa_gather.cu", "encode.cu", "error.cu"])
@pytest.mark.parametrize(("shape", "subspaces"), [(OTHER_SHAPES[0], 32), (OTHER_SHAPES[2], 8)], ids=["narrow", "wide"])
def test_code_kernels_compile_for_other_shapes(name: str, shape: Shape, subspaces: int, tmp_path: Path) -> None:
    compile_source(FOLDER / name, shape, tmp_path / "object.o", subspaces)
