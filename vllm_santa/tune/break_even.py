"""From times at some contexts to the method that is chosen at every context.

Between two measured contexts, the logarithm of a method's speed is taken to be linear in the logarithm of the context. Then any two methods
change places at most once there, at a point that can be computed.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from typing import NamedTuple

from vllm_santa.tune.times import DENSE


class Curve(NamedTuple):
    """Speeds relative to dense at some contexts [n], ascending: by plan [n]. Plans come from the most exact to the least."""

    contexts: Sequence[int]
    speeds: dict[str, Sequence[float]]


class Span(NamedTuple):
    """From `start` tokens of context on, up to the next span: what is chosen, a plan or DENSE."""

    start: int
    plan: str


def chosen(speeds: dict[str, float], margin: float) -> str:
    """The plan for a point: one replaces what is more exact only where it is faster by the margin (0.05: 5 %)."""
    best, best_speed = DENSE, 1.0
    for plan, speed in speeds.items():
        if speed > best_speed * (1 + margin):
            best, best_speed = plan, speed
    return best


def spans(curve: Curve, margin: float) -> list[Span]:
    """What is chosen from the first measured context on. Below that, nothing was measured: dense. The choice at the last one holds for all
    longer contexts."""
    found = [Span(0, DENSE)]
    for start, speeds in _steps(curve, margin):
        plan = chosen(speeds, margin)
        if plan != found[-1].plan:
            found.append(Span(start, plan))
    return found


def _steps(curve: Curve, margin: float) -> Iterator[tuple[int, dict[str, float]]]:
    """Points from which on the choice may be another, with the speeds in the middle of the stretch that follows."""
    logs = {DENSE: [0.0] * len(curve.contexts)} | {plan: [math.log(speed) for speed in speeds] for plan, speeds in curve.speeds.items()}
    places = [math.log(context) for context in curve.contexts]
    for i, (left, right) in enumerate(pairwise(places)):
        cuts = {0.0, 1.0}
        for one, other in combinations(logs.values(), 2):
            # Where the less exact one gains the margin, as a part of the way; an end that is not crossed lies outside of it.
            at_left, at_right = (other[j] - one[j] - math.log1p(margin) for j in (i, i + 1))
            if at_left * at_right < 0:
                cuts.add(at_left / (at_left - at_right))
        for start, end in pairwise(sorted(cuts)):
            middle = (start + end) / 2
            speeds = {plan: math.exp(logs[plan][i] * (1 - middle) + logs[plan][i + 1] * middle) for plan in curve.speeds}
            yield math.ceil(math.exp(left + start * (right - left)) - 1e-6), speeds
    yield curve.contexts[-1], {plan: speeds[-1] for plan, speeds in curve.speeds.items()}
