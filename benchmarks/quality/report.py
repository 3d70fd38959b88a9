"""Pictures and Markdown tables of the attention-error and codebook studies: `python -m benchmarks.quality.report`.

Reads error-*.json and codebook-error.json of benchmarks/results, writes docs/images/error-*.png, and prints the tables that
docs/quality.md quotes.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import typer
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

ROOT = Path(__file__).parents[2]
VALUE_METHODS = ("santa", "strat", "sys", "flash", "pps")
SELECTIONS = ("ssa", "ssa_fixed", "topk", "uniform_tail", "oracle_topk")
SHRUNK = "ssa, James-Stein tail"
OTHERS = (
    SHRUNK,
    "ssa, shrunk tail",
    "ssa, with replacement",
    "ssa, exact proxy",
    "ssa, per query head",
    "ssa_fixed, per query head",
    "topk, per query head",
)
COLOURS = dict(zip((*VALUE_METHODS, *SELECTIONS), plt.get_cmap("tab10").colors, strict=True))
COLOURS[SHRUNK] = COLOURS["ssa"]
PANELS = 3
"""In a row of a picture."""
LABELS = {"sys": "sys, prop", "ssa": "ssa (ours, adaptive)", "pps": "pps (ours)", "oracle_topk": "oracle top-k", "topk": "top-k (PQ)"}


@dataclass(frozen=True)
class Study:
    """One JSON file."""

    report: dict[str, Any]

    @property
    def title(self) -> str:
        report = self.report
        name = f"{report['model']}, {report['context']:,} tokens"
        return name if self.usual_codebook else f"{name}, codebook from {report['training']:,} of {report['codebook_text']}"

    @property
    def usual_codebook(self) -> bool:
        """Codebooks from other essays, from as many positions as are measured."""
        report = self.report
        return report["codebook_text"] == "other-essays" and report.get("training", report["context"]) >= report["context"]

    def rows(self, method: str) -> list[dict[str, Any]]:
        """A method's rows, by budget."""
        return sorted((row for row in self.report["rows"] if row["method"] == method), key=lambda row: row["budget"])


def load(folder: Path) -> list[Study]:
    """All studies in a folder, by model and context."""
    studies = [Study(json.loads(path.read_text())) for path in folder.glob("error-*.json")]
    return sorted(studies, key=lambda study: (_size(study.report["model"]), study.report["context"], study.title))


def _size(model: str) -> float:
    number = model.rpartition("-")[2]
    return float(number[:-1]) * (1000 if number.endswith("b") else 1)


def _draw(studies: list[Study], title: str, methods: tuple[str, ...], x: str, label: str) -> list[Axes]:
    """A panel for each study: the methods' mean errors against the field `x` of their rows."""
    columns, rows = min(PANELS, len(studies)), math.ceil(len(studies) / PANELS)
    figure, grid = plt.subplots(rows, columns, figsize=(4.2 * columns, 4.0 * rows), sharey=True, squeeze=False, layout="constrained")
    figure.suptitle(title)
    axes = list(grid.flat[: len(studies)])
    for empty in grid.flat[len(studies) :]:
        empty.remove()
    for axis, study in zip(axes, studies, strict=True):
        axis.set(xscale="log", yscale="log", title=study.title, xlabel=label)
        axis.grid(True, which="both", alpha=0.25)
        for method in methods:
            rows = study.rows(method)
            width, name = 2.5 if method in ("pps", "ssa") else 1.3, LABELS.get(method, method)
            axis.plot(
                [row[x] for row in rows],
                [row["mean"] for row in rows],
                "o--" if method == SHRUNK else "o-",
                ms=4,
                lw=width,
                color=COLOURS[method],
                label=name,
            )
    for row in grid:
        row[0].set_ylabel("relative L2 error of the output, mean")
    axes[-1].legend()
    return axes


def draw_value_methods(studies: list[Study], path: Path) -> None:
    """Error against the rows of V read per KV head."""
    axes = _draw(studies, "The SANTA family: all of K, few rows of V", VALUE_METHODS, "value_rows", "rows of V read per KV head")
    axes[0].figure.savefig(path, dpi=110)


def draw_selections(studies: list[Study], path: Path) -> None:
    """Error against the budget, SSA beside its comparators."""
    title = "The SSA family: PQ codes choose the rows of K and V (128 + 128 more are always read)"
    axes = _draw(studies, title, (*SELECTIONS, SHRUNK), "budget", "budget, share of the context")
    for axis in axes:
        axis.xaxis.set_major_formatter(PercentFormatter(1, decimals=1))
    axes[0].figure.savefig(path, dpi=110)


def selection_table(study: Study) -> str:
    """Mean / 95th percentile of every method whose budget is a share of the context."""
    budgets = [row["budget"] for row in study.rows("ssa")]
    lines = [f"| {study.title} | " + " | ".join(f"{budget:.1%}" for budget in budgets) + " |", "|---" * (len(budgets) + 1) + "|"]
    measured = {row["method"] for row in study.report["rows"]}
    for method in (name for name in ("pps", *SELECTIONS, *OTHERS) if name in measured):
        name = f"**{method}**" if method in ("ssa", "pps") else method
        lines.append(f"| {name} | " + " | ".join(f"{row['mean']:.3f} / {row['p95']:.2f}" for row in study.rows(method)) + " |")
    return "\n".join(lines)


def comparison_table(studies: list[Study]) -> str:
    """How far the mean error of `ssa`, and of `ssa` with a shrunk tail, lies below (−) or above (+) the others' at 0.5, 1 and 2 %."""
    lines = [
        "| mean errors at 0.5 / 1 / 2 % | " + " | ".join(study.title for study in studies) + " |",
        "|---" * (len(studies) + 1) + "|",
    ]
    for ours in ("ssa", SHRUNK):
        for method in SELECTIONS[1:]:
            cells = []
            for study in studies:
                pairs = list(zip(study.rows(ours), study.rows(method), strict=False))[:3]  # none where a study is older than a method
                cells.append(" / ".join(f"{one['mean'] / other['mean'] - 1:+.0%}" for one, other in pairs).replace("-", "−"))
            lines.append(f"| {ours} against {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draws_table(study: Study) -> str:
    """Mean error (rows of V read per KV head) of every method whose budget is a number of draws."""
    budgets = [row["budget"] for row in study.rows("santa")]
    lines = [f"| {study.title}: S | " + " | ".join(map(str, budgets)) + " |", "|---" * (len(budgets) + 1) + "|"]
    for method in VALUE_METHODS[:-1]:
        cells = (f"{row['mean']:.3f} ({row['value_rows']:.0f})" for row in study.rows(method))
        lines.append(f"| {LABELS.get(method, method)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def bernoulli_table(study: Study) -> str:
    """Error and K access of Bernoulli queries."""
    lines = [f"| {study.title} | B | K features, head | group | error | with sys 128 |", "|---|---|---|---|---|---|"]
    for name in ("Bernoulli, per head", "Bernoulli, mean group query"):
        for row, sampled in zip(study.rows(name), study.rows(f"{name} + sys 128"), strict=True):
            shares = f"{row['key_features_per_head']:.0%} | {row['key_features_per_group']:.0%}"
            lines.append(f"| {name} | {row['budget']} | {shares} | {row['mean']:.3f} | {sampled['mean']:.3f} |")
    return "\n".join(lines)


def codebook_table(title: str, study: dict[str, Any]) -> str:
    """Score and output errors of every transform and training text of benchmarks.quality.codebook."""
    budgets = list(study["rows"][0]["output_error"])
    heads = " | ".join(f"{float(budget):.0%}" for budget in budgets)
    lines = [f"| {title} | bytes a key | score error, nats | {heads} |", "|---" * (len(budgets) + 3) + "|"]
    for row in study["rows"]:
        if row["table"].startswith("positions"):
            continue
        setting = f"trained on {row['setting']}" if row["table"] == "training text" else row["setting"]
        cells = " | ".join(f"{row['output_error'][budget]:.3f}" for budget in budgets)
        lines.append(f"| {setting} | {row['subspaces'] or '–'} | {row['score_error']:.2f} | {cells} |")
    return "\n".join(lines)


def drift_table(title: str, study: dict[str, Any], budget: str = "0.02") -> str:
    """Output error at a budget (and score error) where a text stands at other positions than its codebook's training text."""
    rows = [row for row in study["rows"] if row["table"].startswith("positions")]
    places = list(dict.fromkeys(row["table"] for row in rows))
    lines = [f"| {title}, codebook from | " + " | ".join(places) + " |", "|---" * (len(places) + 1) + "|"]
    for setting in dict.fromkeys(row["setting"] for row in rows):
        cells = (f"{row['output_error'][budget]:.3f} ({row['score_error']:.2f})" for row in rows if row["setting"] == setting)
        lines.append(f"| {setting} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(
    results: Annotated[Path, typer.Option(help="Folder of the JSON files.")] = ROOT / "benchmarks" / "results",
    images: Annotated[Path, typer.Option(help="Folder of the pictures.")] = ROOT / "docs" / "images",
) -> None:
    """Draw the pictures and print the tables."""
    studies = load(results)
    images.mkdir(parents=True, exist_ok=True)
    plain = [study for study in studies if study.usual_codebook]
    draw_value_methods(plain, images / "error-values.png")
    draw_selections(plain, images / "error-selections.png")
    print(comparison_table(plain), *map(selection_table, studies), *map(draws_table, plain), *map(bernoulli_table, plain), sep="\n\n")
    for title, study in json.loads((results / "codebook-error.json").read_text()).items():
        print("", codebook_table(title, study), drift_table(title, study), sep="\n\n")


if __name__ == "__main__":
    typer.run(main)
