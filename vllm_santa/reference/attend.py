"""Attention over the rows a method takes: contiguous caches, any leading dimensions, random numbers given.

Shapes: query [..., H, G, D], key and value [..., H, n, D], budget int64 [..., H]; the output is float32 [..., H, G, D].
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_santa.methods import Method
from vllm_santa.reference.error import OutputError, draws_error, selection_error
from vllm_santa.reference.pps import pps
from vllm_santa.reference.scores import exact_scores
from vllm_santa.reference.select import Selection
from vllm_santa.reference.ssa import importance_weights, shrunk_tail
from vllm_santa.reference.values import sample_values


@dataclass(frozen=True)
class Attended:
    """output: float32 [..., H, G, D]. taken: bool [..., H, n], rows of V that were read. error: of each head's output, where asked for."""

    output: Tensor
    taken: Tensor
    error: OutputError | None = None

    def rows(self) -> float:
        """Rows read, mean over all KV heads."""
        return self.taken.sum(-1).double().mean().item()


def attend_values(method: Method, scores: Tensor, value: Tensor, budget: Tensor, uniform: Tensor, estimate_error: bool = False) -> Attended:
    """The SANTA family: exact scores of all keys, few rows of V.

    scores: float32 [..., H, G, n]. uniform: int64 in [0, ONE): [..., H, 1] for pps, [..., H, G, draws_needed] for the samplers.
    """
    broken = ~(scores < torch.inf).all(-1, keepdim=True)  # NaN or +inf: NaN out, as dense attention gives
    scores = scores.masked_fill(broken, -torch.inf)
    if method == Method.pps:
        selection, weights = pps(scores, budget, uniform[..., 0])
        taken = selection.taken
    else:
        draws = sample_values(method, scores, budget.unsqueeze(-1).expand(scores.shape[:-1]).contiguous(), uniform)
        weights = draws.weights
        taken = weights.amax(-2) > 0
    rows, valid = taken_rows(taken)
    weights = _at(weights, rows) * valid.unsqueeze(-2)
    values = _rows_of(value, rows, valid)
    output = (weights.float() @ values).masked_fill(broken, torch.nan)
    if not estimate_error:
        return Attended(output, taken)
    if method == Method.pps:
        probability = selection.probability.gather(-1, rows).masked_fill(~valid, 1.0)
        return Attended(output, taken, selection_error(weights, probability, values, output, ratio=False))
    return Attended(output, taken, draws_error(method, draws, rows, values, output))


def attend_selected(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    selection: Selection,
    scale: float,
    soft_cap: float = 0.0,
    shrink_tail: bool = False,
    estimate_error: bool = False,
) -> Attended:
    """The SSA family: rows of K and V selected by proxy, exact scores of those rows only, weights e^score/π normalised (SSA §2).

    shrink_tail: less error for some bias, see `shrunk_tail`; how much less, no estimate says.
    """
    rows, valid = taken_rows(selection.taken)
    scores = exact_scores(query, _rows_of(key, rows, valid), scale, soft_cap).masked_fill(~valid.unsqueeze(-2), -torch.inf)
    probability, values = selection.probability.gather(-1, rows), _rows_of(value, rows, valid)
    if shrink_tail:
        return Attended(shrunk_tail(scores, probability, values).float(), selection.taken)
    weights = importance_weights(scores, probability)
    output = weights.float() @ values
    if not estimate_error:
        return Attended(output, selection.taken)
    error = selection_error(weights, probability.masked_fill(~valid, 1.0), values, output, ratio=True)
    return Attended(output, selection.taken, error)


def taken_rows(taken: Tensor) -> tuple[Tensor, Tensor]:
    """Indices of each head's taken tokens in cache order, padded to the longest, and which are none: [..., rows] of bool [..., n]."""
    count = taken.sum(-1)
    order = torch.argsort(~taken, dim=-1, stable=True)[..., : max(int(count.max()), 1)]
    return order, torch.arange(order.shape[-1], device=taken.device) < count.unsqueeze(-1)


def _at(weights: Tensor, rows: Tensor) -> Tensor:
    """[..., G, n] at [..., rows] -> [..., G, rows]."""
    return weights.gather(-1, rows.unsqueeze(-2).expand(*weights.shape[:-1], -1))


def _rows_of(cache: Tensor, rows: Tensor, valid: Tensor) -> Tensor:
    """[..., n, D] at [..., rows], float32, zeros where not valid. The cache may lack leading dimensions of the rows."""
    cache = cache.expand(*rows.shape[:-1], *cache.shape[-2:])
    picked = cache.gather(-2, rows.unsqueeze(-1).expand(*rows.shape, cache.shape[-1])).float()
    return picked.masked_fill(~valid.unsqueeze(-1), 0.0)
