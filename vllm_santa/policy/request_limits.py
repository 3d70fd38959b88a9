"""What a policy lets requests choose for themselves."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, field_validator

from vllm_santa.methods import METHOD_NAMES, Method
from vllm_santa.policy.budget import MAX_ROWS, Budget
from vllm_santa.policy.fields import FractionValue, MethodName, Part, Span, as_tuple, setting


class RowLimits(Span):
    """What a request may ask for as a number of rows."""

    min: int = setting(8, f"an integer from 1 to {MAX_ROWS}", "Fewest rows.", ge=1, le=MAX_ROWS)
    max: int = setting(16384, f"an integer from 1 to {MAX_ROWS}", "Most rows.", ge=1, le=MAX_ROWS)


class FractionLimits(Span):
    """What a request may ask for as a fraction of its context."""

    min: FractionValue = setting(Budget.parse("0.1%"), "a fraction above 0 and below 1, as 0.02 or '2%'", "Smallest fraction.")
    max: FractionValue = setting(Budget.parse("50%"), "a fraction above 0 and below 1, as 0.02 or '2%'", "Largest fraction.")

    @property
    def low(self) -> float:
        return self.min.parts

    @property
    def high(self) -> float:
        return self.max.parts


class RequestLimits(Part):
    """What requests may choose for themselves (docs/requests.md)."""

    allow: bool = setting(True, "true or false", "Whether requests may choose a method and a budget at all. Seeds are always theirs.")
    methods: Annotated[tuple[MethodName, ...], BeforeValidator(as_tuple)] = setting(
        tuple(Method), "a list of methods: " + ", ".join(METHOD_NAMES), "Methods that requests may choose."
    )
    budget: RowLimits = setting(RowLimits(), "min and max", "Limits of `santa_budget` where it is a number of rows.")
    fraction: FractionLimits = setting(FractionLimits(), "min and max", "Limits of `santa_budget` where it is a fraction of the context.")
    bernoulli: bool = setting(
        True,
        "true or false",
        "Whether requests may choose Bernoulli queries. No kernel computes them: a GPU server decodes such rows by the reference, slowly.",
    )
    max_error: bool = setting(
        True,
        "true or false",
        "Whether requests may give error targets. On a GPU they cost one more module to compile and one more set of decode graphs.",
    )
    over_limit: Literal["refuse", "clamp"] = setting(
        "refuse", "refuse or clamp", "Whether a budget outside the limits is refused with HTTP 400, or moved to the nearest limit."
    )

    @field_validator("methods")
    @classmethod
    def _some_method(cls, methods: tuple[Method, ...]) -> tuple[Method, ...]:
        if not methods:
            raise ValueError("empty")
        return methods

    @property
    def clamps(self) -> bool:
        return self.over_limit == "clamp"

    def clamping(self) -> "RequestLimits":
        """These limits, with budgets outside of them clamped."""
        return self if self.clamps else self.model_copy(update={"over_limit": "clamp"})

    def clamp(self, budget: Budget) -> Budget:
        """The nearest budget inside the limits; a fraction stays a fraction."""
        if budget.is_fraction:
            return Budget(0, min(max(budget.parts, self.fraction.min.parts), self.fraction.max.parts))
        return Budget(min(max(budget.count, self.budget.min), self.budget.max))

    def rows(self, budget: Budget, context: int) -> tuple[int, int]:
        """The fewest and the most rows at that context of a budget of this kind: of a number of rows, or of a fraction."""
        if budget.is_fraction:
            return self.fraction.min.rows(context), self.fraction.max.rows(context)
        return self.budget.min, self.budget.max

    def budget_text(self) -> str:
        """The limits in words, for error messages."""
        fraction = self.fraction
        return (
            f"{self.budget.min} to {self.budget.max} rows, or a fraction of the context from {fraction.min.fraction:g} ({fraction.min}) "
            f"to {fraction.max.fraction:g} ({fraction.max})"
        )
