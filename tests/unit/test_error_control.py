"""The controller of a request's budget, on plants whose error is a known function of the budget."""

import math
import random

import pytest

from vllm_santa.error_control import LAG, ErrorControl, ErrorControls
from vllm_santa.policy.decision import ErrorTarget

FIRST = 5000


def run(
    control: ErrorControl, target: ErrorTarget, start: int = 256, tokens: int = 400, slope: float = 0.8, noise: float = 0.0,
    at_start: float = 0.2, first: int = FIRST, seed: int = 0,
) -> tuple[list[int], list[float]]:  # fmt: skip
    """Budgets and errors of a row whose error is at_start · (start / budget)^slope, times lognormal noise of that many octaves. An error is
    known one token later."""
    draw = random.Random(seed)
    budgets, errors = [], []
    for context in range(first, first + tokens):
        budgets.append(control.budget(context, start, target))
        errors.append(at_start * (start / budgets[-1]) ** slope * 2 ** draw.gauss(0, noise))
        control.observe(context, errors[-1], target.max_error)
    return budgets, errors


@pytest.mark.parametrize("slope", [0.5, 0.8, 1.2, 2.0, 2.8])
@pytest.mark.parametrize("max_error", [0.02, 0.05, 0.2, 0.6])
def test_the_error_settles_at_the_target(slope: float, max_error: float) -> None:
    _, errors = run(ErrorControl(), ErrorTarget(max_error, 1, 10**6), slope=slope, tokens=600)
    assert errors[-100:] == pytest.approx([max_error] * 100, rel=slope * 0.1)  # budgets move in steps of 9 %


@pytest.mark.parametrize("noise", [0.1, 0.3, 0.6])
def test_most_tokens_stay_under_the_target(noise: float) -> None:
    budgets, errors = run(ErrorControl(), ErrorTarget(0.05, 1, 10**6), noise=noise, tokens=3000)
    assert len(set(budgets)) < 60, "few different ones"
    settled = errors[500:]
    under = sum(error <= 0.05 for error in settled) / len(settled)
    assert 0.7 < under < 0.97
    assert sum(settled) / len(settled) < 0.05


def test_too_large_errors_are_met_within_some_tokens() -> None:
    budgets, errors = run(ErrorControl(), ErrorTarget(0.05, 1, 10**6), at_start=0.4, tokens=60)
    assert budgets[:LAG] == [256] * LAG, "it starts with the budget that it was given"
    assert budgets[LAG] > 256
    assert all(error < 0.06 for error in errors[40:])


def test_budgets_stay_within_their_limits_and_leave_them_at_once() -> None:
    target = ErrorTarget(0.05, 128, 1024)
    control = ErrorControl()
    budgets, _ = run(control, target, at_start=0.8, tokens=300)
    assert max(budgets) == budgets[-1] == 1024
    budgets, _ = run(control, target, at_start=0.01, tokens=300, first=FIRST + 300)
    assert budgets[8] < 1024, "it had not wound up"
    assert min(budgets) == budgets[-1] == 128


def test_an_error_of_zero_lowers_the_budget_and_an_unknown_one_does_nothing() -> None:
    control, target = ErrorControl(), ErrorTarget(0.05, 8, 4096)
    for context in range(FIRST, FIRST + 40):
        assert control.budget(context, 256, target) == 256
        control.observe(context, math.nan if context % 2 else math.inf, 0.05)
    for context in range(FIRST + 40, FIRST + 80):
        control.budget(context, 256, target)
        control.observe(context, 0.0, 0.05)
    assert 8 <= control.budget(FIRST + 80, 256, target) < 64


def test_small_budgets_move_too() -> None:
    """Steps of less than a row add up."""
    budgets, _ = run(ErrorControl(), ErrorTarget(0.19, 1, 100), start=8, tokens=200)
    assert set(budgets[-50:]) <= {8, 9}


@pytest.mark.parametrize("delay", range(1, LAG))
def test_budgets_do_not_depend_on_when_errors_become_known(delay: int) -> None:
    target, at_once, late = ErrorTarget(0.05, 1, 10**6), ErrorControl(), ErrorControl()
    expected, errors = run(at_once, target, noise=0.3, tokens=100)
    budgets = []
    for i in range(100):
        if i >= delay:
            late.observe(FIRST + i - delay, errors[i - delay], 0.05)
        budgets.append(late.budget(FIRST + i, 256, target))
    assert budgets == expected


def test_tokens_that_are_computed_again_get_what_they_got() -> None:
    control, target = ErrorControl(), ErrorTarget(0.05, 1, 10**6)
    budgets, errors = run(control, target, noise=0.3, tokens=100)
    assert [control.budget(FIRST + i, 256, target) for i in range(100)] == budgets
    for i in range(100):  # what is learnt again is known
        control.observe(FIRST + i, errors[i], 0.05)
    other = ErrorControl()
    run(other, target, noise=0.3, tokens=100)
    assert [one.budget(FIRST + 100, 256, target) for one in (control, other)] == [other.budget(FIRST + 100, 256, target)] * 2


def test_a_start_that_changes_keeps_the_factor() -> None:
    """A fraction of the context grows; a rule for longer contexts may say another number."""
    control, target = ErrorControl(), ErrorTarget(0.05, 1, 10**6)
    budgets, _ = run(control, target, tokens=200)
    assert control.budget(FIRST + 200, 2560, target) == pytest.approx(10 * budgets[-1], rel=0.1)


def test_steps_without_a_budget_leave_a_gap() -> None:
    control, target = ErrorControl(), ErrorTarget(0.05, 1, 10**6)
    budgets, _ = run(control, target, tokens=50)
    later = control.budget(FIRST + 500, 256, target)
    assert later == pytest.approx(budgets[-1], rel=0.5) and control.last == FIRST + 500
    assert control.budget(FIRST + 500, 256, target) == later


def test_requests_that_come_back_find_their_control() -> None:
    controls, target = ErrorControls(kept=3), ErrorTarget(0.05, 1, 10**6)
    key = ("what it asked for", 7, FIRST)
    one = controls.enter(key, 0)
    run(one, target, tokens=20, first=FIRST + 1)
    another = controls.enter(key, 0)
    run(another, target, tokens=30, first=FIRST + 1)
    assert one is not another
    assert controls.enter(key, FIRST + 20) is one, "the nearest that had come as far"
    assert controls.enter(key, FIRST + 25) is another
    assert controls.enter(key, FIRST + 32) not in (one, another), "none had come as far"
    assert controls.enter(("something else", 7, FIRST), FIRST + 20) is not one
    assert controls.enter(None, FIRST + 20) is not controls.enter(None, FIRST + 20), "nothing to find it by"


def test_old_requests_are_forgotten() -> None:
    controls, target = ErrorControls(kept=3), ErrorTarget(0.05, 1, 10**6)
    first = controls.enter(0, 0)
    run(first, target, tokens=20)
    for key in range(1, 4):
        controls.enter(key, 0)
    assert controls.enter(0, FIRST) is not first
    assert len(controls._kept) == 3
