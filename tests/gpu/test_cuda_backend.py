"""The CUDA backend's builder and layers, without a model: rows by FlashInfer and by kernels in one batch, eagerly and in graphs."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("flashinfer", reason="the CUDA backend is built on FlashInfer")
pytest.importorskip("vllm", reason="the backend is vLLM's")

from attention_harness import Asked, Layers, Step

from vllm_santa.graph_variants import DENSE
from vllm_santa.methods import BernoulliSettings, Method

pytestmark = pytest.mark.gpu

SPARSE = [method for method in Method if method is not Method.dense]
CONTEXTS = [1, 15, 16, 17, 127, 128, 129, 4095, 30000]


@pytest.fixture(scope="module")
def layers() -> Iterator[Layers]:
    made = Layers(policy="rules: []\nsink: 16\nlocal: 16\n")
    made.give_codebooks()
    yield made


ROUNDING = 0.02
"""Relative error that bfloat16 outputs and sums in another order may make."""
MOVED = 0.15
"""The same where scores that are rounded differently may move a few of 64 draws to a neighbour."""


def error(found: Tensor, expected: Tensor) -> float:
    return ((found.float() - expected).norm() / expected.norm().clamp(min=1e-6)).item()


def check_token(step: Step, output: Tensor, token: int, row: int, context: int, index: int = 0) -> None:
    """Sparse tokens against their kernels alone (which tests/gpu/test_*_kernels.py compare with the reference on the same stash), draws of
    values also against the reference from end to end; others against exact attention."""
    one = step.asked[row]
    note = (one, token, context)
    sparse = one.method not in (None, Method.dense) and step.layers.attention[index].impl.santa.sparse and one.bernoulli is None
    if sparse and not covered(step, one, context):
        assert error(output[token], step.alone(token, row, context, index)) < ROUNDING, note
        if one.method.samples_values:
            assert error(output[token], step.expected(token, row, context, index)) < MOVED, note
    else:
        assert error(output[token], step.expected(token, row, context, index)) < ROUNDING, note


def covered(step: Step, one: Asked, context: int) -> bool:
    """Whether the policy makes the row dense because its budget would read it all."""
    if one.method.samples_values:
        return False
    settings = step.layers.runtime.settings
    return one.budget + (settings.sink + settings.local if one.method.needs_codes else 0) >= context


def check(step: Step, output: Tensor, index: int = 0) -> None:
    """Every token of the step."""
    token = 0
    for row, one in enumerate(step.asked):
        for context in range(one.context - one.tokens + 1, one.context + 1):
            check_token(step, output, token, row, context, index)
            token += 1


@pytest.mark.parametrize("context", CONTEXTS)
def test_every_method_at_every_length(layers: Layers, context: int) -> None:
    step = layers.step([Asked(context, method, seed=10 + method) for method in SPARSE] + [Asked(context)])
    check(step, step.run(step.build()))


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 33])
def test_mixed_batches_with_padding(layers: Layers, rows: int) -> None:
    """Dense and sparse rows in turns. The padding of a graph's batch does nothing, though all that it could read is NaN."""
    methods = [None, *SPARSE]
    step = layers.step([Asked(300 + 97 * i, methods[i % len(methods)], seed=i) for i in range(rows)], padded=3)
    output = step.run(step.build())
    check(step, output)


def test_steps_of_sparse_rows_alone_leave_flashinfer_out(layers: Layers) -> None:
    step = layers.step([Asked(5000, Method.pps), Asked(2000, Method.ssa), Asked(90, Method.prop)], padded=2)
    metadata = step.build()
    assert DENSE not in metadata.step.parts
    check(step, step.run(metadata))


def test_a_prefill_beside_decodes_leaves_them_sparse(layers: Layers) -> None:
    step = layers.step([Asked(5000, Method.pps), Asked(2000), Asked(3000, Method.prop), Asked(700, Method.ssa, tokens=700, prompt=700)])
    metadata = step.build()
    assert metadata.num_prefills == 1 and [token.row for token in metadata.step.plan.sparse] == [0, 2]
    output = step.run(metadata)
    for token, row in enumerate((0, 1, 2)):
        check_token(step, output, token, row, step.asked[row].context)
    assert not output[3:].isnan().any()


def test_recomputed_answers_are_sparse(layers: Layers) -> None:
    """A preempted request comes back as a prefill of its prompt and of the answer it had."""
    step = layers.step([Asked(900, Method.pps, tokens=40, prompt=880), Asked(1000, Method.topk, tokens=30, prompt=990)])
    output = step.run(step.build())
    assert len(step.build().step.plan.sparse) == 20 + 10
    for token in (*range(21, 40), *range(61, 70)):
        row = int(token >= 40)
        context = step.asked[row].context - step.asked[row].tokens + 1 + (token - 40 * row)
        check_token(step, output, token, row, context)


def test_bernoulli_queries_go_by_the_reference() -> None:
    layers = Layers(options={"enforce_eager": True})
    layers.give_codebooks()
    step = layers.step([Asked(2000, Method.pps, bernoulli=BernoulliSettings(16)), Asked(900)])
    metadata = step.build()
    assert len(metadata.step.by_reference) == 1
    check(step, step.run(metadata))


def test_dense_layers_see_whole_rows_where_others_see_samples() -> None:
    layers = Layers(layers=2, policy="rules: []\ndense_layers: [0]\n")
    layers.give_codebooks()
    step = layers.step([Asked(4000, Method.pps), Asked(3000)])
    metadata = step.build()
    assert metadata.full is not None
    for index in (0, 1):
        check(step, step.run(metadata, index), index)


@pytest.mark.parametrize("head_dim, heads, kv_heads, dtype, block", [
    (64, 9, 3, torch.bfloat16, 32), (256, 4, 4, torch.float16, 64), (128, 16, 1, torch.bfloat16, 16), (128, 12, 2, torch.bfloat16, 16),
    (64, 14, 2, torch.bfloat16, 16),
])  # fmt: skip
def test_other_shapes(head_dim: int, heads: int, kv_heads: int, dtype: torch.dtype, block: int) -> None:
    layers = Layers(heads, kv_heads, head_dim, block, dtype)
    layers.give_codebooks()
    step = layers.step([Asked(1500 + 100 * method, method, seed=method) for method in SPARSE] + [Asked(999)])
    check(step, step.run(step.build()))


@pytest.fixture(scope="module")
def twelve_heads() -> Layers:
    """Qwen2.5-Coder-1.5B's: six query heads per KV head."""
    made = Layers(12, 2)
    made.give_codebooks()
    return made


def test_at_the_longest_contexts_with_twelve_heads(twelve_heads: Layers) -> None:
    for context in (31254, 32768):
        step = twelve_heads.step([Asked(context, method, seed=method) for method in SPARSE] + [Asked(context)])
        check(step, step.run(step.build()))


def end_of_a_prefill(layers: Layers, method: Method | None) -> Step:
    """The step of 8,192 tokens that a server died in (benchmarks/NOTES.md): a decode, the end of a prefill, the start of another."""
    return layers.step([Asked(31254, method), Asked(32555, tokens=5653, prompt=32555), Asked(2586, tokens=2538, prompt=32661)])


@pytest.mark.parametrize("method", [None, Method.prop, Method.pps, Method.ssa], ids=lambda method: method.name if method else "dense")
def test_a_decode_beside_two_prefills(twelve_heads: Layers, method: Method | None) -> None:
    step = end_of_a_prefill(twelve_heads, method)
    metadata = step.build()
    assert (metadata.num_decodes, metadata.num_prefills) == (1, 2)
    output = step.run(metadata)
    check_ends(step, output)


def check_ends(step: Step, output: Tensor) -> None:
    """Every row's first and last token of the step."""
    assert not output.isnan().any()
    start = 0
    for row, one in enumerate(step.asked):
        for token in (0, one.tokens - 1):
            check_token(step, output, start + token, row, one.context - one.tokens + 1 + token)
        start += one.tokens


def test_a_late_gpu_reads_the_plan_of_its_own_step(twelve_heads: Layers) -> None:
    """The step after is planned before the GPU has begun: its plan must not be in the buffer that this step's is copied from.

    With one more decode and one prefill less, it would name heads and rows that do not exist."""
    steps = end_of_a_prefill(twelve_heads, None), twelve_heads.step([Asked(31255), Asked(32556), Asked(10776, tokens=8190, prompt=32661)])
    for _ in range(3):  # at first, things are compiled and allocated, which may wait
        torch.cuda.synchronize()
        torch.cuda._sleep(1_000_000_000)  # cycles: about half a second
        begun = torch.cuda.Event()
        begun.record()
        outputs = [step.run(step.build()) for step in steps]
        late = not begun.query()
    assert late
    for step, output in zip(steps, outputs, strict=True):
        check_ends(step, output)


def captured(step: Step, batch: list[Asked]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A graph of the step as vLLM captures it: with rows that ask for nothing."""
    asked, step.asked = step.asked, []
    metadata = step.build(capture=True)
    output = torch.full_like(step.query, torch.nan)
    step.asked = asked
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step.run(metadata, output=output)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run(metadata, output=output)
    return graph, output


def test_graphs_serve_whatever_the_rows_ask_for(layers: Layers) -> None:
    """One graph: all dense, all sparse, mixed; every replay is what the rows ask for then."""
    contexts = [700 + 311 * i for i in range(8)]
    step = layers.step([Asked(context) for context in contexts], padded=2)
    graph, output = captured(step, step.asked)
    mixes: list[list[Method | None]] = [[None] * 8, [Method.pps] * 8, [None, *SPARSE[:7]], [*SPARSE[2:], None, None][:8], [None] * 8]
    for round_, methods in enumerate(mixes):
        step.asked = [Asked(context, method, seed=round_) for context, method in zip(contexts, methods, strict=True)]
        step.build()
        output.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        check(step, output)


def test_replays_draw_anew_and_repeat_by_seed(layers: Layers) -> None:
    step = layers.step([Asked(6000, Method.prop, budget=16, seed=1), Asked(6000, Method.pps, budget=16, seed=1)])
    graph, output = captured(step, step.asked)

    def replay(seed: int) -> Tensor:
        step.asked = [Asked(6000, one.method, budget=16, seed=seed) for one in step.asked]
        step.build()
        graph.replay()
        torch.cuda.synchronize()
        return output.clone()

    first, other, again = replay(1), replay(2), replay(1)
    assert torch.equal(first, again)
    changed = (first != other).any(dim=-1).float().mean(dim=1)  # of the heads of each row; one huge score leaves a head no choice
    assert (changed > 0.5).all()


@pytest.mark.parametrize("beside", [[], [Asked(4000, tokens=100, prompt=4000)]], ids=["decodes", "with a prefill"])
def test_the_step_never_waits_for_the_gpu(layers: Layers, beside: list[Asked]) -> None:
    """Building and running a step of every method synchronises nowhere."""
    step = layers.step([Asked(3000, method) for method in SPARSE] + [Asked(500), *beside])
    step.run(step.build())
    torch.cuda.set_sync_debug_mode("error")
    try:
        step.run(step.build())
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_rows_beyond_the_buffers_are_dense_and_counted() -> None:
    layers = Layers(policy="rules: []\nworkspace_tokens: 65536\n")
    step = layers.step([Asked(9000, Method.pps)] + [Asked(300, Method.pps, budget=16) for _ in range(7)])
    metadata = step.build()  # 8 rows share 65,536 tokens
    assert [token.decision.reason for token in metadata.step.plan.decoding] == ["workspace"] + ["request"] * 7
    output = step.run(metadata)
    for row in range(1, 8):
        check_token(step, output, row, row, 300)
    step.asked[0] = Asked(9000)
    check_token(step, output, 0, 0, 9000)
