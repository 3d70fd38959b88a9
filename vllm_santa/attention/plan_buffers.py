"""Pinned memory for FlashInfer's plans, so that a plan never writes where an earlier step's copy to the device may still read.

A FlashInfer wrapper writes every plan into one pinned buffer of its own and copies it without waiting. But vLLM's V2 runner plans a step
while the one before it runs. Where the GPU is late (shared with others, say), that copy may not have run yet: the earlier step then reads
the later one's plan, and if that has other numbers of decodes or prefills, heads and rows that are not there. Met by others too:
mini-sglang, pull request 103.
"""

from typing import Any

import torch
from torch import Tensor


class PlanBuffers:
    """A ring of pinned buffers for all wrappers of a builder.

    concurrent: steps that can be in flight at once. plans: that a step makes, at most.
    """

    def __init__(self, concurrent: int, plans: int):
        self._count = (concurrent + 1) * plans
        self._ring: list[Tensor] = []
        self._next = 0

    def renew(self, wrapper: Any) -> Any:
        """The wrapper, with a buffer for its next plan that no step in flight can read."""
        if len(self._ring) < self._count:
            own = wrapper._pin_memory_int_workspace_buffer
            self._ring.append(torch.empty_like(own, pin_memory=own.is_pinned()))
        wrapper._pin_memory_int_workspace_buffer = self._ring[self._next]
        self._next = (self._next + 1) % self._count
        return wrapper
