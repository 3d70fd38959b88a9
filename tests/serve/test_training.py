"""A server without a codebook file trains its own from the first prompts. The backend is chosen by `--attention-config.backend` here."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from server import Ask, Server
from tiny_model import prompt

POLICY = """
rules:
  - context: {min: 100}
    method: ssa
    budget: 32
sink: 16
local: 16
training_tokens: 600
base_seed: 11
"""


@pytest.fixture(scope="module")
def untrained(model: Path, logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    policy = tmp_path_factory.mktemp("policy") / "training.yaml"
    policy.write_text(POLICY)
    options = (
        "--attention-config.backend", "santa", "--max-model-len", "2048", "--max-num-batched-tokens", "512",
        "--additional-config", f'{{"santa": {{"policy": "{policy}"}}}}', "--worker-extension-cls", "cache_probe.CacheProbe",
    )  # fmt: skip
    with Server(model, logs / "training.log", *options, VLLM_SERVER_DEV_MODE="1") as server:
        yield server


def test_from_dense_to_sparse(untrained: Server) -> None:
    """One story, in order: dense for want of a codebook, trained by prompts, sparse, and the tokens from before have codes too."""
    untrained.rpc("poison_cache")
    first = Ask(prompt(500, 1), 9)
    with untrained.counting() as gained:
        before = untrained.ask(first)
    assert gained.after.total("santa_codebooks_ready") == 0
    assert gained.total("santa_rows_total", method="dense", reason="no_codebook") == 8
    assert "methods with PQ codes decode densely until 600 prompt tokens have passed" in untrained.log.read_text()

    with untrained.counting() as gained:  # 500 + 300 prompt tokens
        untrained.ask(Ask(prompt(300, 2), 9))
    assert gained.after.total("santa_codebooks_ready") == 1
    assert gained.total("santa_rows_total", method="ssa", reason="rule") == 8
    assert len(re.findall("Codebooks trained from 600 prompt tokens for 2 layers", untrained.log.read_text())) == 1

    with untrained.counting() as gained:  # its prompt comes from the cache, written before there were codes
        after = untrained.ask(first)
    assert gained.total("vllm:prefix_cache_hits_total") > 300
    assert gained.total("santa_rows_total", method="ssa", reason="rule") == 8
    assert gained.total("santa_value_rows_read_total", method="ssa") == pytest.approx(8 * 64, abs=8)
    assert after.agreement(before) < 4
    (codes,) = untrained.rpc("check_codes")
    assert codes["written"] > 2 * 600, "the blocks of the first two prompts are still there"
    assert codes["excess"] < 1e-3

    repeated = untrained.ask(first)
    assert repeated.agreement(after) == 9, "the policy's base_seed serves requests without a seed"
