"""Counters: from a worker's step to the samples that Prometheus scrapes, through a file."""

import stat
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Histogram
from prometheus_client.multiprocess import MultiProcessCollector

from vllm_santa import metrics
from vllm_santa.counters import BUDGETS, ROW_REASONS, Counters
from vllm_santa.methods import BernoulliSettings, Method
from vllm_santa.policy import Decision
from vllm_santa.rows import DecodingToken

vllm_distributed = pytest.importorskip("vllm.distributed")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch):
    """Counters of a worker: worker(tensor-parallel rank, pipeline rank, data-parallel rank)."""

    def create(tensor: int = 0, pipeline: int = 0, data: int = 0, instance: str = "abc") -> Counters:
        monkeypatch.setattr(vllm_distributed, "get_tensor_model_parallel_rank", lambda: tensor)
        monkeypatch.setattr(vllm_distributed, "get_pp_group", lambda: SimpleNamespace(rank_in_group=pipeline))
        return Counters.create(SimpleNamespace(instance_id=instance, parallel_config=SimpleNamespace(data_parallel_rank=data)))

    return create


def scrape(instance: str = "abc") -> dict[tuple[str, ...], float]:
    """Samples that are not zero: (name, label values in the order of their names) -> value."""
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in metrics._WorkerFiles(instance).collect()
        for sample in family.samples
        if sample.value
    }


STEP = [
    DecodingToken(0, 1000, Decision(Method.pps, 64, "request", BernoulliSettings(4))),
    DecodingToken(1, 500, Decision(Method.dense, 0, "no_rule")),
    DecodingToken(2, 700, Decision(Method.dense, 0, "no_codebook")),
]


def test_round_trip(worker) -> None:
    counters = worker()
    counters.count_decoding(STEP)
    counters.count_decoding(STEP[:1])
    for _layer in range(2):
        counters.count_read(Method.pps, 1000 / 2, 63.5 / 2)
    counters.set_ignored(3)
    counters.set_codebooks_ready(True)
    assert scrape() == {
        ("santa_rows_total", "0", "pps", "request"): 2,
        ("santa_rows_total", "0", "dense", "no_rule"): 1,
        ("santa_rows_total", "0", "dense", "no_codebook"): 1,
        **{("santa_budget_bucket", "0", le, "pps"): 2 for le in (*BUDGETS[6:], "+Inf")},  # 64 and above
        ("santa_budget_count", "0", "pps"): 2,
        ("santa_budget_sum", "0", "pps"): 128,
        ("santa_context_tokens_total", "0", "pps"): 2000,
        ("santa_context_tokens_total", "0", "dense"): 1200,
        ("santa_key_rows_read_total", "0", "pps"): 1000,
        ("santa_value_rows_read_total", "0", "pps"): 63.5,
        ("santa_key_rows_read_total", "0", "dense"): 1200,
        ("santa_value_rows_read_total", "0", "dense"): 1200,
        ("santa_ignored_parameters_total", "0"): 3,
        ("santa_codebooks_ready", "0"): 1,
    }


def test_budgets_lie_in_the_buckets_of_their_size(worker) -> None:
    """Against a histogram of prometheus_client that was given the same budgets."""
    counters, budgets = worker(), [1, 2, 3, 4, 5, 63, 64, 65, 1000, 2**18 - 1, 2**18]
    theirs = Histogram("theirs", "", buckets=[float(bound) for bound in BUDGETS], registry=None)
    for budget in budgets:
        counters.count_decoding([DecodingToken(0, 2**19, Decision(Method.ssa, budget, "rule"))])
        theirs.observe(budget)
    ours = scrape()
    assert len(BUDGETS) == 19
    for sample in next(iter(theirs.collect())).samples:
        if not sample.name.endswith("_created"):
            key = (sample.name.replace("theirs", "santa_budget"), "0", *sample.labels.values(), "ssa")
            assert ours.get(key, 0) == sample.value, key


def test_every_decision_has_a_counter(worker) -> None:
    counters = worker()
    for reason in ROW_REASONS:
        counters.count_decoding([DecodingToken(0, 10, Decision(method, 1, reason)) for method in Method])
    assert sum(value for (name, *_), value in scrape().items() if name == "santa_rows_total") == len(Method) * len(ROW_REASONS)


def test_pipeline_stages_count_a_row_once_and_engines_stay_apart(worker) -> None:
    """A stage's reads are the mean over its layers; so the mean over stages is that over the model's."""
    for pipeline, data, rows in ((0, 0, 10.0), (1, 0, 20.0), (0, 1, 5.0)):
        counters = worker(pipeline=pipeline, data=data)
        counters.count_decoding([DecodingToken(0, 100, Decision(Method.ssa, 12, "rule"))])
        counters.count_read(Method.ssa, rows, rows)
        counters.set_codebooks_ready(pipeline == 0)
    found = scrape()
    assert found["santa_rows_total", "0", "ssa", "rule"] == found["santa_budget_count", "0", "ssa"] == 1
    assert found["santa_context_tokens_total", "0", "ssa"] == 100
    assert found["santa_value_rows_read_total", "0", "ssa"] == 15
    assert found["santa_value_rows_read_total", "1", "ssa"] == 5
    assert ("santa_codebooks_ready", "0") not in found, "one stage of engine 0 has none yet"
    assert found["santa_codebooks_ready", "1"] == 1


def test_other_tensor_parallel_ranks_are_not_counted_again(worker, folder: Path) -> None:
    worker(tensor=1).count_decoding(STEP)
    assert scrape() == {}
    assert not list(folder.rglob("abc-*"))


def test_a_file_of_another_kind_is_left_out(worker, folder: Path) -> None:
    worker().count_decoding(STEP)
    (path,) = folder.rglob("abc-*")
    path.write_bytes(path.read_bytes()[:-8])
    assert scrape() == {}


def test_other_engines_are_not_mixed_in(worker) -> None:
    worker(instance="abc").count_read(Method.ssa, 1, 1)
    worker(instance="xyz").count_read(Method.ssa, 2, 2)
    assert scrape("xyz")["santa_value_rows_read_total", "0", "ssa"] == 2


def test_the_folder_is_private_and_files_can_be_removed(worker, folder: Path) -> None:
    worker()
    (path,) = folder.rglob("abc-*")
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    metrics._WorkerFiles("abc").remove()
    assert not path.exists()


@pytest.mark.parametrize(("backend", "registers"), [("SANTA", True), ("CPU_ATTN", False), (None, False)])
def test_only_a_server_on_santa_shows_counters(monkeypatch: pytest.MonkeyPatch, backend: str | None, registers: bool) -> None:
    registered: list[object] = []
    monkeypatch.setattr(REGISTRY, "register", registered.append)
    monkeypatch.setattr(metrics.atexit, "register", lambda *_: None)
    monkeypatch.setattr(metrics.SantaStatLogger, "_collected", set())
    attention = SimpleNamespace(backend=backend and SimpleNamespace(name=backend), backend_per_kind=None)
    monkeypatch.setattr(metrics, "show_request_counters", lambda: None)
    for engine in range(2):  # vLLM makes a logger for each data-parallel engine
        metrics.SantaStatLogger(SimpleNamespace(instance_id="abc", attention_config=attention), engine)
    assert len(registered) == int(registers)


def test_each_of_several_api_servers_shows_the_same_counters(worker, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have configurations, and ids, of their own; what they share with the workers is vLLM's folder for their metrics."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(folder / "shared"))
    monkeypatch.setattr(MultiProcessCollector, "collect", MultiProcessCollector.collect)  # undone at the end
    monkeypatch.setattr(metrics.SantaStatLogger, "_collected", set())
    (folder / "shared").mkdir()
    worker(instance="engines").count_read(Method.ssa, 1, 2)
    worker(instance="engines", data=1).count_read(Method.ssa, 3, 4)
    attention = SimpleNamespace(backend=SimpleNamespace(name="SANTA"), backend_per_kind=None)
    metrics.SantaStatLogger(SimpleNamespace(instance_id="server", attention_config=attention))
    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # as vLLM does when it makes its app
    for engine, rows in (("0", 2), ("1", 4)):
        assert registry.get_sample_value("santa_value_rows_read_total", {"engine": engine, "method": "ssa"}) == rows
