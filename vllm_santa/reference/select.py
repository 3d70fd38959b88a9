"""Which rows of the cache a KV head reads, and with what probability each was to be read.

One piece of code for pps (exact scores) and the SSA family (PQ proxies): both hand over log-codes of a positive weight per token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_santa.reference.fixed_point import EXCLUDED, LOG_STEPS, MAX_LEVEL, ONE, ONE_BITS, power, power_fine


@dataclass(frozen=True)
class Selection:
    """taken: [..., n] bool. probability: [..., n] float64 in [0, 1], the inclusion probability π of every token."""

    taken: Tensor
    probability: Tensor

    def __or__(self, other: "Selection") -> "Selection":
        """Union of selections of disjoint sets of tokens: π adds, as each is 0 on the other's tokens."""
        return Selection(self.taken | other.taken, self.probability + other.probability)


def certain(tokens: Tensor) -> Selection:
    """Take these tokens, π = 1. tokens: [..., n] bool."""
    return Selection(tokens, tokens.double())


def solve_level(codes: Tensor, budget: Tensor, bin_bits: int = 0) -> Tensor:
    """λ of Σ min(1, λ q) = k (SSA §2), as the largest level with Σ π <= k.

    codes: int64 [..., n]. budget: int64 [...]. bin_bits: log2 of the codes per histogram bin; 0 is exact, kernels use more.
    Returns int64 [...], in 2^-16 octaves.
    """
    if bin_bits:
        middle = (codes >> bin_bits << bin_bits) + (1 << (bin_bits - 1))
        codes = torch.where(codes == EXCLUDED, EXCLUDED, middle)
    # Truncated to integers the π sum to less, so the level sought is rarely below the real-valued one, and mostly just above it.
    low, reach = _real_level(codes, budget) - 32, 64
    while (fits := _fits(codes, low + reach, budget)).any():
        low, reach = torch.where(fits, low + reach, low), 2 * reach
    while reach > 1:
        reach //= 2
        low = torch.where(_fits(codes, low + reach, budget), low + reach, low)
    return torch.where((codes != EXCLUDED).sum(-1) <= budget, MAX_LEVEL, low)


def _fits(codes: Tensor, level: Tensor, budget: Tensor) -> Tensor:
    """Σ π <= k, exactly: the sum of the upper parts cannot overflow, and where it fits, neither can the whole sum."""
    rates = power_fine(codes, level)
    return ((rates >> 20).sum(-1) <= budget << ONE_BITS - 20) & (rates.sum(-1) <= budget * ONE) & (level < MAX_LEVEL)


def _real_level(codes: Tensor, budget: Tensor) -> Tensor:
    """floor(65536 log2 λ) in double: with the h heaviest at π = 1, λ = (k − h) / (sum of the others), for the first h that fits."""
    ordered = torch.sort(codes, dim=-1, descending=True).values
    top = ordered[..., :1]
    weights = torch.exp2((ordered - top).double() / LOG_STEPS).masked_fill(ordered == EXCLUDED, 0.0)
    rest = weights.flip(-1).cumsum(-1).flip(-1)
    heavy = torch.arange(codes.shape[-1], device=codes.device)
    rate = (budget.unsqueeze(-1) - heavy).double() / rest
    first = (rate * weights < 1).int().argmax(-1, keepdim=True)
    saturated = torch.where(first > 0, 1 / weights.gather(-1, (first - 1).clamp(min=0)), 0.0)  # where nothing is left for the others
    level = torch.log2(torch.maximum(rate.gather(-1, first), saturated)) * 65536 - top * (65536 // LOG_STEPS)
    return torch.floor(level.nan_to_num(0, 0, 0)).clamp(-MAX_LEVEL, MAX_LEVEL).squeeze(-1).to(torch.int64)


def systematic(rates: Tensor, offset: Tensor) -> Tensor:
    """How often a systematic sample with one offset takes each token: 0 or 1 where the rate is at most ONE.

    rates: int64 [..., n], expected copies in units of 1/ONE. offset: int64 [...] in [0, ONE). Returns int64 [..., n].
    """
    prefix = rates.cumsum(-1) + offset.unsqueeze(-1)
    return (prefix >> ONE_BITS) - ((prefix - rates) >> ONE_BITS)


def draw(rates: Tensor, points: Tensor) -> Tensor:
    """How many of the points fall on each token: token i owns [C_(i−1), C_i) of the prefix sums C of the rates.

    rates: int64 [..., n]. points: int64 [..., S]; a negative point, or one beyond the total, falls on none. Returns int64 [..., n].
    """
    prefix = rates.cumsum(-1)
    token = torch.searchsorted(prefix, points.contiguous(), right=True)
    hit = (points >= 0) & (points < prefix[..., -1:])
    counts = torch.zeros_like(rates)
    return counts.scatter_add(-1, token.clamp(max=rates.shape[-1] - 1), hit.to(torch.int64))


def adaptive(codes: Tensor, budget: Tensor, offset: Tensor, bin_bits: int = 0) -> Selection:
    """π = min(1, λ q), systematically: distinct tokens in cache order, k of them give or take one (SSA §2's theory).

    codes: int64 [..., n]. budget, offset: int64 [...].
    """
    rates = power_fine(codes, solve_level(codes, budget, bin_bits))
    return Selection(systematic(rates, offset) > 0, rates.double() / ONE)


def heaviest(codes: Tensor, count: Tensor) -> Selection:
    """The `count` largest codes, ties to the earlier token, π = 1. codes: int64 [..., n]. count: int64 [...]."""
    order = torch.sort(codes, dim=-1, descending=True, stable=True).indices
    rank = torch.empty_like(order).scatter(-1, order, torch.arange(codes.shape[-1], device=codes.device).expand_as(order))
    return certain((rank < count.unsqueeze(-1)) & (codes != EXCLUDED))


def with_replacement(codes: Tensor, draws: Tensor, uniform: Tensor) -> Selection:
    """m draws in proportion to q, duplicates once: π = 1 − (1 − p)^m (SSA §2, §3).

    codes: int64 [..., n]. draws: int64 [...], m. uniform: int64 [..., at least max m] in [0, ONE).
    """
    top = codes.amax(-1, keepdim=True) | 31  # the upper edge of its histogram bin, which a kernel knows before it knows the code
    weights = torch.where(codes == EXCLUDED, 0, power(codes - top) >> 12)
    share = draws.double() * ONE / weights.sum(-1).clamp(min=1).double()
    rates = (weights.double() * share.unsqueeze(-1)).to(torch.int64)
    wanted = torch.arange(uniform.shape[-1], device=codes.device) < draws.unsqueeze(-1)
    taken = draw(rates, torch.where(wanted, draws.unsqueeze(-1) * uniform, -1)) > 0
    p = rates.double() / (draws.unsqueeze(-1).double() * ONE).clamp(min=1)
    return Selection(taken, -torch.expm1(draws.unsqueeze(-1) * torch.log1p(-p)).nan_to_num())


def adaptive_with_replacement(codes: Tensor, budget: Tensor, uniform: Tensor) -> Selection:
    """SSA §2 as the paper states it: heavy where λq >= 1, the m = k − |heavy| left are drawn with replacement from the others.

    codes: int64 [..., n]. budget: int64 [...]. uniform: int64 [..., at least max m] in [0, ONE).
    """
    heavy = certain(power_fine(codes, solve_level(codes, budget)) == ONE)
    rest = torch.where(heavy.taken, EXCLUDED, codes)
    return heavy | with_replacement(rest, budget - heavy.taken.sum(-1), uniform)


def uniform(included: Tensor, count: Tensor, offset: Tensor) -> Selection:
    """`count` of the included tokens, all equally likely (the residual of vAttention). included: [..., n] bool. count: int64 [...]."""
    rate = (count * ONE) // included.sum(-1).clamp(min=1)
    rates = torch.where(included, rate.clamp(max=ONE).unsqueeze(-1), 0)
    return Selection(systematic(rates, offset) > 0, rates.double() / ONE)
