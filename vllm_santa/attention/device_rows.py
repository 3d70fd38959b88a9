"""What each row of a step gets, in device memory that stays where it is, so that captured graphs read it at every replay."""

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from vllm_santa.rows import SparseToken

UNLIMITED = np.iinfo(np.int32).max


class DeviceRows:
    """Buffers for up to `capacity` rows.

    seed: int64 [capacity], unsigned 64 bits as signed. budget: int32 [capacity]. limit: int32 [capacity], the length of the row that dense
    attention sees: 1 for sparse rows. method: int8 [capacity], `Method`, 0 = dense or padding. measured: int8 [capacity], 1 for rows whose
    error is to be estimated.
    """

    def __init__(self, capacity: int, device: torch.device):
        self.capacity = capacity
        kinds = {"seed": np.int64, "budget": np.int32, "limit": np.int32, "method": np.int8, "measured": np.int8}
        self._sizes = {name: (kind, capacity) for name, kind in kinds.items()}
        host = self._host()
        self._packed = host.to(device)
        parts = dict(self._parts(self._packed))
        self.seed, self.budget, self.limit, self.method, self.measured = (parts[name] for name in self._sizes)
        self._all_dense = True

    def fill(self, tokens: Iterable[SparseToken]) -> None:
        """Give the rows of `tokens` what they are to get, all others dense attention.

        One copy to the device, from a new pinned buffer each time: an earlier one may still be read. Steps that are dense like the one
        before them cost nothing.
        """
        tokens = list(tokens)
        if not tokens and self._all_dense:
            return
        self._all_dense = not tokens
        host = self._host(pinned=self._packed.is_cuda)
        parts = {name: part.numpy() for name, part in self._parts(host)}
        if tokens:
            rows = [token.row for token in tokens]
            parts["seed"].view(np.uint64)[rows] = [token.seed for token in tokens]
            parts["budget"][rows] = [token.budget for token in tokens]
            parts["limit"][rows] = 1
            parts["method"][rows] = [token.method for token in tokens]
            parts["measured"][rows] = [token.control is not None for token in tokens]
        self._packed.copy_(host, non_blocking=True)

    def _host(self, pinned: bool = False) -> Tensor:
        size = sum(np.dtype(kind).itemsize * count for kind, count in self._sizes.values())
        host = torch.empty(size, dtype=torch.uint8, pin_memory=pinned).zero_()
        dict(self._parts(host))["limit"].fill_(UNLIMITED)
        return host

    def _parts(self, packed: Tensor) -> Iterator[tuple[str, Tensor]]:
        start = 0
        for name, (kind, count) in self._sizes.items():
            end = start + np.dtype(kind).itemsize * count
            yield name, packed[start:end].view(getattr(torch, np.dtype(kind).name))
            start = end
