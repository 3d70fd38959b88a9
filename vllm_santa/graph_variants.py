"""Several CUDA graphs of each decode batch size, each with some of the parts that attention may need: dense rows, families of kernels.

A step replays the smallest that holds its parts, so a step without sparse rows runs what vLLM's FlashInfer backend would, nothing else.
(Kernels that find no work cost about 1 µs each, a conditional graph node 5 µs, in every layer: benchmarks/NOTES.md.) Model runner V2 only;
V1 has one graph of each size, which holds everything.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from vllm_santa.engine_id import engine_id
from vllm_santa.wrapping import wrap_once

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Parts = frozenset[int]
"""Of a step's attention: indices of kernel families, and DENSE."""
DENSE = -1
"""FlashInfer's attention, for rows that are dense."""
ERRORS = -2
"""Estimates of the error of rows that have a target, behind the kernels that decoded them."""

_variants: "WeakValueDictionary[str, GraphVariants]" = WeakValueDictionary()


class GraphVariants:
    """The variants of one engine's graphs in this process, and which of them is in use.

    sets: the parts that each variant holds; the last one holds all of them.
    """

    def __init__(self, vllm_config: "VllmConfig", sets: list[Parts]):
        self.sets = sets
        self.captured = sets[-1]
        """What a graph that is being captured has to hold."""
        self.needed: Parts = sets[-1]
        """What the step that is about to run needs."""
        _variants[engine_id(vllm_config)] = self
        _watch_captures()

    @contextmanager
    def capturing(self, parts: Parts) -> Iterator[None]:
        """Inside, graphs are captured with these parts."""
        self.captured = parts
        try:
            yield
        finally:
            self.captured = self.sets[-1]

    def choose(self, graphs: Mapping[Parts, Any]) -> Any:
        """The smallest graph that holds what the step needs."""
        return graphs[min((parts for parts in graphs if parts >= self.needed), key=len)]


class VariantGraph:
    """Stands for the graphs of one batch size."""

    def __init__(self, variants: GraphVariants, graphs: Mapping[Parts, Any]):
        self._variants, self._graphs = variants, graphs

    def replay(self) -> None:
        self._variants.choose(self._graphs).replay()


def _watch_captures() -> None:
    """Have vLLM's V2 runner capture every variant. Once per process."""
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager, ModelCudaGraphManager

    def capture(original: Callable[..., None], self: Any, create_forward_fn: Callable[..., Any], *args: Any, **others: Any) -> None:
        variants = _variants.get(engine_id(self.vllm_config))
        profiling = getattr(self, "_max_full_descs_to_capture", None) is not None
        if variants is None or profiling or not isinstance(self, ModelCudaGraphManager) or CUDAGraphMode.FULL not in self._capture_descs:
            original(self, create_forward_fn, *args, **others)
            return
        wanted = self._capture_descs
        by_variant: dict[Parts, dict[Any, Any]] = {}
        try:
            for parts in reversed(variants.sets):  # the largest first: the others then fit in the pool's memory
                with variants.capturing(parts):
                    original(self, create_forward_fn, *args, **others)
                by_variant[parts] = dict(self.graphs)
                self.graphs.clear()
                self._capture_descs = {CUDAGraphMode.FULL: wanted[CUDAGraphMode.FULL]}  # the other modes hold no attention
        finally:
            self._capture_descs = wanted
        for desc in by_variant[variants.sets[-1]]:
            self.graphs[desc] = VariantGraph(variants, {parts: graphs[desc] for parts, graphs in by_variant.items()})

    wrap_once(CudaGraphManager, "capture", capture)
