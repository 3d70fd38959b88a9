"""From what layers write to the error of a row, some steps later."""

import math

import pytest
import torch

pytest.importorskip("vllm")

from vllm_santa.error_control import LAG, ErrorControl  # noqa: E402
from vllm_santa.error_meter import ErrorMeter  # noqa: E402
from vllm_santa.methods import Method  # noqa: E402
from vllm_santa.reference.error import OutputError  # noqa: E402
from vllm_santa.rows import SparseToken  # noqa: E402


def token(row: int, context: int) -> SparseToken:
    return SparseToken(row, row, context, Method.pps, 64, 1, control=ErrorControl(), max_error=0.1)


def found(variance: float, square: float) -> OutputError:
    """Of two heads."""
    return OutputError(torch.tensor([variance / 4, variance * 3 / 4]), torch.tensor([square / 2, square / 2]))


def meter(**others) -> ErrorMeter:
    return ErrorMeter(**{"layers": {3, 5}, "rows": 4, "parts": 2, "device": torch.device("cpu"), "over_ranks": lambda x: x} | others)


def after(one: ErrorMeter, steps: int) -> list:
    """What the last of so many steps without rows tells."""
    for _ in range(steps - 1):
        assert one.begin_step([]) == []
    return one.begin_step([])


def test_the_error_is_the_mean_over_layers_and_comes_in_time_for_its_lag() -> None:
    one, tokens = meter(), [token(2, 900), token(0, 700)]
    assert one.begin_step(tokens) == []
    for layer, variance in ((3, 1.0), (5, 9.0)):
        one.write(layer, 2, found(variance, 100.0 + variance))
        one.write(layer, 0, found(0.0, 1.0))
    (two, error), (zero, none) = after(one, LAG - 1)
    assert (two, zero) == tuple(tokens)
    assert error == pytest.approx((0.1 + 0.3) / 2) and none == 0
    assert one.begin_step([]) == []


def test_parts_add_up() -> None:
    one = meter()
    one.begin_step([token(1, 900)])
    for layer in (3, 5):
        one.layer(layer)[1] = torch.tensor([[1.0, 61.0], [3.0, 43.0]])
    assert after(one, LAG - 1)[0][1] == pytest.approx(0.2)


def test_a_layer_that_wrote_nothing_leaves_the_error_unknown() -> None:
    one = meter()
    one.begin_step([token(1, 900)])
    one.write(3, 1, found(1.0, 101.0))
    one.write(5, 1, found(1.0, 101.0))
    one.begin_step([token(1, 901)])  # what the step before wrote is not taken for this one's
    one.write(3, 1, found(1.0, 101.0))
    first = after(one, LAG - 2)
    assert [(seen.context, error) for seen, error in first] == [(900, pytest.approx(0.1))]
    ((seen, error),) = one.begin_step([])
    assert seen.context == 901 and math.isnan(error)


def test_ranks_pool_their_heads() -> None:
    one = meter(over_ranks=lambda sums: sums + torch.tensor([3.0, 99.0]))
    one.begin_step([token(0, 900)])
    for layer in (3, 5):
        one.write(layer, 0, found(1.0, 5.0))
    assert after(one, LAG - 1)[0][1] == pytest.approx(0.2)


def test_a_step_of_every_token() -> None:
    one, contexts = meter(), []
    for context in range(900, 920):
        contexts += [seen.context for seen, _ in one.begin_step([token(0, context)])]
        for layer in (3, 5):
            one.write(layer, 0, found(1.0, 101.0))
    assert contexts == list(range(900, 920 - LAG + 1))
