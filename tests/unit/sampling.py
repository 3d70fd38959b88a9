"""What the estimators' tests share: many draws at once, and statistical bounds instead of loose tolerances."""

import math

import torch
from scipy.stats import chi2
from torch import Tensor

from vllm_santa.reference.philox import Stream, uniform44

DRAWS = 20_000


def uniform_bits(count: int = 1, draws: int = DRAWS, head: int = 0) -> Tensor:
    """int64 [draws, count]: the numbers of `draws` rows with the seeds 0, 1, 2, ..."""
    seed = torch.arange(draws).unsqueeze(-1)
    return uniform44(seed, torch.tensor(41), 5, Stream.values, torch.tensor(head), torch.arange(count))


def many(x: Tensor, draws: int = DRAWS) -> Tensor:
    """The same input for every draw, in a new leading dimension."""
    return x.expand(draws, *x.shape)


def assert_mean(samples: Tensor, expected: Tensor) -> None:
    """samples [draws, ...]: their mean lies within four standard errors of `expected` everywhere."""
    samples, expected = samples.double(), expected.double()
    bound = 4 * samples.std(0) / math.sqrt(samples.shape[0]) + 1e-6 * expected.abs().max()
    worst = ((samples.mean(0) - expected).abs() / bound).max().item()
    assert worst <= 1, f"a mean is {4 * worst:.1f} standard errors from its expectation"


def assert_inclusion(taken: Tensor, probability: Tensor) -> None:
    """taken bool [draws, n]: each token is taken as often as its π [n] says (chi-square with one degree of freedom, Bonferroni)."""
    draws, expected = taken.shape[0], probability.double()
    hits = taken.sum(0).double()
    assert torch.equal(hits[expected == 0], torch.zeros_like(hits[expected == 0])), "a token with π = 0 was taken"
    assert (hits[expected == 1] == draws).all(), "a token with π = 1 was left out"
    open_ = (expected > 0) & (expected < 1)
    p = expected[open_]
    statistic = (hits[open_] - draws * p) ** 2 / (draws * p * (1 - p))
    assert open_.any() and chi2.sf(statistic.max().item(), 1) * open_.sum().item() > 1e-3, "a token's frequency is not its π"
