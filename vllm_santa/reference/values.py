"""SANTA and S²ANTA (arXiv 2605.01910 §2, §3): exact scores, S drawn rows of V per query head, their mean.

All functions take one softmax distribution per leading index: scores [..., n].
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_santa.methods import Method
from vllm_santa.reference.fixed_point import ONE, pow2
from vllm_santa.reference.select import draw

GROUP = 64
"""Tokens that share one exponent in the stash."""
FLASH_TILE = 256
"""Tokens of one `flash` tile."""
_NO_EXPONENT = -(1 << 20)


@dataclass(frozen=True)
class Stash:
    """exp(score) as integers: weights [..., groups, GROUP] int64 in [0, 65535], times 2^exponents; exponents [..., groups] int64."""

    weights: Tensor
    exponents: Tensor

    def mass(self) -> tuple[Tensor, Tensor]:
        """Total weight Z, int64 [...], in units of 2^(E − 36), and the largest exponent E, int64 [...]."""
        top = self.exponents.amax(-1)
        behind = (top.unsqueeze(-1) - self.exponents).clamp(max=63)
        return ((self.weights.sum(-1) << 20) >> behind).sum(-1), top


def stash_scores(scores: Tensor, multiple: int = GROUP) -> Stash:
    """Quantise scores (float32 [..., n], natural-log units, −inf = masked), padded with masked tokens to a multiple."""
    x = F.pad(scores, (0, -scores.shape[-1] % multiple), value=-torch.inf).unflatten(-1, (-1, GROUP)) * 1.4426950408889634
    peak = x.amax(-1)
    exponents = torch.where(peak == -torch.inf, _NO_EXPONENT, torch.floor(peak).nan_to_num(0, 0, 0) + 1).to(torch.int64)
    weights = torch.exp2(x - exponents.unsqueeze(-1)) * 65536
    return Stash(weights.to(torch.int64).clamp(0, 65535), exponents)


def expected_copies(stash: Stash, budget: Tensor) -> Tensor:
    """Each token's expected number of copies among S draws, int64 [..., groups * GROUP] in units of 1/ONE. budget: int64 [...]."""
    mass, top = stash.mass()
    unit = budget.double() * 2.0**64 / mass.double()
    factor = (unit.unsqueeze(-1) * pow2(stash.exponents - top.unsqueeze(-1))).masked_fill((mass == 0).unsqueeze(-1), 0.0)
    return (stash.weights * factor.to(torch.int64).unsqueeze(-1)).flatten(-2)


def draws_needed(method: Method, budget: int, context: int) -> int:
    """How many random numbers a head's sample takes."""
    if method in (Method.santa, Method.strat):
        return budget
    return -(-context // FLASH_TILE) if method == Method.flash else 1


@dataclass(frozen=True)
class Draws:
    """copies: int64 [..., n], how often each token was drawn. rates: int64 [..., n], how often it was to be, in units of 1/ONE. each:
    float64 [..., n] or [..., 1], the weight of one copy."""

    copies: Tensor
    rates: Tensor
    each: Tensor

    @property
    def weights(self) -> Tensor:
        """float64 [..., n]: the weight each V row gets."""
        return self.copies * self.each


def sample_values(method: Method, scores: Tensor, budget: Tensor, uniform: Tensor) -> Draws:
    """The copies that a method's sampler draws; their weights are unbiased for softmax(scores).

    santa: S independent draws (§2). strat: one draw per stratum of the CDF (§2.1). sys, prop: one shared offset (§2.1, §3.2;
    prop is the GPU's way to the same sample). flash: every tile samples on its own, weighted by its mass afterwards (§3.3).
    scores: float32 [..., n]. budget: int64 [...], S. uniform: int64 [..., draws_needed] in [0, ONE).
    """
    n = scores.shape[-1]
    if method == Method.flash:
        return _flash_draws(scores, budget, uniform)
    rates = expected_copies(stash_scores(scores), budget)
    copies = draw(rates, _points(method, budget, uniform))
    return Draws(copies[..., :n], rates[..., :n], 1 / budget.double().unsqueeze(-1))


def value_weights(method: Method, scores: Tensor, budget: Tensor, uniform: Tensor) -> Tensor:
    """The weight each V row gets, as `sample_values`: float64 [..., n]."""
    return sample_values(method, scores, budget, uniform).weights


def _points(method: Method, budget: Tensor, uniform: Tensor) -> Tensor:
    """Where a sampler looks into [0, S · ONE), int64 [..., max S], −1 beyond a row's own S."""
    budget, draws = budget.unsqueeze(-1), int(budget.max())
    j = torch.arange(draws, device=budget.device)
    if method == Method.santa:
        points = budget * uniform[..., :draws]
    elif method == Method.strat:
        points = j * ONE + uniform[..., :draws]
    else:  # one offset for all strata
        points = j * ONE + (ONE - 1 - uniform[..., :1])
    return torch.where(j < budget, points, -1)


def _flash_draws(scores: Tensor, budget: Tensor, uniform: Tensor) -> Draws:
    whole = stash_scores(scores, FLASH_TILE)
    per_tile = FLASH_TILE // GROUP
    tiles = Stash(whole.weights.unflatten(-2, (-1, per_tile)), whole.exponents.unflatten(-1, (-1, per_tile)))
    count = tiles.weights.shape[-3]
    tile_budget = (budget // count).clamp(min=1).unsqueeze(-1).expand(tiles.weights.shape[:-2]).contiguous()
    rates = expected_copies(tiles, tile_budget)
    copies = draw(rates, _points(Method.sys, tile_budget, uniform.unsqueeze(-1)))
    mass, top = tiles.mass()
    mass = mass.double() * pow2(top - top.amax(-1, keepdim=True))
    share = mass / mass.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    each = (share / tile_budget).unsqueeze(-1).expand_as(copies)
    return Draws(*(part.flatten(-2)[..., : scores.shape[-1]] for part in (copies, rates, each)))
