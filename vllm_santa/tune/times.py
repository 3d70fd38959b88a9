"""What was measured: the decode attention of one layer, by method, context and batch. Kept as JSON, so that a policy can be made again."""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from vllm_santa.methods import METHOD_NAMES, Method
from vllm_santa.policy.budget import Budget

DENSE = "dense"


def parse_plan(text: str) -> tuple[Method, Budget]:
    """A method and its budget in words, as "ssa 2%".

    Raises:
        ValueError: says what is allowed.
    """
    name, _, budget = text.partition(" ")
    if name not in METHOD_NAMES[1:]:
        raise ValueError(f"{text!r} is not a sparse method with its budget, as 'ssa 2%'; methods: {', '.join(METHOD_NAMES[1:])}")
    return Method[name], Budget.parse(budget)


class Point(BaseModel):
    """One context and batch. microseconds: by method with budget, as "ssa 2%"; "dense" is FlashInfer."""

    model_config = ConfigDict(extra="forbid")
    context: int = Field(ge=1)
    batch: int = Field(ge=1)
    microseconds: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]]

    @field_validator("microseconds")
    @classmethod
    def _known(cls, times: dict[str, float]) -> dict[str, float]:
        if DENSE not in times:
            raise ValueError("dense is missing")
        for name in times.keys() - {DENSE}:
            parse_plan(name)
        return times

    def speed(self, plan: str) -> float:
        """Times as fast as dense."""
        return self.microseconds[DENSE] / self.microseconds[plan]


class Times(BaseModel):
    """A measurement. shape: QUERY_HEADS/KV_HEADS/HEAD_DIM. plans: methods with budgets, from the most exact to the least."""

    model_config = ConfigDict(extra="forbid")
    shape: str
    dtype: str
    gpu: str
    versions: dict[str, str]
    date: str
    plans: list[str] = Field(min_length=1)
    points: list[Point] = Field(min_length=1)

    @model_validator(mode="after")
    def _whole(self) -> "Times":
        wanted = {DENSE, *self.plans}
        seen: set[tuple[int, int]] = set()
        for point in self.points:
            where = f"context {point.context}, batch {point.batch}"
            if point.microseconds.keys() != wanted:
                raise ValueError(f"{where}: times of {', '.join(point.microseconds)}; must be of {', '.join([DENSE, *self.plans])}")
            if (point.context, point.batch) in seen:
                raise ValueError(f"{where}: measured twice")
            seen.add((point.context, point.batch))
        return self

    @property
    def batches(self) -> list[int]:
        return sorted({point.batch for point in self.points})

    def of_batch(self, batch: int) -> list[Point]:
        """Its points, from the shortest context on."""
        return sorted((point for point in self.points if point.batch == batch), key=lambda point: point.context)


def read_times(path: Path) -> Times:
    """Raises ValueError: names the file and what is wrong with it."""
    try:
        return Times.model_validate_json(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
