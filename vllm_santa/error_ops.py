"""Thin launcher of the kernel that estimates how far off the outputs of pps and the SSA family are. No allocation and no host sync."""

from collections.abc import Iterable

import torch
from torch import Tensor

from vllm_santa.jit import Shape, error_module
from vllm_santa.kernel_ops import Layer, PpsWorkspace, Rows
from vllm_santa.methods import Method
from vllm_santa.ssa_ops import SsaWorkspace

HEADS = 4
"""Query heads that a block of the kernel takes."""
MOST_SPLITS, BLOCKS = 16, 1024
"""Blocks that share a row and its heads, at most, and that a launch need not exceed."""


class ErrorWorkspace:
    """Device buffers for up to `rows` rows.

    lse: float32 [rows, Hq], where the methods' kernels leave the log2 of their weights' sum. parts: in how many parts a row's sums come.
    """

    def __init__(self, rows: int, kv_heads: int, shape: Shape, device: torch.device | str = "cuda"):
        self.shape, self.rows, heads = shape, rows, min(HEADS, shape.group)
        self.parts = kv_heads * -(-shape.group // heads)
        blocks = max(rows * self.parts, BLOCKS)
        self.lse = torch.empty(rows, kv_heads * shape.group, dtype=torch.float32, device=device)
        self.partial = torch.empty(blocks, heads * shape.head_dim, dtype=torch.float32, device=device)
        self.scalars = torch.empty(blocks, heads + 2, dtype=torch.float32, device=device)
        self.done = torch.zeros(rows * self.parts, dtype=torch.int32, device=device)

    def splits(self, rows: int) -> int:
        """Blocks that share a row and its heads in a batch of so many rows."""
        return max(1, min(MOST_SPLITS, BLOCKS // (rows * self.parts)))


def estimate_errors(
    query: Tensor,
    kv: Tensor,
    rows: Rows,
    measured: Tensor,
    layer: Layer,
    methods: Iterable[Method],
    output: Tensor,
    selected: PpsWorkspace | SsaWorkspace,
    sums: Tensor,
    workspace: ErrorWorkspace,
) -> None:
    """Estimate the error of the rows of these methods that are `measured`, behind the kernels that decoded them.

    query, output: [R, Hq, D]. kv: [B, H, N, 2D]. measured: int8 [R]. selected: of those kernels, which had `workspace.lse` for their lse.
    sums: float32 [>= R, parts, 2], variance and ‖output‖² of the row's heads; the first `workspace.parts` parts are written.
    """
    count = rows.seq_lens.shape[0]
    if count > workspace.rows or sums.shape[0] < count or sums.shape[1] < workspace.parts or not sums.is_contiguous():
        raise ValueError(
            f"sums: {list(sums.shape)} for {count} rows; must be contiguous, of at least that many rows (at most {workspace.rows}) and "
            f"{workspace.parts} parts"
        )
    if measured.dtype != torch.int8 or measured.shape != (count,) or not query.is_contiguous() or not output.is_contiguous():
        raise ValueError(f"measured: {measured.dtype} {list(measured.shape)}; must be torch.int8 [{count}], query and output contiguous")
    error_module(workspace.shape).error(
        query, kv, rows.seq_lens, rows.method, measured, output, workspace.lse, selected.sample, selected.count, sums, workspace.partial,
        workspace.scalars, workspace.done, layer.scale, layer.soft_cap, sum(1 << method for method in methods),
        isinstance(selected, SsaWorkspace), workspace.splits(count),
    )  # fmt: skip
