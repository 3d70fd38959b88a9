"""Models with sliding windows beside full attention (Gemma-3) and with soft-capped scores (Gemma-2): windowed layers dense, the others
sparse with the cap on exact scores. Shown against transformers, which shares no code with the server."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from server import NOISE, Answer, Ask, Server
from tiny_gemma import LAYERS, WINDOW, build_gemma, load_gemma
from tiny_model import prompt
from transformers import PreTrainedModel

TOKENS = 8
PROMPTS = [prompt(length, 40 + length) for length in (150, 300, 450)]
POLICY = "sink: 16\nlocal: 16\ntraining_tokens: 512\n"
"""Codebooks are trained by the server, for layers without a window only."""


@pytest.fixture(scope="module", params=[2, 3], ids=["gemma2", "gemma3"])
def generation(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def folder(generation: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(f"gemma{generation}")
    build_gemma(made / "model", generation)
    return made


@pytest.fixture(scope="module")
def gemma(folder: Path, generation: int, logs: Path) -> Iterator[Server]:
    (folder / "policy.yaml").write_text(POLICY)
    options = ("--attention-backend", "santa", "--max-model-len", "1024", "--max-num-batched-tokens", "256")
    with Server(folder / "model", logs / f"gemma{generation}.log", *options, SANTA_POLICY=str(folder / "policy.yaml")) as server:
        yield server


def greedy(model: PreTrainedModel, tokens: list[int]) -> Answer:
    """TOKENS greedy tokens and their log-probabilities."""
    answer = Answer([], [])
    with torch.no_grad():
        for _ in range(TOKENS):
            logprobs = model(torch.tensor([[*tokens, *answer.tokens]])).logits[0, -1].log_softmax(-1)
            answer.tokens.append(int(logprobs.argmax()))
            answer.logprobs.append(float(logprobs.max()))
    return answer


def read_share(server: Server, santa: dict, name: str) -> tuple[float, float]:
    """Of one decode row of every prompt: rows read by the server, mean over layers; and what windowed layers alone read of them."""
    with server.counting() as gained:
        for tokens in PROMPTS:
            server.ask(Ask(tokens, 2, santa))
    assert gained.total("santa_rows_total", method=santa["method"]) == len(PROMPTS)
    return gained.total(name), LAYERS.count("sliding_attention") * WINDOW * len(PROMPTS) / len(LAYERS)


def test_dense_answers_are_those_of_transformers(gemma: Server, folder: Path, generation: int) -> None:
    model = load_gemma(folder / "model", generation)
    answers = [gemma.ask(Ask(tokens, TOKENS, {"method": "dense"})) for tokens in PROMPTS]
    for tokens, answer in zip(PROMPTS, answers, strict=True):
        assert answer.agreement(greedy(model, tokens)) == TOKENS
    if generation == 2:  # and the cap is not without effect
        model.config.attn_logit_softcapping = None
        for layer in model.model.layers:
            layer.self_attn.attn_logit_softcapping = None
        bent = [greedy(model, tokens) for tokens in PROMPTS]
        assert sum(abs(a.logprobs[0] - b.logprobs[0]) for a, b in zip(answers, bent, strict=True)) > 100 * NOISE


@pytest.mark.parametrize("method", ["pps", "ssa"])
def test_sparse_rows_approach_dense_ones(gemma: Server, method: str) -> None:
    """All but a few rows read: what a missing window or cap would change is far more than what is left out."""
    wait_for_codebooks(gemma)
    far = near = 0.0
    for tokens in PROMPTS:
        exact = gemma.ask(Ask(tokens, 2, {"method": "dense"}))
        most = gemma.ask(Ask(tokens, 2, {"method": method, "budget": len(tokens) - 40, "seed": 1}))
        few = gemma.ask(Ask(tokens, 2, {"method": method, "budget": 8, "seed": 1}))
        assert most.tokens[0] == few.tokens[0] == exact.tokens[0], "the first token comes from the prompt"
        near += abs(most.logprobs[1] - exact.logprobs[1])
        far += abs(few.logprobs[1] - exact.logprobs[1]) if few.tokens == exact.tokens else 1
    print(f"{method}: off by {near:.4f} with most rows, {far:.4f} with 8")
    assert near < 0.1 * len(PROMPTS) and near < far / 2


def test_windowed_layers_read_their_window_and_no_more(gemma: Server) -> None:
    wait_for_codebooks(gemma)
    full = LAYERS.count("full_attention") / len(LAYERS)
    contexts = sum(len(tokens) + 1 for tokens in PROMPTS)
    keys, windows = read_share(gemma, {"method": "pps", "budget": 32, "seed": 2}, "santa_key_rows_read_total")
    assert keys == pytest.approx(full * contexts + windows)
    values, windows = read_share(gemma, {"method": "topk", "budget": 32}, "santa_value_rows_read_total")
    assert values == pytest.approx(full * (32 + 32) * len(PROMPTS) + windows), "the budget, and sink and local rows"


def wait_for_codebooks(server: Server) -> None:
    """Trained from the prompts that the tests have sent, after some steps."""
    for seed in range(20):
        if server.metrics().total("santa_codebooks_ready") == 1:
            return
        server.ask(Ask(prompt(300, 900 + seed), 8))
    raise AssertionError("no codebooks after 6,000 tokens")
