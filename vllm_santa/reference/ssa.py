"""SSA (Stratified Sparse Attention) and its comparators: a proxy score per key picks the rows, exact scores weigh them by 1/π."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_santa.methods import Method
from vllm_santa.reference.fixed_point import EXCLUDED, log_codes
from vllm_santa.reference.scores import group_mixture
from vllm_santa.reference.select import Selection, adaptive, certain, heaviest, uniform, with_replacement


@dataclass(frozen=True)
class SelectionSettings:
    """What a policy fixes for every selection by proxy scores.

    sink, local: tokens at the start and the end that are always taken, outside the budget.
    heavy_fraction: share of the budget that `ssa_fixed` and `uniform_tail` give to the largest proxies (SSA §3, h).
    uniform_share: uniform mass mixed into the proposal; bounds 1/π without bias.
    """

    sink: int = 128
    local: int = 128
    heavy_fraction: float = 0.4
    uniform_share: float = 0.02


def forced_tokens(context: int, settings: SelectionSettings, device: torch.device) -> Tensor:
    """True for the sink and local tokens. bool [context]."""
    index = torch.arange(context, device=device)
    return (index < settings.sink) | (index >= context - settings.local)


def proposal(scores: Tensor, settings: SelectionSettings) -> tuple[Tensor, Tensor]:
    """The forced tokens and the log-codes of every other token's weight q.

    scores: float32 [..., G, n], natural-log units. Returns bool and int64 [..., n].
    """
    forced = forced_tokens(scores.shape[-1], settings, scores.device).expand(*scores.shape[:-2], -1)
    mixture = group_mixture(scores, ~forced, settings.uniform_share)
    return forced, log_codes(mixture, ~forced)


def select_by_proxy(method: Method, proxies: Tensor, settings: SelectionSettings, budget: Tensor, uniform_bits: Tensor) -> Selection:
    """Rows a KV head reads, forced ones included.

    ssa: π = min(1, λq), systematic (SSA §2, our sampling). ssa_fixed: a heavy share h, the rest with replacement (SSA §3). topk: the
    largest proxies (PQCache); on exact scores it is the paper's Oracle-top-k. uniform_tail: the largest, then uniform (vAttention).
    proxies: float32 [..., G, n], approximate scores in natural-log units; query heads that select for themselves are groups of one.
    budget: int64 [...], rows besides the forced ones. uniform_bits: int64 [..., >= draws] in [0, ONE): one number, or `budget` of them
    for `ssa_fixed`. Returns a selection over [..., n].
    """
    forced, codes = proposal(proxies, settings)
    offset = uniform_bits[..., 0]
    if method == Method.ssa:
        return certain(forced) | adaptive(codes, budget, offset)
    if method == Method.topk:
        return certain(forced) | heaviest(codes, budget)
    heavy = heaviest(codes, (budget.double() * settings.heavy_fraction).long())
    rest = torch.where(heavy.taken, EXCLUDED, codes)
    left = budget - heavy.taken.sum(-1)
    tail = with_replacement(rest, left, uniform_bits) if method == Method.ssa_fixed else uniform(rest != EXCLUDED, left, offset)
    return certain(forced) | heavy | tail


def importance_weights(scores: Tensor, probability: Tensor) -> Tensor:
    """SSA's weights: exp(score)/π, normalised (SSA §2). Numerator and denominator are unbiased, their ratio is consistent.

    scores: float32 [..., G, rows], exact, −inf = no row. probability: float64 [..., rows]. Returns float64 [..., G, rows].
    """
    peak = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    weights = torch.exp(scores.double() - peak) / probability.clamp(min=torch.finfo(torch.float64).tiny).unsqueeze(-2)
    return weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)


def shrunk_tail(scores: Tensor, probability: Tensor, values: Tensor) -> Tensor:
    """SSA's output with the sampled tail shrunk as far as the sample contradicts itself: less error at small budgets, for some bias.

    SSA's output is o + Σ x_i: the rows read as they stand, and what each row with π < 1 adds by standing for the rows not read. The sum is
    multiplied by James and Stein's positive-part factor (1961) with Σ |x_i|² for its variance: c = max(0, 1 − Σ|x_i|² / |Σ x_i|²), for each
    query head. The bias is towards the rows read and goes as c approaches 1, which it does where the sample is large.
    scores: float32 [..., G, rows], exact, −inf = no row. probability: float64 [..., rows]. values: [..., rows, D].
    Returns float64 [..., G, D].
    """
    unweighted = importance_weights(scores, torch.ones_like(probability))
    extra = unweighted * (1 / probability.clamp(min=torch.finfo(torch.float64).tiny) - 1).unsqueeze(-2)
    extra = extra / (1 + extra.sum(-1, keepdim=True))
    values = values.double()
    output = unweighted @ values
    correction = extra @ values - extra.sum(-1, keepdim=True) * output
    own = (extra.square() * torch.cdist(output, values).square()).sum(-1, keepdim=True)
    square = correction.square().sum(-1, keepdim=True)
    agreement = (1 - own / square.clamp(min=torch.finfo(torch.float64).tiny)).clamp(min=0)
    return output + agreement * correction
