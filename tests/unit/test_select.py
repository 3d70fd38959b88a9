"""Selections: λ is the largest that fits, every token is taken with exactly its π, and integers keep that true for any tiling."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import DRAWS, assert_inclusion, assert_mean, many, uniform_bits
from torch import Tensor

from vllm_santa.reference.fixed_point import EXCLUDED, MAX_LEVEL, ONE, log_codes, power_fine
from vllm_santa.reference.select import (
    Selection,
    adaptive,
    adaptive_with_replacement,
    certain,
    draw,
    heaviest,
    solve_level,
    systematic,
    uniform,
    with_replacement,
)

CODES = log_codes(torch.rand(40, generator=torch.Generator().manual_seed(1)) ** 6, torch.arange(40) != 7)
CODE_LISTS = st.one_of(
    st.lists(st.integers(-32767, 32767), min_size=1, max_size=80),
    st.lists(st.integers(-300, 0), min_size=1, max_size=80),
    st.lists(st.sampled_from([-900, -512, 0, EXCLUDED]), min_size=1, max_size=80),
)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def total(codes: Tensor, level: int) -> int:
    """Σ π in units of 1/ONE, without the limits of int64."""
    rates = power_fine(codes, torch.tensor(level))
    return (int((rates >> 22).sum()) << 22) + int((rates & (1 << 22) - 1).sum())


def plain_level(codes: Tensor, budget: int, bin_bits: int) -> int:
    """The contract read literally: a binary search over every level there is."""
    if int((codes != EXCLUDED).sum()) <= budget:
        return MAX_LEVEL
    if bin_bits:
        codes = torch.where(codes == EXCLUDED, EXCLUDED, (codes // 2**bin_bits) * 2**bin_bits + 2 ** (bin_bits - 1))
    low, high = -MAX_LEVEL, MAX_LEVEL
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if total(codes, middle) <= budget * ONE else (low, middle - 1)
    return low


@settings(max_examples=150, deadline=None)
@given(CODE_LISTS, st.integers(1, 70), st.sampled_from([0, 1, 4, 6]))
def test_level_is_the_largest_that_fits(codes: list[int], budget: int, bin_bits: int) -> None:
    row = torch.tensor(codes)
    assert int(solve_level(row, torch.tensor(budget), bin_bits)) == plain_level(row, budget, bin_bits)


@pytest.mark.parametrize("budget", [1, 1000, 1 << 18])
@pytest.mark.parametrize("spread", [0.0, 4.0, 40.0])
def test_level_of_a_million_tokens(budget: int, spread: float) -> None:
    scores = torch.randn(1 << 20, generator=torch.Generator().manual_seed(2)) * spread
    codes = log_codes(torch.softmax(scores, -1) * 0.98 + 0.02 / len(scores), torch.ones(len(scores), dtype=torch.bool))
    level = int(solve_level(codes, torch.tensor(budget)))
    assert total(codes, level) <= budget * ONE < total(codes, level + 2)  # two neighbours may share their factor
    taken = adaptive(codes, torch.tensor(budget), torch.tensor(ONE - 1)).taken
    assert -1 - budget * 2**-15 <= int(taken.sum()) - budget <= 1  # a step of λ is 2^-16 octaves: several rows of a huge budget


def test_level_of_many_rows_at_once() -> None:
    codes = torch.randint(-4000, 0, (3, 2, 100))
    budget = torch.tensor([[1, 5], [20, 99], [100, 200]])
    levels = solve_level(codes, budget)
    expected = [[plain_level(codes[i, j], int(budget[i, j]), 0) for j in range(2)] for i in range(3)]
    assert levels.tolist() == expected


@pytest.mark.parametrize("bin_bits", [0, 4])
def test_order_of_tokens_changes_no_probability(bin_bits: int) -> None:
    """Sums are exact, so tiles may be added in any order."""
    codes, order = torch.randint(-5000, 0, (2000,)), torch.randperm(2000)
    here = adaptive(codes, torch.tensor(64), torch.tensor(0), bin_bits)
    there = adaptive(codes[order], torch.tensor(64), torch.tensor(0), bin_bits)
    assert torch.equal(here.probability[order], there.probability)


@pytest.mark.parametrize("tile", [64, 1024, 8192])
def test_tiles_give_the_same_sample(tile: int) -> None:
    """Prefix sums tile by tile, as kernels form them, place the same tokens."""
    codes, offset = torch.randint(-3000, 0, (20_000,)), 12_345_678_901
    rates = power_fine(codes, solve_level(codes, torch.tensor(300)))
    taken, before = [], 0
    for part in rates.split(tile):
        taken.append(systematic(part, torch.tensor((before + offset) % ONE)))
        before += int(part.sum())
    assert torch.equal(torch.cat(taken), systematic(rates, torch.tensor(offset)))


def test_systematic_takes_each_token_as_its_rate_says() -> None:
    rates = power_fine(CODES, solve_level(CODES, torch.tensor(9)))
    counts = systematic(many(rates), uniform_bits()[:, 0])
    assert counts.max() == 1
    assert_inclusion(counts > 0, rates.double() / ONE)
    whole = int(rates.sum())
    assert counts.sum(-1).min() >= whole // ONE and counts.sum(-1).max() <= -(-whole // ONE)


def test_systematic_with_rates_above_one() -> None:
    rates = torch.tensor([ONE // 2, 5 * ONE // 2, 0, 3 * ONE])
    counts = systematic(many(rates), uniform_bits()[:, 0])
    assert_mean(counts, rates.double() / ONE)
    assert ((counts - rates / ONE).abs() < 1).all()


def test_draw_gives_every_point_its_token() -> None:
    rates = torch.tensor([3, 0, 2, 5])
    points = torch.tensor([0, 2, 3, 4, 5, 9, 10, -1])
    assert draw(rates, points).tolist() == [2, 0, 2, 2]
    assert draw(torch.zeros(4, dtype=torch.int64), points).tolist() == [0, 0, 0, 0]


def test_adaptive_inclusion_and_count() -> None:
    budget = 9
    selection = adaptive(many(CODES), torch.full((DRAWS,), budget), uniform_bits()[:, 0])
    assert_inclusion(selection.taken, selection.probability[0])
    count = selection.taken.sum(-1)
    assert count.min() >= budget - 1 and count.max() <= budget + 1
    assert abs(selection.probability[0].sum().item() - budget) < 0.01
    assert not selection.taken[:, 7].any()


def test_adaptive_takes_all_where_the_budget_allows() -> None:
    for budget in (39, 40, 1000):  # one of the 40 is excluded
        selection = adaptive(CODES, torch.tensor(budget), torch.tensor(ONE - 1))
        assert torch.equal(selection.taken, CODES != EXCLUDED) and torch.equal(selection.probability, selection.taken.double())


@pytest.mark.parametrize("select", [adaptive, heaviest])
def test_nothing_to_take(select) -> None:
    excluded = torch.full((3, 20), EXCLUDED)
    selection = select(excluded, torch.tensor([1, 5, 50]), *([torch.tensor([0, 1, ONE - 1])] if select is adaptive else []))
    assert not selection.taken.any() and not selection.probability.any()


def test_one_token() -> None:
    selection = adaptive(torch.tensor([-700]), torch.tensor(1), torch.tensor(0))
    assert selection.taken.tolist() == [True] and selection.probability.tolist() == [1.0]


def test_one_huge_weight_is_certain_and_the_rest_share_the_budget() -> None:
    codes = torch.cat((torch.tensor([0]), torch.full((99,), -9000)))
    selection = adaptive(codes, torch.tensor(5), torch.tensor(99))
    assert selection.probability[0] == 1
    assert torch.allclose(selection.probability[1:], torch.tensor(4 / 99, dtype=torch.float64), rtol=1e-4)


def test_equal_weights_are_equally_likely() -> None:
    selection = adaptive(torch.full((1000,), -123), torch.tensor(10), torch.tensor(0))
    assert torch.allclose(selection.probability, torch.tensor(0.01, dtype=torch.float64), rtol=1e-4)
    assert selection.taken.sum() in (9, 10)


@pytest.mark.parametrize("bin_bits", [1, 4])
def test_coarse_bins_only_move_the_count(bin_bits: int) -> None:
    """Σπ is off by the width of half a bin at most; π stays exact for the λ chosen."""
    codes = torch.randint(-6000, 0, (4000,))
    rates = adaptive(codes, torch.tensor(200), torch.tensor(0), bin_bits).probability
    assert abs(rates.sum().item() / 200 - 1) <= 2 ** (2**bin_bits / 2 / 256) - 1
    selection = adaptive(many(codes[:50], DRAWS), torch.full((DRAWS,), 6), uniform_bits()[:, 0], bin_bits)
    assert_inclusion(selection.taken, selection.probability[0])


def test_heaviest_prefers_the_earlier_of_equals() -> None:
    codes = torch.tensor([-5, -1, -5, EXCLUDED, -5, -9])
    assert heaviest(codes, torch.tensor(2)).taken.tolist() == [True, True, False, False, False, False]
    assert heaviest(codes, torch.tensor(10)).taken.tolist() == [True, True, True, False, True, True]
    assert not heaviest(codes, torch.tensor(0)).taken.any()


def test_with_replacement_inclusion() -> None:
    draws = 6
    selection = with_replacement(many(CODES), torch.full((DRAWS,), draws), uniform_bits(10))
    assert_inclusion(selection.taken, selection.probability[0])
    p = torch.exp2(CODES.double() / 256).masked_fill(CODES == EXCLUDED, 0.0)
    expected = 1 - (1 - p / p.sum()) ** draws
    assert torch.allclose(selection.probability[0], expected, atol=1e-8, rtol=1e-6)
    assert selection.taken.sum(-1).max() <= draws


def test_with_replacement_without_draws_or_tokens() -> None:
    for codes, draws in ((CODES, 0), (torch.full((40,), EXCLUDED), 3)):
        selection = with_replacement(codes, torch.tensor(draws), uniform_bits(4, 1)[0])
        assert not selection.taken.any() and not selection.probability.any()


def test_adaptive_with_replacement_inclusion() -> None:
    selection = adaptive_with_replacement(many(CODES), torch.full((DRAWS,), 9), uniform_bits(9))
    assert_inclusion(selection.taken, selection.probability[0])
    assert selection.taken.sum(-1).max() <= 9
    certain_ = adaptive(CODES, torch.tensor(9), torch.tensor(0)).probability == 1
    assert torch.equal(selection.probability[0] == 1, certain_) and certain_.any()


@pytest.mark.parametrize(("count", "share"), [(4, 0.1), (40, 1.0), (90, 1.0)])
def test_uniform(count: int, share: float) -> None:
    included = torch.arange(60) % 3 != 0
    selection = uniform(many(included), torch.full((DRAWS,), count), uniform_bits()[:, 0])
    assert torch.allclose(selection.probability[0], included.double() * share, atol=1e-9)
    assert not selection.taken[:, ~included].any()
    if share < 1:
        assert_inclusion(selection.taken, selection.probability[0])


def test_union_of_disjoint_selections() -> None:
    first, second = torch.tensor([True, False, False]), Selection(torch.tensor([False, False, True]), torch.tensor([0, 0.5, 0.2]))
    both = certain(first) | second
    assert both.taken.tolist() == [True, False, True]
    assert torch.allclose(both.probability, torch.tensor([1.0, 0.5, 0.2], dtype=torch.float64))


@pytest.mark.parametrize("name", ["adaptive", "with_replacement", "adaptive_with_replacement"])
def test_rows_do_not_see_each_other(name: str) -> None:
    codes, budget, bits = torch.randint(-3000, 0, (4, 3, 90)), torch.randint(1, 20, (4, 3)), uniform_bits(20, 12).unflatten(0, (4, 3))
    select = {"adaptive": lambda c, b, u: adaptive(c, b, u[..., 0])}.get(name) or globals()[name]
    together = select(codes, budget, bits)
    for i, j in ((0, 0), (3, 2), (1, 1)):
        alone = select(codes[i, j], budget[i, j], bits[i, j])
        assert torch.equal(together.taken[i, j], alone.taken) and torch.equal(together.probability[i, j], alone.probability)
