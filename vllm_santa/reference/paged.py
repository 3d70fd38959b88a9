"""Reading one row's cache out of vLLM's pages."""

from torch import Tensor


def gather_context(page: Tensor, block_table: Tensor, context: int) -> Tensor:
    """The first `context` tokens of a row, as [H, context, C].

    page: [B, H, N, C], any strides. block_table: int32 [at least ceil(context / N)].
    """
    block_size = page.shape[2]
    blocks = block_table[: -(-context // block_size)].long()
    return page[blocks].transpose(0, 1).flatten(1, 2)[:, :context]
