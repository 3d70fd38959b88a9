"""NVIDIA GPUs as the driver names them, with no other library."""

import shutil
import subprocess
from typing import NamedTuple

from vllm_santa.doctor.finding import Finding, error, ok, warning

CHECK = "GPU"
OLDEST, TUNED = (8, 0), (9, 0)
_QUERY = ("--query-gpu=name,compute_cap,driver_version,memory.total", "--format=csv,noheader,nounits")


class Gpu(NamedTuple):
    """name: as the driver says. capability: of its multiprocessors, (9, 0) for an H200. driver: its version. memory: MiB."""

    name: str
    capability: tuple[int, int]
    driver: str
    memory: int


class DriverError(RuntimeError):
    """nvidia-smi is there and fails; the message is its own."""


def find_gpus() -> list[Gpu]:
    """All GPUs of this machine; none without a driver.

    Raises:
        DriverError: there is a driver, and it does not answer.
    """
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        done = subprocess.run(["nvidia-smi", *_QUERY], capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        raise DriverError("nvidia-smi does not answer within 60 s") from None
    lines = done.stdout.strip().splitlines()
    if done.returncode:
        raise DriverError((done.stdout + done.stderr).strip().splitlines()[0] if done.stdout + done.stderr else "nvidia-smi fails")
    return [_gpu(line) for line in lines if line.count(",") == 3]


def _gpu(line: str) -> Gpu:
    name, capability, driver, memory = (part.strip() for part in line.split(","))
    major, minor = capability.split(".")
    return Gpu(name, (int(major), int(minor)), driver, int(memory))


def check_gpus(gpus: list[Gpu], failure: str = "") -> Finding:
    """failure: what DriverError said."""
    if failure:
        return error(
            CHECK, failure, "Repair the NVIDIA driver: `nvidia-smi` has to list the GPUs. In a container, start it with the NVIDIA runtime."
        )
    if not gpus:
        cure = "Nothing, if you want that. Else install the NVIDIA driver, or start the container with the NVIDIA runtime."
        return warning(CHECK, "none: servers run on vLLM's CPU build, which shows what the methods do but is slow", cure)
    found = "; ".join(f"{gpu.name}, SM {gpu.capability[0]}.{gpu.capability[1]}, {gpu.memory / 1024:.0f} GiB" for gpu in gpus)
    found += f"; driver {gpus[0].driver}"
    least = min(gpu.capability for gpu in gpus)
    if least < OLDEST:
        return error(
            CHECK, found, f"The kernels need SM {OLDEST[0]}.{OLDEST[1]} or newer (Ampere): hide older GPUs with CUDA_VISIBLE_DEVICES."
        )
    if least != TUNED:
        return warning(
            CHECK,
            found,
            "The kernels were run and tuned on SM 9.0 only. Run `make test` and benchmarks/kernels on this GPU before you rely on it.",
        )
    return ok(CHECK, found)
