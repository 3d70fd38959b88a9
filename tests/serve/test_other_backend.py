"""A server on another backend, in an environment where vllm-santa is installed: nothing changes, and santa_* parameters are refused."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from server import Ask, Server
from tiny_model import prompt


@pytest.fixture(scope="module")
def other(model: Path, logs: Path) -> Iterator[Server]:
    with Server(model, logs / "other.log", "--max-model-len", "2048", SANTA_POLICY="/does/not/exist.yaml") as server:
        yield server


def test_the_default_backend_answers_as_santa_does_densely(other: Server, server: Server) -> None:
    ask = Ask(prompt(500, 1), 16)
    assert other.ask(ask).agreement(server.ask(ask)) == 16


def test_it_knows_nothing_of_santa(other: Server) -> None:
    assert not [name for name in other.metrics().names() if name.startswith("santa_")]
    log = other.log.read_text()
    assert "SANTA policy" not in log and "SANTA backend" not in log and "odebooks" not in log


def test_parameters_are_refused(other: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="santa_method: this server does not run --attention-backend santa"):
        other.ask(Ask([1, 2, 3], 4, {"method": "pps"}))
    assert other.healthy()
