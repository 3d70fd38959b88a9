"""Decode attention of the SANTA family against FlashInfer's dense paged decode: same pages, one process, replayed graphs.

    python -m benchmarks.kernels.santa [--quick] [--published FOLDER] [--results FOLDER]

Prints a table and writes santa-kernels.json: one row per method and shape, with the bytes that had to be read and the share of the
machine's copy speed they were read at.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

from vllm_santa import kernel_ops as ops
from vllm_santa.jit import DTYPES, Shape
from vllm_santa.methods import Method

from . import published as published_kernels
from .common import Case, Inputs, copy_speed, flashinfer_decode, make_inputs, time_us, versions
from .published import Published

LLAMA_8B = [Case(32, 8, 128, context, batch) for batch in (1, 8) for context in (32768, 131072)]
OTHERS = [
    Case(64, 8, 128, 131072, 8),
    Case(16, 4, 256, 131072, 8),
    Case(16, 4, 256, 131072, 8, torch.float16),
    Case(32, 8, 128, 30000, 2),
    Case(32, 8, 128, 30000, 6),
    Case(32, 8, 128, 2048, 256),
    Case(32, 8, 128, 1048576, 1),
]
BUDGETS = [(Method.pps, 512), (Method.prop, 128), (Method.santa, 128), (Method.flash, 2048)]
PEAKS = {"peaked": 3.0, "flat": 0.02}
"""Standard deviation of the scores, in nats."""


@dataclass(frozen=True)
class Row:
    """One line of the results. published: time of the published kernels instead of ours. budget: rows per KV head (pps) or draws per query
    head. sparsity: rows of K and V not read, of all. flashinfer_us: the better of tensor cores on and off, which speedup refers to;
    vLLM always has them on (flashinfer_in_vllm_us)."""

    method: str
    published: bool
    scores: str
    query_heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    context: int
    batch: int
    budget: int
    sparsity: float
    time_us: float
    flashinfer_us: float
    flashinfer_in_vllm_us: float
    speedup: float
    bytes_read: int
    terabytes_per_second: float
    copy_share: float


def decoder(case: Case, method: Method, budget: int, output: Tensor) -> Callable[[Inputs], Callable[[], None]]:
    """A function that makes the benchmarked call for an input."""
    shape, layer = Shape(case.head_dim, case.group, case.dtype), ops.Layer(0, case.head_dim**-0.5)
    sizes = (case.batch, case.kv_heads, shape, -(-case.context // case.block_size) * case.block_size, budget)
    if method == Method.pps:
        pps = ops.PpsWorkspace(*sizes)
        return lambda inputs: lambda: ops.pps(inputs.query, inputs.kv, inputs.rows, layer, output, pps)
    workspace = ops.ValuesWorkspace(*sizes)
    return lambda inputs: lambda: ops.sample_values(inputs.query, inputs.kv, inputs.rows, layer, output, workspace, methods=[method])


def bytes_read(case: Case, method: Method, budget: int) -> int:
    """All of K, and the chosen rows: K and V once per KV head for pps, V at most once per draw for the others."""
    rows = min(budget, case.context) * case.kv_heads * 2 if method == Method.pps else min(budget, case.context) * case.query_heads
    rows = min(rows, case.context * case.kv_heads)
    return case.key_bytes + case.batch * rows * case.row_bytes()


def measure(case: Case, scores: str, budgets: list[tuple[Method, int]], copy: float, published: Published | None = None) -> list[Row]:
    """All methods of one shape, on the same inputs as FlashInfer, and the published kernels where they fit."""
    sets = max(1, min(4, int(400e6 / (2 * case.key_bytes))))  # inputs that would stay in the L2 cache take turns
    inputs = [make_inputs(case, Method.pps, 1, PEAKS[scores], seed) for seed in range(sets)]
    output = torch.empty_like(inputs[0].query)
    in_vllm, without = (time_us([flashinfer_decode(case, one, output, tensor_cores) for one in inputs]) for tensor_cores in (True, False))
    dense = min(in_vllm, without)
    rows = []

    def add(method: Method, budget: int, calls: list[Callable[[], None]], theirs: bool) -> None:
        elapsed = time_us(calls)
        read = bytes_read(case, method, budget)
        speed = read / elapsed / 1e6
        dtype = DTYPES[case.dtype]
        shape = (case.query_heads, case.kv_heads, case.head_dim, dtype, case.context, case.batch)
        costs = (1 - read / (2 * case.key_bytes), elapsed, dense, in_vllm, dense / elapsed, read, speed, speed * 1e12 / copy)
        rows.append(Row(method.name, theirs, scores, *shape, budget, *costs))
        name = f"{method.name:6} {scores:6} {case.query_heads}/{case.kv_heads}/{case.head_dim} {dtype} {case.context:>8} x {case.batch:<3}"
        times = f"{elapsed:8.1f} us  FlashInfer {dense:8.1f} us  {dense / elapsed:5.2f}x (as vLLM runs it {in_vllm / elapsed:5.2f}x)"
        print(
            f"{name} budget {budget:>5}  {times}  {speed:5.2f} TB/s  {speed * 1e14 / copy:3.0f} % of copy{'  published' * theirs}",
            flush=True,
        )

    for method, budget in budgets:
        for one in inputs:
            one.rows.method.fill_(int(method))
            one.rows.budget.fill_(budget)
        make = decoder(case, method, budget, output)
        add(method, budget, [make(one) for one in inputs], False)
        if published and published.fits(case) and method in published.modules:
            add(method, budget, [published.decoder(method, one, budget) for one in inputs], True)
    torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the Llama-3.1-8B shapes with peaked scores only")
    parser.add_argument("--published", type=Path, help="a checkout of github.com/OPUSLab/SANTA, to be built and timed as well")
    parser.add_argument("--results", type=Path, default=Path(__file__).parents[1] / "results")
    args = parser.parse_args()
    published = published_kernels.build(args.published) if args.published else None
    copy = copy_speed()
    print(f"copy: {copy / 1e12:.2f} TB/s")
    runs = [(case, "peaked", BUDGETS, published) for case in LLAMA_8B]
    if not args.quick:
        runs += [(case, "flat", BUDGETS[:2], None) for case in LLAMA_8B]
        runs += [(case, "peaked", BUDGETS[:2], None) for case in OTHERS]
    options = ["--quick"] * args.quick + ["--published SANTA"] * bool(args.published)
    result = {
        "command": " ".join(["python -m benchmarks.kernels.santa", *options]),
        "date": datetime.now(UTC).date().isoformat(),
        "versions": versions(),
        "copy_terabytes_per_second": copy / 1e12,
        "rows": [],
    }
    args.results.mkdir(parents=True, exist_ok=True)
    for case, scores, budgets, theirs in runs:
        result["rows"] += [asdict(row) for row in measure(case, scores, budgets, copy, theirs)]
        (args.results / "santa-kernels.json").write_text(json.dumps(result, indent=1) + "\n")  # a run that ends early keeps what it has


if __name__ == "__main__":
    main()
