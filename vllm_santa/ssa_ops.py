"""Thin launchers of the kernels with PQ codes: cache write, encode, and decode by ssa, ssa_fixed, topk and uniform_tail.

No allocation and no host sync once the buffers exist.
"""

import torch
from torch import Tensor

from vllm_santa.codebook import CENTROIDS, SUBSPACES, Codebook, CodebookError, check_subspaces
from vllm_santa.jit import Shape, encode_module, ssa_module
from vllm_santa.kernel_ops import BIN_BITS, CHUNK, UNIT, Layer, Rows, check_tensors
from vllm_santa.methods import Method
from vllm_santa.reference.fixed_point import exp2_table
from vllm_santa.reference.ssa import SelectionSettings

HEAD_DIMS = (64, 128, 256)
SSA_METHODS = (Method.ssa, Method.ssa_fixed, Method.topk, Method.uniform_tail)

_QUAD = 4  # query heads that share an entry of a look-up table
_ROWS = 128  # rows that a block of the gather takes at a time


class CodebookBuffers:
    """One layer's codebook for `kv_heads` KV heads, on the device, in the orders that the kernels read.

    Zeros until `load` fills them in place, so that captured graphs see a codebook that appears later; with zeros every code is 0.
    Raises CodebookError for subspaces or a head_dim that have no kernels.
    """

    def __init__(self, kv_heads: int, head_dim: int, subspaces: int, device: torch.device | str = "cuda"):
        check_subspaces(head_dim, subspaces)
        if head_dim not in HEAD_DIMS:
            raise CodebookError(f"head_dim is {head_dim}: kernels with PQ codes are for {', '.join(map(str, HEAD_DIMS))}")
        self.kv_heads, self.head_dim, self.subspaces = kv_heads, head_dim, subspaces
        features = head_dim // subspaces
        columns = max(features, 8)  # of the transform that the encoder works on together

        def zeros(*size: int) -> Tensor:
            return torch.zeros(kv_heads, *size, dtype=torch.float32, device=device)

        # Fragments of mma.m16n8k8: lane = 4 * column or centroid + place. See kernels/encode.cu.
        self.key_transform = zeros(head_dim // columns, columns // 8, head_dim // 32, 2, 32, 4)
        self.key_bias = zeros(head_dim)
        self.key_centroids = zeros(subspaces, 16, columns // 8, 32, 4)
        self.key_norms = zeros(subspaces, CENTROIDS)
        # For the look-up tables: see kernels/ssa_tables.cu.
        self.query_transform = zeros(subspaces, head_dim, features)
        self.query_offset = zeros(head_dim)
        self.centroids = zeros(subspaces, features, CENTROIDS)

    def load(self, codebook: Codebook, first_kv_head: int = 0) -> None:
        """Copy in the codebook's KV heads [first_kv_head, first_kv_head + kv_heads). Raises CodebookError if it is of another shape."""
        own = codebook.slice_heads(first_kv_head, self.kv_heads).to(self.key_bias.device)
        for field in ("head_dim", "subspaces"):
            if getattr(own, field) != getattr(self, field):
                raise CodebookError(f"{field} of the codebook is {getattr(own, field)}, the buffers are for {getattr(self, field)}")
        heads, features = self.kv_heads, self.head_dim // self.subspaces
        columns, pieces = max(features, 8), self.head_dim // 32
        # [piece, place, half, 4 features] x [group, tile, column]
        transform = own.key_transform.view(heads, pieces, 4, 2, 4, self.head_dim // columns, columns // 8, 8)
        self.key_transform.copy_(transform.permute(0, 5, 6, 1, 3, 7, 2, 4).reshape(self.key_transform.shape))
        self.key_bias.copy_(-(own.mean.double().unsqueeze(1) @ own.key_transform.double()).squeeze(1))
        # Subspaces that share a group of columns have zeros in the others' columns.
        together = columns // features
        place = torch.nn.functional.one_hot(torch.arange(self.subspaces, device=own.mean.device) % together, together)
        wide = (own.centroids.unsqueeze(-2) * place[:, None, :, None]).flatten(-2)  # [H, M, 256, columns]
        tiles = wide.view(heads, self.subspaces, 16, 2, 8, columns // 8, 4, 2)
        self.key_centroids.copy_(tiles.permute(0, 1, 2, 5, 4, 6, 3, 7).reshape(self.key_centroids.shape))
        self.key_norms.copy_(-own.centroids.square().sum(-1) / 2)
        self.query_transform.copy_(own.query_transform.unflatten(-1, (self.subspaces, features)).transpose(1, 2))
        self.query_offset.copy_(own.query_offset)
        self.centroids.copy_(own.centroids.mT)

    def key_side(self) -> tuple[Tensor, ...]:
        """What the encoder reads, in its order."""
        return self.key_transform, self.key_bias, self.key_centroids, self.key_norms

    def query_side(self) -> tuple[Tensor, ...]:
        """What the look-up tables are made from, in the kernels' order."""
        return self.query_transform, self.query_offset, self.centroids


def write_cache(key: Tensor, value: Tensor, kv: Tensor, codes: Tensor, slots: Tensor, buffers: CodebookBuffers) -> None:
    """Write new keys, values and the keys' codes into their pages, in one launch.

    key, value: [T, H, D], tokens and heads at any stride that is a multiple of 8. kv: [B, H, N, 2D]. codes: uint8 [B, H, N, M].
    slots: int64 [T], block * N + offset, -1 = not written.
    """
    _check_planes(kv, codes, buffers)
    for name, tensor in (("key", key), ("value", value)):
        strides = tensor.stride()
        if tensor.shape != (slots.shape[0], buffers.kv_heads, buffers.head_dim) or tensor.dtype != kv.dtype or strides[2] != 1:
            wanted = [slots.shape[0], buffers.kv_heads, buffers.head_dim]
            raise ValueError(f"{name}: {tensor.dtype} {list(tensor.shape)}, strides {strides}; must be {kv.dtype} {wanted}, features dense")
        if strides[0] % 8 or strides[1] % 8 or tensor.data_ptr() % 16:
            raise ValueError(f"{name}: strides {strides}; must be multiples of 8, and the data 16-byte aligned")
    if slots.dtype != torch.int64 or not slots.is_contiguous():
        raise ValueError(f"slots: {slots.dtype} {list(slots.shape)}; must be contiguous torch.int64")
    encode_module(buffers.head_dim, kv.dtype, buffers.subspaces).write_cache(key, value, slots, kv, codes, *buffers.key_side())


def encode_blocks(kv: Tensor, codes: Tensor, blocks: Tensor | None, buffers: CodebookBuffers) -> None:
    """Write the codes of whole cached blocks. kv: [B, H, N, 2D]. codes: uint8 [B, H, N, M]. blocks: int64 [n] on the device, None = all."""
    _check_planes(kv, codes, buffers)
    if blocks is not None and (blocks.dtype != torch.int64 or not blocks.is_contiguous() or not blocks.is_cuda):
        raise ValueError(f"blocks: {blocks.dtype} {list(blocks.shape)} on {blocks.device}; must be contiguous torch.int64 on the GPU")
    encode_module(buffers.head_dim, kv.dtype, buffers.subspaces).encode_blocks(blocks, kv, codes, *buffers.key_side())


class SsaWorkspace:
    """Device buffers of the SSA family for up to `rows` rows of `max_context` tokens and budgets up to `max_budget` rows per KV head.

    subspaces: the most that a codebook may have.
    """

    def __init__(
        self,
        rows: int,
        kv_heads: int,
        shape: Shape,
        max_context: int,
        max_budget: int,
        device: torch.device | str = "cuda",
        subspaces: int = SUBSPACES[-1],
    ):
        self.shape, self.max_context, self.max_budget, self.subspaces = shape, max_context, max_budget, subspaces
        units, chunks, quads = -(-max_context // UNIT), -(-max_context // CHUNK), -(-shape.group // _QUAD)
        samples = max_budget + max_budget // 16 + 2  # bins are counted at their middle: off by at most 4.4 %
        processors = torch.cuda.get_device_properties().multi_processor_count if torch.cuda.is_available() else 132
        resident = 1 if shape.head_dim == 256 else 3 if shape.group <= 8 else 2  # blocks of the gather on a multiprocessor
        splits = _gather_splits(rows * kv_heads, processors * resident, -(-samples // _ROWS) + 2)

        def empty(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(rows, kv_heads, *size, dtype=dtype, device=device)

        self.tables = empty(quads, CENTROIDS, max(subspaces, 16), _QUAD, dtype=torch.float16)
        self.broken = empty(shape.group, dtype=torch.int32)
        self.scores = empty(quads, units * UNIT, _QUAD, dtype=torch.float16)
        self.norm = empty(2 * processors, shape.group, 2)
        self.codes = empty(units * UNIT, dtype=torch.int16)
        self.histogram = empty(65536 >> BIN_BITS, dtype=torch.int32)
        self.rate = empty(dtype=torch.int32)
        self.chunk_sum = empty(chunks, dtype=torch.int64)
        self.chunk_taken = empty(chunks, dtype=torch.int64)
        self.fine = empty(chunks + 1, 1 << BIN_BITS, dtype=torch.int32)
        self.low_weight = empty(dtype=torch.int64)
        self.sample = empty(samples, 4, dtype=torch.int32)
        self.count = empty(dtype=torch.int32)
        """Rows that were selected, windows not counted: [R, H]."""
        self.read = empty(dtype=torch.int32)
        """Rows that were read, windows counted: [R, H]."""
        self.partial = empty(splits, shape.group, shape.head_dim)
        self.mass = empty(splits, shape.group, 2)
        self.done = torch.zeros(rows, kv_heads, dtype=torch.int32, device=device)

    def buffers(self) -> tuple[Tensor, ...]:
        """In the order the kernels take them."""
        return (
            self.tables, self.broken, self.scores, self.norm, self.codes, self.histogram, self.rate, self.chunk_sum, self.chunk_taken,
            self.fine, self.low_weight, self.sample, self.count, self.read, self.partial, self.mass, self.done,
        )  # fmt: skip


def ssa(
    query: Tensor,
    kv: Tensor,
    codes: Tensor,
    rows: Rows,
    layer: Layer,
    buffers: CodebookBuffers,
    settings: SelectionSettings,
    output: Tensor,
    workspace: SsaWorkspace,
    lse: Tensor | None = None,
    methods: tuple[Method, ...] = SSA_METHODS,
) -> None:
    """Attention of the batch's rows by ssa, ssa_fixed, topk and uniform_tail; other rows of `output` and `lse` are left alone.

    query, output: [R, Hq, D]. kv: [B, H, N, 2D]. codes: uint8 [B, H, N, M]. lse: float32 [R, Hq] or None, log2 of the estimated sum of
    exponentials. methods: those the rows may have; a kernel of none of them is not launched. `workspace.count` and `.read` hold the rows
    taken, per row and KV head.
    """
    check_tensors(query, kv, output, rows, workspace.shape, workspace.max_context, workspace.count.shape[0])
    _check_planes(kv, codes, buffers)
    if buffers.subspaces > workspace.subspaces:
        raise ValueError(f"subspaces: {buffers.subspaces}; the workspace is for {workspace.subspaces} at most")
    ssa_module(workspace.shape, buffers.subspaces).ssa(
        query, kv, codes, rows.block_table, rows.seq_lens, rows.method, rows.budget, rows.seed, output, lse, exp2_table(query.device),
        *buffers.query_side(), *workspace.buffers(), layer.scale, layer.soft_cap, sum(1 << method for method in methods), layer.layer,
        layer.head_offset, settings.sink, settings.local, settings.heavy_fraction, settings.uniform_share,
    )  # fmt: skip


def _gather_splits(pairs: int, resident: int, most: int) -> int:
    """Blocks of the gather that share a row and KV head: what keeps `resident` blocks busy to the end, no more than `most`."""

    def busy(splits: int) -> float:
        blocks = pairs * splits
        return blocks / (-(-blocks // resident) * resident)

    choices = range(1, max(1, min(most, -(-resident // pairs) * 2)) + 1)
    best = max(map(busy, choices))
    return next(splits for splits in choices if busy(splits) > best - 0.02)  # few, for merging them takes time


def _check_planes(kv: Tensor, codes: Tensor, buffers: CodebookBuffers) -> None:
    """Raises ValueError where the planes of a cache do not fit each other or the codebook."""
    blocks, heads, block_size, row = kv.shape
    if heads != buffers.kv_heads or row != 2 * buffers.head_dim or kv.stride()[1:] != (block_size * row, row, 1) or block_size % 16:
        wanted = f"[B, {buffers.kv_heads}, N, {2 * buffers.head_dim}] dense per block, N a multiple of 16"
        raise ValueError(f"kv: {list(kv.shape)} strides {kv.stride()}; must be {wanted}")
    size = buffers.subspaces
    if codes.dtype != torch.uint8 or codes.shape != (blocks, heads, block_size, size) or codes.stride()[1:] != (block_size * size, size, 1):
        wanted = f"torch.uint8 {[blocks, heads, block_size, size]} dense per block"
        raise ValueError(f"codes: {codes.dtype} {list(codes.shape)} strides {codes.stride()}; must be {wanted}")
    if codes.stride(0) % 16 or codes.data_ptr() % 16 or kv.stride(0) % 8 or kv.data_ptr() % 16:
        raise ValueError(f"kv, codes: page strides {kv.stride(0)} elements, {codes.stride(0)} bytes; pages must be 16-byte aligned")
