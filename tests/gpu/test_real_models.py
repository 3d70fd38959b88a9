"""Real models on the GPU: dense rows answer as with FlashInfer, sparse rows find what dense ones find."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("flashinfer", reason="the CUDA backend is built on FlashInfer")
pytest.importorskip("vllm", reason="needs vLLM")

from tokenizers import Tokenizer
from transformers import AutoTokenizer

from benchmarks.engine import Engine, EngineSpec
from benchmarks.models import MODELS, cache_folder
from examples.demo.haystack import Needle, docstring_prose, messages

pytestmark = pytest.mark.gpu

TOKENS = 24
LENGTHS = [300, 1500, 6000, 6500]
NEEDLES = [Needle(f"gentle-harbor-{i}", str(3918274 + 1000003 * i), 0.15 + 0.2 * i) for i in range(len(LENGTHS))]


@pytest.fixture(scope="module", params=sorted(MODELS))
def folder(request: pytest.FixtureRequest) -> Path:
    made = cache_folder() / request.param
    if not made.is_dir():
        pytest.skip(f"{made} is missing; `python -m benchmarks.models {request.param}` makes it")
    return made


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[list[int]]:
    tokenizer, text = AutoTokenizer.from_pretrained(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    chats = [messages(needle, docstring_prose(text, length)) for needle, length in zip(NEEDLES, LENGTHS, strict=True)]
    return [tokenizer.apply_chat_template(chat, continue_final_message=True, return_dict=False) for chat in chats]


def start(folder: Path, backend: str) -> Engine:
    """Without torch.compile: it picks kernels by timing them, so two engines may round differently, and a near tie falls the other way."""
    options = {
        "dtype": "bfloat16",
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]},
    }
    return Engine(EngineSpec(backend, folder, 0.2, 8192, 8, options=options, environment={"VLLM_USE_FLASHINFER_SAMPLER": "0"}))


@pytest.fixture(scope="module")
def santa(folder: Path, prompts: list[list[int]]) -> Iterator[Engine]:
    with start(folder, "santa") as engine:
        yield engine


def found(folder: Path, answers: list[list[int]]) -> list[bool]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [needle.value in tokenizer.decode(answer) for needle, answer in zip(NEEDLES, answers, strict=True)]


def test_dense_rows_get_the_tokens_of_flashinfer(folder: Path, prompts: list[list[int]], santa: Engine) -> None:
    with start(folder, "FLASHINFER") as engine:
        expected = engine.generate(prompts, TOKENS)
    dense = santa.generate(prompts, TOKENS, {"santa_method": "dense"})
    assert dense.tokens == expected.tokens
    assert sum(found(folder, expected.tokens)) >= len(NEEDLES) - 1


@pytest.mark.parametrize("method, budget", [("pps", 256), ("prop", 256), ("ssa", 256)])
def test_sparse_rows_find_what_dense_rows_find(folder: Path, prompts: list[list[int]], santa: Engine, method: str, budget: int) -> None:
    dense = found(folder, santa.generate(prompts, TOKENS, {"santa_method": "dense"}).tokens)
    sparse = santa.generate(prompts, TOKENS, {"santa_method": method, "santa_budget": budget, "santa_seed": 1})
    assert sparse.rows[method] >= (TOKENS - 1) * 3, sparse.rows  # a budget and its windows may cover the shortest
    assert sum(found(folder, sparse.tokens)) >= sum(dense) - 1
