"""Collects what the layers of a step find about the error of its rows, and hands it out some steps later, without waiting for a GPU."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_santa.error_control import LAG
from vllm_santa.reference.error import OutputError, relative_error
from vllm_santa.rows import SparseToken

_DELAY = LAG - 2
"""Steps from the copy to the host until it is read. It is made in the step after the rows', and what is read acts in the step after that.
vLLM has two steps under way at most, so by then the copy has long arrived."""


@dataclass(frozen=True)
class _Reading:
    step: int
    tokens: list[SparseToken]
    errors: Tensor
    """float64 [rows], on the host once `arrived`."""
    arrived: "torch.cuda.Event | None"


class ErrorMeter:
    """sums: float32 [layers, rows, parts, 2], the estimated variance and ‖output‖² of each row, in as many parts as its writers like; it
    stays where it is, so that captured graphs can write it.

    The error of a row is the mean over its sparse layers of the relative error of the layer's output, all query heads of the model as one
    vector.
    """

    def __init__(self, layers: Iterable[int], rows: int, parts: int, device: torch.device, over_ranks: Callable[[Tensor], Tensor]):
        """layers: those that read sparsely. over_ranks: sum over tensor-parallel ranks, which have other heads."""
        self._index = {layer: index for index, layer in enumerate(sorted(layers))}
        self._over_ranks = over_ranks
        self._blank = torch.zeros(len(self._index), rows, parts, 2, dtype=torch.float32, device=device)
        self._blank[:, :, 0] = torch.nan  # a layer that wrote nothing leaves no error, not an error of zero
        self.sums = self._blank.clone()
        self._step = 0
        self._measuring: list[SparseToken] = []
        self._readings: deque[_Reading] = deque()

    def layer(self, layer: int) -> Tensor:
        """The part of `sums` that belongs to a layer, by its index in the model: [rows, parts, 2]."""
        return self.sums[self._index[layer]]

    def write(self, layer: int, row: int, error: OutputError) -> None:
        """What the reference found for a row's heads."""
        self.layer(layer)[row] = 0
        self.layer(layer)[row, 0] = torch.stack((error.variance.sum(), error.square.sum())).float()

    def begin_step(self, tokens: list[SparseToken]) -> list[tuple[SparseToken, float]]:
        """Close the step before, and begin one that measures these tokens, one of a row. Returns what has become known of earlier ones."""
        self._step += 1
        if self._measuring:
            self._read()
        self._measuring = tokens
        if tokens:
            rows = 1 + max(token.row for token in tokens)
            self.sums[:, :rows].copy_(self._blank[:, :rows])
        known: list[tuple[SparseToken, float]] = []
        while self._readings and self._readings[0].step <= self._step - _DELAY:
            reading = self._readings.popleft()
            if reading.arrived is not None:
                reading.arrived.synchronize()
            known += zip(reading.tokens, reading.errors.tolist(), strict=True)
        return known

    def _read(self) -> None:
        at = torch.tensor([token.row for token in self._measuring], pin_memory=self.sums.is_cuda).to(self.sums.device, non_blocking=True)
        variance, square = self._over_ranks(self.sums[:, at].sum(2)).double().unbind(-1)
        errors, arrived = relative_error(variance, square).mean(0), None
        if errors.is_cuda:
            on_host = torch.empty(errors.shape, dtype=errors.dtype, pin_memory=True)
            errors, arrived = on_host.copy_(errors, non_blocking=True), torch.cuda.Event()
            arrived.record()
        self._readings.append(_Reading(self._step, self._measuring, errors, arrived))
