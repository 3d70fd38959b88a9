"""All checks in order: packages, GPU, plugin, kernels, and what the server is to be given."""

from collections.abc import Iterator
from pathlib import Path

from vllm_santa.doctor import compilers, gpus, kernels, packages, plugin, serving
from vllm_santa.doctor.finding import Finding, error, ok
from vllm_santa.doctor.probe import ProbeError, ask


def diagnose(model: str | None = None, codebooks: Path | None = None, policy: Path | None = None) -> Iterator[Finding]:
    """Findings one by one, as they are made.

    Args:
        model: Hugging Face folder, to see whether it and the codebooks fit the backend.
        codebooks: a file for the model; None looks at those that the policy names.
        policy: None for the built-in default.
    """
    yield packages.check_us()
    yield packages.check_python()
    found, failure = _gpus()
    has_gpus = bool(found or failure)
    yield gpus.check_gpus(found, failure)
    torch, torch_cuda = packages.check_torch(has_gpus)
    yield torch
    vllm = packages.check_vllm(has_gpus)
    yield vllm
    yield (flashinfer := packages.check_flashinfer(has_gpus))
    yield plugin.check_entry_points()
    works = torch.level != "error"
    if works and packages.installed("vllm"):
        yield from _plugin()
    yield compilers.check_nvcc(has_gpus, torch_cuda)
    yield compilers.check_cxx(has_gpus)
    yield compilers.check_ninja(has_gpus)
    if works and flashinfer.level == "ok" and packages.installed("flashinfer-python"):
        yield from _kernels()
    yield from _serving(model, codebooks, policy, has_gpus, works)


def _gpus() -> tuple[list[gpus.Gpu], str]:
    try:
        return gpus.find_gpus(), ""
    except gpus.DriverError as reason:
        return [], str(reason)


def _plugin() -> Iterator[Finding]:
    try:
        probed = ask("vllm_plugin")
    except ProbeError as reason:
        yield error("backend", f"vLLM cannot load its plugins: {reason}", "Make `python -c 'import vllm'` work first; reinstall vLLM.")
        return
    yield plugin.check_backend(probed)
    if probed["registered"]:
        yield plugin.check_spawn(probed)


def _kernels() -> Iterator[Finding]:
    try:
        probed = ask("flashinfer_jit")
    except ProbeError as reason:
        yield error(
            "kernel sources", f"FlashInfer cannot be asked: {reason}", "Make `python -c 'import flashinfer'` work first; reinstall it."
        )
        return
    yield kernels.check_sources(probed)
    yield kernels.check_compiled(probed)


def _serving(model: str | None, codebooks: Path | None, path: Path | None, has_gpus: bool, works: bool) -> Iterator[Finding]:
    finding, policy = serving.check_policy(path)
    yield finding
    if policy is None:
        return
    file = codebooks or policy.codebooks
    if model is None:
        if codebooks is not None:
            yield error("codebooks", f"{codebooks} was given without its model", "Add --model DIR.")
        return
    if not (works and packages.installed("transformers")):
        yield error("model", "cannot be looked at without torch and transformers", "Install vLLM, which brings them.")
        return
    try:
        probed = ask("model_fit", model, str(file or ""), str(policy.subspaces))
    except ProbeError as reason:
        yield error("model", f"{model}: {reason}", "Give the folder of a Hugging Face model, with its config.json.")
        return
    yield serving.check_model(probed, has_gpus)
    layers = serving.check_dense_layers(policy, probed["num_layers"])
    if layers is not None:
        yield layers
    elif file is not None:
        yield serving.check_codebooks(probed, policy.dense_layer_set(probed["num_layers"]))
    else:
        yield ok("codebooks", "none given: the server trains them from its first prompts")
