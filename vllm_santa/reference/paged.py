"""Reading one row's cache out of vLLM's pages."""

import torch
from torch import Tensor


def gather_context(page: Tensor, block_table: Tensor, context: int) -> Tensor:
    """The first `context` tokens of a row, as [H, context, C].

    page: [B, H, N, C], any strides. block_table: int32 [at least ceil(context / N)].
    """
    block_size = page.shape[2]
    blocks = block_table[: -(-context // block_size)].long()
    return page[blocks].transpose(0, 1).flatten(1, 2)[:, :context]


def taken_rows(taken: Tensor) -> tuple[Tensor, Tensor]:
    """Indices of each head's taken tokens in cache order, padded to the longest. taken: bool [H, n]. Returns (index, valid) [H, rows]."""
    count = taken.sum(-1)
    order = torch.argsort(~taken, dim=-1, stable=True)[:, : max(int(count.max()), 1)]
    return order, torch.arange(order.shape[1], device=taken.device) < count.unsqueeze(-1)
