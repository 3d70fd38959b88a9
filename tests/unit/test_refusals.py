"""What stops the start."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_santa.refusals import refuse_codebooks_among_weights, refuse_configuration, refuse_layer


def config(**changes: Any) -> Any:
    parallel = {"enable_dbo": False, "prefill_context_parallel_size": 1, "decode_context_parallel_size": 1}
    cache = {"kv_sharing_fast_prefill": False}
    for part in (parallel, cache):
        part.update((name, value) for name, value in changes.items() if name in part)
    return SimpleNamespace(parallel_config=SimpleNamespace(**parallel), cache_config=SimpleNamespace(**cache))


def test_usual_servers_start() -> None:
    refuse_configuration(config())
    refuse_layer("decoder", ALiBi=None, sinks=None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"enable_dbo": True}, "--enable-dbo: on; allowed"),
        ({"kv_sharing_fast_prefill": True}, "--kv-sharing-fast-prefill: on; allowed"),
        ({"prefill_context_parallel_size": 2}, "--prefill-context-parallel-size: 2; allowed"),
        ({"decode_context_parallel_size": 4}, "--decode-context-parallel-size: 4; allowed"),
    ],
)
def test_options_that_do_not_go_together(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        refuse_configuration(config(**changes))


@pytest.mark.parametrize(
    ("attn_type", "features", "words"),
    [
        ("encoder", {}, "encoder attention"),
        ("decoder", {"ALiBi": [0.5]}, "ALiBi"),
        ("decoder", {"sinks": object()}, "sinks"),
        ("decoder", {"KV_sharing_between_layers": "layers.0"}, "KV sharing between layers"),
    ],
)
def test_layers_that_cannot_be_right(attn_type: str, features: dict[str, object], words: str) -> None:
    with pytest.raises(NotImplementedError, match=f"does not support {words}"):
        refuse_layer(attn_type, **features)


def test_codebooks_lie_beside_the_model(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    refuse_codebooks_among_weights(tmp_path / "codebooks.safetensors", str(tmp_path / "model"))
    refuse_codebooks_among_weights("codebooks.safetensors", "hub/name")
    for inside in ("model/codebooks.safetensors", "model/../model/c.safetensors"):
        with pytest.raises(ValueError, match="codebooks: .* lies in the model's folder"):
            refuse_codebooks_among_weights(tmp_path / inside, str(tmp_path / "model"))
