"""From a row and its request to the method and budget of its next decode step.

Runs for every decode row of every step, so it works on plain tuples that are prepared once from the policy.
"""

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import NamedTuple

from vllm_santa.methods import BernoulliSettings, Method
from vllm_santa.policy.budget import Budget
from vllm_santa.policy.parameters import RequestParams


class RowContext(NamedTuple):
    """What a policy may look at: `context` tokens in the row (the current one included), `generated` tokens of its answer so far,
    `batch` decode rows in the step, and the served model's name."""

    context: int
    generated: int = 0
    batch: int = 1
    model: str = ""


class ErrorTarget(NamedTuple):
    """`max_error`: what the relative error of the attention output is to stay under. `least`, `most`: rows that its budget may be."""

    max_error: float
    least: int
    most: int


class Decision(NamedTuple):
    """Method and budget in rows (0 for dense). `reason` is a short, stable word, fit for a metric label (see REASONS).
    `bernoulli`: not None where keys are scored by Bernoulli queries, which only the reference computes. `target`: not None where the
    budget is only the one to start from."""

    method: Method
    budget: int
    reason: str
    bernoulli: BernoulliSettings | None = None
    target: ErrorTarget | None = None


REASONS = {
    "rule": "a rule of the policy chose the method and the budget",
    "rule_dense": "a rule of the policy asks for dense attention",
    "no_rule": "no rule matches the row, so it is dense",
    "request": "the request chose the method, the budget or both",
    "request_dense": "the request asks for dense attention",
    "budget_covers_context": "the budget (and windows) would read every row, so dense attention is as cheap and exact",
}

_RULE_DENSE, _NO_RULE, _REQUEST_DENSE, _COVERED = (
    Decision(Method.dense, 0, reason) for reason in ("rule_dense", "no_rule", "request_dense", "budget_covers_context")
)
_NO_REQUEST = RequestParams()
_DENSE = Method.dense  # a member's look-up in its class is slow beside the rest of a decision


class Condition(NamedTuple):
    """An inclusive range for one number of the row; `field` is its index in RowContext."""

    field: int
    low: int
    high: float


class CompiledRule(NamedTuple):
    conditions: tuple[Condition, ...]
    model: str | None
    method: Method
    budget: Budget
    bernoulli: BernoulliSettings | None
    max_error: float | None

    def mismatch(self, row: RowContext) -> str | None:
        """The name of the first condition that the row does not meet, or None where it meets them all."""
        for field, low, high in self.conditions:
            if not low <= row[field] <= high:  # type: ignore[operator]
                return RowContext._fields[field]
        if self.model is not None and not _model_matches(self.model, row.model):
            return "model"
        return None


@lru_cache(maxsize=256)
def _model_matches(pattern: str, model: str) -> bool:
    return fnmatchcase(model, pattern) or fnmatchcase(model.rstrip("/").rpartition("/")[2], pattern)


class Decider:
    """The policy's rules and defaults, ready for use."""

    __slots__ = ("rules", "default_method", "default_budget", "_limits_of", "_beside")

    def __init__(
        self,
        rules: Iterable[CompiledRule],
        default_method: Method,
        default_budget: Budget,
        limits_of: Callable[[Budget, int], tuple[int, int]],
        windows: int,
    ) -> None:
        """`limits_of`: a budget and a context -> the fewest and the most rows that an error target may make of it. `windows`: tokens of
        sink and local windows together, which methods that score codes read beside the budget."""
        self.rules = tuple(rules)
        self.default_method = default_method
        self.default_budget = default_budget
        self._limits_of = limits_of
        # By method: rows read beside the budget; None where a budget counts draws, which never cover a row.
        self._beside = tuple(None if method.samples_values else windows if method.needs_codes else 0 for method in Method)

    def match(self, row: RowContext) -> CompiledRule | None:
        """The first rule that the row meets."""
        for rule in self.rules:
            if rule.mismatch(row) is None:
                return rule
        return None

    def __call__(self, row: RowContext, request: RequestParams | None = None) -> Decision:
        asked = request or _NO_REQUEST
        if asked.method is _DENSE:
            return _REQUEST_DENSE
        rule = self.match(row)
        reason = "rule" if asked.method is None and asked.budget is None and asked.max_error is None else "request"
        method, budget, bernoulli, max_error = self.default_method, self.default_budget, None, asked.max_error
        if rule is not None and rule.method is not _DENSE:
            method, budget, bernoulli = rule.method, rule.budget, rule.bernoulli
            if reason == "rule":  # who names a method or a budget gets that
                max_error = rule.max_error
        elif reason == "rule":
            return _NO_RULE if rule is None else _RULE_DENSE
        if asked.method is not None:  # Bernoulli queries belong to the method: who names the one says the other
            method, bernoulli = asked.method, asked.bernoulli
        budget = asked.budget or budget
        rows = budget.rows(row.context)
        if bernoulli is None and self._covers(method, rows, row.context):
            return _COVERED
        target = None
        if max_error is not None and bernoulli is None and method.estimates_error:
            least, most = self._limits_of(budget, row.context)
            target = ErrorTarget(max_error, min(least, rows), max(most, rows))
        return Decision(method, rows, reason, bernoulli, target)

    def with_budget(self, decision: Decision, rows: int, context: int) -> Decision:
        """The decision with the budget that its error target has led to."""
        if self._covers(decision.method, rows, context):
            return _COVERED
        return decision._replace(budget=rows)

    def _covers(self, method: Method, rows: int, context: int) -> bool:
        beside = self._beside[method]
        return beside is not None and rows + beside >= context
