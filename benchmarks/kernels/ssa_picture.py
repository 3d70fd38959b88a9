"""Picture of the SSA kernels' speed: `python -m benchmarks.kernels.ssa_picture`.

Reads benchmarks/results/ssa-kernels.json, writes docs/images/ssa-speed.png.
"""

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

ROOT = Path(__file__).parents[2]
SHAPES = {(16, 4, 256): "16 query heads, 4 KV heads, head_dim 256, fp16", (32, 8, 128): "32 query heads, 8 KV heads, head_dim 128, bf16"}
RATIOS = (50, 20, 10)
COLOURS = dict(zip(RATIOS, ("tab:green", "tab:blue", "tab:purple"), strict=True))
PUBLISHED = {(1048576, 1, 50): 1.79, (1048576, 1, 20): 1.39, (1048576, 1, 10): 1.07, (1048576, 16, 50): 2.96}
"""SSA's own kernels on an H200, its shape: (context, batch, tokens per row read) -> speed against FlashInfer (SSA, experiments)."""


def draw(axes: Axes, rows: list[dict[str, Any]], shape: tuple[int, int, int]) -> None:
    """One panel: a group of bars for every context and batch, a bar for every budget."""
    cases = sorted({(row["context"], row["batch"]) for row in rows})
    width = 0.8 / len(RATIOS)
    for index, ratio in enumerate(RATIOS):
        by_case = {(row["context"], row["batch"]): row["speedup"] for row in rows if row["sparsity"] == ratio}
        places = [place + (index - 1) * width for place in range(len(cases))]
        bars = axes.bar(places, [by_case[case] for case in cases], width, color=COLOURS[ratio], label=f"1 row of {ratio}")
        axes.bar_label(bars, fmt="%.1f", fontsize=7)
    if shape == (16, 4, 256):
        marks = {cases.index((context, batch)) + (RATIOS.index(ratio) - 1) * width: x for (context, batch, ratio), x in PUBLISHED.items()}
        axes.plot(list(marks), list(marks.values()), "k_", markersize=14, label="SSA's own kernels")
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_xticks(range(len(cases)), [f"{context // 1024}K × {batch}" for context, batch in cases])
    axes.set_xlabel("context × batch")
    axes.set_title(SHAPES[shape], fontsize=9)


def main() -> None:
    rows = [row for row in json.loads((ROOT / "benchmarks/results/ssa-kernels.json").read_text())["rows"] if row["subspaces"] == 16]
    figure, panels = plt.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
    for axes, shape in zip(panels, SHAPES, strict=True):
        draw(axes, [row for row in rows if (row["query_heads"], row["kv_heads"], row["head_dim"]) == shape], shape)
    panels[0].set_ylabel("speed, FlashInfer's dense decode = 1")
    panels[0].legend(fontsize=8, loc="upper left")
    figure.savefig(ROOT / "docs/images/ssa-speed.png", dpi=130)


if __name__ == "__main__":
    main()
