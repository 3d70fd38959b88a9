"""The workers' counters on vLLM's /metrics: read from their files (counters.py) when Prometheus asks."""

import atexit
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from prometheus_client import REGISTRY
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from vllm_santa.counters import BUDGETS, INDEX, PER_METHOD, SINGLE, SLOTS, counters_folder, shared_folder
from vllm_santa.engine_id import engine_id
from vllm_santa.methods import METHOD_NAMES
from vllm_santa.request_counters import show_request_counters

try:
    from vllm.v1.metrics.loggers import StatLoggerBase
except ImportError:  # without vLLM the counters can still be tested
    StatLoggerBase = object  # type: ignore[assignment,misc]

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class _WorkerFiles(Collector):
    """Reads the files of one server's workers.

    A single API server has made its engines' configuration itself and knows its id. Of several, each has a configuration of its own, with
    another id than the engines'; but their folder holds no other server's files.
    """

    def __init__(self, instance_id: str):
        self._pattern = "*-*-*" if shared_folder() else f"{instance_id}-*"

    def _engines(self) -> dict[str, np.ndarray]:
        """Counters by data-parallel rank, [pipeline stages, slots]."""
        stages: dict[str, list[np.ndarray]] = {}
        for path in sorted(counters_folder().glob(self._pattern)):
            values = np.fromfile(path, dtype=np.float64)
            if len(values) == len(SLOTS):
                stages.setdefault(path.name.split("-")[1], []).append(values)
        return {engine: np.stack(parts) for engine, parts in stages.items()}

    def remove(self) -> None:
        """Delete the files; workers that were killed could not."""
        for path in counters_folder().glob(self._pattern):
            path.unlink(missing_ok=True)

    def describe(self) -> Iterable[Metric]:
        return []  # nothing to check at registration: the workers' files are not there yet

    def collect(self) -> Iterator[Metric]:
        rows = CounterMetricFamily("santa_rows", "Decoding rows by method, and why they got it.", labels=["engine", "method", "reason"])
        read = {name: CounterMetricFamily(name, text, labels=["engine", "method"]) for name, text in PER_METHOD.items()}
        single = {name: CounterMetricFamily(name, text, labels=["engine"]) for name, text in SINGLE.items()}
        ready = GaugeMetricFamily("santa_codebooks_ready", "1 once every sparse layer has PQ codebooks.", labels=["engine"])
        budgets = HistogramMetricFamily(
            "santa_budget", "Budgets of sparse decoding rows, as their method counts.", labels=["engine", "method"]
        )
        for engine, stages in self._engines().items():
            values = stages.mean(0)  # each stage decodes every row, in its own layers
            _add_budgets(budgets, engine, values)
            for (name, method, reason), value, least in zip(SLOTS, values, stages.min(0), strict=True):
                if name == "santa_codebooks_ready":
                    ready.add_metric([engine], least)
                elif name in single:
                    single[name].add_metric([engine], value)
                elif name in read:
                    read[name].add_metric([engine, method], value)
                elif name == "santa_rows" and value > 0:  # most pairs of method and reason never occur
                    rows.add_metric([engine, method, reason], value)
        yield from (rows, budgets, *read.values(), *single.values(), ready)


def _add_budgets(family: HistogramMetricFamily, engine: str, values: np.ndarray) -> None:
    """Add the methods that rows got: Prometheus counts a row in every bucket from its own on."""
    for method in METHOD_NAMES:
        counts = np.cumsum([values[INDEX["santa_budget", method, bound]] for bound in BUDGETS])
        if counts[-1] > 0:
            buckets = [*zip(BUDGETS, counts, strict=True), ("+Inf", counts[-1])]
            family.add_metric([engine, method], buckets, values[INDEX["santa_budget", method, "sum"]])


def rows_by_method(instance_id: str) -> dict[str, float]:
    """Decoding rows so far by the method they got, over all workers of an engine."""
    rows: dict[str, float] = {}
    for metric in _WorkerFiles(instance_id).collect():
        if metric.name == "santa_rows":
            for sample in metric.samples:
                rows[sample.labels["method"]] = rows.get(sample.labels["method"], 0.0) + sample.value
    return rows


def _collect_with_others(files: Collector) -> None:
    """Show the files wherever prometheus_client gathers the metrics of several processes: vLLM then makes a registry of its own for
    /metrics, and later than this."""
    original = MultiProcessCollector.collect

    def collect(self: MultiProcessCollector) -> Iterator[Metric]:
        yield from original(self)
        yield from files.collect()

    MultiProcessCollector.collect = collect  # type: ignore[method-assign]


class SantaStatLogger(StatLoggerBase):  # type: ignore[misc,valid-type]
    """Puts our counters on /metrics (entry point `vllm.stat_logger_plugins`). Does nothing on servers with another backend."""

    _collected: set[str] = set()

    def __init__(self, vllm_config: "VllmConfig", engine_index: int = 0):
        from vllm_santa.front import runs_santa

        instance_id = engine_id(vllm_config)
        if runs_santa(vllm_config) and instance_id not in self._collected:
            self._collected.add(instance_id)
            show_request_counters()
            files = _WorkerFiles(instance_id)
            if shared_folder():
                _collect_with_others(files)
            else:
                REGISTRY.register(files)
                atexit.register(files.remove)

    def record(self, scheduler_stats: object, iteration_stats: object, mm_cache_stats: object = None, engine_idx: int = 0) -> None:
        """Nothing to do: the collector reads when asked."""

    def log_engine_initialized(self) -> None:
        """Nothing to add to vLLM's own line."""
