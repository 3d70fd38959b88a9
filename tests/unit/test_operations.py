"""docs/operations.md and examples/grafana.json speak of the metrics that there are."""

import json
import re
from pathlib import Path

import pytest

from vllm_santa.rows import STEP_REASONS

ROOT = Path(__file__).parents[2]


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, set[str]]:
    """Names of the samples on /metrics, and their labels."""
    import numpy as np

    from vllm_santa import metrics

    monkeypatch.setattr(metrics.tempfile, "gettempdir", lambda: str(tmp_path))
    metrics._folder().mkdir()
    np.ones(len(metrics._SLOTS)).tofile(metrics._folder() / "abc-0-0")
    samples = [sample for family in metrics._WorkerFiles("abc").collect() for sample in family.samples]
    return {sample.name: set(sample.labels) for sample in samples}


def test_the_table_of_metrics(exported: dict[str, set[str]]) -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    described = {
        name: set(re.findall(r"`(\w+)`", labels)) for name, labels in re.findall(r"^\| `(santa_\w+)` \|(.*?)\|", text, re.MULTILINE)
    }
    assert described == {name: labels - {"engine"} for name, labels in exported.items()}
    assert set(re.findall(r"santa_\w+", text)) <= exported.keys() | {"santa_seed"}
    for reason, meaning in STEP_REASONS.items():
        assert f"- `{reason}`: {meaning}." in text


def test_the_dashboard(exported: dict[str, set[str]]) -> None:
    dashboard = json.loads((ROOT / "examples" / "grafana.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    shown = {name for expression in expressions for name in re.findall(r"santa_\w+", expression)}
    assert shown == exported.keys(), "every metric, and no other"
    for expression in expressions:
        assert expression.count("(") == expression.count(")") and expression.count("{") == expression.count("}")
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
