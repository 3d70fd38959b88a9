"""Exact attention over a paged cache: prefill chunks, and decode rows that are served dense."""

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_santa.reference.scores import exact_scores


def dense_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, soft_cap: float = 0.0, window: int | None = None) -> Tensor:
    """Causal attention of the last T tokens of one sequence.

    query: [T, Hq, D]. key, value: [H, n, D], n >= T; query head h reads KV head h // (Hq / H). window: tokens visible to each query,
    itself included (None: all). Returns [T, Hq, D] in the query's dtype.
    """
    tokens, heads = query.shape[:2]
    context = key.shape[1]
    query = query.transpose(0, 1)
    key, value = (x.repeat_interleave(heads // x.shape[0], dim=0) for x in (key, value))
    position = torch.arange(context - tokens, context, device=query.device).unsqueeze(-1)
    index = torch.arange(context, device=query.device)
    visible = index <= position
    if window is not None:
        visible &= index > position - window
    if soft_cap > 0:
        scores = exact_scores(query, key, scale, soft_cap).masked_fill(~visible, -torch.inf)
        return (torch.softmax(scores, -1) @ value.float()).transpose(0, 1).to(query.dtype)
    out = F.scaled_dot_product_attention(query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0), attn_mask=visible, scale=scale)
    return out[0].transpose(0, 1)
