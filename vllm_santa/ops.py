"""The operations of a sparse layer by the torch reference: encode new keys, decode sparse rows. On CUDA, kernels do the same
(attention/kernels.py); both compute the numbers of docs/estimators.md."""

from collections.abc import Iterable, Iterator

from torch import Tensor

from vllm_santa.codebook import Codebook
from vllm_santa.reference import pq
from vllm_santa.reference.decode import LayerContext, RowResult, decode_row
from vllm_santa.reference.ssa import SelectionSettings
from vllm_santa.rows import SparseToken


def encode(key: Tensor, codes: Tensor, slots: Tensor, codebook: Codebook) -> None:
    """Write the PQ codes of new keys beside them.

    key: [T, H, D]. codes: uint8 [B, H, N, M], written at slots. slots: int64 [T], none negative.
    """
    block_size = codes.shape[2]
    codes[slots // block_size, :, slots % block_size] = pq.encode(key, codebook)


def encode_blocks(kv: Tensor, codes: Tensor, blocks: Tensor, codebook: Codebook) -> None:
    """Write the codes of whole cached blocks, when codebooks appear. kv: [B, H, N, 2D]. blocks: int64 [n]."""
    head_dim = kv.shape[-1] // 2
    for block in blocks.split(256):
        keys = kv[block][..., :head_dim].transpose(1, 2)  # [n, N, H, D]
        codes[block] = pq.encode(keys.flatten(0, 1), codebook).unflatten(0, keys.shape[:2]).transpose(1, 2)


def decode(
    query: Tensor,
    kv: Tensor,
    codes: Tensor,
    block_table: Tensor,
    tokens: Iterable[SparseToken],
    layer: LayerContext,
    settings: SelectionSettings,
    output: Tensor,
) -> Iterator[tuple[SparseToken, RowResult]]:
    """Sparse attention of the given tokens, written to their rows of the output.

    query, output: [T, Hq, D]. kv: [B, H, N, 2D]. codes: uint8 [B, H, N, M]. block_table: int32 [rows, blocks].
    Yields each token with its result, which holds the error of those that have a control.
    """
    for token in tokens:
        result = decode_row(
            query[token.token], kv, codes, block_table[token.row], token.context, token.method, token.budget, token.seed, layer, settings,
            token.bernoulli, estimate_error=token.control is not None,
        )  # fmt: skip
        output[token.token] = result.output
        yield token, result
