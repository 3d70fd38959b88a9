"""The values that fields of a policy take, and how a field says what is allowed."""

import re
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, PlainValidator, model_validator

from vllm_santa.methods import METHOD_NAMES, Method
from vllm_santa.policy.budget import MAX_ROWS, Budget

LAYERS = re.compile(r"(-?[0-9]{1,5})-(-?[0-9]{1,5})")


def _method(value: object) -> Method:
    if isinstance(value, Method):
        return value
    if not isinstance(value, str) or value not in METHOD_NAMES:
        raise ValueError("not a method")
    return Method[value]


def _budget(value: object) -> Budget:
    if isinstance(value, Budget):
        return value
    try:
        budget = Budget.parse(value)
    except ValueError:
        budget = None
    if budget is None or budget.count > MAX_ROWS:
        raise ValueError("not a budget")  # the field's own words say what is allowed
    return budget


def _fraction(value: object) -> Budget:
    budget = _budget(value)
    if not budget.is_fraction:
        raise ValueError("a number of rows, where a fraction is wanted")
    return budget


def _layer(value: object) -> int | str:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if not is_number and not (isinstance(value, str) and LAYERS.fullmatch(value)):
        raise ValueError("neither a layer number nor a range")
    return value  # type: ignore[return-value]


def as_tuple(value: object) -> object:
    """A list as a tuple; frozen models hold no lists."""
    return tuple(value) if isinstance(value, list) else value


MethodName = Annotated[Method, BeforeValidator(_method), PlainSerializer(lambda method: method.name, return_type=str)]
BudgetValue = Annotated[Budget, BeforeValidator(_budget), PlainSerializer(str, return_type=str)]
FractionValue = Annotated[Budget, BeforeValidator(_fraction), PlainSerializer(str, return_type=str)]
Layer = Annotated[int | str, PlainValidator(_layer)]


def setting(default: Any, allowed: str, description: str, **constraints: Any) -> Any:
    """A field with the words that its errors and the reference use for what is allowed."""
    return Field(default, description=description, json_schema_extra={"allowed": allowed}, **constraints)


class Part(BaseModel):
    """A mapping of the file: nothing unknown in it, nothing of another type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Span(Part):
    """`min` and `max`, which a subclass declares."""

    @model_validator(mode="after")
    def _ordered(self) -> "Span":
        if self.low > self.high:
            raise ValueError(f"min {self.min} is above max {self.max}")  # type: ignore[attr-defined]
        return self

    @property
    def low(self) -> float:
        return self.min or 0  # type: ignore[attr-defined]

    @property
    def high(self) -> float:
        return float("inf") if self.max is None else self.max  # type: ignore[attr-defined]
