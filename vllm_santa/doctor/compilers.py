"""What FlashInfer's JIT compiles the kernels with, looked for where it looks."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from vllm_santa.doctor.finding import Finding, error, ok, warning

DEFAULT_CUDA = "/usr/local/cuda"
ONLY_GPU = "not found; only GPUs need it"


def find_nvcc() -> Path | None:
    """nvcc of CUDA_HOME or CUDA_PATH, else of PATH, else of /usr/local/cuda."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    found = None if home else shutil.which("nvcc")
    nvcc = Path(found) if found else Path(home or DEFAULT_CUDA) / "bin" / "nvcc"
    return nvcc if os.access(nvcc, os.X_OK) else None


def check_nvcc(gpus: bool, torch_cuda: str | None) -> Finding:
    """gpus: whether the machine has any. torch_cuda: the CUDA version torch was built for."""
    nvcc = find_nvcc()
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if nvcc is None:
        where = f"not in {home}/bin, where CUDA_HOME or CUDA_PATH points" if home else f"neither on PATH nor in {DEFAULT_CUDA}"
        cure = f"Install the CUDA toolkit{f' {torch_cuda}' if torch_cuda else ''} and set CUDA_HOME to its folder."
        return error("nvcc", where, cure) if gpus else ok("nvcc", ONLY_GPU)
    release = re.search(r"release (\d+\.\d+)", _output(nvcc, "--version"))
    if release is None:
        broken = f"{nvcc} does not say its version"
        return error("nvcc", broken, "Reinstall the CUDA toolkit.") if gpus else ok("nvcc", f"{broken}; only GPUs need it")
    found = f"{release[1]} at {nvcc}"
    if torch_cuda and release[1].split(".")[0] != torch_cuda.split(".")[0]:
        return warning("nvcc", f"{found}, but torch was built for CUDA {torch_cuda}", f"Set CUDA_HOME to a CUDA {torch_cuda} toolkit.")
    return ok("nvcc", found)


def check_cxx(gpus: bool) -> Finding:
    name = os.environ.get("CXX", "c++")
    found = shutil.which(name)
    if found is None:
        cure = "Install g++, or set CXX to a C++17 compiler."
        return error("C++ compiler", f"{name} is not on PATH", cure) if gpus else ok("C++ compiler", f"{name} {ONLY_GPU}")
    return ok("C++ compiler", f"{_output(Path(found), '--version').partition(chr(10))[0]} at {found}")


def check_ninja(gpus: bool) -> Finding:
    found = shutil.which("ninja")
    if found is not None:
        return ok("ninja", f"{_output(Path(found), '--version').strip()} at {found}")
    beside = Path(sys.executable).parent / "ninja"
    where, cure = "not on PATH", "pip install ninja"
    if beside.exists():
        where, cure = f"at {beside}, which is not on PATH", f"Activate the environment, or add {beside.parent} to PATH."
    return error("ninja", where, cure) if gpus else ok("ninja", f"{where}; only GPUs need it")


def _output(program: Path, *arguments: str) -> str:
    """What a program prints; nothing if it cannot be run."""
    try:
        return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
