"""Two API servers before one engine: parameters are checked by both, and either shows the counters of both and of the engine."""

from pathlib import Path

import httpx
import openai
import pytest
from server import Ask, Metrics, Server
from tiny_model import prompt


def test_two_api_servers(model: Path, policy: Path, logs: Path) -> None:
    options = ("--attention-backend", "santa", "--max-model-len", "1024", "--api-server-count", "2")
    with Server(model, logs / "two.log", *options, SANTA_POLICY=str(policy)) as two:
        two.ask_together([Ask(prompt(300, i), 9, {"method": "topk", "budget": 16, "seed": i}) for i in range(8)])
        for refused in range(1, 9):  # the kernel gives a connection to either
            metrics = Metrics(httpx.get(f"{two.url}/metrics").text)
            assert metrics.total("santa_rows_total", method="topk", reason="request") == 8 * 8
            assert metrics.total("santa_budget_bucket", method="topk", le="16.0") == 8 * 8
            assert metrics.total("santa_key_rows_read_total", method="topk") == pytest.approx(8 * 8 * 48)
            with pytest.raises(openai.BadRequestError, match="santa_budget: 0 is not a budget"):
                two.ask(Ask([1, 2, 3], 4, {"budget": 0}))
            counted = Metrics(httpx.get(f"{two.url}/metrics").text)
            assert counted.total("santa_refused_parameters_total") == refused, "by both servers together"
            assert counted.total("santa_refused_parameters_total", parameter="santa_budget") == refused
