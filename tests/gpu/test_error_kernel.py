"""The kernel that estimates errors, against the float64 reference on the samples that the decoding kernels leave."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("flashinfer", reason="the kernels are compiled by FlashInfer's JIT")

import test_santa_kernels as santa
import test_ssa_kernels as proxies

from vllm_santa.error_ops import HEADS, ErrorWorkspace, estimate_errors
from vllm_santa.jit import Shape, error_spec, santa_spec, ssa_spec
from vllm_santa.kernel_ops import PpsWorkspace, pps
from vllm_santa.methods import Method
from vllm_santa.reference.error import sample_variance, selection_error
from vllm_santa.reference.ssa import importance_weights
from vllm_santa.ssa_ops import SsaWorkspace

pytestmark = pytest.mark.gpu

SHAPES = santa.SHAPES
SSA_SHAPES = [(Shape(128, 4, torch.bfloat16), 16), (Shape(64, 1, torch.float16), 8)]
SSA_METHODS = [Method.ssa, Method.ssa_fixed, Method.uniform_tail]
CONTEXTS = [9000, 1, 0, 65, 17003, 640]
KV_HEADS, UNTOUCHED = 2, 7.0


@pytest.fixture(scope="module", autouse=True)
def modules() -> None:
    """Compile everything side by side."""
    specs = [*map(error_spec, SHAPES), *map(santa_spec, SHAPES), *(ssa_spec(*shape) for shape in SSA_SHAPES)]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda spec: spec.build(), specs))


def expected(scores: Tensor, log_mass: Tensor, value: Tensor, output: Tensor, samples: Tensor, count: Tensor, ratio: bool) -> Tensor:
    """Of one row, from its samples: scores [H, G, n] in nats, log_mass [H, G], value [H, n, D], output [Hq, D], samples [H, max, 4].
    Returns [parts, 3]: variance, ‖output‖², and the variance without centring, which bounds what rounding can do."""
    found = []
    for head in range(KV_HEADS):
        taken = samples[head, : int(count[head])]
        tokens, probability = taken[:, 0].long(), taken[:, 2].contiguous().view(torch.float32).double()
        weights = (scores[head][:, tokens] - log_mass[head].unsqueeze(-1)).exp() / probability
        own = output.double().unflatten(0, (KV_HEADS, -1))[head]
        values = value[head][tokens]
        error = selection_error(weights, probability, values, own, ratio)
        terms = weights.unsqueeze(-1) * (values - own.unsqueeze(-2) if ratio else values.unsqueeze(0))
        doubt = (1 - probability).expand(weights.shape)
        raw = sample_variance(terms, doubt, torch.ones_like(doubt), centred=False)
        found.append(torch.stack((error.variance, error.square, raw), -1))
    return torch.cat([torch.stack([chunk.sum(0) for chunk in head.split(HEADS)]) for head in found])


def assert_sums(actual: Tensor, wanted: Tensor) -> None:
    variance, square, raw = wanted.unbind(-1)
    slack = 1e-3 * raw + 1e-12
    assert ((actual[:, 0] - variance).abs() <= 0.01 * variance + slack).all(), (actual, wanted)
    assert ((actual[:, 1] - square).abs() <= 1e-4 * square).all(), (actual, wanted)


def estimate_pps(batch: "santa.Batch", measured: Tensor | None = None) -> tuple[Tensor, Tensor, PpsWorkspace, ErrorWorkspace]:
    """Sums, outputs, and what they came from. Rows that are not measured keep UNTOUCHED."""
    rows = len(batch.query)
    workspace = PpsWorkspace(rows, KV_HEADS, batch.shape, santa.capacity(batch), int(batch.rows.budget.max()))
    errors = ErrorWorkspace(rows + 3, KV_HEADS, batch.shape)
    errors.lse.fill_(torch.nan)
    for buffer in (errors.partial, errors.scalars):
        buffer.fill_(torch.nan)
    output = torch.full_like(batch.query, 7)
    sums = torch.full((rows + 3, errors.parts + 1, 2), UNTOUCHED, device="cuda")
    measured = torch.ones(rows, dtype=torch.int8, device="cuda") if measured is None else measured
    pps(batch.query, batch.kv, batch.rows, batch.layer, output, workspace, errors.lse)
    estimate_errors(batch.query, batch.kv, batch.rows, measured, batch.layer, [Method.pps], output, workspace, sums, errors)
    assert errors.done.eq(0).all()
    assert sums[rows:].eq(UNTOUCHED).all() and sums[:, errors.parts :].eq(UNTOUCHED).all()
    return sums, output, workspace, errors


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("budget", [1, 300, 3000])
def test_pps_rows_are_estimated_like_the_reference(shape: Shape, budget: int) -> None:
    batch = santa.make_batch(shape, Method.pps, budget, CONTEXTS, soft_cap=20.0 if shape.head_dim == 96 else 0.0)
    sums, output, workspace, errors = estimate_pps(batch)
    for row, n in enumerate(CONTEXTS):
        if n == 0:
            assert sums[row, : errors.parts].eq(0).all()
            continue
        scores = batch.scores(row)
        wanted = expected(
            scores, scores.logsumexp(-1), batch.context(row)[1], output[row], workspace.sample[row], workspace.count[row], ratio=False
        )
        assert_sums(sums[row, : errors.parts].double(), wanted)
        if n <= budget:
            assert wanted[:, 0].eq(0).all() and sums[row, : errors.parts, 0].eq(0).all(), "everything was taken for sure"


@pytest.mark.parametrize(("shape", "subspaces"), SSA_SHAPES, ids=lambda value: getattr(value, "name", value))
@pytest.mark.parametrize("method", SSA_METHODS, ids=lambda method: method.name)
def test_rows_by_proxies_are_estimated_like_the_reference(shape: Shape, subspaces: int, method: Method) -> None:
    """Between them a row of topk, which has no estimate."""
    contexts = [9000, 65, 4000, 640, 1]
    methods = [method, method, Method.topk, method, method]
    batch = proxies.make_batch(shape, subspaces, contexts, methods, [200, 200, 200, 50, 200])
    workspace: SsaWorkspace = proxies.make_workspace(batch)
    errors = ErrorWorkspace(len(contexts), KV_HEADS, shape)
    output, lse, _ = proxies.run(batch, workspace)
    errors.lse.copy_(lse)
    sums = torch.full((len(contexts), errors.parts, 2), UNTOUCHED, device="cuda")
    measured = torch.ones(len(contexts), dtype=torch.int8, device="cuda")
    estimate_errors(batch.query, batch.cache.kv, batch.rows, measured, batch.layer, SSA_METHODS, output, workspace, sums, errors)
    for row, n in enumerate(contexts):
        if methods[row] is Method.topk:
            assert sums[row].eq(UNTOUCHED).all()
            continue
        scores, value = batch.scores(row), batch.cache.context(row, n)[1]
        taken, probability = torch.zeros(KV_HEADS, n, device="cuda").bool(), torch.ones(KV_HEADS, n, device="cuda").double()
        window = torch.arange(n, device="cuda")
        taken |= (window < batch.settings.sink) | (window >= n - batch.settings.local)
        for head in range(KV_HEADS):
            sample = workspace.sample[row, head, : int(workspace.count[row, head])]
            taken[head, sample[:, 0].long()] = True
            probability[head, sample[:, 0].long()] = sample[:, 2].contiguous().view(torch.float32).double()
        kept = scores.masked_fill(~taken.unsqueeze(1), -torch.inf)
        log_mass = (kept - probability.log().unsqueeze(1)).logsumexp(-1)
        weights = importance_weights(kept.float(), probability)
        assert torch.allclose(weights, (kept - log_mass.unsqueeze(-1)).exp() / probability.unsqueeze(1), rtol=1e-3, atol=1e-9)
        wanted = expected(scores, log_mass, value, output[row], workspace.sample[row], workspace.count[row], ratio=True)
        assert_sums(sums[row].double(), wanted)
        assert n < 500 or (wanted[:, 0] > 0).all()


def test_only_measured_rows_of_the_methods_are_written() -> None:
    batch = santa.make_batch(SHAPES[0], Method.pps, 64, [900, 800, 700, 600])
    everything, _, _, errors = estimate_pps(batch)
    batch.rows.method[1] = int(Method.ssa)
    sums, *_ = estimate_pps(batch, torch.tensor([1, 1, 0, 1], dtype=torch.int8, device="cuda"))
    assert sums[[1, 2]].eq(UNTOUCHED).all()
    assert sums[[0, 3], : errors.parts].equal(everything[[0, 3], : errors.parts])


@pytest.mark.parametrize("rows", [1, 4, 40, 200])
def test_a_row_does_not_depend_on_the_batch_and_runs_repeat(rows: int) -> None:
    """However many blocks share a row, its sum is the same but for rounding; of one batch, to the bit."""
    batch = santa.make_batch(SHAPES[0], Method.pps, 1000, [6000] + [300 + 7 * i for i in range(rows - 1)])
    sums, output, workspace, errors = estimate_pps(batch)
    scores = batch.scores(0)
    wanted = expected(scores, scores.logsumexp(-1), batch.context(0)[1], output[0], workspace.sample[0], workspace.count[0], ratio=False)
    assert_sums(sums[0, : errors.parts].double(), wanted)
    assert all(estimate_pps(batch)[0].equal(sums) for _ in range(3))


def test_what_is_not_finite_is_not_an_error_of_zero() -> None:
    batch = santa.make_batch(SHAPES[0], Method.pps, 32, [700, 700])
    block = batch.rows.block_table[0, 3].long()
    batch.kv[block, :, 5, 0] = torch.nan
    sums, _, _, errors = estimate_pps(batch)
    assert sums[0, : errors.parts].isnan().all() and sums[1, : errors.parts].isfinite().all()


def test_a_captured_graph_follows_its_buffers() -> None:
    batch = santa.make_batch(SHAPES[0], Method.pps, 100, [12000, 3000])
    _, output, workspace, errors = estimate_pps(batch)
    sums, measured = torch.zeros(2, errors.parts, 2, device="cuda"), torch.ones(2, dtype=torch.int8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pps(batch.query, batch.kv, batch.rows, batch.layer, output, workspace, errors.lse)
        estimate_errors(batch.query, batch.kv, batch.rows, measured, batch.layer, [Method.pps], output, workspace, sums, errors)
    batch.rows.seq_lens.copy_(torch.tensor([700, 2999], dtype=torch.int32))
    batch.rows.budget.copy_(torch.tensor([5, 60], dtype=torch.int32))
    graph.replay()
    replayed = sums.clone()
    again, *_ = estimate_pps(batch)
    torch.testing.assert_close(replayed, again[:2, : errors.parts], rtol=1e-3, atol=1e-6)
    measured.zero_()
    sums.fill_(UNTOUCHED)
    graph.replay()
    assert sums.eq(UNTOUCHED).all()


def test_clear_errors() -> None:
    batch = santa.make_batch(SHAPES[0], Method.pps, 10, [100])
    _, output, workspace, errors = estimate_pps(batch)
    measured = torch.ones(1, dtype=torch.int8, device="cuda")
    arguments = (batch.layer, [Method.pps], output, workspace)
    with pytest.raises(ValueError, match="sums: .* must be contiguous"):
        estimate_errors(batch.query, batch.kv, batch.rows, measured, *arguments, torch.zeros(1, 1, 2, device="cuda"), errors)
    with pytest.raises(ValueError, match="measured: torch.int8 \\[2\\]; must be"):
        estimate_errors(
            batch.query, batch.kv, batch.rows, measured.repeat(2), *arguments, torch.zeros(1, errors.parts, 2, device="cuda"), errors
        )
