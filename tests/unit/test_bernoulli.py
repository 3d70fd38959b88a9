"""Bernoulli queries: unbiased scores, the share of K's features they touch, and the stratified draw."""

import pytest
import torch
from sampling import DRAWS, assert_inclusion, assert_mean, many, uniform_bits
from torch import Tensor

from vllm_santa.methods import BernoulliSettings
from vllm_santa.reference.bernoulli import BernoulliQuery, bernoulli_query

GROUP, DIM = 3, 16
QUERY = torch.randn(GROUP, DIM, generator=torch.Generator().manual_seed(0))
KEYS = torch.randn(5, DIM, generator=torch.Generator().manual_seed(1)).double()


def estimate(settings: BernoulliSettings, query: Tensor = QUERY, draws: int = DRAWS) -> BernoulliQuery:
    group, dim = query.shape
    heads = 1 if settings.mean_group else group
    numbers = torch.stack([uniform_bits(dim, draws, head) for head in range(heads)], 1)
    return bernoulli_query(many(query, draws), settings, numbers)


def probability(settings: BernoulliSettings) -> Tensor:
    """P(a feature is touched) = min(1, B |q| / norm), [G, D]: of B stratified draws, all but one are certain."""
    magnitude = QUERY.abs().mean(0, keepdim=True).expand(GROUP, -1) if settings.mean_group else QUERY.abs()
    return (settings.samples * magnitude.double() / magnitude.amax(-1, keepdim=True)).clamp(max=1)


BOTH = pytest.mark.parametrize("mean_group", [False, True])


@BOTH
@pytest.mark.parametrize("samples", [1, 4, 16])
def test_scores_are_unbiased(samples: int, mean_group: bool) -> None:
    query = estimate(BernoulliSettings(samples, mean_group)).query.double()
    assert_mean(query, QUERY)
    assert_mean(query @ KEYS.T, QUERY.double() @ KEYS.T)


@BOTH
def test_a_query_is_ternary_times_its_norm(mean_group: bool) -> None:
    """One draw: every feature is −norm, 0 or +norm (per head), or the same times q/m (mean group query)."""
    query = estimate(BernoulliSettings(1, mean_group), draws=200).query
    magnitude = QUERY.abs().mean(0, keepdim=True) if mean_group else QUERY.abs()
    ternary = query / (magnitude.amax(-1, keepdim=True) * (QUERY / magnitude))
    assert torch.allclose(ternary, ternary.round(), atol=1e-5)
    assert set(ternary.round().unique().tolist()) == {0.0, 1.0}


@BOTH
@pytest.mark.parametrize("samples", [1, 4])
def test_share_of_key_features(samples: int, mean_group: bool) -> None:
    settings = BernoulliSettings(samples, mean_group)
    result, p = estimate(settings), probability(settings)
    for head in range(GROUP):
        assert_inclusion(result.touched[:, head], p[head].where(p[head] < 1 - 1e-6, 1.0))
    assert torch.equal(result.touched, result.query != 0)
    assert_mean(result.head_share(), p.mean())
    assert_mean(result.group_share(), p[0].mean() if mean_group else (1 - (1 - p).prod(0)).mean())


def test_the_mean_group_query_reads_fewer_features_per_group() -> None:
    per_head, mean = (estimate(BernoulliSettings(2, mean_group)) for mean_group in (False, True))
    assert mean.group_share().mean() < per_head.group_share().mean()
    assert torch.equal(mean.group_share(), mean.head_share())


@BOTH
def test_error_falls_with_the_samples(mean_group: bool) -> None:
    """Stratified: the error of a feature is at most norm / B, so that B = 16 is far closer than 1/√16 of B = 1."""
    one, sixteen = (estimate(BernoulliSettings(b, mean_group), draws=3000).query.sub(QUERY).square().mean().sqrt() for b in (1, 16))
    assert sixteen < one / 6
    bound = QUERY.abs().amax(-1, keepdim=True) / 16 * 1.001
    assert mean_group or (estimate(BernoulliSettings(16, False), draws=3000).query.sub(QUERY).abs() <= bound).all()


@BOTH
def test_zero_queries_stay_zero(mean_group: bool) -> None:
    result = estimate(BernoulliSettings(4, mean_group), torch.zeros(2, DIM), 10)
    assert not result.query.any() and not result.touched.any()


@BOTH
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_query_that_is_not_finite_gives_nan_scores(mean_group: bool, bad: float) -> None:
    query = QUERY.clone()
    query[1, 3] = bad
    scores = estimate(BernoulliSettings(4, mean_group), query, 10).query @ KEYS.T.float()
    assert scores[:, 1].isnan().all()
    assert mean_group or scores[:, 0].isfinite().all()


@pytest.mark.parametrize("samples", [0, -1, (1 << 18) + 1])
def test_samples_out_of_range(samples: int) -> None:
    with pytest.raises(ValueError, match=f"samples: {samples} is not between 1 and 262144"):
        BernoulliSettings(samples)


def test_the_largest_number_of_samples_is_exact() -> None:
    estimated = estimate(BernoulliSettings(1 << 18, False), draws=3).query
    assert torch.allclose(estimated, QUERY.expand(3, -1, -1), atol=1e-4)
