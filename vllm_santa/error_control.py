"""Holds the estimated error of a request's attention output under its target, by the budget of the steps to come.

An integral controller of log2(budget). What it learns from a token acts LAG tokens later, never sooner: a worker knows the estimate by then
without waiting for its GPU, and the same seed gives the same budgets. A table of what each token got lets a preempted request compute its
answer again as it was.
"""

import math
from array import array
from collections import deque
from collections.abc import Hashable

from vllm_santa.policy.decision import ErrorTarget

LAG = 4
"""Tokens from an estimate to the first budget that it moves."""
RAISE, LOWER = 1 / 4, 1 / 32
"""Octaves of budget for an octave of error above and below the target. Errors of neighbouring tokens differ; raising faster than lowering
holds most of them, not only their mean, under the target."""
SLOPE = 1.0
"""Octaves of error that an octave of budget takes off, about: what budgets whose effect is not seen yet will still do. The loop is stable
for errors that fall with up to the 2.9th power of the budget."""
STEP = 1 / 8
"""Octaves between budgets. Matrix products round a little differently with the size of the batch; in finer steps that would soon move a
budget, and with it the answer."""
SURPRISE = 3.0
"""Octaves that one estimate can differ from the target."""


class ErrorControl:
    """Of one request. Contexts are those of its decoding tokens; levels are log2 of budget over the budget that the policy starts from."""

    def __init__(self) -> None:
        self._first = 0
        self._levels = array("f")
        self._seen: dict[int, float] = {}

    @property
    def last(self) -> int:
        """The longest context that has been given a budget; below the first one if there was none."""
        return self._first + len(self._levels) - 1

    def budget(self, context: int, start: int, target: ErrorTarget) -> int:
        """Rows for the token at this context; asked again, the same. start: rows that the policy gives it without a target."""
        if not self._levels:
            self._first = context
        if context > self.last:
            level = self._next_level(context)
            level = min(max(level, math.log2(target.least / start)), math.log2(target.most / start))
            self._levels.extend([level] * (context - self.last))
        level = self._levels[max(context - self._first, 0)]
        return min(max(round(start * 2.0 ** (STEP * round(level / STEP))), target.least), target.most)

    def observe(self, context: int, error: float, max_error: float) -> None:
        """The estimate for the token at a context that was given a budget. What is not finite says nothing."""
        if context > self.last - LAG and math.isfinite(error):
            excess = math.log2(error / max_error) if error > 0 else -SURPRISE
            self._seen[context] = min(max(excess, -SURPRISE), SURPRISE)

    def _next_level(self, context: int) -> float:
        level = self._levels[-1] if self._levels else 0.0
        for seen in sorted(at for at in self._seen if at <= context - LAG):
            excess = self._seen.pop(seen) - SLOPE * (level - self._levels[seen - self._first])
            level += (RAISE if excess > 0 else LOWER) * excess
        return level


class ErrorControls:
    """Finds the control of a request that comes back after preemption: the workers are not told which one it was."""

    def __init__(self, kept: int = 1024):
        self._kept: deque[tuple[Hashable, ErrorControl]] = deque(maxlen=kept)

    def enter(self, key: Hashable, answered: int) -> ErrorControl:
        """For a request that enters the batch.

        key: what such a request keeps over preemption, None if nothing. answered: context of the last token that it has computed, 0 if it
        is new. Of those that left with the same key and had come as far (or all but one token, which was under way), the nearest.
        """
        found = [entry for entry in self._kept if entry[0] == key and entry[1].last >= answered - 1] if answered and key is not None else []
        if found:
            entry = min(found, key=lambda entry: abs(entry[1].last - answered))
            self._kept.remove(entry)
        else:
            entry = (key, ErrorControl())
        if key is not None:
            self._kept.append(entry)
        return entry[1]
