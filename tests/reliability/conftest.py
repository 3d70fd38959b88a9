"""The server that the traffic runs on: its cache holds exactly one request of full length."""

import os
from collections.abc import Iterator
from pathlib import Path

import jobs
import pytest
import tiny_model
from server import ENVIRONMENT, Server

HERE = Path(__file__).parent
BLOCK = 16
OPTIONS = (
    "--attention-backend", "santa", "--max-model-len", str(jobs.LIMIT), "--block-size", str(BLOCK), "--max-num-batched-tokens", "256",
    "--max-num-seqs", "8", "--worker-extension-cls", "row_probe.RowProbe",
    "--num-gpu-blocks-override", str(jobs.LIMIT // BLOCK + 1),  # vLLM keeps one block to itself
)  # fmt: skip


@pytest.fixture(scope="session")
def busy_server(model: Path, codebooks: Path, logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    adapter = tmp_path_factory.mktemp("adapter")
    tiny_model.build_adapter(adapter)
    # Two slots for one adapter: on vLLM's CPU build base rows get what the last slot holds (docs/compatibility.md).
    options = (*OPTIONS, "--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--lora-modules", f"{jobs.ADAPTER}={adapter}")
    policy = codebooks.with_name("traffic.yaml")
    policy.write_text(jobs.POLICY.format(codebooks=codebooks))
    path = os.pathsep.join((str(HERE), ENVIRONMENT["PYTHONPATH"]))
    with Server(model, logs / "traffic.log", *options, SANTA_POLICY=str(policy), VLLM_SERVER_DEV_MODE="1", PYTHONPATH=path) as server:
        yield server
