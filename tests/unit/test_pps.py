"""pps: distinct rows of V per KV head, and a sum that is exactly unbiased for every query head of the group."""

import pytest
import torch
from sampling import DRAWS, assert_inclusion, assert_mean, many, uniform_bits
from torch import Tensor

from vllm_santa.reference.fixed_point import ONE
from vllm_santa.reference.pps import pps
from vllm_santa.reference.select import Selection


def sample(scores: Tensor, budget: int, draws: int = DRAWS) -> tuple[Selection, Tensor]:
    """The selection [draws, ..., n] and weights [draws, ..., G, n] of the same scores [..., G, n] under `draws` seeds."""
    heads = scores.shape[:-2]
    offset = torch.stack([uniform_bits(1, draws, head)[:, 0] for head in range(heads.numel())], -1).view(draws, *heads)
    return pps(many(scores, draws), torch.full((draws, *heads), budget), offset)


def problem(*shape: int, spread: float = 2.0) -> tuple[Tensor, Tensor]:
    """scores [..., G, n] and values [..., n, 3]."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator) * spread, torch.randn(*shape[:-2], shape[-1], 3, generator=generator).double()


@pytest.mark.parametrize("group", [1, 4])
def test_unbiased_for_every_head_of_the_group(group: int) -> None:
    scores, values = problem(group, 80)
    selection, weights = sample(scores, 10)
    assert_mean(weights @ values, torch.softmax(scores.double(), -1) @ values)
    assert_inclusion(selection.taken, selection.probability[0])
    count = selection.taken.sum(-1)
    assert count.min() >= 9 and count.max() <= 11


def test_one_selection_per_query_head_or_per_kv_head() -> None:
    """Query heads that select for themselves are groups of one: same function, one more leading dimension."""
    scores, values = problem(2, 3, 60)
    alone = scores.unsqueeze(-2)
    selection, weights = sample(alone, 8, 5000)
    assert selection.taken.shape == (5000, 2, 3, 60)
    assert_mean(weights.squeeze(-2) @ values, torch.softmax(scores.double(), -1) @ values)
    for head in ((0, 0), (1, 2)):
        _, single = pps(alone[head], torch.tensor(8), uniform_bits(1, 5000, 3 * head[0] + head[1])[17, 0])
        assert torch.equal(single, weights[17][head])


def test_heavy_tokens_are_exact() -> None:
    scores = torch.full((2, 500), -12.0)
    scores[0, 3], scores[1, 4] = 5.0, 6.0
    selection, weights = sample(scores, 8, 50)
    assert selection.taken[:, [3, 4]].all()
    assert torch.allclose(weights[:, :, [3, 4]], torch.softmax(scores, -1)[:, [3, 4]].double().expand(50, -1, -1))


def test_every_head_gets_its_share_of_the_budget() -> None:
    """π ≥ p · k/G for every head, however far apart the heads' scores are: what kernels with estimated norms are held to (remix.cuh)."""
    scores, _ = problem(4, 3000)
    scores *= torch.tensor([0.1, 1.0, 3.0, 6.0]).unsqueeze(1)
    scores[0] += 40
    scores[3, 100:1500] += 50
    selection, _ = sample(scores, 64, 1)
    share = torch.softmax(scores.double(), -1) * 64 / 4
    assert (selection.probability[0] >= 0.99 * share.clamp(max=1)).all()  # log-codes are floored


@pytest.mark.parametrize("budget", [70, 71, 10_000])
def test_a_budget_for_every_token_gives_dense_attention(budget: int) -> None:
    scores, _ = problem(3, 70)
    selection, weights = sample(scores, budget, 10)
    assert selection.taken.all()
    assert torch.allclose(weights, torch.softmax(scores, -1).double().expand(10, -1, -1))


@pytest.mark.parametrize("level", [-1e4, 0.0, 1e4])
def test_equal_scores(level: float) -> None:
    selection, weights = sample(torch.full((2, 400), level), 20, 2000)
    assert torch.allclose(selection.probability[0], torch.tensor(0.05).double(), rtol=1e-4)
    assert ((selection.taken.sum(-1) - 20).abs() <= 1).all()
    assert_mean(weights[..., :90].sum(-1), torch.tensor([0.225, 0.225]))


def test_masked_tokens_are_never_taken() -> None:
    scores, values = problem(2, 90)
    scores[:, 10:40] = -torch.inf
    scores[0, 50] = -torch.inf  # masked for one head only: the other may still take it
    selection, weights = sample(scores, 12)
    assert not selection.taken[:, 10:40].any() and not weights[:, 0, 50].any()
    assert_mean(weights @ values, torch.softmax(scores.double(), -1) @ values)


def test_a_row_of_masked_tokens() -> None:
    selection, weights = sample(torch.full((2, 2, 30), -torch.inf), 5, 10)
    assert not selection.taken.any() and not weights.any()


def test_coarse_bins_stay_unbiased() -> None:
    """A kernel's histogram moves λ, not the rule that the π it drew with is the π it divides by."""
    scores, values = problem(2, 80)
    _, weights = pps(many(scores), torch.full((DRAWS,), 10), uniform_bits()[:, 0], bin_bits=4)
    assert_mean(weights @ values, torch.softmax(scores.double(), -1) @ values)


def test_error_falls_faster_than_with_repeated_draws() -> None:
    """Ten times the rows, more than ten times less variance: rows that are certain have none."""
    scores, values = problem(2, 300, spread=3.0)
    small, large = (sample(scores, budget, 3000)[1] @ values for budget in (10, 100))
    assert large.var(0).sum() < small.var(0).sum() / 10


@pytest.mark.parametrize("budget", [1, 4096, 1 << 18])
def test_a_million_tokens(budget: int) -> None:
    scores = torch.randn(2, 1 << 20, generator=torch.Generator().manual_seed(0)) * 3
    selection, weights = pps(scores, torch.tensor(budget), torch.tensor(ONE // 3))
    assert abs(int(selection.taken.sum()) - budget) <= 1 + budget * 2**-15
    if budget > 1000:
        assert torch.allclose(weights.sum(-1), torch.ones(2).double(), atol=0.1)
