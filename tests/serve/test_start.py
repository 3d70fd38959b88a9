"""What must not start does not, and says why."""

from pathlib import Path

import pytest
import tiny_model
from server import Server

pytest.importorskip("vllm")
from vllm import EngineArgs  # noqa: E402


def refusal(model: Path, log: Path, policy: Path) -> str:
    return Server(model, log, "--attention-backend", "santa", "--max-model-len", "1024", SANTA_POLICY=str(policy)).run_to_failure()


def test_a_policy_with_mistakes(model: Path, logs: Path, tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("sink: 16\nrules:\n  - method: psp\n    budget: 0\n")
    said = refusal(model, logs / "policy.log", policy)
    assert f"{policy}:3: rules[0].method: 'psp': not a method; allowed: one of dense, santa" in said
    assert f"{policy}:4: rules[0].budget: 0: not a budget; allowed: rows as an integer from 1 to 262144" in said


def test_codebooks_of_another_model(model: Path, logs: Path, tmp_path: Path) -> None:
    policy, codebooks = tmp_path / "policy.yaml", tmp_path / "codebooks.safetensors"
    tiny_model.build_codebooks(model, codebooks, subspaces=8)
    policy.write_text(f"codebooks: {codebooks.name}\n")
    said = refusal(model, logs / "codebooks.log", policy)
    assert f"{codebooks}: subspaces is 8, but the policy says 16; set `subspaces: 8` in the policy" in said


def test_missing_codebooks(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration alone is enough to refuse: this is where `vllm serve` stops, before it starts an engine."""
    policy = tmp_path / "policy.yaml"
    policy.write_text("codebooks: none.safetensors\n")
    monkeypatch.setenv("SANTA_POLICY", str(policy))
    with pytest.raises(ValueError, match=f"codebooks: no such file: {tmp_path / 'none.safetensors'}; allowed: null, or the path"):
        EngineArgs(model=str(model), attention_backend="santa", max_model_len=1024).create_engine_config()
    EngineArgs(model=str(model), max_model_len=1024).create_engine_config()  # nobody else minds
