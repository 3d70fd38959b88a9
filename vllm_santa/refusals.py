"""What the backend refuses at start because it could not be right, beyond what vLLM asks a backend about itself."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def refuse_configuration(vllm_config: "VllmConfig") -> None:
    """Refuse a server's configuration.

    Raises:
        ValueError: names the option, what it was and what is allowed.
    """
    if vllm_config.parallel_config.enable_dbo:
        raise ValueError(
            "--enable-dbo: on; allowed with --attention-backend santa: off (its two half batches would use the kernels' buffers at once)"
        )
    if vllm_config.cache_config.kv_sharing_fast_prefill:
        raise ValueError("--kv-sharing-fast-prefill: on; allowed with --attention-backend santa: off (layers keep their own codes)")
    for phase in ("prefill", "decode"):
        size = getattr(vllm_config.parallel_config, f"{phase}_context_parallel_size")
        if size > 1:
            option = f"--{phase}-context-parallel-size"
            raise ValueError(f"{option}: {size}; allowed with --attention-backend santa: 1 (a row's cache must be in one place)")


def refuse_layer(attn_type: str, **features: object) -> None:
    """Refuse an attention layer. features: name=value, present if not None.

    Raises:
        NotImplementedError: names the feature.
    """
    if attn_type != "decoder":
        features = {f"{attn_type} attention": attn_type}
    for feature, value in features.items():
        if value is not None:
            raise NotImplementedError(
                f"--attention-backend santa does not support {feature.replace('_', ' ')}; serve this model with another backend"
            )


def refuse_codebooks_among_weights(codebooks: Path | str, model: str) -> None:
    """Refuse a codebook file in the model's own folder: vLLM takes every .safetensors file there for weights, and fails.

    Raises:
        ValueError: names the file.
    """
    if Path(model).is_dir() and Path(codebooks).resolve().parent == Path(model).resolve():
        raise ValueError(
            f"codebooks: {codebooks} lies in the model's folder, where vLLM takes every .safetensors file for weights; "
            "allowed: any other folder"
        )
