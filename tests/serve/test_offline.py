"""vLLM without a server: `LLM(attention_backend="santa")` in a program of its own gives the main server's answers."""

import json
import os
import subprocess
import sys
from pathlib import Path

from server import ENVIRONMENT, HERE, Answer, Ask, Server, assert_same
from tiny_model import prompt


def test_llm(model: Path, policy: Path, server: Server, tmp_path: Path) -> None:
    environment = os.environ | ENVIRONMENT | {"SANTA_POLICY": str(policy)}
    program = [sys.executable, str(HERE / "offline_program.py"), str(model), str(tmp_path / "result.json")]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-5000:]
    result = json.loads((tmp_path / "result.json").read_text())
    asks = [
        Ask(prompt(300, 600), 12, {"method": "pps", "budget": 24, "seed": 5}),
        Ask(prompt(300, 601), 12, {"method": "topk", "budget": "10%"}),
    ]
    assert_same(asks, [Answer(*answer) for answer in result["answers"]], [server.ask(ask) for ask in asks])
    assert "santa_budget: 0 is not a budget" in result["refused"]
