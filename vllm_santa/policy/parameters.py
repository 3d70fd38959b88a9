"""The `santa_*` parameters of a request, read from `SamplingParams.extra_args` (the OpenAI API's `vllm_xargs`)."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from vllm_santa.methods import MAX_BERNOULLI_SAMPLES, METHOD_NAMES, BernoulliSettings, Method
from vllm_santa.policy.budget import Budget, shown

if TYPE_CHECKING:
    from vllm_santa.policy.request_limits import RequestLimits

PREFIX = "santa_"
UNKNOWN = "unknown"
"""Stands for every parameter that there is not, where refusals are counted."""
BERNOULLI_QUERIES = ("group", "head")
BERNOULLI_METHODS = tuple(method.name for method in Method if method.scores_exactly)
ERROR_METHODS = tuple(method.name for method in Method if method.estimates_error)
_SAMPLES = re.compile("[0-9]{1,18}")
_NUMBER = re.compile(r"([0-9]{1,18}(?:\.[0-9]{0,18})?|\.[0-9]{1,18}) ?(%?)")
SEED_MIN, SEED_MAX = -(2**63), 2**64 - 1


@dataclass(frozen=True, slots=True)
class RequestParams:
    """What a request asks for; None where it leaves the choice to the policy. `seed` is an unsigned 64-bit value. `bernoulli` comes with a
    `method` that it suits. `max_error` is in (0, 1], without `bernoulli`; a `method` beside it estimates its error."""

    method: Method | None = None
    budget: Budget | None = None
    seed: int | None = None
    bernoulli: BernoulliSettings | None = None
    max_error: float | None = None


class ParameterError(ValueError):
    """A parameter that cannot be followed: its name, its value and what is allowed. parameter: the name, or UNKNOWN."""

    def __init__(self, parameter: str, message: str) -> None:
        super().__init__(message)
        self.parameter = parameter


def parse(extra_args: Mapping[str, Any] | None, limits: "RequestLimits") -> RequestParams:
    """Read and check the parameters, at the server's door.

    Raises:
        ParameterError: vLLM answers HTTP 400 with it.
    """
    return _params(_read(extra_args, limits))


def parse_lenient(extra_args: Mapping[str, Any] | None, limits: "RequestLimits") -> tuple[RequestParams, int]:
    """The same behind the door, where nothing may fail: budgets outside the limits are clamped, what cannot be read is left out.

    Returns the parameters and how many of them were left out.
    """
    values: dict[str, Any] = {}
    ignored = 0
    limits = limits.clamping()
    for key, value in (extra_args or {}).items():
        if not _is_ours(key):
            continue
        try:
            values |= _read({key: value}, limits)
        except ValueError:
            ignored += 1
    for dropped in ("", "bernoulli", "max_error"):  # what does not go together; the rest can still be served
        rest = {name: value for name, value in values.items() if not dropped or not name.startswith(dropped)}
        ignored, values = ignored + len(values) - len(rest), rest
        try:
            return _params(values), ignored
        except ValueError:
            continue
    raise AssertionError(f"parameters that are right one by one do not go together: {values}")


def has_santa(extra_args: Mapping[str, Any] | None) -> bool:
    """True if the request names any `santa_*` parameter."""
    return any(map(_is_ours, extra_args or ()))


def unsigned(seed: int) -> int:
    """A signed or unsigned 64-bit seed as the unsigned value that keys the random numbers."""
    return seed & SEED_MAX


def _params(values: dict[str, Any]) -> RequestParams:
    """The parameters as one, from values that are right each for itself."""
    method, samples, query = values.get("method"), values.get("bernoulli"), values.get("bernoulli_query")
    if samples is None and query is not None:
        text = f"santa_bernoulli_query: {query!r} is given without santa_bernoulli; allowed: both, or neither"
        raise ParameterError("santa_bernoulli_query", text)
    if samples is not None and (method is None or not method.scores_exactly):
        given = "no santa_method" if method is None else f"santa_method {method.name}"
        text = f"santa_bernoulli: {samples} is given with {given}; allowed: with santa_method {', '.join(BERNOULLI_METHODS)}"
        raise ParameterError("santa_bernoulli", text)
    bernoulli = None if samples is None else BernoulliSettings(samples, query != "head")
    max_error = values.get("max_error")
    if max_error is not None and method is not None and not method.estimates_error:
        why = "reads everything" if method is Method.dense else "takes no row by chance, so its rows do not tell its error"
        text = (
            f"santa_max_error: {max_error:g} is given with santa_method {method.name}, which {why}; "
            f"allowed: with santa_method {', '.join(ERROR_METHODS)}, or without one"
        )
        raise ParameterError("santa_max_error", text)
    if max_error is not None and bernoulli is not None:
        text = f"santa_max_error: {max_error:g} is given with santa_bernoulli, whose error the rows read do not tell; allowed: one of them"
        raise ParameterError("santa_max_error", text)
    return RequestParams(method, values.get("budget"), values.get("seed"), bernoulli, max_error)


def _is_ours(key: object) -> bool:
    return isinstance(key, str) and key.startswith(PREFIX)


def _read(extra_args: Mapping[str, Any] | None, limits: "RequestLimits") -> dict[str, Any]:
    """Our parameters among these, each read for itself, by their names without the prefix."""
    values = {}
    for key, value in (extra_args or {}).items():
        if not _is_ours(key):
            continue
        if key not in _READERS:
            near = get_close_matches(key, _READERS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            text = f"{shown(key)[1:-1]}: unknown parameter (value {shown(value)}); allowed: {', '.join(_READERS)}{hint}"
            raise ParameterError(UNKNOWN, text)
        try:
            values[key.removeprefix(PREFIX)] = _READERS[key](value, limits)
        except ValueError as error:
            raise ParameterError(key, str(error)) from None
    return values


def _read_method(value: object, limits: "RequestLimits") -> Method:
    _check_may_choose("santa_method", value, limits)
    allowed = [method.name for method in limits.methods]
    if not isinstance(value, str) or value not in METHOD_NAMES:
        near = get_close_matches(value, allowed, n=1) if isinstance(value, str) else []
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"santa_method: {shown(value)} is not a method; allowed: {', '.join(allowed)}{hint}")
    if value not in allowed:
        raise ValueError(f"santa_method: {value!r} is not allowed by this server's policy; allowed: {', '.join(allowed)}")
    return Method[value]


def _read_budget(value: object, limits: "RequestLimits") -> Budget:
    _check_may_choose("santa_budget", value, limits)
    budget = Budget.parse(value, "santa_budget", limits.budget_text())
    bounded = limits.clamp(budget)
    if bounded != budget and not limits.clamps:
        raise ValueError(f"santa_budget: {shown(value)} is outside this server's limits; allowed: {limits.budget_text()}")
    return bounded


def _read_seed(value: object, limits: "RequestLimits") -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not SEED_MIN <= value <= SEED_MAX:
        raise ValueError(f"santa_seed: {shown(value)} is not a seed; allowed: an integer from -2^63 to 2^64 - 1")
    return unsigned(value)


def _read_bernoulli(value: object, limits: "RequestLimits") -> int:
    _check_may_choose("santa_bernoulli", value, limits)
    _check_bernoulli("santa_bernoulli", value, limits)
    number = int(value) if isinstance(value, str) and _SAMPLES.fullmatch(value) else value
    if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= MAX_BERNOULLI_SAMPLES:
        raise ValueError(
            f"santa_bernoulli: {shown(value)} is not a number of samples; allowed: an integer from 1 to {MAX_BERNOULLI_SAMPLES}"
        )
    return number


def _read_bernoulli_query(value: object, limits: "RequestLimits") -> str:
    _check_may_choose("santa_bernoulli_query", value, limits)
    _check_bernoulli("santa_bernoulli_query", value, limits)
    if not isinstance(value, str) or value not in BERNOULLI_QUERIES:
        raise ValueError(f"santa_bernoulli_query: {shown(value)} is not a query; allowed: {', '.join(BERNOULLI_QUERIES)}")
    return value


def _read_max_error(value: object, limits: "RequestLimits") -> float:
    _check_may_choose("santa_max_error", value, limits)
    if not limits.max_error:
        raise ValueError(
            f"santa_max_error: {shown(value)} is refused; allowed: nothing, this server's policy has no error targets for requests"
        )
    number = value
    if isinstance(value, str) and (text := _NUMBER.fullmatch(value.strip())):
        number = float(text[1]) / (100 if text[2] else 1)
    if not isinstance(number, (int, float)) or isinstance(number, bool) or not math.isfinite(number) or not 0 < number <= 1:
        raise ValueError(f"santa_max_error: {shown(value)} is not an error; allowed: a number above 0 and up to 1, as 0.05 or '5%'")
    return float(number)


def _check_may_choose(key: str, value: object, limits: "RequestLimits") -> None:
    if not limits.allow:
        raise ValueError(f"{key}: {shown(value)} is refused; allowed: nothing, this server's policy lets requests choose only santa_seed")


def _check_bernoulli(key: str, value: object, limits: "RequestLimits") -> None:
    if not limits.bernoulli:
        raise ValueError(f"{key}: {shown(value)} is refused; allowed: nothing, this server's policy has no Bernoulli queries for requests")


_READERS: dict[str, Callable[[Any, "RequestLimits"], Any]] = {
    "santa_method": _read_method,
    "santa_budget": _read_budget,
    "santa_seed": _read_seed,
    "santa_bernoulli": _read_bernoulli,
    "santa_bernoulli_query": _read_bernoulli_query,
    "santa_max_error": _read_max_error,
}
PARAMETERS = tuple(_READERS)
