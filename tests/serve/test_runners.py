"""The same answers from every way to run the model: vLLM's V2 runner, and two tensor-parallel workers, against the main server."""

import os
from pathlib import Path

import pytest
from server import ENVIRONMENT, HERE, Answer, Ask, Server, assert_same
from tiny_model import prompt

METHODS = ("pps", "ssa", "ssa_fixed", "uniform_tail", "santa", "strat", "flash", "topk")


def asks() -> list[Ask]:
    """Two of each method."""
    return [Ask(prompt(300 + 7 * i, 600 + i), 6, {"method": method, "budget": 24, "seed": 70 + i}) for i, method in enumerate(METHODS * 2)]


@pytest.fixture(scope="module")
def expected(server: Server) -> list[Answer]:
    """The main server's answers: V1 runner, one worker."""
    assert "using the V1 model runner" in server.log.read_text()
    with server.counting() as gained:
        answers = server.ask_together(asks())
    for method in METHODS:
        assert gained.total("santa_rows_total", method=method, reason="request") >= 10
    return answers


def test_v2_runner(model: Path, policy: Path, logs: Path, expected: list[Answer]) -> None:
    """Its rows are sorted anew every step, and slots are used again: four times as many requests as slots."""
    path = os.pathsep.join((str(HERE / "triton_interpreter"), ENVIRONMENT["PYTHONPATH"]))
    options = ("--attention-backend", "santa", "--max-model-len", "1024", "--max-num-seqs", "4")
    with Server(model, logs / "v2.log", *options, SANTA_POLICY=str(policy), PYTHONPATH=path) as v2:
        assert "using the V1 model runner" not in v2.log.read_text()
        with v2.counting() as gained:
            answers = v2.ask_together(asks())
        for method in METHODS:
            assert gained.total("santa_rows_total", method=method, reason="request") == 2 * 5
    assert_same(asks(), answers, expected)


def test_tensor_parallel(model: Path, policy: Path, logs: Path, expected: list[Answer]) -> None:
    """Two workers with a KV head each draw what one worker draws for both."""
    options = ("--attention-backend", "santa", "--max-model-len", "1024", "--tensor-parallel-size", "2")
    with Server(model, logs / "tp2.log", *options, SANTA_POLICY=str(policy)) as pair:
        with pair.counting() as gained:
            answers = pair.ask_together(asks())
        assert gained.total("santa_rows_total", method="topk") == 2 * 5, "the two workers count a row once"
    assert_same(asks(), answers, expected)
