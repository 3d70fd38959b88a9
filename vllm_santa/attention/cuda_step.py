"""One step on the GPU: which rows the kernels decode, and how a layer does it, eagerly or in a captured graph."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm_santa.attention.device_rows import DeviceRows
from vllm_santa.attention.layer import SparseStep
from vllm_santa.graph_variants import DENSE, ERRORS, Parts
from vllm_santa.kernel_ops import Rows
from vllm_santa.rows import SparseToken, StepPlan

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends.flashinfer import FlashInferMetadata

    from vllm_santa.attention.kernel_layer import KernelLayer
    from vllm_santa.attention.kernels import Kernels


@dataclass(frozen=True)
class GatheredRows:
    """Sparse tokens that stand among others of their request, as recomputed ones do.

    tokens: int64 [R], indices in the flat batch. owners: int64 [R], their rows in the batch. measured: int64, those of the R whose error is
    wanted; None if it is nobody's.
    """

    tokens: Tensor
    owners: Tensor
    rows: Rows
    families: frozenset[int]
    measured: Tensor | None


@dataclass(frozen=True)
class CudaStep(SparseStep):
    """A SparseStep by kernels.

    decodes: rows of one token at the head of the batch, with what they get; measured: int8 [their number], 1 where their error is wanted.
    parts: families of kernels that the methods among them need, DENSE unless those rows are all of the step, ERRORS if one is measured.
    gathered: other sparse tokens. by_reference: tokens that no kernel decodes.
    """

    decodes: Rows | None = None
    measured: Tensor | None = None
    parts: Parts = frozenset({DENSE})
    gathered: tuple[GatheredRows, ...] = ()
    by_reference: tuple[SparseToken, ...] = ()

    @classmethod
    def all_dense(cls, common: "CommonAttentionMetadata", plan: StepPlan | None = None) -> "CudaStep":
        return cls(common.block_table_tensor, plan or StepPlan([0, common.num_actual_tokens], [], []))

    def decode(self, layer: "KernelLayer", query: Tensor, key: Tensor, value: Tensor, kv: Tensor, codes: Tensor, output: Tensor) -> None:
        """Write the outputs of the layer's sparse tokens; while there are no codebooks, let it collect the step's prompt tokens.

        query, output: [>= tokens, Hq, D]. key, value: [>= tokens, H, D]. kv, codes: the cache's planes.
        """
        output = output.view(output.shape[0], -1, layer.head_dim)
        families = self.parts - {DENSE, ERRORS}
        if self.decodes is not None and families:
            count, measured = self.decodes.seq_lens.shape[0], self.measured if ERRORS in self.parts else None
            layer.launch(query[:count].contiguous(), kv, codes, self.decodes, families, output[:count], measured)
        if torch.cuda.is_current_stream_capturing():
            return
        layer.observe(query, key, value, self)
        for part in self.gathered:
            result = torch.empty_like(query[part.tokens])
            layer.launch_gathered(query[part.tokens], kv, codes, part, result)
            output[part.tokens] = result
        if self.by_reference:
            layer.decode(query, kv, codes, self.block_table, self.by_reference, output)


class StepRows:
    """Makes the CudaStep of each step; owns the device buffers behind it."""

    def __init__(self, kernels: "Kernels", block_size: int, device: torch.device):
        self._kernels, self._limits, self._block_size, self._device = kernels, kernels.limits, block_size, device
        self._buffers = DeviceRows(self._limits.rows, device)
        self._dense_lens = torch.empty(self._limits.rows, dtype=torch.int32, device=device)

    def fill(self, common: "CommonAttentionMetadata", plan: StepPlan) -> "CommonAttentionMetadata":
        """Send the plan's rows of one token to the device. Returns the step as FlashInfer is to see it: those rows are one token long."""
        tokens = [token for token in plan.sparse if token.by_kernel and _alone(plan, token)]
        self._buffers.fill(tokens)
        rows = common.num_reqs
        lengths = torch.minimum(common.seq_lens, self._buffers.limit[:rows], out=self._dense_lens[:rows])
        if not tokens:
            return common.replace(seq_lens=lengths)
        on_host = common.seq_lens_cpu_upper_bound.clone()
        on_host[[token.row for token in tokens]] = 1
        return common.replace(seq_lens=lengths, seq_lens_cpu_upper_bound=on_host)

    def step(self, common: "CommonAttentionMetadata", plan: StepPlan, dense: "FlashInferMetadata") -> CudaStep:
        """What the layers do beside FlashInfer's `dense` plan of the same step."""
        count = dense.num_decodes
        uniform = dense.num_decode_tokens == count  # else there are drafts among the decodes, and a row is not a token
        first = [token.by_kernel and uniform and token.row < count for token in plan.sparse]
        decodes = [token for token, leads in zip(plan.sparse, first, strict=True) if leads]
        others = [token for token, leads in zip(plan.sparse, first, strict=True) if token.by_kernel and not leads]
        parts = self._kernels.families(token.method for token in decodes)
        if len(decodes) < sum(end > start for start, end in pairwise(plan.starts)):
            parts |= {DENSE}
        if any(token.control is not None for token in decodes):
            parts |= {ERRORS}
        alone = count > 0 and uniform
        return CudaStep(
            common.block_table_tensor,
            plan,
            self._decodes(common, count) if alone else None,
            self._buffers.measured[:count] if alone else None,
            parts,
            tuple(self._gathered(common.block_table_tensor, others)),
            tuple(token for token in plan.sparse if not token.by_kernel),
        )

    def _decodes(self, common: "CommonAttentionMetadata", count: int) -> Rows:
        table, buffers = self._narrow(common.block_table_tensor[:count]), self._buffers
        return Rows(table, common.seq_lens[:count], buffers.method[:count], buffers.budget[:count], buffers.seed[:count])

    def _narrow(self, block_table: Tensor) -> Tensor:
        """The columns that sparse rows of such a batch can need. block_table: int32 [R, blocks]."""
        return block_table[:, : self._limits.row_context(block_table.shape[0]) // self._block_size]

    def _gathered(self, block_table: Tensor, tokens: list[SparseToken]) -> Iterator[GatheredRows]:
        if not tokens:
            return
        size = self._limits.rows_of(max(token.context for token in tokens))
        for start in range(0, len(tokens), size):
            part = tokens[start : start + size]
            owners = self._upload((token.row for token in part), torch.int64)
            rows = Rows(
                self._narrow(block_table[owners]),
                self._upload((token.context for token in part), torch.int32),
                self._upload((token.method for token in part), torch.int8),
                self._upload((token.budget for token in part), torch.int32),
                self._upload((_signed(token.seed) for token in part), torch.int64),
            )
            families = self._kernels.families(token.method for token in part)
            wanted = [i for i, token in enumerate(part) if token.control is not None]
            measured = self._upload(wanted, torch.int64) if wanted else None
            yield GatheredRows(self._upload((token.token for token in part), torch.int64), owners, rows, families, measured)

    def _upload(self, values: Iterable[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(list(values), dtype=dtype, pin_memory=self._device.type == "cuda").to(self._device, non_blocking=True)


def _alone(plan: StepPlan, token: SparseToken) -> bool:
    """True if the token is all that its request computes in this step."""
    return plan.starts[token.row + 1] - plan.starts[token.row] == 1


def _signed(seed: int) -> int:
    return seed - (1 << 64) if seed >= 1 << 63 else seed
