"""From a row and its request to the method and budget of its next decode step.

Runs for every decode row of every step, so it works on plain tuples that are prepared once from the policy.
"""

from collections.abc import Iterable
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


class Decision(NamedTuple):
    """Method and budget in rows (0 for dense). `reason` is a short, stable word, fit for a metric label (see REASONS).
    `bernoulli`: not None where keys are scored by Bernoulli queries, which only the reference computes."""

    method: Method
    budget: int
    reason: str
    bernoulli: BernoulliSettings | None = None


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

    __slots__ = ("rules", "default_method", "default_budget", "_beside")

    def __init__(self, rules: Iterable[CompiledRule], default_method: Method, default_budget: Budget, windows: int) -> None:
        """`windows`: tokens of sink and local windows together, which methods that score codes read beside the budget."""
        self.rules = tuple(rules)
        self.default_method = default_method
        self.default_budget = default_budget
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
        reason = "rule" if asked.method is None and asked.budget is None else "request"
        method, budget, bernoulli = self.default_method, self.default_budget, None
        if rule is not None and rule.method is not _DENSE:
            method, budget, bernoulli = rule.method, rule.budget, rule.bernoulli
        elif reason == "rule":
            return _NO_RULE if rule is None else _RULE_DENSE
        if asked.method is not None:  # Bernoulli queries belong to the method: who names the one says the other
            method, bernoulli = asked.method, asked.bernoulli
        rows = (asked.budget or budget).rows(row.context)
        beside = self._beside[method]
        if bernoulli is None and beside is not None and rows + beside >= row.context:
            return _COVERED
        return Decision(method, rows, reason, bernoulli)
