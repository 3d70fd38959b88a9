"""In which order the kernels of a step are launched, and with what; no GPU is needed to say so."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
from vllm_santa.attention import kernels as module  # noqa: E402
from vllm_santa.attention.kernels import Batch, Family, Kernels, Wanted  # noqa: E402
from vllm_santa.graph_variants import DENSE, ERRORS  # noqa: E402
from vllm_santa.methods import Method  # noqa: E402
from vllm_santa.policy.file import parse_policy  # noqa: E402
from vllm_santa.runtime import Runtime  # noqa: E402

PPS, VALUES, PROXIES = {Method.pps}, {Method.sys, Method.prop}, {Method.ssa, Method.topk}
LSE = torch.zeros(4)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What was launched: a family's methods with the tensor for its log-sum-exps, or an estimate with its methods and workspace."""
    made: list[tuple[Any, ...]] = []

    def estimate(query, kv, rows, measured, layer, methods, output, workspace, sums, errors) -> None:
        made.append(("estimate", set(methods), workspace))

    monkeypatch.setattr(module, "estimate_errors", estimate)
    return made


def made_for(calls: list, errors: Any) -> Kernels:
    kernels = object.__new__(Kernels)
    kernels._families = tuple(
        Family(
            frozenset(methods), None, lambda *_: None,
            lambda batch, workspace, settings, lse, methods=methods: calls.append((methods, lse)), selects=methods is not VALUES,
        )
        for methods in (PPS, VALUES, PROXIES)
    )  # fmt: skip
    kernels.limits, kernels.settings, kernels.errors = SimpleNamespace(slots=lambda rows: 2), None, errors
    kernels._placed = {2: ("pps space", "values space", "proxies space")}
    return kernels


def batch(errors: Wanted | None) -> Batch:
    return Batch(None, None, None, SimpleNamespace(seq_lens=torch.zeros(2)), None, None, None, errors)  # type: ignore[arg-type]


WANTED = Wanted(torch.ones(2, dtype=torch.int8), torch.zeros(2, 1, 2))


def test_estimates_follow_each_family_before_the_next_takes_its_memory(calls: list) -> None:
    kernels = made_for(calls, SimpleNamespace(lse=LSE))
    kernels.launch(batch(WANTED), {0, 1, 2})
    assert calls == [
        (PPS, LSE), ("estimate", PPS, "pps space"), (VALUES, None), (PROXIES, LSE), ("estimate", {Method.ssa}, "proxies space"),
    ]  # fmt: skip


def test_without_targets_nothing_is_estimated(calls: list) -> None:
    made_for(calls, SimpleNamespace(lse=LSE)).launch(batch(None), {0, 2})
    assert calls == [(PPS, None), (PROXIES, None)]
    with pytest.raises(ValueError, match="made without error targets"):
        made_for(calls, None).launch(batch(WANTED), {0})


@pytest.mark.parametrize(
    ("policy", "errors"),
    [
        ("rules: [{method: pps}]", [{0, 1, 2, DENSE, ERRORS}]),
        ("rules: [{method: pps, max_error: 0.1}]", [{0, ERRORS}, {0, DENSE, ERRORS}, {0, 1, 2, DENSE, ERRORS}]),
        ("rules: [{method: pps}]\nrequests: {max_error: false}", []),
    ],
)
def test_graphs_with_estimates_are_variants_of_their_own(policy: str, errors: list[set[int]]) -> None:
    family = {method: index for index, methods in enumerate((PPS, VALUES, PROXIES)) for method in methods}
    kernels = SimpleNamespace(families=lambda methods: frozenset(family[method] for method in methods if method in family))
    runtime = SimpleNamespace(
        policy=parse_policy(policy, "p"), _kernels={0: kernels}, vllm_config=SimpleNamespace(instance_id="launch", additional_config={})
    )
    variants = Runtime.__dict__["graph_variants"].func(runtime)
    assert [parts for parts in map(set, variants.sets) if ERRORS in parts] == errors
    assert variants.sets[-1] >= frozenset().union(*variants.sets)
