"""Counters of a worker, in a small file that the API server reads (metrics.py).

A worker adds to an array mapped from a file that carries the engine's id. No messages, no flags, and nothing to wait for on the step's
path.
"""

import atexit
import os
import tempfile
from collections.abc import Iterable
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vllm_santa.engine_id import engine_id
from vllm_santa.methods import METHOD_NAMES, Method
from vllm_santa.policy import REASONS
from vllm_santa.policy.budget import MAX_ROWS
from vllm_santa.rows import STEP_REASONS, DecodingToken

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ROW_REASONS = (*REASONS, *STEP_REASONS)
PER_METHOD = {
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
SINGLE = {
    "santa_ignored_parameters": "Request parameters that reached a worker and could not be read.",
    "santa_reference_rows": "Sparse rows that the torch reference decoded; the others were decoded by CUDA kernels.",
}
BUDGETS = [str(float(1 << power)) for power in range(MAX_ROWS.bit_length())]
"""Upper bounds of the buckets of `santa_budget`. The largest is the largest budget that there is."""

# (metric, method, reason or bucket) of every slot of the file, in order; empty where it has none.
SLOTS = [("santa_rows", method, reason) for method in METHOD_NAMES for reason in ROW_REASONS]
SLOTS += [("santa_budget", method, bound) for method in METHOD_NAMES for bound in (*BUDGETS, "sum")]
SLOTS += [(name, method, "") for name in PER_METHOD for method in METHOD_NAMES]
SLOTS += [(name, "", "") for name in (*SINGLE, "santa_codebooks_ready")]
INDEX = {slot: index for index, slot in enumerate(SLOTS)}


def shared_folder() -> str | None:
    """Where several API servers share their metrics. vLLM makes it for them before it starts any process of the server, and shows on
    /metrics what prometheus_client finds there. None with one API server."""
    return os.environ.get("PROMETHEUS_MULTIPROC_DIR")


def counters_folder() -> Path:
    return Path(shared_folder() or tempfile.gettempdir()) / f"vllm-santa-{os.getuid()}"


class Counters:
    """One worker's counters; `values` is float64 [slots], shared with whoever reads the file."""

    def __init__(self, values: np.ndarray):
        self.values = values

    @classmethod
    def create(cls, vllm_config: "VllmConfig") -> "Counters":
        """Counters in the file of this worker. Tensor-parallel ranks see the same rows, so only their first is read by anyone."""
        from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank

        if get_tensor_model_parallel_rank() > 0:
            return cls(np.zeros(len(SLOTS)))
        engine = vllm_config.parallel_config.data_parallel_rank
        counters_folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        path = counters_folder() / f"{engine_id(vllm_config)}-{engine}-{get_pp_group().rank_in_group}"
        atexit.register(path.unlink, missing_ok=True)
        return cls(np.memmap(path, dtype=np.float64, mode="w+", shape=(len(SLOTS),)))

    def count_decoding(self, tokens: Iterable[DecodingToken]) -> None:
        """Count the decoding tokens of a step. Dense rows read all they see."""
        contexts: dict[tuple[Method, int, str], list[int]] = {}
        for _, context, decision in tokens:
            contexts.setdefault((decision.method, decision.budget, decision.reason), []).append(context)
        for (method, budget, reason), seen in contexts.items():
            self.values[INDEX["santa_rows", method.name, reason]] += len(seen)
            self.values[INDEX["santa_context_tokens", method.name, ""]] += sum(seen)
            if method is Method.dense:
                self.count_read(method, sum(seen), sum(seen))
            else:
                self._count_budget(method, budget, len(seen))

    def _count_budget(self, method: Method, budget: int, rows: int) -> None:
        bucket = INDEX["santa_budget", method.name, BUDGETS[(budget - 1).bit_length()]]
        self.values[bucket] += rows
        self.values[INDEX["santa_budget", method.name, "sum"]] += rows * budget

    def count_read(self, method: Method, key_rows: float, value_rows: float) -> None:
        """Add rows read; a layer adds its share of the mean over layers."""
        self.values[INDEX["santa_key_rows_read", method.name, ""]] += key_rows
        self.values[INDEX["santa_value_rows_read", method.name, ""]] += value_rows

    def count_error(self, method: Method, budget: int, error: float, max_error: float) -> None:
        """Count a row with an error target. An error that is not finite says nothing."""
        if isfinite(error):
            self.values[INDEX["santa_estimated_rows", method.name, ""]] += 1
            self.values[INDEX["santa_estimated_error", method.name, ""]] += error
            self.values[INDEX["santa_estimated_budget", method.name, ""]] += budget
            self.values[INDEX["santa_missed_targets", method.name, ""]] += error > max_error

    def count_reference_rows(self, count: int) -> None:
        self.values[INDEX["santa_reference_rows", "", ""]] += count

    def set_ignored(self, count: int) -> None:
        self.values[INDEX["santa_ignored_parameters", "", ""]] = count

    def set_codebooks_ready(self, ready: bool) -> None:
        self.values[INDEX["santa_codebooks_ready", "", ""]] = ready
