"""A model's shape, and whether PQ codes, kernels and codebooks fit it. Arguments: MODEL, CODEBOOKS or "", the policy's subspaces."""

import json
import sys

from transformers import AutoConfig, PretrainedConfig

from vllm_santa.codebook import CodebookError, ModelShape, check_subspaces, load_served_codebooks


def shape_of(config: PretrainedConfig) -> tuple[ModelShape, int]:
    """The shape, and query heads per KV head, from a model's text config."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return ModelShape(config.num_hidden_layers, kv_heads, head_dim), heads // kv_heads


def kernels_failure(head_dim: int, group: int) -> str:
    """Why there are no kernels for the shape; empty if there are."""
    import torch

    from vllm_santa.jit import Shape

    try:
        Shape(head_dim, group, torch.bfloat16)
    except ValueError as reason:
        return str(reason)
    return ""


def codes_failure(head_dim: int) -> str:
    """Why PQ codes do not fit; empty if they do."""
    try:
        check_subspaces(head_dim, 8)
    except CodebookError as reason:
        return str(reason)
    return ""


def codebooks_of(path: str, shape: ModelShape, subspaces: int) -> dict[str, object]:
    """What the file holds, or why it cannot serve the model."""
    try:
        loaded = load_served_codebooks(path, shape, subspaces)
    except CodebookError as reason:
        return {"failure": str(reason)}
    info = loaded.info.model_dump(include={"model", "subspaces", "training_tokens"})
    return info | {"layers": sorted(loaded.layers), "fingerprint": loaded.fingerprint()}


def main() -> None:
    model, codebooks, subspaces = sys.argv[1:]
    shape, group = shape_of(AutoConfig.from_pretrained(model).get_text_config())
    found = shape._asdict() | {
        "group": group,
        "codes": codes_failure(shape.head_dim),
        "kernels": kernels_failure(shape.head_dim, group),
        "codebooks": codebooks_of(codebooks, shape, int(subspaces)) if codebooks else None,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
