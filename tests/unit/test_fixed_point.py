"""Probabilities as integers: accurate to a unit, monotone, and without overflow."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_santa.reference.fixed_point import EXCLUDED, MAX_LEVEL, ONE, log_codes, pow2, power, power_fine

ALL_CODES = torch.arange(-32767, 32768)


def test_power_is_two_to_the_code_within_a_unit() -> None:
    z = torch.arange(-44 * 256, 0)
    exact = torch.exp2(z.double() / 256) * ONE
    assert ((power(z).double() - exact).abs() <= 1).all()
    assert (power(torch.tensor([0, 1, 255, 98_303])) == ONE).all()
    assert (power(torch.tensor([-45 * 256, -65_536, -98_303])) == 0).all()
    assert (power(z).diff() >= 0).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(-MAX_LEVEL, MAX_LEVEL - 1))
def test_inclusion_grows_with_the_level(level: int) -> None:
    now, more = power_fine(ALL_CODES, torch.tensor(level)), power_fine(ALL_CODES, torch.tensor(level + 1))
    assert (now <= more).all() and (now >= 0).all() and (more <= ONE).all()
    assert (now.diff() >= 0).all()
    exact = torch.exp2(ALL_CODES.double() / 256 + level / 65536).clamp(max=1) * ONE
    assert ((now.double() - exact).abs() <= 2 + exact * 2**-15).all()


def test_ends_of_the_level() -> None:
    codes = torch.tensor([-32768, -32767, 0, 32767])
    assert power_fine(codes, torch.tensor(MAX_LEVEL)).tolist() == [0, ONE, ONE, ONE]
    assert power_fine(codes, torch.tensor(-MAX_LEVEL)).tolist() == [0, 0, 0, power(torch.tensor(32767 - 65536)).item()]


def test_levels_broadcast_over_rows_and_heads() -> None:
    codes, level = torch.randint(-3000, 0, (2, 3, 50)), torch.randint(-1000, 500_000, (2, 3))
    both = power_fine(codes, level)
    for row in range(2):
        for head in range(3):
            assert torch.equal(both[row, head], power_fine(codes[row, head], level[row, head]))


def test_log_codes() -> None:
    weights = torch.tensor([1.0, 0.5, 2.0, 0.0, 1e-45, math.inf, 0.3])
    included = torch.tensor([True] * 6 + [False])
    assert log_codes(weights, included).tolist() == [0, -256, 256, -32767, max(-32767, -149 * 256), 32767, EXCLUDED]
    small = torch.rand(1000) * 1e-4
    codes = log_codes(small, torch.ones(1000, dtype=torch.bool))
    ratio = small.double().log2() * 256 - codes
    assert (ratio >= -1e-3).all() and (ratio <= 1 + 1e-3).all()


@pytest.mark.parametrize("exponent", [-1022, -52, -1, 0, 1, 62, 1023])
def test_pow2_is_exact(exponent: int) -> None:
    assert pow2(torch.tensor(exponent)).item() == 2.0**exponent


def test_pow2_below_the_normal_range_is_zero() -> None:
    assert pow2(torch.tensor([-1023, -(1 << 20)])).tolist() == [0.0, 0.0]
