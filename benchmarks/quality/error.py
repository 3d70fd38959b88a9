"""Attention error on real queries, keys and values: `python -m benchmarks.quality.error smollm2-135m --context 4096`.

One prefill of the measured text and one of another text, which trains the codebooks as `vllm-santa calibrate` does; then every estimator
on query tokens spread over the second half of the text, against dense attention in float32. Writes
benchmarks/results/error-MODEL-CONTEXT.json after every query token, so that a run that is cut short leaves what it measured, on all layers.
"""

import json
import platform
import time
from collections import defaultdict
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks.models import load, prepare
from benchmarks.quality.estimates import SETTINGS, Measured, Problem, measure
from benchmarks.quality.texts import TEXTS
from vllm_santa.capture import Captured, capture_qkv
from vllm_santa.codebook import Codebook
from vllm_santa.reference.pq import encode, lookup_tables, proxy_scores
from vllm_santa.rotary import layer_rotary
from vllm_santa.training import train_codebook

RESULTS = Path(__file__).parents[1] / "results"
_LN2 = 0.6931471805599453


def main(
    model: Annotated[str, typer.Argument(help="A name of benchmarks.models.")],
    context: Annotated[int, typer.Option(help="Tokens of the measured text.")] = 4096,
    text: Annotated[str, typer.Option(help=f"Measured text: one of {', '.join(TEXTS)}.")] = "essays",
    codebook_text: Annotated[str, typer.Option(help="Text that trains the codebooks.")] = "other-essays",
    training: Annotated[int | None, typer.Option(help="Tokens that train the codebooks (default: as many as are measured).")] = None,
    subspaces: Annotated[int, typer.Option(help="Bytes of a key's code.")] = 16,
    device: Annotated[str, typer.Option(help="cpu (the model in float32) or cuda (in its own bfloat16, as a server caches it).")] = "cpu",
    layer_step: Annotated[int, typer.Option(help="Every how-manieth layer is measured.")] = 1,
    positions: Annotated[int, typer.Option(help="Query tokens measured per layer.")] = 6,
    repeats: Annotated[int, typer.Option(help="Seeds per random estimate.")] = 2,
    data: Annotated[Path | None, typer.Option(help="Folder with RULER's wheel (default: download it).")] = None,
    output: Annotated[Path, typer.Option(help="Folder for the JSON file.")] = RESULTS,
    suffix: Annotated[str, typer.Option(help="Added to the file's name.")] = "",
) -> None:
    """Measure every estimator's output error on one model and text."""
    started, console = time.time(), Console(stderr=True)
    network = load(model, device)
    tokenizer = AutoTokenizer.from_pretrained(prepare(model))
    layers = range(0, network.config.num_hidden_layers, layer_step)
    served = network.config.max_position_embeddings
    captures = []
    for name, tokens in ((codebook_text, training or context), (text, context)):
        console.print(f"{model}: prefill of {tokens} tokens of {name}")
        ids = tokenizer(TEXTS[name](data)[: 8 * tokens], return_tensors="pt", verbose=False).input_ids[:, :tokens]
        if ids.shape[1] < tokens:
            raise typer.BadParameter(f"{name} has {ids.shape[1]} tokens of the {tokens} asked for")
        captures.append(capture_qkv(network, ids, layers))
    other, records = captures
    codebooks = {
        layer: train_codebook(
            record.keys, record.grouped_queries(), subspaces, rotary=layer_rotary(network.config, layer, served), values=record.values
        )
        for layer, record in track(other.items(), "codebooks", console=console)
    }
    report: dict[str, Any] = {
        "command": f"python -m benchmarks.quality.error {model} --context {context} --text {text} --codebook-text {codebook_text} "
        f"--training {training or context} --subspaces {subspaces} --device {device} --layer-step {layer_step} --positions {positions} "
        f"--repeats {repeats}" + (f" --suffix={suffix}" if suffix else ""),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {name: version(name) for name in ("torch", "transformers")} | {"python": platform.python_version()},
        "device": torch.cuda.get_device_name(device) if network.device.type == "cuda" else device,
        "dtype": str(network.dtype).removeprefix("torch."),
        "model": model,
        "context": context,
        "text": text,
        "codebook_text": codebook_text,
        "training": training or context,
        "codebook_positions": served,
        "value_norms": True,
        "subspaces": subspaces,
        "layers": list(layers),
        "repeats": repeats,
        "settings": vars(SETTINGS),
    }
    output.mkdir(parents=True, exist_ok=True)
    path = output / f"error-{model}-{context}{suffix}.json"
    found: dict[tuple[str, float], list[Measured]] = defaultdict(list)
    codes = {layer: encode(record.keys, codebooks[layer]) for layer, record in records.items()}
    for done, position in enumerate(track(query_tokens(context, positions), "query tokens", console=console), 1):
        for layer, record in records.items():
            for result in measure(problem(record, codebooks[layer], codes[layer], layer, position), repeats):
                found[result.method, result.budget].append(result)
        rows = [summary(results) for results in found.values()]
        measured = {"positions": done, "seconds": round(time.time() - started), "rows": rows}
        path.write_text(json.dumps(report | measured, indent=1) + "\n")
    console.print(f"wrote {path}")


def query_tokens(tokens: int, count: int) -> list[int]:
    """`count` positions, evenly spread over the second half of the text, the last one included, which comes first."""
    return [tokens // 2 + (tokens - tokens // 2) * i // count - 1 for i in range(count, 0, -1)]


def problem(record: Captured, codebook: Codebook, codes: Tensor, layer: int, position: int) -> Problem:
    """What a layer's attention has to do for the query token at `position`. codes: of all the record's keys, [n, H, M]."""
    seen = slice(position + 1)
    key, value = (x[seen].float().transpose(0, 1).contiguous() for x in (record.keys, record.values))
    query = record.grouped_queries()[position].float()
    proxies = proxy_scores(lookup_tables(query, codebook, record.scale), codes[seen]) * _LN2
    return Problem(query, key, value, record.scale, proxies, layer, position)


def summary(results: list[Measured]) -> dict[str, float | str]:
    """One line of the report: all layers, positions, heads and repeats of one method at one budget."""
    errors = torch.cat([result.errors for result in results])
    features = torch.tensor([result.key_features for result in results]).mean(0)
    return {
        "method": results[0].method,
        "budget": results[0].budget,
        "value_rows": _mean([result.rows for result in results]),
        "mean": round(errors.mean().item(), 5),
        "p95": round(_quantile(errors, 0.95), 5),
        "key_features_per_head": round(features[0].item(), 4),
        "key_features_per_group": round(features[1].item(), 4),
        "errors": errors.numel(),
    }


def _mean(values: list[float]) -> float:
    return round(sum(values) / len(values), 2)


def _quantile(values: Tensor, share: float) -> float:
    return values.kthvalue(max(1, round(share * values.numel()))).values.item()


if __name__ == "__main__":
    typer.run(main)
