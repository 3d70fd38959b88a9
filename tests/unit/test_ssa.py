"""SSA and its comparators: unbiased numerator and denominator, known inclusion probabilities, and the paper's worked example."""

import pytest
import torch
from sampling import DRAWS, assert_inclusion, assert_mean, many, uniform_bits
from torch import Tensor

from vllm_santa.methods import Method
from vllm_santa.reference.fixed_point import EXCLUDED, LOG_STEPS, ONE, log_codes
from vllm_santa.reference.select import Selection, adaptive_with_replacement, certain, solve_level
from vllm_santa.reference.ssa import SelectionSettings, forced_tokens, importance_weights, proposal, select_by_proxy, shrunk_tail

SETTINGS = SelectionSettings(sink=4, local=6)
RANDOM = [Method.ssa, Method.ssa_fixed, Method.uniform_tail]
ALL = [*RANDOM, Method.topk]
BUDGET = 15


def problem(group: int = 3, n: int = 90) -> tuple[Tensor, Tensor, Tensor]:
    """Exact scores and noisy proxies [G, n], values [n, 3]."""
    generator = torch.Generator().manual_seed(group)
    scores = torch.randn(group, n, generator=generator) * 2
    proxies = scores + torch.randn(group, n, generator=generator) * 0.7
    return scores, proxies, torch.randn(n, 3, generator=generator).double()


def select(method: Method, proxies: Tensor, budget: int = BUDGET, draws: int = DRAWS, settings: SelectionSettings = SETTINGS) -> Selection:
    numbers = uniform_bits(max(budget, 1), draws)
    return select_by_proxy(method, many(proxies, draws), settings, torch.full((draws,), budget), numbers)


def assert_unbiased_sums(selection: Selection, scores: Tensor, values: Tensor) -> None:
    """Σ e^l/π v and Σ e^l/π over the taken tokens, against the sums over all (SSA §2)."""
    weights = torch.exp(scores.double())
    inverse = torch.where(selection.taken, 1 / selection.probability, 0.0)
    estimates = weights * inverse.unsqueeze(-2)
    assert_mean(estimates @ values, weights @ values)
    assert_mean(estimates.sum(-1), weights.sum(-1))


@pytest.mark.parametrize("method", RANDOM)
def test_numerator_and_denominator_are_unbiased(method: Method) -> None:
    scores, proxies, values = problem()
    selection = select(method, proxies)
    assert_unbiased_sums(selection, scores, values)
    assert_inclusion(selection.taken, selection.probability[0])


def test_the_papers_theory_is_unbiased_too() -> None:
    """Heavy set by λ, then draws with replacement."""
    scores, proxies, values = problem()
    forced, codes = proposal(many(proxies), SETTINGS)
    selection = certain(forced) | adaptive_with_replacement(codes, torch.full((DRAWS,), BUDGET), uniform_bits(BUDGET))
    assert_unbiased_sums(selection, scores, values)
    assert_inclusion(selection.taken, selection.probability[0])


def test_worked_example_of_the_paper() -> None:
    """SSA §2: five tokens, budget 3: λ = 4, the first is heavy, π = 0.64 and 0.36, and one draw's denominator is 10.9."""
    q, w = torch.tensor([0.5, 0.2, 0.1, 0.1, 0.1]), torch.tensor([5.0, 2.0, 1.0, 1.0, 1.0]).double()
    codes = log_codes(q, torch.ones(5, dtype=torch.bool))
    code_step = 2 ** (1 / LOG_STEPS) - 1  # a code holds log q to this precision
    assert abs(2 ** (solve_level(codes, torch.tensor(3)).item() / 65536) / 4 - 1) <= code_step
    selection = adaptive_with_replacement(many(codes), torch.full((DRAWS,), 3), uniform_bits(3))
    expected = torch.tensor([1.0, 0.64, 0.36, 0.36, 0.36]).double()
    assert torch.allclose(selection.probability[0], expected, atol=code_step)
    assert_inclusion(selection.taken, selection.probability[0])
    denominators = (selection.taken * (w / selection.probability)).sum(-1)
    assert_mean(denominators, w.sum())
    drawn = (selection.taken == torch.tensor([True, True, False, True, False])).all(-1)
    assert drawn.any() and abs(denominators[drawn][0].item() - 10.9) < 0.03
    topk = select_by_proxy(Method.topk, q.log().unsqueeze(0), SelectionSettings(0, 0), torch.tensor(3), torch.tensor([0]))
    assert topk.taken.tolist() == [True, True, True, False, False] and (topk.taken * w).sum() == 8


@pytest.mark.parametrize("budget", [1, 7, 40])
def test_ssa_reads_its_budget_give_or_take_one(budget: int) -> None:
    _, proxies, _ = problem()
    count = select(Method.ssa, proxies, budget).taken.sum(-1) - SETTINGS.sink - SETTINGS.local
    assert count.min() >= budget - 1 and count.max() <= budget + 1


@pytest.mark.parametrize("method", ALL)
def test_no_method_reads_more_than_its_budget(method: Method) -> None:
    _, proxies, _ = problem()
    count = select(method, proxies, draws=500).taken.sum(-1) - SETTINGS.sink - SETTINGS.local
    assert count.max() <= BUDGET + (method in (Method.ssa, Method.uniform_tail))


@pytest.mark.parametrize("method", ALL)
def test_forced_tokens_are_always_read(method: Method) -> None:
    _, proxies, _ = problem()
    forced = forced_tokens(90, SETTINGS, proxies.device)
    assert forced.nonzero().flatten().tolist() == [0, 1, 2, 3, 84, 85, 86, 87, 88, 89]
    selection = select(method, proxies - 100 * forced, draws=50)
    assert selection.taken[:, forced].all() and (selection.probability[:, forced] == 1).all()


@pytest.mark.parametrize("method", ALL)
@pytest.mark.parametrize("n", [1, 4, 9, 10, 11])
def test_contexts_no_longer_than_what_is_forced(method: Method, n: int) -> None:
    selection = select(method, torch.randn(2, n, generator=torch.Generator().manual_seed(n)), budget=1, draws=20)
    assert selection.taken.all() and (selection.probability == 1).all()


@pytest.mark.parametrize("method", [Method.ssa, Method.topk])
@pytest.mark.parametrize("budget", [80, 81, 5000])
def test_a_budget_for_every_token_reads_all(method: Method, budget: int) -> None:
    selection = select(method, problem()[1], budget, draws=5)
    assert selection.taken.all() and (selection.probability == 1).all()


def test_uniform_tail_with_a_budget_for_every_token_reads_all() -> None:
    assert select(Method.uniform_tail, problem()[1], 80, draws=5).taken.all()


def test_topk_on_exact_scores_is_the_oracle() -> None:
    scores, proxies, _ = problem(group=1)
    free = SelectionSettings(0, 0, uniform_share=0.0)
    assert select(Method.topk, scores, draws=1, settings=free).taken[0].nonzero().flatten().tolist() == sorted(
        scores[0].topk(BUDGET).indices.tolist()
    )
    assert select(Method.topk, proxies, draws=1, settings=free).taken[0].sum() == BUDGET


@pytest.mark.parametrize("method", [Method.ssa_fixed, Method.uniform_tail])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_heavy_share(method: Method, share: float) -> None:
    _, proxies, _ = problem()
    settings = SelectionSettings(4, 6, heavy_fraction=share)
    selection = select(method, proxies, draws=200, settings=settings)
    sure = (selection.probability[0] == 1).sum() - 10
    assert sure == int(share * BUDGET)
    assert selection.taken.sum(-1).max() <= BUDGET + 11


@pytest.mark.parametrize("method", RANDOM)
def test_per_query_head_is_a_group_of_one(method: Method) -> None:
    scores, proxies, values = problem(group=2)
    numbers = torch.stack([uniform_bits(BUDGET, DRAWS, head) for head in range(2)], 1)
    selection = select_by_proxy(method, many(proxies).unsqueeze(-2), SETTINGS, torch.full((DRAWS, 2), BUDGET), numbers)
    assert selection.taken.shape == (DRAWS, 2, 90)
    for head in range(2):
        assert_unbiased_sums(Selection(selection.taken[:, head], selection.probability[:, head]), scores[head : head + 1], values)


def test_uniform_share_bounds_the_weights() -> None:
    """ε = 0.02: no token outside the heavy set has a π below ε · λ / n, whatever its proxy says."""
    proxies = torch.zeros(1, 1000)
    proxies[0, 500] = -60.0
    _, codes = proposal(proxies, SelectionSettings(0, 0, uniform_share=0.02))
    share = torch.exp2(codes[500].double() / LOG_STEPS)
    assert abs(share.item() * 1000 / 0.02 - 1) < 0.01
    _, bare = proposal(proxies, SelectionSettings(0, 0, uniform_share=0.0))
    assert bare[500] < -60 * LOG_STEPS and bare.min() > EXCLUDED


def test_importance_weights() -> None:
    scores = torch.tensor([[0.0, 1.0, -torch.inf], [-torch.inf, 300.0, 299.0]])
    probability = torch.tensor([0.5, 1.0, 0.0]).double()
    weights = importance_weights(scores, probability)
    e = torch.exp(torch.tensor(1.0)).double()
    assert torch.allclose(weights[0], torch.stack((2 / (2 + e), e / (2 + e), 0 * e)))
    assert torch.allclose(weights.sum(-1), torch.ones(2).double())


def test_importance_weights_of_nothing_and_of_nan() -> None:
    none = torch.full((1, 4), -torch.inf)
    assert not importance_weights(none, torch.ones(4).double()).any()
    for bad in (torch.nan, torch.inf):
        scores = torch.tensor([[0.0, bad, 1.0]])
        assert importance_weights(scores, torch.ones(3).double()).isnan().all()


@pytest.mark.parametrize("method", ALL)
@pytest.mark.parametrize("kind", ["equal", "one huge", "all tiny"])
def test_extreme_proxies(method: Method, kind: str) -> None:
    proxies = torch.zeros(2, 90) + {"equal": 5.0, "one huge": 0.0, "all tiny": -1e4}[kind]
    if kind == "one huge":
        proxies[:, 40] = 1e3
    selection = select(method, proxies, draws=200)
    assert ((selection.probability >= 0) & (selection.probability <= 1)).all()
    if kind == "one huge":
        assert selection.taken[:, 40].all()
    assert selection.taken.sum(-1).min() >= 10 + int(SETTINGS.heavy_fraction * BUDGET)


@pytest.mark.parametrize("method", ALL)
def test_a_million_tokens_with_the_largest_budget(method: Method) -> None:
    proxies = torch.randn(1, 1 << 20, generator=torch.Generator().manual_seed(0)) * 3
    budget = 1 << 18 if method != Method.ssa_fixed else 1 << 12
    numbers = uniform_bits(budget if method == Method.ssa_fixed else 1, 1)[0]
    selection = select_by_proxy(method, proxies, SelectionSettings(), torch.tensor(budget), numbers)
    count = int(selection.taken.sum()) - 256
    assert count <= budget + 1 and count >= (budget * 0.5 if method == Method.ssa_fixed else budget * (1 - 2**-15) - 1)
    assert ((selection.probability >= 0) & (selection.probability <= 1)).all()
    assert abs(selection.probability.sum().item() - 256 - count) < max(4.0, budget * 0.02)
    assert budget * ONE <= 1 << 62


def shrunk(group: int, n: int, budget: int, spread: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean squared errors of SSA and of SSA with a shrunk tail, [G]; the shrunk output's mean over the draws and the exact output, [G, D].

    spread: how much values differ, beside a common part that the forced rows do not show.
    """
    scores, proxies, _ = problem(group, n)
    generator = torch.Generator().manual_seed(n)
    values = spread * torch.randn(n, 16, generator=generator).double()
    values[SETTINGS.sink : n - SETTINGS.local] += 1.0
    selection = select(Method.ssa, proxies, budget, 2000)
    kept = many(scores, 2000).masked_fill(~selection.taken.unsqueeze(-2), -torch.inf)
    plain = importance_weights(kept, selection.probability) @ values
    output = shrunk_tail(kept, selection.probability, values)
    exact = torch.softmax(scores.double(), -1) @ values
    return ((plain - exact).square().sum(-1).mean(0), (output - exact).square().sum(-1).mean(0), output.mean(0), exact)


def test_a_shrunk_tail_has_less_error_where_rows_disagree() -> None:
    plain, output, _, _ = shrunk(group=3, n=400, budget=8, spread=3.0)
    assert output.sum() < 0.9 * plain.sum()


def test_a_shrunk_tail_is_ssa_where_rows_agree() -> None:
    plain, output, mean, exact = shrunk(group=2, n=400, budget=60, spread=0.05)
    assert (output < 1.25 * plain).all()
    assert (mean - exact).norm() < 0.01 * exact.norm()


def test_shrunk_tail_without_a_tail_is_exact() -> None:
    scores, _, values = problem(3, 20)
    certainly = torch.ones(20, dtype=torch.float64)
    assert torch.allclose(shrunk_tail(scores, certainly, values), torch.softmax(scores.double(), -1) @ values)
    nothing = torch.full_like(scores, -torch.inf)
    assert (shrunk_tail(nothing, certainly, values) == 0).all()
