"""Error targets on the GPU: a step estimates its own errors, and whole engines with decode graphs follow their targets."""

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

pytestmark = pytest.mark.gpu
__all__ = ["folder"]  # a fixture of this module too

TOKENS = 64
LONG = [prompt for prompt in PROMPTS if len(prompt) > 1000]
OPTIONS = {"worker_extension_cls": "error_probe.ErrorProbe"}


# One step


@pytest.mark.parametrize("reference_too", [False, True], ids=["kernels", "and the reference"])
def test_a_step_estimates_the_errors_that_it_makes(reference_too: bool) -> None:
    """Rows with and without a target, of errors far apart; without graphs, also one whose error only the reference computes."""
    layers = Layers(layers=2, policy="rules: []\nsink: 16\nlocal: 16\n", options={"enforce_eager": reference_too})
    layers.give_codebooks()
    asked = [Asked(6000, Method.pps, 1500, 1), Asked(5000, Method.ssa, 2500, 2), Asked(900), Asked(4000, Method.ssa_fixed, 2000, 3)]
    asked += [Asked(3000, Method.pps, 64, 4), Asked(3500, Method.sys, 64, 5), Asked(2500, Method.pps, 24, 6)]
    seen: dict[int, float] = {}

    class Control(ErrorControl):
        def observe(self, context: int, error: float, max_error: float) -> None:
            assert max_error == 0.1
            seen[context] = error

    controls = {row: Control() for row in (0, 1, 3, 6, *([5] if reference_too else []))}
    rows_of = layers.rows_of

    def with_targets(common):
        rows = rows_of(common)
        for row, control in controls.items():
            rows[row] = replace(rows[row], params=replace(rows[row].params, max_error=0.1), control=control)
        return rows

    layers.rows_of = with_targets
    step = layers.step(asked)
    metadata = step.build()
    assert ERRORS in metadata.step.parts
    true: dict[int, list[float]] = {}
    for index, attention in enumerate(layers.attention):
        output = step.run(metadata, index)
        for row in controls:
            key, value = (part[index][row].float().transpose(0, 1) for part in (step.keys, step.values))
            query = step.query[row].float().unflatten(0, (layers.kv_heads, -1))
            dense = (torch.softmax(query @ key.transpose(1, 2) * attention.impl.santa.context.scale, -1) @ value).flatten(0, 1)
            error = (output[row].float() - dense).norm() / dense.norm()
            true.setdefault(asked[row].context, []).append(min(error.item(), 1.0))
    controls.clear()  # later steps ask for nothing
    for _ in range(LAG - 1):
        assert not seen
        assert ERRORS not in step.build().step.parts
    assert seen.keys() == true.keys()
    for context, errors in true.items():  # one draw of few heads, with heavy rows left to chance
        assert sum(errors) / 2 / 2.5 < seen[context] < 2.5 * sum(errors) / 2, (context, seen, true)
    assert seen[6000] < 0.3 * seen[2500], "each row's own"


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
    plain = {"santa_method": "pps", "santa_budget": 64, "santa_seed": 1}
    engine.generate(LONG, 8, plain)  # estimates of requests before these become known in their first steps
    before = engine.rpc("achieved")
    engine.generate(LONG, 8, plain)
    assert engine.rpc("achieved") == before


def test_graphs_give_the_errors_of_eager_steps(folder: Path, engine: Engine) -> None:
    graphs = ask(engine, "pps", 0.1)
    with start(folder, "santa", enforce_eager=True, **OPTIONS) as other:
        eager = ask(other, "pps", 0.1)
    assert eager.error == pytest.approx(graphs.error, rel=0.2) and eager.budget == pytest.approx(graphs.budget, rel=0.2)
