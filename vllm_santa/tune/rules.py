"""The policy file that follows from a measurement: rules, with the measured figures as comments."""

from collections.abc import Iterable, Sequence

from vllm_santa.policy.file import parse_policy
from vllm_santa.tune.break_even import Curve, Span, spans
from vllm_santa.tune.times import DENSE, Point, Times, parse_plan

ROUND = 256
"""Contexts of rules are rounded up to a multiple of this; a measurement is not more precise."""


def curve_of(points: Sequence[Point], plans: Iterable[str]) -> Curve:
    """points: of one batch, from the shortest context on."""
    return Curve([point.context for point in points], {plan: [point.speed(plan) for point in points] for plan in plans})


def slowest_curve(times: Times) -> Curve:
    """At every context, each plan at the batch at which it gains least."""
    contexts = sorted({point.context for point in times.points})
    at = [[point for point in times.points if point.context == context] for context in contexts]
    return Curve(contexts, {plan: [min(point.speed(plan) for point in points) for points in at] for plan in times.plans})


def choices(times: Times, margin: float, by_batch: bool) -> list[tuple[int | None, list[Span]]]:
    """The smallest batch of each group of rules, and its spans, rounded; None for rules of every batch. A group's last batch is below the
    next group's smallest: larger batches gain more, so nothing is chosen that is slower than at the batch measured."""
    if not by_batch:
        return [(None, _rounded(spans(slowest_curve(times), margin)))]
    found: list[tuple[int | None, list[Span]]] = []
    for batch in times.batches:
        chosen = _rounded(spans(curve_of(times.of_batch(batch), times.plans), margin))
        if not found or chosen != found[-1][1]:
            found.append((batch if found else 1, chosen))
    return found


def policy_text(times: Times, margin: float, by_batch: bool) -> str:
    """A policy file. Rules of the largest batches and longest contexts come first, so that each needs only its minimum.

    Raises:
        PolicyError: never for times that were measured; the text is checked before it is returned.
    """
    lines = [f"# {line}".rstrip() for line in _heading(times, margin, by_batch)]
    rules = [rule for batch, found in reversed(choices(times, margin, by_batch)) for rule in _rules(batch, found)]
    lines += ["rules:", *rules] if rules else ["rules: []  # nothing measured is faster than dense attention"]
    text = "\n".join(lines) + "\n"
    parse_policy(text, "the tuned policy")
    return text


def _rounded(found: list[Span]) -> list[Span]:
    """Spans that rounding leaves without a context go."""
    starts = {-(-span.start // ROUND) * ROUND: span.plan for span in found}
    return [Span(start, plan) for start, plan in starts.items()]


def _rules(batch: int | None, found: list[Span]) -> list[str]:
    lines: list[str] = []
    for span in reversed(found):
        if batch in (None, 1) and span.start == 0:
            continue  # dense, as any row that no rule matches
        conditions = [f"context: {{min: {span.start}}}"] * (span.start > 0) + [f"batch: {{min: {batch}}}"] * (batch not in (None, 1))
        if span.plan == DENSE:
            body = [*conditions, f"method: {DENSE}"]
        else:
            method, budget = parse_plan(span.plan)
            body = [*conditions, f"method: {method.name}", f"budget: {budget}"]
        lines += [("  - " if i == 0 else "    ") + line for i, line in enumerate(body)]
    return lines


def _heading(times: Times, margin: float, by_batch: bool) -> list[str]:
    query, kv, dim = times.shape.split("/")
    versions = ", ".join(f"{name} {version}" for name, version in times.versions.items())
    batches = (
        "Rules look at the batch, so answers depend on the load of the server; `--any-batch` writes rules that do not."
        if by_batch
        else "Rules hold at every measured batch: each method counts with the batch at which it gains least."
    )
    return [
        f"Written by `vllm-santa tune {times.shape}` on {times.date}: {times.gpu}, {versions}.",
        f"Decode attention of one layer, {query} query heads and {kv} KV heads of {dim}, {times.dtype}: microseconds, and the speed",
        "relative to dense (FlashInfer). The rest of a decode step, and encoding new keys for methods with codes, come on top.",
        "",
        *_table(times),
        "",
        f"A method replaces what is more exact (left of it) where it is more than {margin:.0%} faster. Between measured contexts, speeds",
        "are interpolated; beyond the longest, its choice goes on.",
        batches,
        "Speed says nothing of answers: docs/choosing.md and docs/quality.md do.",
    ]


def _table(times: Times) -> list[str]:
    width = max(14, *(len(plan) + 2 for plan in times.plans))
    lines = [f"{'batch':>5} {'context':>9} {DENSE:>9}" + "".join(f"{plan:>{width}}" for plan in times.plans)]
    for batch in times.batches:
        for point in times.of_batch(batch):
            cells = [f"{point.microseconds[plan]:.1f} {point.speed(plan):5.2f}x" for plan in times.plans]
            row = f"{batch:>5} {point.context:>9,} {point.microseconds[DENSE]:>9.1f}" + "".join(f"{cell:>{width}}" for cell in cells)
            lines.append(row)
    return lines
