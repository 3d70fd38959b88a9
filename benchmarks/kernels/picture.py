"""Picture of santa-kernels.json: `python -m benchmarks.kernels.picture` writes docs/images/santa-speed.png."""

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

ROOT = Path(__file__).parents[2]
METHODS = ("pps", "prop", "flash")
COLOURS = dict(zip(METHODS, plt.get_cmap("tab10").colors, strict=False))


def draw(axes: Axes, rows: list[dict[str, Any]], batch: int) -> None:
    """Speed-up against context for one batch size of the Llama-3.1-8B shape; solid: ours, dashed: the published kernels."""
    for method in METHODS:
        for published in (False, True):
            points = [
                (row["context"], row["speedup"], row["budget"])
                for row in rows
                if (row["method"], row["published"], row["batch"], row["scores"]) == (method, published, batch, "peaked")
                and (row["query_heads"], row["kv_heads"], row["head_dim"]) == (32, 8, 128)
            ]
            if points:
                contexts, speedups, budgets = zip(*sorted(points), strict=True)
                label = f"{method}, {'published' if published else 'ours'}, budget {budgets[0]}"
                axes.plot(contexts, speedups, "o--" if published else "o-", color=COLOURS[method], label=label)
    axes.axhline(1, color="grey", linewidth=1)
    axes.text(axes.get_xlim()[0], 1.02, " FlashInfer", color="grey")
    axes.set_xscale("log", base=2)
    ticks = sorted({row["context"] for row in rows if row["batch"] == batch and row["head_dim"] == 128})
    axes.set_xticks(ticks, [f"{tick // 1024}K" for tick in ticks])
    axes.set_title(f"batch {batch}")
    axes.set_xlabel("context, tokens")
    axes.set_ylim(0, 2.05)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)


def main() -> None:
    result = json.loads((ROOT / "benchmarks/results/santa-kernels.json").read_text())
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    draw(left, result["rows"], 1)
    draw(right, result["rows"], 8)
    left.set_ylabel("speed-up over FlashInfer's dense decode")
    figure.suptitle(f"Decode attention, 32 query and 8 KV heads of 128, bf16, {result['versions']['gpu']}", fontsize=10)
    figure.tight_layout()
    figure.savefig(ROOT / "docs/images/santa-speed.png", dpi=110)


if __name__ == "__main__":
    main()
