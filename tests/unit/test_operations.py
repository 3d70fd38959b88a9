"""docs/operations.md and examples/grafana.json speak of the metrics that there are."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from vllm_santa.rows import STEP_REASONS

ROOT = Path(__file__).parents[2]


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, set[str]]:
    """Names of the samples on /metrics, and their labels. Of a histogram, its buckets stand for it."""
    import numpy as np

    from vllm_santa import counters, metrics, request_counters

    monkeypatch.setattr(counters.tempfile, "gettempdir", lambda: str(tmp_path))
    counters.counters_folder().mkdir()
    np.ones(len(counters.SLOTS)).tofile(counters.counters_folder() / "abc-0-0")
    monkeypatch.setattr(request_counters, "REGISTRY", CollectorRegistry())
    request_counters.show_request_counters.__wrapped__()
    families = [*metrics._WorkerFiles("abc").collect(), *request_counters.REFUSED.collect(), *request_counters.CLAMPED.collect()]
    samples = [sample for family in families for sample in family.samples]
    return {sample.name: set(sample.labels) for sample in samples if not sample.name.endswith(("_sum", "_count", "_created"))}


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
