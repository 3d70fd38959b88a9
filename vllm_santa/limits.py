"""How much the CUDA kernels of a worker must be able to hold.

Their buffers grow with rows × context. The most rows and the longest context never come together, because the KV cache has no room
for that; so a batch of R rows divides the memory into R parts, and a row that is longer than its part is dense (reason `workspace`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_santa.kernel_ops import CHUNK

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_santa.policy import Policy


@dataclass(frozen=True)
class Limits:
    """What a worker's kernels have to hold: rows in a step, tokens in a row, budgets, and context tokens in a step's sparse rows."""

    rows: int
    context: int
    max_budget: Callable[[int], int]
    """Context length -> the most rows that a budget can be there."""
    tokens: int

    def slots(self, rows: int) -> int:
        """The layout for a batch of `rows`: the next power of two."""
        return 1 << max(rows - 1, 0).bit_length()

    def row_context(self, rows: int) -> int:
        """The longest context that a sparse row of such a batch can have, a multiple of CHUNK."""
        share = self.tokens // self.slots(rows) // CHUNK * CHUNK
        return max(CHUNK, min(share, -(-self.context // CHUNK) * CHUNK))

    def rows_of(self, context: int) -> int:
        """The most rows of this context that a batch can have."""
        slots = self.slots(self.rows)
        while slots > 1 and self.row_context(slots) < context:
            slots //= 2
        return slots

    def row_budget(self, rows: int) -> int:
        """The largest budget in such a batch. One that covers the row makes it dense."""
        context = self.row_context(rows)
        return min(self.max_budget(context), context)


def limits_of(vllm_config: "VllmConfig", policy: "Policy") -> Limits:
    """The limits of a server. Graphs may pad a batch beyond max_num_seqs."""
    rows = max(vllm_config.scheduler_config.max_num_seqs, vllm_config.compilation_config.max_cudagraph_capture_size or 0)
    return Limits(rows, vllm_config.model_config.max_model_len, policy.max_budget, policy.workspace_tokens)
