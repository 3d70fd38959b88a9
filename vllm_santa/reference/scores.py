"""Exact attention scores and the one weight per token that a whole group of query heads agrees on."""

import torch
from torch import Tensor


def exact_scores(query: Tensor, key: Tensor, scale: float, soft_cap: float = 0.0) -> Tensor:
    """Scaled (and soft-capped, if soft_cap > 0) scores in float32.

    query: [..., H, G, D]. key: [..., H, n, D]. Returns [..., H, G, n].
    """
    scores = torch.matmul(query.float(), key.float().transpose(-1, -2)) * scale
    return soft_cap * torch.tanh(scores / soft_cap) if soft_cap > 0 else scores


def group_mixture(scores: Tensor, included: Tensor, uniform_share: float = 0.0) -> Tensor:
    """The proposal q of a KV head: the mean over its query heads of softmax(scores), mixed with a uniform share.

    One mixture keeps every head's estimator valid. The uniform share, a defensive mixture (Hesterberg 1995), bounds 1/π without the bias
    of SSA's clamp of π at 1e-4 (SSA §3).
    scores: [..., G, n] float32, natural-log units. included: [..., n] bool. Returns [..., n] float32, 0 where not included.
    """
    weights = softmax_or_zero(scores.masked_fill(~included.unsqueeze(-2), -torch.inf)).mean(-2)
    uniform = included / included.sum(-1, keepdim=True).clamp(min=1)
    return (1 - uniform_share) * weights + uniform_share * uniform


def softmax_or_zero(scores: Tensor) -> Tensor:
    """Softmax over the last dimension; zeros, not NaN, where every score is −inf."""
    return torch.softmax(scores, -1).masked_fill((scores == -torch.inf).all(-1, keepdim=True), 0.0)
