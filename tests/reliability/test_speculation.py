"""Speculative decoding: santa_* parameters cannot reach the V1 runner's workers and are refused; a policy's dense rows are exact."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from server import Ask, Server
from tiny_model import prompt

NGRAM = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}'


@pytest.fixture(scope="module")
def speculating(model: Path, codebooks: Path, logs: Path) -> Iterator[Server]:
    policy = codebooks.with_name("speculation.yaml")
    policy.write_text("{}")
    options = ("--attention-backend", "santa", "--max-model-len", "1024", "--speculative-config", NGRAM)
    with Server(model, logs / "speculation.log", *options, SANTA_POLICY=str(policy)) as server:
        yield server


def test_ngram(speculating: Server, busy_server: Server) -> None:
    """Its answers are those of the dense run."""
    asks = [Ask([*prompt(20, i)] * 8, 24) for i in range(4)]  # the n-grams of a repeated prompt give drafts
    with speculating.counting() as gained:
        answers = speculating.ask_together(asks)
    assert gained.total("vllm:spec_decode_num_draft_tokens_total") > 0
    assert gained.total("santa_rows_total") == gained.total("santa_rows_total", method="dense") > 0
    for ask, answer in zip(asks, answers, strict=True):
        assert answer.tokens == busy_server.ask(Ask(ask.prompt, ask.tokens, {"method": "dense"})).tokens


def test_parameters_are_refused(speculating: Server) -> None:
    with pytest.raises(
        openai.BadRequestError, match="santa_method: cannot be followed with speculative decoding on vLLM's V1 model runner"
    ):
        speculating.ask(Ask([1, 2, 3], 4, {"method": "pps"}))
