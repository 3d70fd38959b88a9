"""What each part of the PQ codebooks buys: `python -m benchmarks.quality.codebook smollm2-135m`.

Real keys and queries of a few layers, codebooks trained on one text and measured on another, in two numbers:
score error: root mean square over keys of the proxy's error, in nats, without the part that all keys share.
output error: of adaptive SSA at a budget, relative, root mean square over draws, to first order and without sampling noise:
sqrt(Σ p² (1/π - 1) ‖v - o‖²) / ‖o‖ with the inclusion probabilities π that the proxies give (Horvitz-Thompson variance of a ratio).
Merges the model's results into benchmarks/results/codebook-error.json.
"""

import json
import math
import shlex
import sys
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.models import prepare
from benchmarks.quality.codebook_variants import VARIANTS
from benchmarks.quality.texts import TEXTS
from vllm_santa.capture import Captured, capture_qkv
from vllm_santa.codebook import SUBSPACES, Codebook
from vllm_santa.reference.pq import encode, lookup_tables, proxy_scores
from vllm_santa.reference.select import adaptive
from vllm_santa.reference.ssa import SelectionSettings, proposal

RESULT = Path(__file__).parents[1] / "results" / "codebook-error.json"
SETTINGS = SelectionSettings(sink=64, local=64)
BUDGETS = (0.01, 0.02, 0.05)
QUERIES = 12
OURS = "A and allocation"
COMPARED = ("plain", "per-dimension query scale", OURS)
"""Measured with every number of subspaces; the others with 16."""
TRAINING_TOKENS = (256, 512, 1024, 2048)
_LN2 = math.log(2)

Layers = dict[int, Captured]


class Error(NamedTuple):
    """Means over layers, heads and query tokens: score error in nats, output error at each of BUDGETS."""

    score: float
    output: tuple[float, ...]


def measure(codebooks: dict[int, Codebook] | None, layers: Layers) -> Error:
    """The error of codebooks (None: exact scores as proxy) on the second half of a captured text."""
    errors = []
    for index, layer in layers.items():
        last = layer.keys.shape[0] - 1
        for position in torch.linspace(last / 2, last, QUERIES).long().tolist():
            errors.append(_errors(codebooks[index] if codebooks else None, layer, position))
    mean = torch.stack(errors).mean(0).tolist()
    return Error(mean[0], tuple(mean[1:]))


def _errors(codebook: Codebook | None, layer: Captured, position: int) -> Tensor:
    """Score error and output errors of one query token, means over heads; float32 [1 + budgets]."""
    query, keys = layer.grouped_queries()[position].float(), layer.keys[: position + 1].float()
    values = layer.values[: position + 1].float().transpose(0, 1)
    exact = torch.einsum("hgd,nhd->hgn", query, keys) * layer.scale
    proxy = exact if codebook is None else proxy_scores(lookup_tables(query, codebook, layer.scale), encode(keys, codebook)) * _LN2
    gap = proxy - exact
    results = [(gap - gap.mean(-1, keepdim=True)).square().mean(-1).sqrt().mean()]
    p = exact.softmax(-1)
    output = p @ values
    distance = torch.cdist(output, values).square()
    forced, codes = proposal(proxy, SETTINGS)
    for budget in BUDGETS:
        count = torch.full(codes.shape[:-1], round(budget * (position + 1)))
        probability = adaptive(codes, count, torch.zeros_like(count)).probability + forced
        variance = (p.square() * (1 / probability.clamp(min=1e-12) - 1).float()[:, None] * distance).sum(-1)
        results.append((variance.sqrt() / output.norm(dim=-1)).mean())
    return torch.stack(results)


def train(layers: Layers, variant: str = OURS, subspaces: int = 16, tokens: int | None = None) -> dict[int, Codebook]:
    """Codebooks from the first `tokens` (default: all) tokens of a captured text."""
    build = VARIANTS[variant]
    return {i: build(layer.keys[:tokens].float(), layer.grouped_queries()[:tokens].float(), subspaces) for i, layer in layers.items()}


def study(captured: dict[str, Layers], progress: Progress) -> list[dict[str, object]]:
    """Every comparison, a row each. The first captured text is measured; the second trains, unless a row says otherwise."""
    measured, training = list(captured.values())[:2]
    names = {name: "the measured text itself" if layers is measured else name for name, layers in captured.items()}
    cases: list[tuple[str, str, int, Layers, int | None]] = []
    for name in VARIANTS:
        cases += [("transform", name, subspaces, training, None) for subspaces in (SUBSPACES if name in COMPARED else (16,))]
    cases += [("training text", names[name], 16, layers, None) for name, layers in captured.items()]
    cases += [("training tokens", str(tokens), 16, training, tokens) for tokens in TRAINING_TOKENS]
    rows = [_row("transform", "exact scores as proxy", None, measure(None, measured))]
    for table, setting, subspaces, layers, tokens in progress.track(cases, description="codebooks"):
        codebooks = train(layers, setting if table == "transform" else OURS, subspaces, tokens)
        rows.append(_row(table, setting, subspaces, measure(codebooks, measured)))
    return rows


def _row(table: str, setting: str, subspaces: int | None, error: Error) -> dict[str, object]:
    output = {str(budget): round(value, 4) for budget, value in zip(BUDGETS, error.output, strict=True)}
    return {"table": table, "setting": setting, "subspaces": subspaces, "score_error": round(error.score, 4), "output_error": output}


def capture(model: str, tokens: int, count: int, data: Path | None) -> dict[str, Layers]:
    """Queries, keys and values of `count` layers spread over the model, for the first `tokens` tokens of every text."""
    network = AutoModelForCausalLM.from_pretrained(prepare(model), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(prepare(model))
    layers = torch.linspace(1, network.config.num_hidden_layers - 2, count).long().tolist()
    captured = {}
    for name, text in TEXTS.items():
        ids = tokenizer(text(data)[: 8 * tokens], return_tensors="pt", verbose=False).input_ids[:, :tokens]
        captured[name] = capture_qkv(network, ids, layers)
    return captured


def main(
    model: Annotated[str, typer.Argument(help="A name of benchmarks.models.")],
    tokens: Annotated[int, typer.Option(help="Of each text.")] = 4096,
    layers: Annotated[int, typer.Option(help="How many layers, spread over the model.")] = 5,
    data: Annotated[Path | None, typer.Option(help="Folder with RULER's wheel (default: download it).")] = None,
    result: Annotated[Path, typer.Option(help="JSON file to merge into.")] = RESULT,
) -> None:
    """Measure codebook variants on one model."""
    console = Console(stderr=True)
    with Progress(console=console) as progress:
        progress.console.print(f"{model}: {tokens} tokens of {', '.join(TEXTS)}")
        captured = capture(model, tokens, layers, data)
        rows = study(captured, progress)
    report = json.loads(result.read_text()) if result.exists() else {}
    report[model] = {
        "command": shlex.join(["python", "-m", "benchmarks.quality.codebook", *sys.argv[1:]]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "tokens": tokens,
        "layers": sorted(next(iter(captured.values()))),
        "texts": list(TEXTS),
        "queries": QUERIES,
        "sink_and_local": [SETTINGS.sink, SETTINGS.local],
        "rows": rows,
    }
    result.write_text(json.dumps(report, indent=1) + "\n")
    console.print(f"wrote {result}")


if __name__ == "__main__":
    typer.run(main)
