"""The servers. The main one lives as long as the session; others as long as the module that tests them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from server import Server

POLICY = """
sink: 16
local: 16
default_budget: 64
codebooks: {codebooks}
requests:
  methods: [dense, santa, strat, sys, flash, pps, ssa, ssa_fixed, topk, uniform_tail]  # all but prop
  budget: {{min: 8, max: 512}}
"""


@pytest.fixture(scope="session")
def policy(codebooks: Path) -> Path:
    """Rows are dense unless a request asks for more; codebooks come from a file."""
    path = codebooks.with_name("policy.yaml")
    path.write_text(POLICY.format(codebooks=codebooks))
    return path


@pytest.fixture(scope="session")
def server(model: Path, policy: Path, logs: Path) -> Iterator[Server]:
    """The main server: a pool of 2,560 tokens in blocks of 16, prompts in chunks of 256, workers that can look into their cache."""
    options = (
        "--attention-backend", "santa", "--max-model-len", "2048", "--block-size", "16", "--num-gpu-blocks-override", "160",
        "--max-num-batched-tokens", "256", "--max-num-seqs", "8", "--worker-extension-cls", "cache_probe.CacheProbe",
    )  # fmt: skip
    with Server(model, logs / "main.log", *options, SANTA_POLICY=str(policy), VLLM_SERVER_DEV_MODE="1") as server:
        yield server
