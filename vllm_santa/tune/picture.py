"""A picture of a measurement: speed against context, a panel for each batch, and what the policy chooses."""

from pathlib import Path

from vllm_santa.tune.break_even import Span
from vllm_santa.tune.times import DENSE, Times


def draw(times: Times, choices: list[tuple[int | None, list[Span]]], path: Path) -> None:
    """choices: as rules.choices gives them. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = dict(zip((DENSE, *times.plans), ("lightgrey", *plt.get_cmap("tab10").colors), strict=False))
    figure, panels = plt.subplots(
        1, len(times.batches), figsize=(4.2 * len(times.batches), 4), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, batch in zip(panels[0], times.batches, strict=True):
        points = times.of_batch(batch)
        contexts = [point.context for point in points]
        for plan in times.plans:
            axes.plot(contexts, [point.speed(plan) for point in points], "o-", color=colours[plan], label=plan)
        axes.axhline(1, color="grey", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_xticks(contexts, [_tokens(context) for context in contexts], rotation=45, fontsize=8)
        axes.minorticks_off()
        ends = axes.get_xlim()
        for start, end, plan in _stretches(_of_batch(choices, batch), *ends):
            axes.axvspan(start, end, color=colours[plan], alpha=0.12, linewidth=0)
        axes.set_xlim(ends)
        axes.set_title(f"batch {batch}", fontsize=10)
        axes.set_xlabel("context, tokens")
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel("speed, FlashInfer's dense decode = 1")
    panels[0][0].legend(fontsize=8)
    figure.suptitle(f"One layer's decode attention, {times.shape} {times.dtype}, {times.gpu}; shaded: what the policy chooses", fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _of_batch(choices: list[tuple[int | None, list[Span]]], batch: int) -> list[Span]:
    return next(found for smallest, found in reversed(choices) if smallest is None or smallest <= batch)


def _stretches(found: list[Span], low: float, high: float) -> list[tuple[float, float, str]]:
    """Where each choice holds, within [low, high]."""
    starts = [max(low, span.start) for span in found]
    return [(start, end, span.plan) for start, end, span in zip(starts, [*starts[1:], high], found, strict=True) if start < end]


def _tokens(context: int) -> str:
    return f"{context // 1024}K" if context % 1024 == 0 else str(context)
