"""SANTA's value samplers against float64 softmax attention: unbiased, with the variance the paper proves, at every edge."""

import pytest
import torch
from sampling import DRAWS, assert_inclusion, assert_mean, many, uniform_bits
from torch import Tensor

from vllm_santa.methods import Method
from vllm_santa.reference.fixed_point import ONE
from vllm_santa.reference.values import FLASH_TILE, GROUP, draws_needed, expected_copies, stash_scores, value_weights

SAMPLERS = [Method.santa, Method.strat, Method.sys, Method.prop, Method.flash]
GLOBAL = SAMPLERS[:-1]  # one sample over the whole row, S copies exactly


def sample(method: Method, scores: Tensor, budget: int, draws: int = DRAWS) -> Tensor:
    """Weights float64 [draws, n]."""
    numbers = uniform_bits(draws_needed(method, budget, scores.shape[-1]), draws)
    return value_weights(method, many(scores, draws), torch.full((draws,), budget), numbers)


def problem(n: int, spread: float = 2.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    return torch.randn(n, generator=generator) * spread, torch.randn(n, 3, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("method", SAMPLERS)
@pytest.mark.parametrize(("n", "budget"), [(90, 8), (300, 5)])  # 300 tokens: two flash tiles, which 5 does not divide
def test_unbiased(method: Method, n: int, budget: int) -> None:
    scores, values = problem(n)
    weights = sample(method, scores, budget)
    assert_mean(weights @ values, torch.softmax(scores.double(), -1) @ values)


@pytest.mark.parametrize("method", GLOBAL)
def test_every_token_gets_its_expected_copies(method: Method) -> None:
    scores, _ = problem(90)
    rates = expected_copies(stash_scores(scores), torch.tensor(8))[:90]
    weights = sample(method, scores, 8)
    assert_mean(weights, rates.double() / (8 * ONE))
    if method in (Method.sys, Method.prop):  # systematic: a token with less than one expected copy is there with just that probability
        light = rates < ONE
        assert_inclusion(weights[:, light] > 0, rates[light].double() / ONE)


def test_santa_inclusion() -> None:
    scores, _ = problem(90)
    p = expected_copies(stash_scores(scores), torch.tensor(8))[:90].double() / (8 * ONE)
    assert_inclusion(sample(Method.santa, scores, 8) > 0, 1 - (1 - p) ** 8)


@pytest.mark.parametrize("method", GLOBAL)
def test_weights_are_copies_of_exactly_the_budget(method: Method) -> None:
    weights = sample(method, problem(90)[0], 8, 500)
    assert torch.equal((weights * 8).round(), weights * 8)
    assert torch.equal(weights.sum(-1), torch.ones(500, dtype=torch.float64))


def variance(method: Method, scores: Tensor, values: Tensor, budget: int, draws: int = DRAWS) -> Tensor:
    return (sample(method, scores, budget, draws) @ values).var(0).sum()


def test_variance_of_santa_is_that_of_the_paper() -> None:
    """Appendix A.2: Cov = Σ_q / S, so the mean squared error falls as 1/S."""
    scores, values = problem(90)
    p = torch.softmax(scores.double(), -1)
    spread = (p @ values.square() - (p @ values).square()).sum()
    for budget in (2, 8, 32):
        assert torch.isclose(variance(Method.santa, scores, values, budget), spread / budget, rtol=0.03)


@pytest.mark.parametrize("budget", [2, 8, 32])
def test_strata_never_add_variance(budget: int) -> None:
    """Appendix A.5: Var(strat) <= Var(santa), proved; sys has no such theorem, but on this row it holds too."""
    scores, values = problem(90)
    iid = variance(Method.santa, scores, values, budget)
    assert variance(Method.strat, scores, values, budget) <= iid * 1.02  # 2 %: the noise of two measured variances
    assert variance(Method.sys, scores, values, budget) <= iid * 1.02


def test_variance_falls_with_the_budget() -> None:
    scores, values = problem(300)
    for method in SAMPLERS:
        small, large = (variance(method, scores, values, budget, 4000) for budget in (8, 64))
        assert large < small / 6, method.name


@pytest.mark.parametrize("n", [40_960, 49_152])
@pytest.mark.parametrize("method", [Method.prop, Method.sys])
def test_tile_counts_that_are_no_power_of_two(method: Method, n: int) -> None:
    """Uniform scores, S = 128: the published prop kernel gives the last quarter a mass of 0.0625 and 0; it has 0.25."""
    weights = sample(method, torch.zeros(n), 128, 20)
    last_quarter = weights[:, -(n // 4) :].sum(-1)
    assert ((last_quarter - 0.25).abs() <= 1 / 128).all()
    flash = sample(Method.flash, torch.zeros(n), 256, 2)
    assert torch.allclose(flash[:, -(n // 4) :].sum(-1), torch.tensor(0.25, dtype=torch.float64), atol=1e-3)


@pytest.mark.parametrize("method", SAMPLERS)
@pytest.mark.parametrize("budget", [1, 3, 500])
def test_one_token(method: Method, budget: int) -> None:
    assert torch.equal(sample(method, torch.tensor([-7.5]), budget, 50), torch.ones(50, 1, dtype=torch.float64))


@pytest.mark.parametrize("method", SAMPLERS)
def test_more_draws_than_tokens(method: Method) -> None:
    scores, values = problem(12, spread=1.0)
    weights = sample(method, scores, 4000, 200)
    exact = torch.softmax(scores.double(), -1)
    assert (weights - exact).abs().max() < (0.04 if method == Method.santa else 0.002)


@pytest.mark.parametrize("method", SAMPLERS)
def test_one_huge_score_takes_everything(method: Method) -> None:
    scores = torch.full((700,), -40.0)
    scores[345] = 60.0
    expected = torch.zeros(700, dtype=torch.float64)
    expected[345] = 1
    assert torch.allclose(sample(method, scores, 16, 50), expected.expand(50, -1), atol=1e-9)


@pytest.mark.parametrize("method", SAMPLERS)
def test_equal_scores_far_from_zero(method: Method) -> None:
    for level in (-1e4, 0.0, 3e4):
        weights = sample(method, torch.full((512,), level), 128, 2000)
        assert_mean(weights[:, :64].sum(-1), torch.tensor(64 / 512))


@pytest.mark.parametrize("method", SAMPLERS)
def test_masked_tokens_are_never_drawn(method: Method) -> None:
    scores, values = problem(600)
    scores[5:70] = -torch.inf  # a whole group, and parts of its neighbours
    scores[256:512] = -torch.inf  # a whole flash tile
    weights = sample(method, scores, 32)
    assert not weights[:, scores == -torch.inf].any()
    assert_mean(weights @ values, torch.softmax(scores.double(), -1) @ values)


@pytest.mark.parametrize("method", SAMPLERS)
def test_nothing_but_masked_tokens(method: Method) -> None:
    assert not sample(method, torch.full((300,), -torch.inf), 16, 10).any()


@pytest.mark.parametrize("method", SAMPLERS)
def test_rows_do_not_see_each_other(method: Method) -> None:
    scores = torch.randn(3, 2, 300, generator=torch.Generator().manual_seed(0))
    budget = torch.tensor([[4, 9], [1, 30], [16, 2]])
    numbers = uniform_bits(draws_needed(method, 30, 300), 6).unflatten(0, (3, 2))
    together = value_weights(method, scores, budget, numbers)
    for i, j in ((0, 0), (1, 1), (2, 0)):
        assert torch.equal(together[i, j], value_weights(method, scores[i, j], budget[i, j], numbers[i, j]))


def test_order_of_tiles_changes_no_rate() -> None:
    """Z is a sum of integers: whatever order tiles are added in, every token keeps its expected copies to the bit."""
    scores = torch.randn(40, GROUP, generator=torch.Generator().manual_seed(4)) * 9
    order = torch.randperm(40, generator=torch.Generator().manual_seed(5))
    here, there = (expected_copies(stash_scores(x.flatten()), torch.tensor(128)).view(40, GROUP) for x in (scores, scores[order]))
    assert torch.equal(here[order], there)


@pytest.mark.parametrize("n", [1 << 20, 1 << 23])
@pytest.mark.parametrize("spread", [0.0, 8.0])
def test_rates_of_long_rows(n: int, spread: float) -> None:
    """No overflow, and Σ rates is S short of at most n · 2^-28 rows (the truncated fractions of f_g)."""
    scores = torch.randn(n, generator=torch.Generator().manual_seed(3)) * spread
    for budget in (1, 128, 1 << 18):
        rates = expected_copies(stash_scores(scores), torch.tensor(budget))
        assert rates.min() >= 0
        total = int((rates >> 20).sum()) * 2**20 + int((rates & (1 << 20) - 1).sum())
        assert budget - n * 2**-28 - budget * 2**-20 <= total / ONE <= budget * (1 + 2**-17)


def test_stash_keeps_sixteen_bits() -> None:
    scores, _ = problem(1000, spread=5.0)
    stash = stash_scores(scores)
    back = (stash.weights * 2.0 ** (stash.exponents.unsqueeze(-1) - 16)).flatten()[:1000]
    exact = torch.exp(scores.double())
    largest = torch.nn.functional.pad(exact, (0, 24)).view(-1, GROUP).amax(-1).repeat_interleave(GROUP)[:1000]
    assert (back <= exact * (1 + 1e-5)).all() and (exact - back <= largest * 2**-14).all()
    assert (stash.weights.amax(-1) >= 32767).all()
    assert FLASH_TILE % GROUP == 0
