"""What each part of the PQ codebooks buys: `python -m benchmarks.quality.codebook smollm2-135m`.

Real keys and queries of a few layers, codebooks trained on one text and measured on another, in two numbers:
score error: root mean square over keys of the proxy's error, in nats, without the part that all keys share.
output error: of adaptive SSA at a budget, relative, root mean square over draws, to first order and without sampling noise:
sqrt(Σ p² (1/π - 1) ‖v - o‖²) / ‖o‖ with the inclusion probabilities π that the proxies give (Horvitz-Thompson variance of a ratio).
Merges the model's results into benchmarks/results/codebook-error.json, after every row, so that a run that is cut short leaves its rows.
"""

import json
import math
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.models import load, prepare
from benchmarks.quality.codebook_variants import COMPARED, OURS, VARIANTS, Sample
from benchmarks.quality.texts import TEXTS
from vllm_santa.capture import Captured, capture_qkv
from vllm_santa.codebook import SUBSPACES, Codebook
from vllm_santa.reference.pq import encode, lookup_tables, proxy_scores
from vllm_santa.reference.select import adaptive
from vllm_santa.reference.ssa import SelectionSettings, proposal
from vllm_santa.rotary import Rotary, layer_rotary

RESULT = Path(__file__).parents[1] / "results" / "codebook-error.json"
SETTINGS = SelectionSettings(sink=64, local=64)
BUDGETS = (0.01, 0.02, 0.05)
QUERIES = 12
TRAINING_TOKENS = (1024, 4096)

Codebooks = dict[int, Codebook]
Row = dict[str, object]


class Text(NamedTuple):
    """A captured text: its layers, and their rotary embeddings."""

    layers: dict[int, Captured]
    rotary: dict[int, Rotary]


class Error(NamedTuple):
    """Means over layers, heads and query tokens: score error in nats, output error at each of BUDGETS."""

    score: float
    output: list[float]


def measure(text: Text, codebooks: Codebooks | None = None, offset: int = 0) -> Error:
    """The error of codebooks (None: exact scores as proxy) on the second half of a text that starts `offset` positions into the context.

    Queries and keys moved by the same number of positions have the same exact scores; only the codebooks see a difference.
    """
    errors = []
    for index, layer in text.layers.items():
        last = layer.keys.shape[0] - 1
        shift = torch.full((last + 1,), offset)
        queries, keys = (text.rotary[index].rotate(x, shift) for x in (layer.grouped_queries(), layer.keys))
        values, codebook = layer.values.float().transpose(0, 1), codebooks[index] if codebooks else None
        for position in torch.linspace(last / 2, last, QUERIES).long().tolist():
            seen = slice(position + 1)
            errors.append(_errors(queries[position], keys[seen], values[:, seen], layer.scale, codebook))
    score, *output = torch.stack(errors).mean(0).tolist()
    return Error(score, output)


def _errors(query: Tensor, keys: Tensor, values: Tensor, scale: float, codebook: Codebook | None) -> Tensor:
    """Score error and output errors of one query token, means over heads; float32 [1 + budgets].

    query [H, G, D], keys [n, H, D], values [H, n, D].
    """
    exact = torch.einsum("hgd,nhd->hgn", query, keys) * scale
    proxy = proxy_scores(lookup_tables(query, codebook, scale), encode(keys, codebook)) * math.log(2) if codebook else exact
    gap = proxy - exact
    results = [(gap - gap.mean(-1, keepdim=True)).square().mean(-1).sqrt().mean()]
    p = exact.softmax(-1)
    output = p @ values
    distance = torch.cdist(output, values).square()
    forced, codes = proposal(proxy, SETTINGS)
    for budget in BUDGETS:
        count = codes.new_full(codes.shape[:-1], round(budget * keys.shape[0]))
        probability = adaptive(codes, count, torch.zeros_like(count)).probability + forced
        variance = (p.square() * (1 / probability.clamp(min=1e-12) - 1).float()[:, None] * distance).sum(-1)
        results.append((variance.sqrt() / output.norm(dim=-1)).mean())
    return torch.stack(results)


def train(text: Text, variant: str = OURS, subspaces: int = 16, tokens: int | None = None, spread: bool = True) -> Codebooks:
    """Codebooks from the first `tokens` (default: all) tokens of a text, spread over the model's context or as they stand."""
    codebooks = {}
    for index, layer in text.layers.items():
        keys, queries = layer.keys[:tokens].float(), layer.grouped_queries()[:tokens].float()
        if spread:
            generator = torch.Generator().manual_seed(0)
            keys, queries = (text.rotary[index].spread(x, generator) for x in (keys, queries))
        codebooks[index] = VARIANTS[variant](Sample(keys, queries, layer.values[:tokens].float()), subspaces)
    return codebooks


def study(texts: dict[str, Text], progress: Progress) -> Iterator[Row]:
    """Every comparison, a row each. The first text is measured; the second trains, unless a row says otherwise."""
    measured, training = list(texts.values())[:2]
    cases: list[tuple[str, str, int, Callable[[], Codebooks], int]] = []
    for name in VARIANTS:
        for subspaces in SUBSPACES if name in COMPARED else (16,):
            cases.append(("transform", name, subspaces, partial(train, training, name, subspaces), 0))
    for name, text in texts.items():
        cases.append(("training text", "the measured text itself" if text is measured else name, 16, partial(train, text), 0))
    context = next(iter(training.rotary.values())).context
    length = next(iter(measured.layers.values())).keys.shape[0]
    for tokens in TRAINING_TOKENS:
        for spread in (False, True):
            setting = f"{tokens} tokens, {'spread over the context' if spread else 'as they stand'}"
            for offset in sorted({0, (context - length) // 2, context - length}):
                cases.append((f"positions from {offset}", setting, 16, partial(train, training, tokens=tokens, spread=spread), offset))
    yield _row("transform", "exact scores as proxy", None, measure(measured))
    for table, setting, width, codebooks, offset in progress.track(cases, description="codebooks"):
        yield _row(table, setting, width, measure(measured, codebooks(), offset))


def _row(table: str, setting: str, subspaces: int | None, error: Error) -> Row:
    output = {str(budget): round(value, 4) for budget, value in zip(BUDGETS, error.output, strict=True)}
    return {"table": table, "setting": setting, "subspaces": subspaces, "score_error": round(error.score, 4), "output_error": output}


def capture(network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tokens: int, count: int, data: Path | None) -> dict[str, Text]:
    """`count` layers spread over the model, for the first `tokens` tokens of every text that has as many."""
    indices = torch.linspace(1, network.config.num_hidden_layers - 2, count).long().tolist()
    context = network.config.max_position_embeddings
    rotary = {index: rotary for index in indices if (rotary := layer_rotary(network.config, index, context))}
    texts = {}
    for name, text in TEXTS.items():
        ids = tokenizer(text(data)[: 8 * tokens], return_tensors="pt", verbose=False).input_ids[:, :tokens]
        texts[name] = Text(capture_qkv(network, ids, indices), rotary)
    return texts


def main(
    model: Annotated[str, typer.Argument(help="A name of benchmarks.models.")],
    tokens: Annotated[int, typer.Option(help="Of each text.")] = 4096,
    layers: Annotated[int, typer.Option(help="How many layers, spread over the model.")] = 5,
    device: Annotated[str, typer.Option(help="cpu (the model in float32) or cuda (in its own bfloat16, as a server caches it).")] = "cpu",
    data: Annotated[Path | None, typer.Option(help="Folder with the texts' wheels (default: download them).")] = None,
    result: Annotated[Path, typer.Option(help="JSON file to merge into.")] = RESULT,
) -> None:
    """Measure codebook variants on one model."""
    console = Console(stderr=True)
    console.print(f"{model}: {tokens} tokens of {', '.join(TEXTS)}")
    network = load(model, device)
    texts = capture(network, AutoTokenizer.from_pretrained(prepare(model)), tokens, layers, data)
    report = json.loads(result.read_text()) if result.exists() else {}
    rows: list[Row] = []
    report[f"{model}, {tokens:,} tokens"] = {
        "command": f"python -m benchmarks.quality.codebook {model} --tokens {tokens} --layers {layers} --device {device}",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "device": torch.cuda.get_device_name(device) if network.device.type == "cuda" else device,
        "dtype": str(network.dtype).removeprefix("torch."),
        "tokens": tokens,
        "layers": list(next(iter(texts.values())).layers),
        "texts": list(TEXTS),
        "queries": QUERIES,
        "sink_and_local": [SETTINGS.sink, SETTINGS.local],
        "rows": rows,
    }
    with Progress(console=console) as progress:
        for row in study(texts, progress):
            rows.append(row)
            result.write_text(json.dumps(report, indent=1) + "\n")
    console.print(f"wrote {result}")


if __name__ == "__main__":
    typer.run(main)
