"""The SSA-family kernels against the plain-torch reference, given the same proxies and random numbers."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("flashinfer", reason="the kernels are compiled by FlashInfer's JIT")

from pq_cache import LAYER, Cache, make_cache, make_layer, make_rows, random_codebook

from vllm_santa.codebook import Codebook
from vllm_santa.jit import Shape, ssa_spec
from vllm_santa.kernel_ops import BIN_BITS, Layer, Rows
from vllm_santa.methods import Method
from vllm_santa.reference import fixed_point, philox, pq, select
from vllm_santa.reference.ssa import SelectionSettings, proposal
from vllm_santa.ssa_ops import SSA_METHODS, CodebookBuffers, SsaWorkspace, ssa

pytestmark = pytest.mark.gpu

HEADS = 2
SHAPES = [
    (Shape(128, 4, torch.bfloat16), 16),
    (Shape(256, 4, torch.float16), 16),
    (Shape(64, 1, torch.float16), 8),
    (Shape(128, 16, torch.float16), 32),
]
CONTEXTS = [9000, 1, 0, 65, 17003, 640, 40]
SETTINGS = SelectionSettings(sink=20, local=33, heavy_fraction=0.4, uniform_share=0.02)


@pytest.fixture(scope="module", autouse=True)
def modules() -> None:
    """Compile all shapes side by side."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda shape: ssa_spec(*shape).build(), SHAPES))


@dataclass
class Batch:
    shape: Shape
    query: Tensor
    cache: Cache
    rows: Rows
    layer: Layer
    codebook: Codebook
    buffers: CodebookBuffers
    settings: SelectionSettings = SETTINGS

    def length(self, row: int) -> int:
        return int(self.rows.seq_lens[row])

    def scores(self, row: int) -> Tensor:
        """Exact scores in nats, float64 [H, G, n]."""
        key = self.cache.context(row, self.length(row))[0]
        x = self.query[row].double().unflatten(0, (HEADS, -1)) @ key.mT * self.layer.scale
        cap = self.layer.soft_cap
        return cap * torch.tanh(x / cap) if cap else x

    def proxies(self, row: int) -> Tensor:
        """The reference's proxy scores, in nats: [H, G, n]."""
        grouped = self.query[row].unflatten(0, (HEADS, -1))
        codes = self.cache.context(row, self.length(row))[2]
        return pq.proxy_scores(pq.lookup_tables(grouped, self.codebook, self.layer.scale), codes) * math.log(2)

    def uniform(self, row: int, draws: int) -> Tensor:
        heads = self.layer.head_offset + torch.arange(HEADS, device="cuda")
        position = self.rows.seq_lens[row].long() - 1
        draw = torch.arange(draws, device="cuda")
        return philox.uniform44(self.rows.seed[row], position, LAYER, philox.Stream.selection, heads.unsqueeze(-1), draw)


def make_batch(
    shape: Shape,
    subspaces: int,
    contexts: list[int],
    methods: list[Method],
    budgets: list[int],
    block: int = 16,
    peak: float = 2.0,
    soft_cap: float = 0.0,
) -> Batch:
    torch.manual_seed(1)
    cache = make_cache(HEADS, shape.head_dim, subspaces, shape.dtype, contexts, block)
    query = (torch.randn(len(contexts), HEADS * shape.group, shape.head_dim, device="cuda") * peak).to(shape.dtype)
    codebook = random_codebook(HEADS, shape.head_dim, subspaces)
    buffers = CodebookBuffers(HEADS, shape.head_dim, subspaces)
    buffers.load(codebook)
    rows = make_rows(cache, contexts, [int(method) for method in methods], budgets)
    return Batch(shape, query, cache, rows, make_layer(shape.head_dim, soft_cap), codebook, buffers)


def make_workspace(batch: Batch) -> SsaWorkspace:
    capacity = batch.rows.block_table.shape[1] * batch.cache.kv.shape[2]
    workspace = SsaWorkspace(len(batch.query), HEADS, batch.shape, capacity, int(batch.rows.budget.max()))
    for name, tensor in vars(workspace).items():  # nothing but `done` may count on what it held before
        if isinstance(tensor, Tensor) and name != "done":
            tensor.view(torch.uint8).random_()
    return workspace


def run(batch: Batch, workspace: SsaWorkspace | None = None) -> tuple[Tensor, Tensor, SsaWorkspace]:
    workspace = workspace or make_workspace(batch)
    output, lse = torch.full_like(batch.query, 7), torch.full(batch.query.shape[:2], 7.0, device="cuda")
    cache = batch.cache
    ssa(batch.query, cache.kv, cache.codes, batch.rows, batch.layer, batch.buffers, batch.settings, output, workspace, lse)
    return output, lse, workspace


def expected_selection(batch: Batch, row: int, codes: Tensor, rate: Tensor) -> select.Selection:
    """The reference's selection by the kernel's log-codes [H, n], windows not included; for ssa, with the kernel's lambda too."""
    method, budget = Method(int(batch.rows.method[row])), int(batch.rows.budget[row])
    budgets, numbers = torch.full((HEADS,), budget, device="cuda"), batch.uniform(row, budget)
    if method == Method.ssa:
        rates = fixed_point.power_fine(codes, rate.long() << 8)
        return select.Selection(select.systematic(rates, numbers[:, 0]) > 0, rates.double() / fixed_point.ONE)
    heavy = select.heaviest(codes, budgets if method == Method.topk else (budgets.double() * batch.settings.heavy_fraction).long())
    if method == Method.topk:
        return heavy
    rest, left = torch.where(heavy.taken, fixed_point.EXCLUDED, codes), budgets - heavy.taken.sum(-1)
    if method == Method.ssa_fixed:
        return heavy | select.with_replacement(rest, left, numbers)
    return heavy | select.uniform(rest != fixed_point.EXCLUDED, left, numbers[:, 0])


def check_row(batch: Batch, row: int, output: Tensor, lse: Tensor, workspace: SsaWorkspace) -> None:
    n = batch.length(row)
    if n == 0:
        assert output[row].eq(0).all() and lse[row].eq(-torch.inf).all() and workspace.read[row].eq(0).all()
        return
    forced, codes_expected = proposal(batch.proxies(row).float(), batch.settings)
    codes = workspace.codes[row, :, :n].long()
    assert codes.eq(fixed_point.EXCLUDED).equal(forced.expand_as(codes))
    # fp16 tables, and norms in steps of 1/16 octave: mostly within a few hundredths of an octave.
    difference = (codes - codes_expected)[~forced.expand_as(codes)].abs().double()
    if len(difference):
        assert difference.mean() < 12 and difference.max() < 64, (float(difference.mean()), float(difference.max()))
    budget = int(batch.rows.budget[row])
    windows = int(forced[0].sum())
    if batch.rows.method[row] == Method.ssa and n - windows > budget:
        exact = select.solve_level(codes, torch.full((HEADS,), budget, device="cuda"), BIN_BITS) >> 8
        assert (exact - workspace.rate[row]).abs().max() <= 1
    selection = expected_selection(batch, row, codes, workspace.rate[row])
    for head in range(HEADS):
        sample = workspace.sample[row, head, : int(workspace.count[row, head])]
        assert sample[:, 0].equal(selection.taken[head].nonzero()[:, 0].int()), (row, head)
        expected = selection.probability[head][sample[:, 0].long()]
        torch.testing.assert_close(sample[:, 2].view(torch.float32).double(), expected, rtol=1e-4, atol=0)
    assert workspace.read[row].equal(workspace.count[row] + windows)
    selection = select.certain(forced.expand_as(codes)) | selection
    scores = batch.scores(row)
    weights = scores - torch.log(selection.probability).unsqueeze(1)
    weights = torch.where(selection.taken.unsqueeze(1), weights, -torch.inf)
    expected = (torch.softmax(weights, -1) @ batch.cache.context(row, n)[1]).flatten(0, 1)
    error = (output[row].double() - expected).norm() / expected.norm()
    assert error < (8e-3 if batch.shape.dtype == torch.bfloat16 else 1.5e-3), float(error)
    torch.testing.assert_close(lse[row].double(), weights.logsumexp(-1).flatten() / math.log(2), atol=5e-3, rtol=0)


@pytest.mark.parametrize("method", SSA_METHODS, ids=lambda method: method.name)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0].name}_m{shape[1]}")
@pytest.mark.parametrize(("budget", "block"), [(1, 16), (300, 32), (5000, 64)])
def test_rows_and_weights_are_those_of_the_reference(shape: tuple[Shape, int], method: Method, budget: int, block: int) -> None:
    count = len(CONTEXTS)
    batch = make_batch(*shape, CONTEXTS, [method] * count, [budget] * count, block, soft_cap=20.0 if shape[0].head_dim == 64 else 0.0)
    result = run(batch)
    for row in range(count):
        check_row(batch, row, *result)


def test_flat_and_peaked_proxies() -> None:
    for peak in (0.0, 0.02, 12.0):
        methods = [*SSA_METHODS]
        batch = make_batch(*SHAPES[0], [9000] * 4, methods, [200] * 4, peak=peak)
        output, lse, workspace = run(batch)
        for row in range(4):
            codes = workspace.codes[row, :, :9000].long()
            selection = expected_selection(batch, row, codes, workspace.rate[row])
            assert workspace.count[row].equal(selection.taken.sum(-1).int()), (peak, row)
        assert output.isfinite().all()


def test_methods_share_a_batch_and_other_rows_are_left_alone() -> None:
    methods = [Method.topk, Method.dense, Method.ssa, Method.pps, Method.uniform_tail, Method.ssa_fixed, Method.ssa]
    contexts, budgets = [3000, 500, 20000, 800, 9000, 16384, 8193], [50, 9, 400, 9, 70, 1000, 1]
    batch = make_batch(*SHAPES[0], contexts, methods, budgets)
    output, lse, workspace = run(batch)
    for row, method in enumerate(methods):
        if method in SSA_METHODS:
            check_row(batch, row, output, lse, workspace)
        else:
            assert output[row].eq(7).all() and lse[row].eq(7).all()
    alone = replace(
        batch, rows=replace(batch.rows, method=torch.where(batch.rows.method == Method.ssa, batch.rows.method, 0).to(torch.int8))
    )
    assert run(alone)[0][[2, 6]].equal(output[[2, 6]])


def test_blocks_take_several_chunks_in_turn() -> None:
    """More chunks of the placement than blocks run at once, of rows of unlike lengths."""
    contexts = [60000 + 1700 * row if row % 5 else 900 for row in range(24)]
    batch = make_batch(*SHAPES[0], contexts, [SSA_METHODS[row % 4] for row in range(24)], [300] * 24)
    result = run(batch)
    for row in range(24):
        check_row(batch, row, *result)


def test_two_million_tokens() -> None:
    batch = make_batch(*SHAPES[0], [2_000_000, 130], [Method.ssa, Method.ssa_fixed], [2000, 2000])
    check_row(batch, 0, *run(batch))


@pytest.mark.parametrize(
    "settings", [SelectionSettings(0, 0), SelectionSettings(10**6, 0), SelectionSettings(0, 700), SelectionSettings(1, 1, 0.0, 0.0)]
)
def test_windows_of_every_size(settings: SelectionSettings) -> None:
    contexts = [700, 701, 1, 64]
    batch = replace(make_batch(*SHAPES[0], contexts, list(SSA_METHODS), [30] * 4), settings=settings)
    result = run(batch)
    for row in range(4):
        check_row(batch, row, *result)


def test_a_budget_for_everything_is_dense_attention() -> None:
    contexts = [2500, 4096, 3, 130]
    batch = make_batch(*SHAPES[0], contexts, list(SSA_METHODS), [4096] * 4)
    output, lse, workspace = run(batch)
    for row, n in enumerate(contexts):
        if batch.rows.method[row] != Method.ssa_fixed:
            assert workspace.read[row].eq(n).all()
        check_row(batch, row, output, lse, workspace)


def test_what_is_not_finite_spoils_its_head_or_row_only() -> None:
    batch = make_batch(*SHAPES[0], [900, 900, 900], [Method.ssa] * 3, [2000] * 3)
    clean, clean_lse, _ = run(batch)
    batch.query[1, 2, 5] = torch.inf
    block = batch.rows.block_table[0, 3].long()
    batch.cache.kv[block, 1, 5, 0] = torch.nan
    output, lse, workspace = run(batch)
    group = batch.shape.group
    assert output[0, group:].isnan().all() and output[0, :group].equal(clean[0, :group])
    spoiled = torch.arange(HEADS * group, device="cuda") == 2
    assert output[1, spoiled].isnan().all() and lse[1, spoiled].isnan().all()
    torch.testing.assert_close(output[1, ~spoiled], clean[1, ~spoiled], rtol=0.05, atol=0.01)
    assert output[2].equal(clean[2])


def test_runs_repeat_bit_for_bit() -> None:
    batch = make_batch(*SHAPES[0], [30000, 12, 8192, 8193], list(SSA_METHODS), [200] * 4)
    first = run(batch)[0]
    assert all(run(batch)[0].equal(first) for _ in range(5))
    other = replace(batch, rows=replace(batch.rows, seed=batch.rows.seed + 1))
    changed = run(other)[0].ne(first).flatten(1).any(-1)
    assert changed[[0, 3]].all() and not changed[2]  # topk draws nothing


def test_a_captured_graph_follows_its_buffers() -> None:
    batch = make_batch(*SHAPES[0], [12000, 3000], [Method.ssa, Method.ssa_fixed], [100, 100])
    expected, _, workspace = run(batch)
    output = torch.empty_like(batch.query)
    cache = batch.cache
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ssa(batch.query, cache.kv, cache.codes, batch.rows, batch.layer, batch.buffers, batch.settings, output, workspace)
    graph.replay()
    assert output.equal(expected)
    batch.rows.seq_lens.copy_(torch.tensor([700, 2999], dtype=torch.int32))
    batch.rows.budget.copy_(torch.tensor([5, 100], dtype=torch.int32))
    batch.rows.method.copy_(torch.tensor([int(Method.topk), int(Method.uniform_tail)], dtype=torch.int8))
    for seed in range(3):
        batch.rows.seed.fill_(seed)
        graph.replay()
        assert output.equal(run(batch, workspace)[0]) and not output.equal(expected)


def test_clear_errors() -> None:
    batch = make_batch(*SHAPES[0], [100], [Method.ssa], [10])
    with pytest.raises(ValueError, match="block_table: .* the workspace holds 64 tokens"):
        run(batch, SsaWorkspace(1, HEADS, batch.shape, 64, 10))
    with pytest.raises(ValueError, match="subspaces: 16; the workspace is for 8"):
        run(batch, SsaWorkspace(1, HEADS, batch.shape, 256, 10, subspaces=8))
    with pytest.raises(ValueError, match="codes: "):
        run(replace(batch, cache=replace(batch.cache, codes=batch.cache.codes[..., :8])))
