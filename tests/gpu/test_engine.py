"""Whole engines on the GPU, each with decode graphs: SANTA beside FlashInfer, and its rows in every mix."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("flashinfer", reason="the CUDA backend is built on FlashInfer")
pytest.importorskip("vllm", reason="needs vLLM")

from benchmarks.engine import Engine, EngineSpec
from vllm_santa.methods import Method

sys.path.append(str(Path(__file__).parents[1] / "serve"))
from tiny_model import build_codebooks, build_model, prompt

pytestmark = pytest.mark.gpu

LENGTHS = [5000, 40, 3000, 1200, 700, 2500, 4100, 300]
PROMPTS = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
TOKENS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    build_model(made / "model")
    build_codebooks(made / "model", made / "codebooks.safetensors")  # beside it: vLLM reads every such file in a model's folder
    (made / "policy.yaml").write_text("rules: []\nsink: 16\nlocal: 16\ncodebooks: codebooks.safetensors\nbase_seed: 5\n")
    return made


def start(folder: Path, backend: str, **options: object) -> Engine:
    environment = {"SANTA_POLICY": str(folder / "policy.yaml"), "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    return Engine(EngineSpec(backend, folder / "model", 0.2, 8192, 16, options={"dtype": "bfloat16"} | options, environment=environment))


@pytest.fixture(scope="module")
def santa(folder: Path) -> Iterator[Engine]:
    with start(folder, "santa") as engine:
        yield engine


def test_dense_rows_get_the_tokens_of_flashinfer(folder: Path, santa: Engine) -> None:
    with start(folder, "FLASHINFER") as engine:
        expected = engine.generate(PROMPTS, TOKENS)
    assert santa.generate(PROMPTS, TOKENS).tokens == expected.tokens
    dense = santa.generate(PROMPTS, TOKENS, {"santa_method": "dense"})
    assert dense.tokens == expected.tokens and set(dense.rows) == {"dense"}


@pytest.mark.parametrize("method", [method.name for method in Method if method is not Method.dense])
def test_every_method_is_sparse_and_repeats_by_seed(santa: Engine, method: str) -> None:
    """The short prompts beside the long ones leave those sparse: every row that a budget of 32 does not cover."""
    asked = {"santa_method": method, "santa_budget": 32, "santa_seed": 3}
    first, again = (santa.generate(PROMPTS, TOKENS, asked) for _ in range(2))
    assert first.tokens == again.tokens
    covered = 40 + TOKENS <= 32 + 32 and Method[method].needs_codes
    assert first.rows == {method: (TOKENS - 1) * len(PROMPTS)} or covered, first.rows
    if method != "topk":  # which draws nothing
        other = santa.generate(PROMPTS, TOKENS, asked | {"santa_seed": 4})
        assert sum(one != two for one, two in zip(first.tokens, other.tokens, strict=True)) >= len(PROMPTS) // 2


def test_graphs_give_the_tokens_of_eager_steps(folder: Path, santa: Engine) -> None:
    """What a graph replays is what the kernels do outside of one, in a model compiled in the same way."""
    with start(folder, "santa", compilation_config={"cudagraph_mode": "NONE"}) as engine:
        for method in ("dense", "pps", "ssa"):
            asked = {"santa_method": method, "santa_budget": 512, "santa_seed": 3} if method != "dense" else {"santa_method": method}
            eager, graphs = engine.generate(PROMPTS, TOKENS, asked), santa.generate(PROMPTS, TOKENS, asked)
            assert eager.rows == graphs.rows
            assert eager.tokens == graphs.tokens, method
