"""The CUDA kernels: their sources are here, and what is compiled of them, or where it will be."""

import os
from pathlib import Path
from typing import Any

from vllm_santa.doctor.finding import Finding, error, ok


def check_sources(probed: dict[str, Any]) -> Finding:
    """probed: what probes.flashinfer_jit says."""
    check = "kernel sources"
    if not probed["sources"]:
        return error(check, f"none in {probed['folder']}: the package is incomplete", "pip install --force-reinstall --no-deps vllm-santa")
    return ok(check, f"{len(probed['sources'])} in {probed['folder']}")


def check_compiled(probed: dict[str, Any]) -> Finding:
    """probed: what probes.flashinfer_jit says."""
    check, cache = "compiled kernels", Path(probed["cache"])
    if not writable(cache):
        return error(
            check, f"FlashInfer's cache {cache} is not writable", "Make it writable, or set FLASHINFER_WORKSPACE_BASE to a folder that is."
        )
    if not probed["compiled"]:
        return ok(check, f"none yet in {cache}; the first start on a GPU compiles those of its model, in about a minute")
    return ok(check, f"{', '.join(name.removeprefix('vllm_santa_') for name in probed['compiled'])} in {cache}")


def writable(folder: Path) -> bool:
    """Whether the folder, or the nearest one above it that exists, can be written to."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return os.access(existing, os.W_OK)
