"""SSA decode against FlashInfer's dense paged decode, and the encoder: same pages, one process, replayed graphs.

    python -m benchmarks.kernels.ssa [--quick] [--results FOLDER]

Prints a table and writes ssa-kernels.json: one row per shape, budget and code size, with the time each stage adds, the bytes that had to
be read and the share of the machine's copy speed they were read at; then the encoder's times.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

from vllm_santa.codebook import Codebook
from vllm_santa.jit import Shape
from vllm_santa.kernel_ops import Layer
from vllm_santa.methods import Method
from vllm_santa.reference.ssa import SelectionSettings
from vllm_santa.ssa_ops import CodebookBuffers, SsaWorkspace, encode_blocks, ssa, write_cache

from .common import Case, Inputs, copy_speed, flashinfer_decode, make_inputs, time_us, versions

K = 1024
PAPER = [Case(16, 4, 256, context * K, batch, torch.float16) for context, batch in ((32, 8), (128, 1), (128, 4), (1024, 1), (1024, 16))]
LLAMA = [Case(32, 8, 128, context * K, batch) for context, batch in ((32, 1), (32, 8), (128, 1), (128, 8), (1024, 1))]
RATIOS = (50, 20, 10)
SETTINGS = SelectionSettings()
WINDOWS = SETTINGS.sink + SETTINGS.local
STAGES = {"tables": "tables_kernel", "score": "scan_kernel", "mix": "mix_kernel", "place": "place_adaptive_kernel", "gather": "rows_kernel"}
PEAK = 3.0
"""Standard deviation of the scores, in nats."""


@dataclass(frozen=True)
class Row:
    """One line of the results. budget: rows per KV head besides the windows. sparsity: tokens per row of the budget.

    stages: microseconds by which each stage's end comes after the one before. bytes_read: codes, and the rows of K and V taken.
    """

    method: str
    subspaces: int
    query_heads: int
    kv_heads: int
    head_dim: int
    context: int
    batch: int
    budget: int
    sparsity: int
    time_us: float
    flashinfer_us: float
    speedup: float
    bytes_read: int
    copy_share: float
    stages: dict[str, float]
    stage_copy_share: dict[str, float]


@dataclass(frozen=True)
class EncodeRow:
    """The encoder. what: new tokens through write_cache, or tokens of whole cached blocks. codebook_bytes: of one layer."""

    what: str
    kv_heads: int
    head_dim: int
    subspaces: int
    tokens: int
    time_us: float
    codebook_bytes: int


def random_buffers(kv_heads: int, head_dim: int, subspaces: int) -> CodebookBuffers:
    """A codebook of random centroids, so scaled that proxies vary about as much as scores."""
    eye = torch.eye(head_dim, device="cuda").expand(kv_heads, -1, -1).contiguous()
    zero = torch.zeros(kv_heads, head_dim, device="cuda")
    centroids = torch.randn(kv_heads, subspaces, 256, head_dim // subspaces, device="cuda")
    buffers = CodebookBuffers(kv_heads, head_dim, subspaces)
    buffers.load(Codebook(zero, eye, eye, centroids, zero))
    return buffers


def stage_times(graph: torch.cuda.CUDAGraph) -> dict[str, float]:
    """Median over replays of how much later each stage ends than the one before it; the first, than it starts."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(7):
            graph.replay()
            torch.cuda.synchronize()
    spans: dict[str, list[tuple[float, float]]] = {stage: [] for stage in STAGES}
    for event in profile.events():
        for stage, kernel in STAGES.items():
            if f"::{kernel}" in event.name:
                spans[stage].append((event.time_range.start, event.time_range.end))
    times = {}
    before: list[float] = [start for start, _ in sorted(spans["tables"])]
    for stage, found in spans.items():
        ends = sorted(end for _, end in found)
        added = sorted(end - start for start, end in zip(before, ends, strict=True))
        times[stage] = added[len(added) // 2]
        before = ends
    return times


def stage_bytes(case: Case, rows: int) -> dict[str, int]:
    """Bytes each stage reads or writes in device memory or L2, large ones only."""
    tokens, quads = case.batch * case.context * case.kv_heads, -(-case.group // 4)
    stash = tokens * quads * 8
    return {
        "score": tokens * case.code_bytes + stash,
        "mix": stash + 2 * tokens,
        "place": 2 * tokens,
        "gather": case.batch * case.kv_heads * rows * 2 * case.row_bytes(),
    }


def decoder(case: Case, most: int, output: Tensor, methods: tuple[Method, ...]) -> Callable[[Inputs], Callable[[], None]]:
    """A function that makes the benchmarked call for an input. most: the largest budget that its rows may have."""
    shape, layer = Shape(case.head_dim, case.group, case.dtype), Layer(0, case.head_dim**-0.5)
    buffers = random_buffers(case.kv_heads, case.head_dim, case.code_bytes)
    workspace = SsaWorkspace(case.batch, case.kv_heads, shape, case.context, most, subspaces=case.code_bytes)
    return lambda one: lambda: ssa(
        one.query, one.kv, one.codes, one.rows, layer, buffers, SETTINGS, output, workspace, methods=methods
    )  # fmt: skip


def measure(case: Case, ratios: tuple[int, ...], dense: float, inputs: list[Inputs], copy: float) -> list[Row]:
    """All budgets of one shape."""
    rows = []
    make = decoder(case, case.context // min(ratios), torch.empty_like(inputs[0].query), (Method.ssa,))
    calls = [make(one) for one in inputs]
    for ratio in ratios:
        budget = case.context // ratio
        for one in inputs:
            one.rows.budget.fill_(budget)
        elapsed = time_us(calls)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            calls[0]()
        stages = stage_times(graph)
        taken = budget + WINDOWS
        moved = stage_bytes(case, taken)
        read = case.batch * case.context * case.kv_heads * case.code_bytes + moved["gather"]
        shares = {stage: size / stages[stage] * 1e6 / copy for stage, size in moved.items()}
        sizes = (case.code_bytes, case.query_heads, case.kv_heads, case.head_dim, case.context, case.batch, budget, ratio)
        rows.append(Row("ssa", *sizes, elapsed, dense, dense / elapsed, read, read / elapsed * 1e6 / copy, stages, shares))
        name = f"{case.query_heads}/{case.kv_heads}/{case.head_dim} {case.context:>8} x {case.batch:<3} {case.code_bytes:>2} B {ratio:>3}x"
        parts = " ".join(f"{stage} {time:.1f}" for stage, time in stages.items())
        print(f"{name} {elapsed:8.1f} us  FlashInfer {dense:8.1f} us  {dense / elapsed:5.2f}x  {parts}", flush=True)
    return rows


def measure_shape(case: Case, code_sizes: tuple[int, ...], ratios: tuple[int, ...], copy: float) -> list[Row]:
    """All code sizes of one shape; FlashInfer on the same pages as the first."""
    rows: list[Row] = []
    dense = 0.0
    for size in code_sizes:
        sized = replace(case, code_bytes=size)
        sets = max(1, min(4, int(400e6 / (2 * case.key_bytes))))  # inputs that would stay in the L2 cache take turns
        inputs = [make_inputs(sized, Method.ssa, 1, PEAK, seed) for seed in range(sets)]
        output = torch.empty_like(inputs[0].query)
        if not dense:
            dense = min(time_us([flashinfer_decode(sized, one, output, cores) for one in inputs]) for cores in (True, False))
        rows += measure(sized, ratios, dense, inputs, copy)
        del inputs
        torch.cuda.empty_cache()
    return rows


def measure_encode(kv_heads: int, head_dim: int, subspaces: int, dtype: torch.dtype) -> list[EncodeRow]:
    """New tokens as a decode step and as a prefill write them, and a cache of 256K tokens."""
    case = Case(kv_heads, kv_heads, head_dim, 256 * K, 1, dtype, code_bytes=subspaces)
    inputs, buffers = make_inputs(case, Method.ssa, 1, 1.0), random_buffers(kv_heads, head_dim, subspaces)
    memory = sum(tensor.nbytes for tensor in vars(buffers).values() if isinstance(tensor, Tensor))
    rows = []

    def add(what: str, tokens: int, elapsed: float) -> None:
        rows.append(EncodeRow(what, kv_heads, head_dim, subspaces, tokens, elapsed, memory))
        print(f"{what:11} {kv_heads}/{head_dim} {subspaces} B {tokens:>7} tokens {elapsed:8.1f} us", flush=True)

    for tokens in (1, 8, 64, 256, 8192):
        fused = torch.randn(tokens, 3, kv_heads, head_dim, device="cuda").to(dtype)
        slots = torch.randperm(case.context, device="cuda")[:tokens].contiguous()
        arguments = (fused[:, 1], fused[:, 2], inputs.kv, inputs.codes, slots, buffers)
        add("write_cache", tokens, time_us([lambda arguments=arguments: write_cache(*arguments)], 20))
    add("encode_blocks", case.context, time_us([lambda: encode_blocks(inputs.kv, inputs.codes, None, buffers)], 20))
    torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the shapes and budgets that have a bar only, 16 bytes a key")
    parser.add_argument("--results", type=Path, default=Path(__file__).parents[1] / "results")
    args = parser.parse_args()
    copy = copy_speed()
    print(f"copy: {copy / 1e12:.2f} TB/s")
    encode = [row for shape in ((8, 128, 16, torch.bfloat16), (4, 256, 16, torch.float16)) for row in measure_encode(*shape)]
    rows = []
    for case in PAPER + LLAMA:
        rows += measure_shape(case, (16,) if args.quick else (16, 8), RATIOS[: 1 if args.quick else 3], copy)
    result = {
        "command": "python -m benchmarks.kernels.ssa" + (" --quick" if args.quick else ""),
        "date": datetime.now(UTC).date().isoformat(),
        "versions": versions(),
        "copy_terabytes_per_second": copy / 1e12,
        "rows": [asdict(row) for row in rows],
        "encode": [asdict(row) for row in encode],
    }
    args.results.mkdir(parents=True, exist_ok=True)
    (args.results / "ssa-kernels.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
