"""pps, ours: SANTA (arXiv 2605.01910) without repeated draws, by the selection of SSA §2.

Probability-proportional-to-size sampling: distinct rows of V per KV head, π = min(1, λ q) from exact scores, placed systematically; the
Horvitz-Thompson sum Σ (p/π) v over the rows taken is unbiased.
"""

import torch
from torch import Tensor

from vllm_santa.reference.fixed_point import log_codes
from vllm_santa.reference.scores import group_mixture, softmax_or_zero
from vllm_santa.reference.select import Selection, adaptive


def pps(scores: Tensor, budget: Tensor, offset: Tensor, bin_bits: int = 0) -> tuple[Selection, Tensor]:
    """Selection of a KV head's rows and the weight p/π each query head gives them: Σ (p/π) v is unbiased for softmax(scores) @ V.

    scores: float32 [..., G, n], −inf = masked. budget: int64 [...], rows per KV head. offset: int64 [...] in [0, ONE).
    Returns the selection over [..., n] and weights float64 [..., G, n], 0 where not taken.
    """
    included = scores.amax(-2) > -torch.inf
    selection = adaptive(log_codes(group_mixture(scores, included), included), budget, offset, bin_bits)
    probability = selection.probability.unsqueeze(-2)
    weights = softmax_or_zero(scores).double() / probability
    return selection, torch.where(selection.taken.unsqueeze(-2), weights, 0.0)
