"""What the estimators' tests share: many draws at once, and statistical bounds instead of loose tolerances."""

import math

import numpy as np
import torch
from scipy.stats import binom
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
    """taken bool [draws, n]: each token is taken as often as its π [n] says (exact binomial test, two-sided, Bonferroni)."""
    draws, hits, expected = taken.shape[0], taken.sum(0).numpy(), probability.double().numpy()
    assert (hits[expected == 0] == 0).all(), "a token with π = 0 was taken"
    assert (hits[expected == 1] == draws).all(), "a token with π = 1 was left out"
    unsure = (expected > 0) & (expected < 1)
    hits, expected = hits[unsure], expected[unsure]
    p_value = 2 * np.minimum(binom.cdf(hits, draws, expected), binom.sf(hits - 1, draws, expected)).min() * len(hits)
    assert p_value > 1e-4, f"a token's frequency is not its π: p = {p_value:.1e}"
