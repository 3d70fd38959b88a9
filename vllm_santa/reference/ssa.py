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


def select_by_proxy(method: Method, proxies: Tensor, settings: SelectionSettings, budget: Tensor, uniform_bits: Tensor) -> Selection:
    """Rows a KV head reads, forced ones included.

    proxies: float32 [..., G, n], approximate scores in natural-log units. budget: int64 [...], rows besides the forced ones.
    uniform_bits: int64 [..., >= draws] in [0, ONE): one number, or `budget` of them for `ssa_fixed`. Returns a selection over [..., n].
    """
    forced = forced_tokens(proxies.shape[-1], settings, proxies.device).expand(*proxies.shape[:-2], -1)
    mixture = group_mixture(proxies, ~forced, settings.uniform_share)
    codes = log_codes(mixture, ~forced)
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
