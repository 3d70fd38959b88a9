"""Variants of decode graphs, captured by vLLM's own manager class with its capture loop replaced."""

from types import SimpleNamespace
from typing import Any

import pytest

utils = pytest.importorskip("vllm.v1.worker.gpu.cudagraph_utils")
from vllm.config import CUDAGraphMode  # noqa: E402

from vllm_santa import graph_variants  # noqa: E402
from vllm_santa.graph_variants import DENSE, GraphVariants, VariantGraph  # noqa: E402

ONLY_DENSE, PPS, ALL = frozenset({DENSE}), frozenset({0}), frozenset({0, 1, 2, DENSE})


class Graph:
    def __init__(self, families: frozenset[int]):
        self.families, self.replays = families, 0

    def replay(self) -> None:
        self.replays += 1


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, frozenset[int]]]:
    """vLLM's capture loop, replaced by one that notes what is captured: (mode, families)."""
    captured: list[tuple[str, frozenset[int]]] = []

    def capture(self: Any, create_forward_fn: Any) -> None:
        for mode, descs in self._capture_descs.items():
            for desc in descs:
                variants = graph_variants._variants.get(self.vllm_config.instance_id)
                families = variants.captured if variants else ONLY_DENSE
                captured.append((mode.name, families))
                if mode == CUDAGraphMode.FULL:
                    assert desc not in self.graphs
                    self.graphs[desc] = Graph(families)

    monkeypatch.setattr(utils.CudaGraphManager, "capture", capture)
    return captured


def manager(name: str, kind: type | None = None) -> Any:
    made = object.__new__(kind or utils.ModelCudaGraphManager)
    made.vllm_config = SimpleNamespace(instance_id=name)
    made.graphs = {}
    made._max_full_descs_to_capture = None
    made._capture_descs = {CUDAGraphMode.PIECEWISE: ["mixed"], CUDAGraphMode.FULL: ["1 row", "8 rows"]}
    return made


def test_every_variant_is_captured_and_the_smallest_that_fits_is_replayed(capturing: list[tuple[str, frozenset[int]]]) -> None:
    one = manager("a")
    variants = GraphVariants(one.vllm_config, [ONLY_DENSE, PPS, ALL])
    utils.CudaGraphManager.capture(one, None)
    assert capturing == [("PIECEWISE", ALL), *[("FULL", parts) for parts in (ALL, PPS, ONLY_DENSE) for _ in range(2)]]
    assert set(one._capture_descs) == {CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL}
    assert set(one.graphs) == {"1 row", "8 rows"} and variants.captured == ALL
    graph = one.graphs["8 rows"]
    assert isinstance(graph, VariantGraph)
    for needed, chosen in ((ONLY_DENSE, ONLY_DENSE), (PPS, PPS), (PPS | {DENSE}, ALL), (frozenset({1}), ALL), (frozenset({0, 2}), ALL)):
        variants.needed = needed
        before = {families: held.replays for families, held in graph._graphs.items()}
        graph.replay()
        after = {families: held.replays for families, held in graph._graphs.items()}
        assert [families for families in after if after[families] > before[families]] == [chosen]


def test_engines_on_other_backends_and_draft_models_are_left_alone(capturing: list[tuple[str, frozenset[int]]]) -> None:
    santa = manager("b")
    variants = GraphVariants(santa.vllm_config, [ONLY_DENSE, ALL])
    for one in (manager("b", utils.CudaGraphManager), manager("c")):
        utils.CudaGraphManager.capture(one, None)
        assert len(one.graphs) == 2 and all(isinstance(graph, Graph) for graph in one.graphs.values())
    assert variants.sets == [ONLY_DENSE, ALL]


def test_memory_profiling_captures_one_variant(capturing: list[tuple[str, frozenset[int]]]) -> None:
    one = manager("d")
    variants = GraphVariants(one.vllm_config, [ONLY_DENSE, ALL])
    one._max_full_descs_to_capture = 2
    utils.CudaGraphManager.capture(one, None)
    assert {families for _, families in capturing} == {ALL} and variants.sets[-1] == ALL


def test_watching_twice_changes_nothing(capturing: list[tuple[str, frozenset[int]]]) -> None:
    one = manager("e")
    kept = [GraphVariants(one.vllm_config, [ONLY_DENSE, ALL]) for _ in range(2)]
    watched = utils.CudaGraphManager.capture
    kept.append(GraphVariants(one.vllm_config, [ONLY_DENSE, ALL]))
    assert utils.CudaGraphManager.capture is watched
