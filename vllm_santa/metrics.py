"""Counters that leave the workers: written to a small shared file, read by the API server for vLLM's /metrics.

A worker adds to an array mapped from a file that carries the engine's id; the API server's collector reads it when Prometheus asks. No
messages, no flags, and nothing to wait for on the step's path.
"""

import atexit
import os
import tempfile
from collections.abc import Iterable, Iterator
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from prometheus_client import REGISTRY
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from vllm_santa.engine_id import engine_id
from vllm_santa.methods import METHOD_NAMES, Method
from vllm_santa.policy import REASONS
from vllm_santa.policy.budget import MAX_ROWS
from vllm_santa.request_counters import show_request_counters
from vllm_santa.rows import STEP_REASONS, DecodingToken

try:
    from vllm.v1.metrics.loggers import StatLoggerBase
except ImportError:  # without vLLM the counters can still be tested
    StatLoggerBase = object  # type: ignore[assignment,misc]

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ROW_REASONS = (*REASONS, *STEP_REASONS)
_PER_METHOD = {
    "santa_context_tokens": "Context tokens of decoding rows, which dense attention reads all of.",
    "santa_key_rows_read": (
        "Rows of K that decoding rows read, mean over layers and KV heads; with Bernoulli queries, a row counts as the share of its "
        "features that was read."
    ),
    "santa_value_rows_read": "Rows of V that decoding rows read, mean over layers and KV heads.",
    "santa_estimated_rows": "Decoding rows with an error target whose error was estimated.",
    "santa_estimated_error": "Sum of their estimated relative errors of the attention output, mean over layers.",
    "santa_estimated_budget": "Sum of the budgets that their error targets led to.",
    "santa_missed_targets": "Those of them whose estimated error was over the target.",
}
_SINGLE = {
    "santa_ignored_parameters": "Request parameters that reached a worker and could not be read.",
    "santa_reference_rows": "Sparse rows that the torch reference decoded; the others were decoded by CUDA kernels.",
}
_BUDGETS = [str(float(1 << power)) for power in range(MAX_ROWS.bit_length())]
"""Upper bounds of the buckets of `santa_budget`. The largest is the largest budget that there is."""

# (metric, method, reason or bucket) of every slot of the file, in order; empty where it has none.
_SLOTS = [("santa_rows", method, reason) for method in METHOD_NAMES for reason in ROW_REASONS]
_SLOTS += [("santa_budget", method, bound) for method in METHOD_NAMES for bound in (*_BUDGETS, "sum")]
_SLOTS += [(name, method, "") for name in _PER_METHOD for method in METHOD_NAMES]
_SLOTS += [(name, "", "") for name in (*_SINGLE, "santa_codebooks_ready")]
_INDEX = {slot: index for index, slot in enumerate(_SLOTS)}


def _shared_folder() -> str | None:
    """Where several API servers share their metrics. vLLM makes it for them before it starts any process of the server, and shows on
    /metrics what prometheus_client finds there. None with one API server."""
    return os.environ.get("PROMETHEUS_MULTIPROC_DIR")


def _folder() -> Path:
    return Path(_shared_folder() or tempfile.gettempdir()) / f"vllm-santa-{os.getuid()}"


class Counters:
    """One worker's counters; `values` is float64 [slots], shared with whoever reads the file."""

    def __init__(self, values: np.ndarray):
        self.values = values

    @classmethod
    def create(cls, vllm_config: "VllmConfig") -> "Counters":
        """Counters in the file of this worker. Tensor-parallel ranks see the same rows, so only their first is read by anyone."""
        from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank

        if get_tensor_model_parallel_rank() > 0:
            return cls(np.zeros(len(_SLOTS)))
        engine = vllm_config.parallel_config.data_parallel_rank
        _folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        path = _folder() / f"{engine_id(vllm_config)}-{engine}-{get_pp_group().rank_in_group}"
        atexit.register(path.unlink, missing_ok=True)
        return cls(np.memmap(path, dtype=np.float64, mode="w+", shape=(len(_SLOTS),)))

    def count_decoding(self, tokens: Iterable[DecodingToken]) -> None:
        """Count the decoding tokens of a step. Dense rows read all they see."""
        contexts: dict[tuple[Method, int, str], list[int]] = {}
        for _, context, decision in tokens:
            contexts.setdefault((decision.method, decision.budget, decision.reason), []).append(context)
        for (method, budget, reason), seen in contexts.items():
            self.values[_INDEX["santa_rows", method.name, reason]] += len(seen)
            self.values[_INDEX["santa_context_tokens", method.name, ""]] += sum(seen)
            if method is Method.dense:
                self.count_read(method, sum(seen), sum(seen))
            else:
                self._count_budget(method, budget, len(seen))

    def _count_budget(self, method: Method, budget: int, rows: int) -> None:
        bucket = _INDEX["santa_budget", method.name, _BUDGETS[(budget - 1).bit_length()]]
        self.values[bucket] += rows
        self.values[_INDEX["santa_budget", method.name, "sum"]] += rows * budget

    def count_read(self, method: Method, key_rows: float, value_rows: float) -> None:
        """Add rows read; a layer adds its share of the mean over layers."""
        self.values[_INDEX["santa_key_rows_read", method.name, ""]] += key_rows
        self.values[_INDEX["santa_value_rows_read", method.name, ""]] += value_rows

    def count_error(self, method: Method, budget: int, error: float, max_error: float) -> None:
        """Count a row with an error target. An error that is not finite says nothing."""
        if isfinite(error):
            self.values[_INDEX["santa_estimated_rows", method.name, ""]] += 1
            self.values[_INDEX["santa_estimated_error", method.name, ""]] += error
            self.values[_INDEX["santa_estimated_budget", method.name, ""]] += budget
            self.values[_INDEX["santa_missed_targets", method.name, ""]] += error > max_error

    def count_reference_rows(self, count: int) -> None:
        self.values[_INDEX["santa_reference_rows", "", ""]] += count

    def set_ignored(self, count: int) -> None:
        self.values[_INDEX["santa_ignored_parameters", "", ""]] = count

    def set_codebooks_ready(self, ready: bool) -> None:
        self.values[_INDEX["santa_codebooks_ready", "", ""]] = ready


class _WorkerFiles(Collector):
    """Reads the files of one server's workers.

    A single API server has made its engines' configuration itself and knows its id. Of several, each has a configuration of its own, with
    another id than the engines'; but their folder holds no other server's files.
    """

    def __init__(self, instance_id: str):
        self._pattern = "*-*-*" if _shared_folder() else f"{instance_id}-*"

    def _engines(self) -> dict[str, np.ndarray]:
        """Counters by data-parallel rank, [pipeline stages, slots]."""
        stages: dict[str, list[np.ndarray]] = {}
        for path in sorted(_folder().glob(self._pattern)):
            values = np.fromfile(path, dtype=np.float64)
            if len(values) == len(_SLOTS):
                stages.setdefault(path.name.split("-")[1], []).append(values)
        return {engine: np.stack(parts) for engine, parts in stages.items()}

    def remove(self) -> None:
        """Delete the files; workers that were killed could not."""
        for path in _folder().glob(self._pattern):
            path.unlink(missing_ok=True)

    def describe(self) -> Iterable[Metric]:
        return []  # nothing to check at registration: the workers' files are not there yet

    def collect(self) -> Iterator[Metric]:
        rows = CounterMetricFamily("santa_rows", "Decoding rows by method, and why they got it.", labels=["engine", "method", "reason"])
        read = {name: CounterMetricFamily(name, text, labels=["engine", "method"]) for name, text in _PER_METHOD.items()}
        single = {name: CounterMetricFamily(name, text, labels=["engine"]) for name, text in _SINGLE.items()}
        ready = GaugeMetricFamily("santa_codebooks_ready", "1 once every sparse layer has PQ codebooks.", labels=["engine"])
        budgets = HistogramMetricFamily(
            "santa_budget", "Budgets of sparse decoding rows, as their method counts.", labels=["engine", "method"]
        )
        for engine, stages in self._engines().items():
            values = stages.mean(0)  # each stage decodes every row, in its own layers
            _add_budgets(budgets, engine, values)
            for (name, method, reason), value, least in zip(_SLOTS, values, stages.min(0), strict=True):
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
        counts = np.cumsum([values[_INDEX["santa_budget", method, bound]] for bound in _BUDGETS])
        if counts[-1] > 0:
            buckets = [*zip(_BUDGETS, counts, strict=True), ("+Inf", counts[-1])]
            family.add_metric([engine, method], buckets, values[_INDEX["santa_budget", method, "sum"]])


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
            if _shared_folder():
                _collect_with_others(files)
            else:
                REGISTRY.register(files)
                atexit.register(files.remove)

    def record(self, scheduler_stats: object, iteration_stats: object, mm_cache_stats: object = None, engine_idx: int = 0) -> None:
        """Nothing to do: the collector reads when asked."""

    def log_engine_initialized(self) -> None:
        """Nothing to add to vLLM's own line."""
