"""Device memory that the kernels of all layers and methods share: one allocation, laid out anew for every batch size."""

from typing import TypeVar

import torch
from torch import Tensor

Buffers = TypeVar("Buffers")
ALIGNMENT = 256
ZEROED = ("done", "tile_done", "queue", "progress")
"""Counters that must be zero before a launch; the kernels leave them zero."""


class Arena:
    """Places buffers over one allocation. Buffers are described by making them on the meta device."""

    def __init__(self, device: torch.device):
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._zeros = torch.empty(0, dtype=torch.uint8, device=device)

    def reserve(self, buffers: object) -> None:
        """Grow to what `buffers` need. Before the first `place`: what was placed earlier does not move along."""
        sizes = {
            zeroed: sum(_bytes(tensor) for name, tensor in _tensors(buffers) if (name in ZEROED) == zeroed) for zeroed in (False, True)
        }
        if sizes[False] > self._memory.numel():
            self._memory = torch.empty(sizes[False], dtype=torch.uint8, device=self._device)
        if sizes[True] > self._zeros.numel():
            self._zeros = torch.zeros(sizes[True], dtype=torch.uint8, device=self._device)

    def place(self, buffers: Buffers) -> Buffers:
        """The same object with its meta tensors replaced by parts of the allocation, from its beginning."""
        used = {False: 0, True: 0}
        for name, tensor in _tensors(buffers):
            zeroed = name in ZEROED
            memory = self._zeros if zeroed else self._memory
            part = memory[used[zeroed] : used[zeroed] + tensor.numel() * tensor.element_size()]
            setattr(buffers, name, part.view(tensor.dtype).view(tensor.shape))
            used[zeroed] += _bytes(tensor)
        return buffers

    @property
    def size(self) -> int:
        """Bytes."""
        return self._memory.numel() + self._zeros.numel()


def _tensors(buffers: object) -> list[tuple[str, Tensor]]:
    return [(name, value) for name, value in vars(buffers).items() if isinstance(value, Tensor)]


def _bytes(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
