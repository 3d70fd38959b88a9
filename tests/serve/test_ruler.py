"""The RULER client against the main server: every configuration does as asked, one prefill serves them all, and runs can be repeated."""

from pathlib import Path

import openai
import pytest
from rich.console import Console
from server import Server
from tiny_model import prompt

from benchmarks.quality.ruler.answers import AnswerFile
from benchmarks.quality.ruler.asking import ask_all
from benchmarks.quality.ruler.prompts import Prompt
from benchmarks.quality.ruler.server import Server as RulerServer

CONFIGURATIONS = ["dense", "flash-256", "pps-64", "ssa-20x", "topk-20x"]
TOKENS = 700


def prompts(first_seed: int) -> list[Prompt]:
    """Two texts of 700 tokens, one a character."""
    texts = ["".join(chr(97 + byte % 26) for byte in prompt(TOKENS, seed)) for seed in (first_seed, first_seed + 1)]
    return [Prompt("fwe", 1024, index, text, ["abc"], TOKENS, 12) for index, text in enumerate(texts)]


def test_a_run(server: Server, tmp_path: Path) -> None:
    client = RulerServer(server.url, chat=False)
    assert client.max_model_len == 2048 and client.runs_santa()
    first, second = (AnswerFile(tmp_path / f"{name}.jsonl", {"run": name}) for name in ("first", "second"))
    with server.counting() as gained:
        ask_all(client, prompts(700), CONFIGURATIONS, first, concurrency=1, console=Console(quiet=True))
    assert len(first.done) == 10
    for method in ("flash", "pps", "ssa", "topk"):
        tokens = [answer.tokens for answer in first.done.values() if answer.configuration.startswith(method)]
        assert gained.total("santa_rows_total", method=method, reason="request") == sum(tokens) - 2
    assert gained.total("vllm:prefix_cache_hits_total") >= 2 * 4 * (TOKENS - 16), "one prefill serves all configurations of a prompt"
    ask_all(client, prompts(700), CONFIGURATIONS, second, concurrency=1, console=Console(quiet=True))
    same = sum(answer.text == second.done[key].text for key, answer in first.done.items())
    assert same >= 9, "the seeds are the samples' own; a rounding may part one answer in many"
    assert len({answer.text for answer in first.done.values() if answer.index == 0}) > 2, "configurations differ"


def test_what_the_policy_refuses_ends_the_run(server: Server, tmp_path: Path) -> None:
    client, file = RulerServer(server.url, chat=False), AnswerFile(tmp_path / "answers.jsonl", {"run": "refused"})
    with pytest.raises(openai.BadRequestError, match="santa_method: 'prop' is not allowed by this server's policy"):
        ask_all(client, prompts(710), ["dense", "prop-64"], file, concurrency=1, console=Console(quiet=True))
    assert [answer.configuration for answer in file.done.values()] == ["dense"]
