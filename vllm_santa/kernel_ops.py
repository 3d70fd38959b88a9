"""Thin launchers of the SANTA-family kernels: workspace, shapes, checks. No allocation and no host sync once a workspace exists."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_santa.jit import Shape, santa_module
from vllm_santa.methods import Method
from vllm_santa.reference.fixed_point import exp2_table
from vllm_santa.reference.values import FLASH_TILE, GROUP

UNIT = GROUP
"""Tokens a warp scores at a time; they share one exponent in a stash, and are the granule of every buffer."""
BIN_BITS = 5
"""log2 of the log-codes per bin of a histogram of 16-bit codes."""
CHUNK = 8192
"""Tokens one block of a placement covers."""
BYTE_CODES, CODE_ZERO, CODE_STEP = 256, 192, 32
"""pps keeps a log-code in a byte c: 0 excludes the token, others stand for CODE_STEP * (c - CODE_ZERO)."""
LOOK_PARTS, LOOK_TOKENS = 8, 2048
"""Blocks that share the first look of pps at a row and KV head: one for every LOOK_TOKENS tokens."""
DRAWS = 128
"""Draws a block of the value samplers takes at a time."""


@dataclass(frozen=True)
class Rows:
    """What each row of a decode batch wants; persistent device buffers, so that graphs can be replayed.

    block_table: int32 [R, blocks]. seq_lens: int32 [R], the current token included. method: int8 [R]. budget: int32 [R]. seed: int64 [R].
    """

    block_table: Tensor
    seq_lens: Tensor
    method: Tensor
    budget: Tensor
    seed: Tensor

    def __post_init__(self) -> None:
        kinds = {"block_table": torch.int32, "seq_lens": torch.int32, "method": torch.int8, "budget": torch.int32, "seed": torch.int64}
        for name, dtype in kinds.items():
            tensor = getattr(self, name)
            if tensor.dtype != dtype or not tensor.is_cuda or tensor.shape[0] != self.seq_lens.shape[0] or tensor.stride(-1) != 1:
                raise ValueError(
                    f"{name}: {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; must be {dtype} on the GPU, dense, one entry per row"
                )


@dataclass(frozen=True)
class Layer:
    """What a layer adds.

    layer: its index in the model. scale, soft_cap: of the scores, soft_cap 0 = none. head_offset: this rank's first KV head, globally.
    """

    layer: int
    scale: float
    soft_cap: float = 0.0
    head_offset: int = 0


class PpsWorkspace:
    """Device buffers of pps for up to `rows` rows of `max_context` tokens and budgets up to `max_budget` rows per KV head."""

    def __init__(self, rows: int, kv_heads: int, shape: Shape, max_context: int, max_budget: int, device: torch.device | str = "cuda"):
        self.shape, self.max_context, self.max_budget = shape, max_context, max_budget
        units = -(-max_context // UNIT)
        samples = max_budget + max_budget // 256 + 2  # lambda is a whole log-code, solved in floating point

        def empty(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        pair = (rows, kv_heads)
        self.look = empty(*pair, LOOK_PARTS, shape.group, 4)
        self.histogram = empty(*pair, BYTE_CODES, dtype=torch.int32)
        self.codes = empty(*pair, units * UNIT, dtype=torch.uint8)
        self.unit_mass = empty(*pair, units, shape.group)
        self.queue = torch.zeros(2, dtype=torch.int32, device=device)
        self.progress = torch.zeros(*pair, 2, dtype=torch.int32, device=device)
        self.rate = empty(*pair, dtype=torch.int32)
        self.sample = empty(*pair, samples, 4, dtype=torch.int32)
        self.count = empty(*pair, dtype=torch.int32)

    def buffers(self) -> tuple[Tensor, ...]:
        """In the order the kernels take them."""
        return (
            self.look, self.histogram, self.codes, self.unit_mass, self.queue, self.progress, self.rate, self.sample, self.count,
        )  # fmt: skip


class ValuesWorkspace:
    """Device buffers of the value samplers for up to `rows` rows of `max_context` tokens and budgets up to `max_budget` draws per head."""

    def __init__(self, rows: int, kv_heads: int, shape: Shape, max_context: int, max_budget: int, device: torch.device | str = "cuda"):
        self.shape, self.max_context, self.max_budget = shape, max_context, max_budget
        head = (rows, kv_heads * shape.group)
        units, splits = -(-max_context // UNIT), max(1, min(64, -(-max_budget // DRAWS), 1024 // (head[0] * head[1])))
        self.weight = torch.empty(*head, units * UNIT, dtype=torch.int16, device=device)
        self.unit = torch.empty(*head, units, 2, dtype=torch.int32, device=device)
        self.queue = torch.zeros(2, dtype=torch.int32, device=device)
        self.progress = torch.zeros(rows, kv_heads, 2, dtype=torch.int32, device=device)
        self.partial = torch.empty(*head, splits, shape.head_dim, dtype=torch.float32, device=device)
        self.done = torch.zeros(head, dtype=torch.int32, device=device)
        pair, tile_splits = (rows, kv_heads), max(1, min(64, -(-max_context // (8 * FLASH_TILE)), 1024 // (rows * kv_heads)))
        self.tile_partial = torch.empty(*pair, tile_splits, shape.group, shape.head_dim, dtype=torch.float32, device=device)
        self.tile_done = torch.zeros(pair, dtype=torch.int32, device=device)
        self.tile_mass = torch.empty(*pair, tile_splits, shape.group, 2, dtype=torch.int32, device=device)

    def buffers(self) -> tuple[Tensor, ...]:
        """In the order the kernels take them."""
        return (
            self.weight, self.unit, self.queue, self.progress, self.partial, self.done, self.tile_partial, self.tile_done, self.tile_mass,
        )  # fmt: skip


def check_tensors(query: Tensor, kv: Tensor, output: Tensor, rows: Rows, shape: Shape, max_context: int, capacity: int) -> None:
    """Raises ValueError where a tensor does not fit the shape the kernels were built for, or the workspace."""
    heads, block_size = kv.shape[1:3]
    batch = rows.seq_lens.shape[0]
    for name, tensor in (("query", query), ("output", output)):
        if tensor.shape != (batch, heads * shape.group, shape.head_dim) or tensor.dtype != shape.dtype or not tensor.is_contiguous():
            wanted = [batch, heads * shape.group, shape.head_dim]
            raise ValueError(f"{name}: {tensor.dtype} {list(tensor.shape)}; must be contiguous {shape.dtype} {wanted}")
    if kv.shape[3] != 2 * shape.head_dim or kv.dtype != shape.dtype or kv.stride()[1:] != (block_size * kv.shape[3], kv.shape[3], 1):
        raise ValueError(
            f"kv: {kv.dtype} {list(kv.shape)} strides {kv.stride()}; must be {shape.dtype} [B, H, N, {2 * shape.head_dim}] dense per block"
        )
    if block_size % 16 or kv.stride(0) % 8 or kv.data_ptr() % 16:
        raise ValueError(f"kv: block size {block_size}, page stride {kv.stride(0)}; must be multiples of 16 and 8, 16-byte aligned")
    if batch > capacity:
        raise ValueError(f"rows: {batch}; the workspace holds {capacity}")
    if rows.block_table.shape[1] * block_size > -(-max_context // block_size) * block_size:
        raise ValueError(f"block_table: {rows.block_table.shape[1]} blocks of {block_size}; the workspace holds {max_context} tokens a row")


def pps(query: Tensor, kv: Tensor, rows: Rows, layer: Layer, output: Tensor, workspace: PpsWorkspace, lse: Tensor | None = None) -> None:
    """pps attention of the batch's pps rows; other rows of `output` and `lse` are left alone.

    query, output: [R, Hq, D]. kv: [B, H, N, 2D]. lse: float32 [R, Hq] or None, log2 of the sum of exponentials, as FlashInfer gives it.
    """
    check_tensors(query, kv, output, rows, workspace.shape, workspace.max_context, workspace.count.shape[0])
    santa_module(workspace.shape).pps(
        query, kv, rows.block_table, rows.seq_lens, rows.method, rows.budget, rows.seed, output, lse, exp2_table(query.device),
        *workspace.buffers(), layer.scale, layer.soft_cap, 1 << Method.pps, layer.layer, layer.head_offset,
    )  # fmt: skip


VALUE_METHODS = (Method.santa, Method.strat, Method.sys, Method.prop, Method.flash)


def sample_values(
    query: Tensor,
    kv: Tensor,
    rows: Rows,
    layer: Layer,
    output: Tensor,
    workspace: ValuesWorkspace,
    lse: Tensor | None = None,
    methods: Iterable[Method] = VALUE_METHODS,
) -> None:
    """Attention of the batch's rows by the value samplers; other rows of `output` and `lse` are left alone.

    Shapes as in `pps`; `lse` is that of the 16-bit stash. methods: those the rows may have; a kernel of none of them is not launched.
    """
    check_tensors(query, kv, output, rows, workspace.shape, workspace.max_context, workspace.done.shape[0])
    santa_module(workspace.shape).values(
        query, kv, rows.block_table, rows.seq_lens, rows.method, rows.budget, rows.seed, output, lse, *workspace.buffers(), layer.scale,
        layer.soft_cap, sum(1 << method for method in methods), layer.layer, layer.head_offset,
    )  # fmt: skip
