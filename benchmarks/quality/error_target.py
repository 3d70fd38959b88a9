"""Estimated and true errors, and budgets under a target, on a real model: `python -m benchmarks.quality.error_target smollm2-135m`.

Queries, keys and values of some layers on real text, as benchmarks.quality.error takes them. First every method at some budgets, on query
tokens spread over the second half of the text: the error that a single draw estimates, and the one it has. Then the text's last tokens one
after the other, as if they were decoded, with the controller of vllm_santa/error_control.py in the loop. A row's error is what a server
controls: the relative error of a layer's output, all heads as one vector, mean over the layers.
Writes benchmarks/results/target-MODEL.json and docs/images/error-target.png, and prints the tables of docs/quality.md.
"""

import json
from collections.abc import Callable
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import matplotlib
import torch
import typer
from rich.console import Console
from rich.progress import track
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.models import prepare
from benchmarks.quality.estimates import SETTINGS, Problem
from benchmarks.quality.texts import TEXTS
from vllm_santa.capture import Captured, capture_qkv
from vllm_santa.codebook import Codebook
from vllm_santa.error_control import ErrorControl
from vllm_santa.methods import Method
from vllm_santa.policy.decision import ErrorTarget
from vllm_santa.reference.attend import attend_selected, attend_values
from vllm_santa.reference.error import relative_error
from vllm_santa.reference.philox import Stream
from vllm_santa.reference.pq import encode, lookup_tables, proxy_scores
from vllm_santa.reference.ssa import select_by_proxy
from vllm_santa.reference.values import draws_needed
from vllm_santa.rotary import layer_rotary
from vllm_santa.training import train_codebook

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

ROOT = Path(__file__).parents[2]
METHODS = [method for method in Method if method.estimates_error and method is not Method.prop]  # prop is sys
BUDGETS = (32, 64, 128, 256, 512)
CONTROLLED = (Method.pps, Method.ssa)
TARGETS = (0.2, 0.1, 0.05)
START, LEAST, MOST = 128, 8, 2048
"""Of the controlled budgets: where they start, and their limits."""
_LN2 = 0.6931471805599453

Layers = list[Callable[[int], Problem]]
"""A measured layer's problem at a position of the text."""


def layer_problems(record: Captured, codebook: Codebook, layer: int) -> Callable[[int], Problem]:
    """The decode problem of a layer at any position: its query, and all that it sees."""
    key, value = (x.float().transpose(0, 1).contiguous() for x in (record.keys, record.values))
    codes, queries = encode(record.keys, codebook), record.grouped_queries().float()

    def problem(position: int) -> Problem:
        seen = slice(position + 1)
        proxies = proxy_scores(lookup_tables(queries[position], codebook, record.scale), codes[seen]) * _LN2
        return Problem(queries[position], key[:, seen], value[:, seen], record.scale, proxies, layer, position)

    return problem


def errors(problem: Problem, method: Method, budget: int, seed: int) -> tuple[float, float]:
    """Estimated and true relative error of the layer's output, of one draw."""
    heads, group, _ = problem.query.shape
    rows = torch.full((heads,), budget)

    def numbers(stream: Stream, count: int, draws: int) -> Tensor:
        return problem.random(seed + 1, stream, count, draws)[seed]

    if method.needs_codes:
        selection = select_by_proxy(method, problem.proxies, SETTINGS, rows, numbers(Stream.selection, heads, budget))
        attended = attend_selected(problem.query, problem.key, problem.value, selection, problem.scale, estimate_error=True)
    else:
        if method is Method.pps:
            uniform = numbers(Stream.selection, heads, 1)
        else:
            uniform = numbers(Stream.values, heads * group, draws_needed(method, budget, problem.context)).unflatten(0, (heads, group))
        attended = attend_values(method, problem.scores(), problem.value, rows, uniform, estimate_error=True)
    assert attended.error is not None
    dense = torch.softmax(problem.scores().double(), -1) @ problem.value.double()
    estimated = relative_error(attended.error.variance.sum(), attended.error.square.sum())
    return estimated.item(), ((attended.output - dense).norm() / dense.norm()).item()


def row_errors(layers: Layers, position: int, method: Method, budget: int, seed: int) -> tuple[float, float]:
    """Estimated and true error of a row: means over the layers."""
    found = torch.tensor([errors(layer(position), method, budget, seed) for layer in layers])
    estimated, true = found.mean(0).tolist()
    return round(estimated, 5), round(true, 5)


def static(layers: Layers, positions: list[int], console: Console) -> list[dict[str, object]]:
    """Every method at every budget: a pair of errors for each position."""
    cases = [(method, budget) for method in METHODS for budget in BUDGETS]
    return [
        {"method": method.name, "budget": budget, "errors": [row_errors(layers, position, method, budget, 0) for position in positions]}
        for method, budget in track(cases, "fixed budgets", console=console)
    ]


def controlled(layers: Layers, positions: range, console: Console) -> list[dict[str, object]]:
    """Every target: budget and errors of each token, decoded one after the other."""
    results: list[dict[str, object]] = []
    cases = [(method, target) for method in CONTROLLED for target in TARGETS]
    for method, target in track(cases, "targets", console=console):
        control, budgets, found = ErrorControl(), [], []
        for position in positions:
            context = position + 1
            budgets.append(control.budget(context, START, ErrorTarget(target, LEAST, MOST)))
            found.append(row_errors(layers, position, method, budgets[-1], 0))
            control.observe(context, found[-1][0], target)
        results.append({"method": method.name, "target": target, "budgets": budgets, "errors": found})
    return results


def draw(report: dict, path: Path) -> None:
    """The picture: estimated against true errors, errors and budgets under control."""
    figure, axes = plt.subplots(1, 3, figsize=(14, 4.4), layout="constrained")
    colours = dict(zip([method.name for method in METHODS], plt.get_cmap("tab10").colors, strict=False))
    for name, colour in colours.items():
        pairs = [pair for row in report["static"] if row["method"] == name for pair in row["errors"]]
        axes[0].plot(*zip(*[(true, estimated) for estimated, true in pairs], strict=True), ".", ms=4, color=colour, label=name)
    ends = (0.01, 1)
    axes[0].plot(ends, ends, "k-", lw=1)
    axes[0].set(
        xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="true error of the draw", ylabel="estimated by the draw itself",
        title=f"{report['model']}, {report['tokens']:,} tokens: one draw each",
    )  # fmt: skip
    axes[0].legend(fontsize=8)
    for case, colour in zip(
        [row for row in report["controlled"] if row["method"] == "pps"], ("tab:green", "tab:blue", "tab:red"), strict=True
    ):
        label = f"target {case['target']:g}"
        axes[1].plot([true for _, true in case["errors"]], color=colour, lw=1, label=label)
        axes[1].axhline(case["target"], color=colour, ls="--", lw=1)
        axes[2].plot(case["budgets"], color=colour, lw=1.5, label=label)
    axes[1].set(yscale="log", xlabel="token", ylabel="true error", title="pps under control: the error")
    axes[2].set(yscale="log", xlabel="token", ylabel="rows of V per KV head", title="pps under control: the budget")
    for axis in axes:
        axis.grid(True, which="both", alpha=0.25)
    axes[1].legend(fontsize=8)
    figure.savefig(path, dpi=110)


def tables(report: dict) -> str:
    """Markdown: mean estimate ÷ mean true error by method and budget, and what targets achieved once the budget had settled."""
    lines = [f"| estimated ÷ true, {report['model']} | " + " | ".join(map(str, BUDGETS)) + " |", "|---" * (len(BUDGETS) + 1) + "|"]
    for method in METHODS:
        cells = []
        for budget in BUDGETS:
            (pairs,) = (row["errors"] for row in report["static"] if (row["method"], row["budget"]) == (method.name, budget))
            estimated, true = torch.tensor(pairs).mean(0).tolist()
            cells.append(f"{estimated / true:.2f} ({true:.3f})")
        lines.append(f"| {method.name} | " + " | ".join(cells) + " |")
    settled = report["settled_after"]
    lines += [
        "",
        "| method | target | mean estimated | mean true | tokens with true error under the target | mean budget |",
        "|---" * 6 + "|",
    ]
    for row in report["controlled"]:
        pairs, budgets = torch.tensor(row["errors"][settled:]), row["budgets"][settled:]
        estimated, true = pairs.mean(0).tolist()
        under = (pairs[:, 1] <= row["target"]).float().mean().item()
        lines.append(
            f"| {row['method']} | {row['target']:g} | {estimated:.3f} | {true:.3f} | {under:.0%} | {sum(budgets) / len(budgets):.0f} |"
        )
    return "\n".join(lines)


def main(
    model: Annotated[str, typer.Argument(help="A name of benchmarks.models.")],
    tokens: Annotated[int, typer.Option(help="Of the text.")] = 4096,
    layer_step: Annotated[int, typer.Option(help="Every how-manieth layer is measured.")] = 5,
    positions: Annotated[int, typer.Option(help="Query tokens for fixed budgets.")] = 8,
    answer: Annotated[int, typer.Option(help="Last tokens of the text, decoded under control.")] = 240,
    settled_after: Annotated[int, typer.Option(help="Tokens of those that the table leaves out.")] = 60,
    data: Annotated[Path | None, typer.Option(help="Folder with RULER's wheel (default: download it).")] = None,
    results: Annotated[Path, typer.Option(help="Folder for the JSON file.")] = ROOT / "benchmarks" / "results",
    image: Annotated[Path, typer.Option(help="The picture.")] = ROOT / "docs" / "images" / "error-target.png",
) -> None:
    """Measure estimated against true errors, and what targets achieve."""
    console = Console(stderr=True)
    network = AutoModelForCausalLM.from_pretrained(prepare(model), dtype=torch.float32)
    tokenizer, served = AutoTokenizer.from_pretrained(prepare(model)), network.config.max_position_embeddings
    indices = range(0, network.config.num_hidden_layers, layer_step)
    captures = []
    for name in ("other-essays", "essays"):
        ids = tokenizer(TEXTS[name](data)[: 8 * tokens], return_tensors="pt", verbose=False).input_ids[:, :tokens]
        captures.append(capture_qkv(network, ids, indices))
    layers: Layers = []
    for index in track(indices, "codebooks", console=console):
        other = captures[0][index]
        rotary = layer_rotary(network.config, index, served)
        codebook = train_codebook(other.keys, other.grouped_queries(), rotary=rotary, values=other.values)
        layers.append(layer_problems(captures[1][index], codebook, index))
    spread = [tokens // 2 + (tokens - tokens // 2) * (i + 1) // positions - 1 for i in range(positions)]
    report = {
        "command": f"python -m benchmarks.quality.error_target {model} --tokens {tokens} --layer-step {layer_step} --positions {positions} "
        f"--answer {answer} --settled-after {settled_after}",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "model": model,
        "tokens": tokens,
        "layers": list(indices),
        "settled_after": settled_after,
        "budget": {"start": START, "least": LEAST, "most": MOST},
        "static": static(layers, spread, console),
        "controlled": controlled(layers, range(tokens - answer, tokens), console),
    }
    path = results / f"target-{model}.json"
    path.write_text(json.dumps(report) + "\n")
    draw(report, image)
    print(tables(report))


if __name__ == "__main__":
    typer.run(main)
