"""Error targets on the GPU: a step's estimates are the reference's, and whole engines with decode graphs follow their targets."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("flashinfer", reason="the CUDA backend is built on FlashInfer")
pytest.importorskip("vllm", reason="needs vLLM")

from attention_harness import Asked, Layers
from test_engine import PROMPTS, folder, start

from benchmarks.engine import Engine
from vllm_santa.error_control import LAG, ErrorControl
from vllm_santa.graph_variants import ERRORS
from vllm_santa.methods import Method
from vllm_santa.reference.decode import decode_row
from vllm_santa.reference.error import relative_error

pytestmark = pytest.mark.gpu
__all__ = ["folder"]  # a fixture of this module too

TOKENS = 64
LONG = [prompt for prompt in PROMPTS if len(prompt) > 1000]
OPTIONS = {"worker_extension_cls": "error_probe.ErrorProbe"}


# One step


@pytest.mark.parametrize("reference_too", [False, True], ids=["kernels", "and the reference"])
def test_a_step_estimates_what_the_reference_does(reference_too: bool) -> None:
    """Rows with and without a target; without graphs, also one whose error only the reference computes."""
    layers = Layers(layers=2, policy="rules: []\nsink: 16\nlocal: 16\n", options={"enforce_eager": reference_too})
    layers.give_codebooks()
    asked = [Asked(6000, Method.pps, 64, 1), Asked(5000, Method.ssa, 100, 2), Asked(900), Asked(4000, Method.ssa_fixed, 100, 3)]
    asked += [Asked(3000, Method.pps, 64, 4), Asked(3000, Method.sys, 64, 5)]
    seen: dict[int, float] = {}

    class Control(ErrorControl):
        def observe(self, context: int, error: float, max_error: float) -> None:
            assert max_error == 0.1
            seen[context] = error

    controls = {row: Control() for row in (0, 1, 3, *([5] if reference_too else []))}
    rows_of = layers.rows_of

    def with_targets(common):
        rows = rows_of(common)
        for row, control in controls.items():
            rows[row] = replace(rows[row], params=replace(rows[row].params, max_error=0.1), control=control)
        return rows

    layers.rows_of = with_targets
    asked[5] = replace(asked[5], context=3500)
    step = layers.step(asked)
    metadata = step.build()
    assert ERRORS in metadata.step.parts
    expected = {}
    for index, attention in enumerate(layers.attention):
        step.run(metadata, index)
        santa = attention.impl.santa
        kv, codes = santa.views(step.caches[index])
        for row in controls:
            one, table = asked[row], step.common.block_table_tensor[row]
            numbers = (one.method, one.budget, one.seed, santa.context, layers.runtime.settings)
            error = decode_row(step.query[row], kv, codes, table, one.context, *numbers, estimate_error=True).error
            expected.setdefault(one.context, []).append(relative_error(error.variance.sum(), error.square.sum()).item())
    controls.clear()  # later steps ask for nothing
    for _ in range(LAG - 1):
        assert not seen
        assert ERRORS not in step.build().step.parts
    assert seen.keys() == expected.keys()
    methods = {one.context: one.method for one in asked}
    for context, errors in expected.items():  # λ and codes are the reference's but for rounding, so samples are others, of the same error
        factor = 3.0 if methods[context].needs_codes else 1.3  # random codebooks leave heavy rows to chance
        assert sum(errors) / 2 / factor < seen[context] < factor * sum(errors) / 2, (context, seen, expected)


# Whole engines


@dataclass
class Achieved:
    tokens: list[list[int]]
    rows: float
    error: float
    budget: float


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with start(folder, "santa", **OPTIONS) as engine:
        yield engine


def ask(engine: Engine, method: str, max_error: float, seed: int = 3) -> Achieved:
    """Means over the rows that were estimated."""
    (before,) = engine.rpc("achieved")
    asked = {"santa_method": method, "santa_budget": 64, "santa_seed": seed, "santa_max_error": max_error}
    tokens = engine.generate(LONG, TOKENS, asked).tokens
    (after,) = engine.rpc("achieved")
    gained = {name: value - before.get(method, {}).get(name, 0) for name, value in after[method].items()}
    rows = gained["santa_estimated_rows"]
    return Achieved(tokens, rows, gained["santa_estimated_error"] / rows, gained["santa_estimated_budget"] / rows)


@pytest.mark.parametrize("method", ["pps", "ssa"])
def test_budgets_follow_their_targets_and_repeat_by_seed(engine: Engine, method: str) -> None:
    loose, tight = ask(engine, method, 0.4), ask(engine, method, 0.1)
    assert tight.rows == pytest.approx(len(LONG) * (TOKENS - 1), abs=len(LONG) * LAG)
    assert tight.error < 0.16 and tight.error < 0.75 * loose.error, (loose, tight)
    assert tight.budget > 1.5 * loose.budget
    again = ask(engine, method, 0.1)
    assert again.tokens == tight.tokens
    assert ask(engine, method, 0.1, seed=4).tokens != tight.tokens


def test_rows_without_a_target_are_not_estimated(engine: Engine) -> None:
    (before,) = engine.rpc("achieved")
    engine.generate(LONG, 8, {"santa_method": "pps", "santa_budget": 64, "santa_seed": 1})
    assert engine.rpc("achieved") == [before]


def test_graphs_give_the_errors_of_eager_steps(folder: Path, engine: Engine) -> None:
    graphs = ask(engine, "pps", 0.1)
    with start(folder, "santa", enforce_eager=True, **OPTIONS) as other:
        eager = ask(other, "pps", 0.1)
    assert eager.error == pytest.approx(graphs.error, rel=0.2) and eager.budget == pytest.approx(graphs.budget, rel=0.2)
