"""Bernoulli qKᵀ (arXiv 2605.01910 §5): a random ternary query with the right mean, so that a score reads only some features of K."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_santa.methods import BernoulliSettings
from vllm_santa.reference.fixed_point import ONE, ONE_BITS


@dataclass(frozen=True)
class BernoulliQuery:
    """query: [..., G, D] float32, E = the true query. touched: bool [..., G, D], features of K that a head's scores read."""

    query: Tensor
    touched: Tensor

    def head_share(self) -> Tensor:
        """Share of K's features that one query head reads, mean over the group. [...] float32."""
        return self.touched.float().mean((-2, -1))

    def group_share(self) -> Tensor:
        """Share of K's features that some head of the group reads. [...] float32."""
        return self.touched.any(-2).float().mean(-1)


def bernoulli_query(query: Tensor, settings: BernoulliSettings, uniform: Tensor) -> BernoulliQuery:
    """The estimate of a group's queries; its scores with any key are unbiased (softmax of them is not).

    Per head, Eq. 5: q̂ = norm/B · Σ_n sign(q) ⊙ Bernoulli(|q|/norm), norm = max |q|.
    Mean group query, Eq. 6: m = mean over the heads of |q|, m̂ drawn as above, q̂ = m̂ ⊙ q/m: all heads read the same features.
    query: [..., G, D]. uniform: int64 in [0, ONE), [..., G, D] per head or [..., 1, D] for the mean group query.
    """
    query = query.float()
    magnitude = query.abs().mean(-2, keepdim=True) if settings.mean_group else query.abs()
    norm = magnitude.amax(-1, keepdim=True)
    copies = _stratified_copies(magnitude / norm.clamp(min=torch.finfo(torch.float32).tiny), settings.samples, uniform)
    direction = torch.where(magnitude > 0, query / magnitude, query)  # a zero stays zero, a NaN stays NaN
    touched = (copies > 0).expand(query.shape)
    return BernoulliQuery(direction * (copies * (norm / settings.samples)), touched)


def _stratified_copies(probability: Tensor, samples: int, uniform: Tensor) -> Tensor:
    """How many of B draws of Bernoulli(p), one in each of B equal strata of [0, 1), give 1. int64.

    All strata but the one that holds p are certain, so one number decides: floor(B·p) or one more.
    """
    rate = (probability.double() * ONE).to(torch.int64)
    return (samples * rate + uniform) >> ONE_BITS
