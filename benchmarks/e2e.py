"""Whole decode steps of a served model: SANTA beside vLLM's own backends, in one call and in turns.

    python -m benchmarks.e2e --case 8192x32 --case 30000x6 --run FLASHINFER --run "santa dense" --output dense-overhead
    python -m benchmarks.e2e --case 131072x6 --filled --one-by-one --run FLASHINFER --run FLASH_ATTN --run "santa pps 512" --output 128k

A run is a backend and, for santa, the method and budget that every request asks for. Without --model the shape is Llama-3.1-8B's with
random weights: right for time, meaningless as text, and its attention is flat. Prints a table and writes
benchmarks/results/e2e-OUTPUT.json.
"""

import json
import random
import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from vllm_santa.codebook import Codebook, CodebookInfo, Codebooks, save_codebooks
from vllm_santa.methods import Method
from vllm_santa.policy.budget import Budget
from vllm_santa.reads import expected_rows

from .engine import Engine, EngineSpec

console = Console(width=140)
RESULTS = Path(__file__).parent / "results"
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 1048576,
    "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WINDOWS = 256
"""Sink and local tokens together, as a policy has them if it says nothing."""


Measured = tuple[float | None, list[float]]
"""Prefill in seconds (None where prompts are not computed), and the µs of a decode step in each repeat."""


@dataclass(frozen=True)
class Case:
    """`rows` requests of `context` prompt tokens each."""

    context: int
    rows: int

    @classmethod
    def parse(cls, text: str) -> "Case":
        context, _, rows = text.partition("x")
        if not (context.isdigit() and rows.isdigit()):
            raise typer.BadParameter(f"{text!r} is not a case; allowed: TOKENSxREQUESTS, as 30000x6")
        return cls(int(context), int(rows))

    def prompts(self) -> list[list[int]]:
        numbers = random.Random(f"{self.context}x{self.rows}")
        return [numbers.choices(range(100, 30000), k=self.context) for _ in range(self.rows)]


@dataclass(frozen=True)
class Run:
    """What is compared: a backend and, for santa, a method with its budget."""

    backend: str
    method: Method = Method.dense
    budget: Budget | None = None

    @classmethod
    def parse(cls, text: str) -> "Run":
        backend, *rest = text.split()
        if backend.upper() != "SANTA":
            return cls(backend)
        return cls(backend, Method[rest[0]], Budget.parse(rest[1]) if len(rest) > 1 else None)

    @property
    def name(self) -> str:
        return self.backend if self.backend.upper() != "SANTA" else f"santa {self.method.name}" + (f" {self.budget}" if self.budget else "")

    @property
    def santa(self) -> dict[str, str | int]:
        """The requests' parameters."""
        if self.backend.upper() != "SANTA":
            return {}
        return {"santa_method": self.method.name} | ({"santa_budget": str(self.budget)} if self.budget else {})


@dataclass(frozen=True)
class Shape:
    """What the bytes of a step follow from."""

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    weight_bytes: int

    @classmethod
    def of(cls, folder: Path) -> "Shape":
        config = json.loads((folder / "config.json").read_text())
        heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads", config["num_attention_heads"])
        hidden, layers = config["hidden_size"], config["num_hidden_layers"]
        head_dim = config.get("head_dim") or hidden // heads
        matrices = 2 * hidden * head_dim * (heads + kv_heads) + 3 * hidden * config["intermediate_size"]
        return cls(layers, heads, kv_heads, head_dim, 2 * (layers * matrices + hidden * config["vocab_size"]))

    def bytes_read(self, case: Case, run: Run) -> int:
        """Of one decode step: the weights, and the rows of K and V (of codes too) that the run reads."""
        group = self.query_heads // self.kv_heads
        keys, values = float(case.context), float(case.context)
        code = 0
        if run.method is not Method.dense and run.budget:
            keys, values = expected_rows(run.method, run.budget.rows(case.context), case.context, group, WINDOWS)
            code = 16 * case.context if run.method.needs_codes else 0
        row = 2 * self.head_dim
        return self.weight_bytes + int(self.layers * self.kv_heads * case.rows * (row * (keys + values) + code))


@dataclass
class Row:
    """One line of the results: medians over the repeats; `steps_us` has them all."""

    method: str
    query_heads: int
    kv_heads: int
    head_dim: int
    context: int
    batch: int
    budget: str
    sparsity: float
    time_us: float
    flashinfer_us: float | None
    speedup: float | None
    bytes_read: int
    copy_share: float
    prefill_s: float | None
    tokens_per_second: float
    steps_us: list[float]


def measure(case: Case, runs: list[Run], engines: dict[str, Engine], steps: int, repeats: int, filled: bool) -> dict[Run, Measured]:
    """Prefill seconds and the step times in µs of every run; the runs take turns. A prompt is computed once an engine: after that, its
    blocks are in the prefix cache.

    Raises RuntimeError where rows got another method than the run's: the time would not be its own.
    """
    prompts = case.prompts()
    prefill: dict[str, float | None] = {}
    for backend, engine in engines.items():
        first = engine.generate(prompts, 8)
        prefill[backend] = None if filled else first.first_token_s
        console.print(f"{case.context} x {case.rows}: {backend} has the prompts after {first.first_token_s:.2f} s")
    for run in runs:
        engines[run.backend].generate(prompts, 8, run.santa)
    times: dict[Run, list[float]] = {run: [] for run in runs}
    for _ in range(repeats):
        for run in runs:
            timing = engines[run.backend].generate(prompts, steps + 1, run.santa)
            if run.santa and set(timing.rows) != {run.method.name}:
                raise RuntimeError(f"{run.name} at {case.context} x {case.rows}: rows by method were {timing.rows}")
            times[run].append(1000 * timing.step_ms)
    for run in runs:
        console.print(f"{case.context} x {case.rows}: {run.name}: {statistics.median(times[run]) / 1000:.3f} ms a step")
    return {run: (prefill[run.backend], times[run]) for run in runs}


def write_config(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    return folder


def random_codebooks(shape: Shape) -> Codebooks:
    """For caches of random numbers: they need look-up tables, not good ones."""
    import torch

    heads, dim = shape.kv_heads, shape.head_dim
    layers = {}
    for layer in range(shape.layers):
        unit = torch.eye(dim).expand(heads, dim, dim).contiguous()
        centroids = torch.randn(heads, 16, 256, dim // 16, generator=torch.Generator().manual_seed(layer))
        layers[layer] = Codebook(torch.zeros(heads, dim), unit, unit.clone(), centroids, torch.zeros(heads, dim))
    info = CodebookInfo(
        model="random", num_layers=shape.layers, num_kv_heads=heads, head_dim=dim, subspaces=16, text_sha256="", training_tokens=0,
        vllm_santa_version="",
    )  # fmt: skip
    return Codebooks(layers, info)


def copy_speed() -> float:
    """Bytes per second of a copy on this GPU, measured in a process that then gives its memory back."""
    import multiprocessing as mp
    from concurrent.futures import ProcessPoolExecutor

    from .kernels.common import copy_speed as measured

    with ProcessPoolExecutor(1, mp_context=mp.get_context("spawn")) as pool:
        return pool.submit(measured).result()


def main(
    case: Annotated[list[str], typer.Option(help="TOKENSxREQUESTS, as 30000x6; repeatable.")],
    run: Annotated[list[str], typer.Option(help="A backend, or `santa METHOD BUDGET`; repeatable.")],
    output: Annotated[str, typer.Option(help="Name of the results: e2e-OUTPUT.json.")],
    model: Annotated[Path | None, typer.Option(help="A model folder; the default is Llama-3.1-8B's shape with random weights.")] = None,
    policy: Annotated[Path | None, typer.Option(help="Policy file of the santa engine; default: every row dense unless it asks.")] = None,
    filled: Annotated[bool, typer.Option(help="Do not compute prompts: fill the KV cache with random numbers.")] = False,
    one_by_one: Annotated[bool, typer.Option(help="One engine at a time with all the memory, instead of all at once in turns.")] = False,
    steps: Annotated[int, typer.Option(help="Decode steps of a measurement.")] = 64,
    repeats: Annotated[int, typer.Option(help="Measurements of each run.")] = 5,
    memory: Annotated[float, typer.Option(help="Share of the GPU's memory for all engines together.")] = 0.92,
    results: Annotated[Path, typer.Option(help="Folder of the JSON file.")] = RESULTS,
) -> None:
    cases, runs = [Case.parse(text) for text in case], [Run.parse(text) for text in run]
    options = [*(f"--case {text}" for text in case), *(f"--run '{text}'" for text in run)]
    options += ([f"--policy {policy.name}"] if policy else []) + ["--filled"] * filled + ["--one-by-one"] * one_by_one
    options += [f"--memory {memory}", f"--steps {steps}", f"--repeats {repeats}", f"--output {output}"]
    backends = list(dict.fromkeys(run.backend for run in runs))
    copy = copy_speed()
    with tempfile.TemporaryDirectory() as scratch:
        folder = model or write_config(Path(scratch) / "model")
        shape = Shape.of(folder)
        if policy is None:
            policy = Path(scratch) / "dense.yaml"
            policy.write_text("rules: []\n")
            if filled and any(run.method.needs_codes for run in runs):
                save_codebooks(random_codebooks(shape), Path(scratch) / "codebooks.safetensors")
                policy.write_text("rules: []\ncodebooks: codebooks.safetensors\n")
        longest = max(case.context for case in cases) + steps + 64

        def spec(backend: str, share: float) -> EngineSpec:
            return EngineSpec(
                backend, folder, share, longest, max(case.rows for case in cases), filled, environment={"SANTA_POLICY": str(policy)}
            )

        result: dict[str, object] = {
            "command": " ".join(["python -m benchmarks.e2e", *options]),
            "policy": policy.read_text(),
            "date": datetime.now(UTC).date().isoformat(),
            "versions": versions(),
            "model": str(model or "Llama-3.1-8B's shape, random weights"),
            "copy_terabytes_per_second": copy / 1e12,
        }  # fmt: skip
        groups = [[backend] for backend in backends] if one_by_one else [backends]
        measured: dict[Case, dict[Run, Measured]] = {case: {} for case in cases}
        results.mkdir(parents=True, exist_ok=True)
        for group in groups:
            with ExitStack() as stack:
                engines = {name: stack.enter_context(Engine(spec(name, memory / len(group)))) for name in group}
                for one in cases:
                    mine = [run for run in runs if run.backend in group]
                    measured[one] |= measure(one, mine, engines, steps, repeats, filled)
                    # As it goes: a run that is cut off leaves what it has.
                    rows = [row for case, times in measured.items() if times for row in rows_of(case, times, shape, copy)]
                    text = json.dumps(result | {"rows": [asdict(row) for row in rows]}, indent=1)
                    (results / f"e2e-{output}.json").write_text(text + "\n")
    show(rows)


def rows_of(case: Case, measured: dict[Run, Measured], shape: Shape, copy: float) -> list[Row]:
    medians = {run: statistics.median(times) for run, (_, times) in measured.items()}
    dense = [time for run, time in medians.items() if run.backend.upper() == "FLASHINFER"]
    flashinfer = min(dense) if dense else None
    full = shape.bytes_read(case, Run("FLASHINFER")) - shape.weight_bytes
    rows = []
    for run, (prefill, times) in measured.items():
        time, read = medians[run], shape.bytes_read(case, run)
        speedup = None if flashinfer is None else flashinfer / time
        rows.append(
            Row(
                run.name,
                shape.query_heads,
                shape.kv_heads,
                shape.head_dim,
                case.context,
                case.rows,
                str(run.budget or ""),
                1 - (read - shape.weight_bytes) / full,
                time,
                flashinfer,
                speedup,
                read,
                read / (time * 1e-6) / copy,
                prefill,
                case.rows / (time * 1e-6),
                times,
            )  # fmt: skip
        )
    return rows


def show(rows: list[Row]) -> None:
    table = Table("context", "requests", "run", "prefill s", "ms/step", "min – max", "× FlashInfer", "tokens/s", "share of copy speed")
    for row in rows:
        prefill = "" if row.prefill_s is None else f"{row.prefill_s:.2f}"
        speedup = "" if row.speedup is None else f"{row.speedup:.3f}"
        table.add_row(
            f"{row.context:,}", str(row.batch), row.method, prefill, f"{row.time_us / 1000:.2f}",
            f"{min(row.steps_us) / 1000:.2f} – {max(row.steps_us) / 1000:.2f}", speedup, f"{row.tokens_per_second:.0f}",
            f"{row.copy_share:.0%}",
        )  # fmt: skip
    console.print(table)


def versions() -> dict[str, str]:
    """What a result depends on; asked for in a process of its own, since CUDA must not start in this one."""
    import subprocess
    import sys
    from importlib.metadata import version

    gpu = subprocess.run([sys.executable, "-c", "import torch; print(torch.cuda.get_device_name())"], capture_output=True, text=True)
    return {"gpu": gpu.stdout.strip()} | {name: version(name) for name in ("torch", "vllm", "flashinfer-python")}


if __name__ == "__main__":
    typer.run(main)
