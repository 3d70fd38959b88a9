"""How far off a sampled output is, estimated from the rows it was made of (docs/estimators.md, "Error of an output").

A sampled output is a sum of terms y_i, one for each copy of a row that was taken. Only rows whose number of copies was left to chance can
have made it wrong; and samples of (nearly) fixed size are wrong only by how much their terms differ. Both is in the variance estimate of
Hájek (Ann. Math. Statist. 35, 1964) for unequal probabilities without replacement: Σ c_i ‖y_i − ȳ‖², ȳ the c-weighted mean of the terms.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_santa.methods import Method
from vllm_santa.reference.fixed_point import ONE
from vllm_santa.reference.values import Draws

_TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class OutputError:
    """Of one output vector each: variance, the estimate of E‖output − dense‖², and square, ‖output‖². Both float64, [...]."""

    variance: Tensor
    square: Tensor


def relative_error(variance: Tensor, square: Tensor) -> Tensor:
    """Estimated ‖output − dense‖ / ‖dense‖, at most 1: the variance is taken off ‖output‖², which noise makes larger. Any one shape."""
    return (variance / torch.maximum(square - variance, variance).clamp(min=_TINY)).sqrt()


def sample_variance(terms: Tensor, doubt: Tensor, copies: Tensor, centred: bool = True) -> Tensor:
    """Σ c ‖y − ȳ‖² · m / (m − 1), m the copies of rows in doubt; a single one has nothing to differ from, and counts whole.

    terms: [..., rows, D], y. doubt: [..., rows], c: variance of a row's copies × copies / expected copies. copies: [..., rows].
    centred False: ȳ = 0, for terms that sum to zero whatever was taken. Returns [...].
    """
    whole = (doubt * terms.square().sum(-1)).sum(-1)
    if not centred:
        return whole
    count = (copies * (doubt > 0)).sum(-1)
    mean = (doubt.unsqueeze(-1) * terms).sum(-2, keepdim=True) / doubt.sum(-1).clamp(min=_TINY)[..., None, None]
    centred_sum = (doubt * (terms - mean).square().sum(-1)).sum(-1)
    return torch.where(count > 1, centred_sum * count / (count - 1).clamp(min=1), whole)


def selection_error(weights: Tensor, probability: Tensor, values: Tensor, output: Tensor, ratio: bool) -> OutputError:
    """Of methods that take rows without repetition: c = 1 − π, y = a·v, or a·(v − output) for a ratio.

    weights: [..., G, rows], a: what each head gives the rows taken. probability: [..., rows], their π; 1 where there is no row.
    values: [..., rows, D]. output: [..., G, D]. ratio: the weights are normalised by their sum (ssa and its kin), not by a known one (pps).
    """
    output, terms = output.double(), values.double().unsqueeze(-3)
    if ratio:
        terms = terms - output.unsqueeze(-2)
    terms = weights.double().unsqueeze(-1) * terms
    doubt = (1 - probability.double()).unsqueeze(-2).expand(weights.shape)
    return OutputError(sample_variance(terms, doubt, torch.ones_like(doubt)), output.square().sum(-1))


def draws_error(method: Method, draws: Draws, rows: Tensor, values: Tensor, output: Tensor) -> OutputError:
    """Of methods that draw rows of V per query head: y = v / S; for `flash`, whose tiles have weights of their own, each·(v − output).

    draws: over [..., G, n]. rows: int64 [..., rows], the tokens that some head of the group drew, padded with any. values: [..., rows, D],
    zeros where there is no row. output: [..., G, D].
    """
    at = rows.unsqueeze(-2).expand(*draws.copies.shape[:-1], -1)
    copies, doubt = (x.gather(-1, at).double() for x in (draws.copies, _doubt(method, draws)))
    each = draws.each.expand(draws.copies.shape).gather(-1, at).unsqueeze(-1)
    output, terms = output.double(), values.double().unsqueeze(-3)
    by_tile = method == Method.flash
    terms = each * (terms - output.unsqueeze(-2) if by_tile else terms)
    return OutputError(sample_variance(terms, doubt, copies, centred=not by_tile), output.square().sum(-1))


def _doubt(method: Method, draws: Draws) -> Tensor:
    """c of every token, float64 [..., n]: of independent draws simply their copies, for these vary as S·p."""
    copies, rate = draws.copies.double(), draws.rates.double() / ONE
    if method == Method.santa:
        return copies
    part = rate.frac()
    variance = part * (1 - part)
    if method == Method.strat:  # a token that reaches over a border of strata may be drawn on both sides of it
        end = draws.rates.cumsum(-1)
        start = end - draws.rates
        first, last = ((-start % ONE).double() / ONE, (end % ONE).double() / ONE)
        crossing = end // ONE > start // ONE
        variance = torch.where(crossing, first * (1 - first) + last * (1 - last), variance)
    return variance * copies / rate.clamp(min=_TINY)
