"""The SANTA-family kernels against the plain-torch reference, on the same stash and random numbers."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("flashinfer", reason="the kernels are compiled by FlashInfer's JIT")

from vllm_santa import kernel_ops as ops
from vllm_santa.jit import Shape, santa_module
from vllm_santa.methods import Method
from vllm_santa.reference import fixed_point, philox, select, values

pytestmark = pytest.mark.gpu

SHAPES = [
    Shape(128, 4, torch.bfloat16),
    Shape(64, 1, torch.float16),
    Shape(96, 3, torch.bfloat16),
    Shape(256, 4, torch.bfloat16),
    Shape(128, 16, torch.float16),
]
HEADS, LAYER = 2, 5
CONTEXTS = [9000, 1, 0, 65, 17003, 640]


@pytest.fixture(scope="module", autouse=True)
def modules() -> None:
    """Compile all shapes side by side."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(santa_module, SHAPES))


@dataclass
class Batch:
    shape: Shape
    query: Tensor
    kv: Tensor
    rows: ops.Rows
    layer: ops.Layer

    def context(self, row: int) -> tuple[Tensor, Tensor]:
        """K and V of a row, float64 [H, n, D]."""
        n, block = int(self.rows.seq_lens[row]), self.kv.shape[2]
        blocks = self.rows.block_table[row, : -(-n // block)].long()
        return self.kv[blocks].transpose(0, 1).flatten(1, 2)[:, :n].double().chunk(2, -1)

    def scores(self, row: int) -> Tensor:
        """Exact scores in nats, float64 [H, G, n]."""
        x = self.query[row].double().unflatten(0, (HEADS, -1)) @ self.context(row)[0].transpose(-1, -2) * self.layer.scale
        cap = self.layer.soft_cap
        return cap * torch.tanh(x / cap) if cap else x

    def uniform(self, row: int, stream: philox.Stream, heads: Tensor, draws: Tensor) -> Tensor:
        position = self.rows.seq_lens[row].long() - 1
        return philox.uniform44(self.rows.seed[row], position, LAYER, stream, heads, draws)


def make_batch(
    shape: Shape, method: Method, budget: int, contexts: list[int], block: int = 32, peak: float = 2.0, soft_cap: float = 0.0
) -> Batch:
    """Ragged rows in shuffled blocks. Everything that no row may read is NaN: blocks, tails of blocks, block-table entries past the row."""
    torch.manual_seed(1)
    width = -(-max(contexts) // block) + 2
    used = [-(-n // block) for n in contexts]
    order = torch.randperm(sum(used) + 3)
    row_size = 2 * shape.head_dim
    pages = torch.full((len(order), HEADS * block * row_size + 24), torch.nan, dtype=shape.dtype, device="cuda")
    kv = pages.as_strided((len(order), HEADS, block, row_size), (pages.stride(0), block * row_size, row_size, 1))
    table = torch.full((len(contexts), width), int(order[-1]), dtype=torch.int32)
    start = 0
    for row, n in enumerate(contexts):
        table[row, : used[row]] = order[start : start + used[row]]
        start += used[row]
        data = torch.full((used[row] * block, HEADS, 2 * shape.head_dim), torch.nan, dtype=shape.dtype, device="cuda")
        data[:n] = torch.randn(n, HEADS, 2 * shape.head_dim, device="cuda").to(shape.dtype)
        kv[table[row, : used[row]].long().cuda()] = data.unflatten(0, (-1, block)).transpose(1, 2)
    count = len(contexts)
    rows = ops.Rows(
        table.cuda(),
        torch.tensor(contexts, dtype=torch.int32, device="cuda"),
        torch.full((count,), int(method), dtype=torch.int8, device="cuda"),
        torch.full((count,), budget, dtype=torch.int32, device="cuda"),
        torch.arange(count, device="cuda") * 7919 - 3,
    )
    query = (torch.randn(count, HEADS * shape.group, shape.head_dim, device="cuda") * peak).to(shape.dtype)
    return Batch(shape, query, kv, rows, ops.Layer(LAYER, 1 / math.sqrt(shape.head_dim), soft_cap, head_offset=6))


def single_row(batch: Batch, row: int) -> Batch:
    """A batch of this row alone, in the same cache."""
    rows = {name: getattr(batch.rows, name)[row : row + 1] for name in ("block_table", "seq_lens", "method", "budget", "seed")}
    return replace(batch, query=batch.query[row : row + 1], rows=ops.Rows(**rows))


def capacity(batch: Batch) -> int:
    return batch.rows.block_table.shape[1] * batch.kv.shape[2]


def run_pps(batch: Batch, workspace: ops.PpsWorkspace | None = None) -> tuple[Tensor, Tensor, ops.PpsWorkspace]:
    budget = int(batch.rows.budget.max())
    workspace = workspace or ops.PpsWorkspace(len(batch.query), HEADS, batch.shape, capacity(batch), budget)
    output, lse = torch.full_like(batch.query, 7), torch.full(batch.query.shape[:2], 7.0, device="cuda")
    ops.pps(batch.query, batch.kv, batch.rows, batch.layer, output, workspace, lse)
    return output, lse, workspace


def run_values(batch: Batch) -> tuple[Tensor, Tensor, ops.ValuesWorkspace]:
    workspace = ops.ValuesWorkspace(len(batch.query), HEADS, batch.shape, capacity(batch), int(batch.rows.budget.max()))
    output, lse = torch.full_like(batch.query, 7), torch.full(batch.query.shape[:2], 7.0, device="cuda")
    ops.sample_values(batch.query, batch.kv, batch.rows, batch.layer, output, workspace, lse)
    return output, lse, workspace


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    error = (actual.double() - expected).norm() / expected.norm()
    assert error < (6e-3 if dtype == torch.bfloat16 else 1e-3), float(error)


def log_codes(byte_codes: Tensor) -> Tensor:
    """The 16-bit log-codes that the kernel's bytes stand for."""
    codes = (byte_codes.long() - ops.CODE_ZERO) * ops.CODE_STEP
    return torch.where(byte_codes == 0, fixed_point.EXCLUDED, codes)


def looks(n: int) -> int:
    """Keys of the first look."""
    return 128 * min(ops.LOOK_PARTS, 1 + n // ops.LOOK_TOKENS)


def expected_codes(batch: Batch, row: int, workspace: ops.PpsWorkspace) -> Tensor:
    """Of q = sum over heads of exp(score - norm), with the kernel's first estimates of the norms: [H, n].

    The heaviest of the keys that stand for others counts once.
    """
    n = int(batch.rows.seq_lens[row])
    base, mass, heaviest, _ = workspace.look[row, :, : looks(n) // 128].double().unbind(-1)
    share = max(1.0, (n - 64) / (looks(n) - 64))
    top = base.amax(1)
    total = (mass * torch.exp2(base - top.unsqueeze(1))).sum(1) - (share - 1) * torch.exp2(heaviest.amax(1) - top)
    norms = (top + total.log2()) * math.log(2)
    q = torch.exp(batch.scores(row) - norms.unsqueeze(-1)).sum(1)
    return (8 * q.log2()).floor().long().clamp(1 - ops.CODE_ZERO, ops.BYTE_CODES - 1 - ops.CODE_ZERO) * ops.CODE_STEP


def check_pps(batch: Batch, output: Tensor, lse: Tensor, workspace: ops.PpsWorkspace) -> None:
    """Every row as the reference has it, from the kernel's estimates of the norms and its lambda."""
    heads = batch.layer.head_offset + torch.arange(HEADS, device="cuda")
    for row, n in enumerate(batch.rows.seq_lens.tolist()):
        if n == 0:
            assert output[row].eq(0).all() and lse[row].eq(-torch.inf).all()
            continue
        codes, rate = log_codes(workspace.codes[row, :, :n]), workspace.rate[row].long()
        budgets = batch.rows.budget[row].long().expand(HEADS).contiguous()
        budget = int(budgets[0])
        exact = select.solve_level(codes, budgets) >> 8
        assert n <= budget or (exact - rate).abs().max() <= 1  # whole log-codes, solved in floating point
        rates = fixed_point.power_fine(codes, rate << 8)
        assert n <= budget or (rates.sum(-1) / fixed_point.ONE - budget).abs().max() <= 0.006 * budget
        assert (codes - expected_codes(batch, row, workspace)).abs().max() <= ops.CODE_STEP
        offset = batch.uniform(row, philox.Stream.selection, heads, torch.tensor(0, device="cuda"))
        taken = select.systematic(rates, offset) > 0
        for head in range(HEADS):
            sample = workspace.sample[row, head, : int(workspace.count[row, head])]
            assert sample[:, 0].equal(taken[head].nonzero()[:, 0].int())
        scores = batch.scores(row)
        weights = torch.where(taken.unsqueeze(1), torch.softmax(scores, -1) / (rates.double() / fixed_point.ONE).unsqueeze(1), 0.0)
        expected = (weights @ batch.context(row)[1]).flatten(0, 1)
        if expected.norm() > 0:
            assert_close(output[row], expected, batch.shape.dtype)
        torch.testing.assert_close(lse[row].double(), scores.logsumexp(-1).flatten() / math.log(2), atol=1e-3, rtol=0)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("budget", [1, 300])
def test_pps_selects_and_weighs_like_the_reference(shape: Shape, budget: int) -> None:
    batch = make_batch(shape, Method.pps, budget, CONTEXTS, soft_cap=20.0 if shape.head_dim == 96 else 0.0)
    check_pps(batch, *run_pps(batch))


def looked_at(n: int) -> Tensor:
    """Tokens of the first look (look.cu): the first 16, the last 48, and others spread evenly between them."""
    spread = looks(n) - 64
    middle = 16 + ((torch.arange(spread) + 0.5) * ((n - 64) / spread)).long()
    return torch.cat([torch.arange(16), middle, torch.arange(n - 48, n)])


def hide_keys(batch: Batch) -> None:
    """Every sixth token or so becomes what the first query head of its group attends to, by 25 to 45 nats, but none that a first look sees
    (nor its neighbours: the kernel's positions are rounded)."""
    group, size = batch.shape.group, batch.shape.head_dim
    for row, n in enumerate(batch.rows.seq_lens.tolist()):
        seen = torch.zeros(n, dtype=torch.bool)
        for step in (-1, 0, 1):
            seen[(looked_at(n) + step).clamp(0, n - 1)] = True
        hidden = (~seen).nonzero()[:, 0]
        hidden = hidden[torch.randperm(len(hidden))[: n // 6]].cuda()
        query = batch.query[row].double().unflatten(0, (HEADS, group))[:, 0]
        nats = torch.linspace(25, 45, len(hidden), device="cuda", dtype=torch.float64)
        shift = nats[:, None, None] / (query.square().sum(-1, keepdim=True) * batch.layer.scale) * query
        blocks, within = batch.rows.block_table[row, hidden // batch.kv.shape[2]].long(), hidden % batch.kv.shape[2]
        keys = batch.kv[blocks, :, within, :size]
        batch.kv[blocks, :, within, :size] = (keys.double() + shift).to(keys.dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("contexts, budget", [([9000, 17003], 300), ([700] * 130 + [9000], 50)], ids=["clusters", "single blocks"])
def test_pps_mixes_anew_where_the_first_look_missed_what_a_head_attends_to(shape: Shape, contexts: list[int], budget: int) -> None:
    """Without that, hundreds of tokens would pass for heavier than all that the other heads attend to, and take their share.

    And for equally heavy, which a head without others would suffer from as well.
    """
    batch = make_batch(shape, Method.pps, budget, contexts)
    hide_keys(batch)
    output, lse, workspace = run_pps(batch)
    assert workspace.look[:, :, 1:, :, 1].eq(0).all(), "one part, the exact masses, in every row and head"
    torch.testing.assert_close(workspace.look[:, :, 0, :, 0].flatten(1), lse, atol=1e-3, rtol=0)
    assert (workspace.rate / 256 > math.log2(budget / shape.group) - 0.25).all(), "a fair share for every head"
    check_pps(batch, output, lse, workspace)


def expected_value_weights(batch: Batch, row: int, method: Method, workspace: ops.ValuesWorkspace) -> Tensor:
    """The reference's weights from the kernel's stash, float64 [Hq, n]."""
    n, budget = int(batch.rows.seq_lens[row]), int(batch.rows.budget[row])
    units = -(-n // values.GROUP)
    padded = -(-n // values.FLASH_TILE) * values.FLASH_TILE // values.GROUP
    weights = workspace.weight[row, :, : units * values.GROUP].long().bitwise_and(0xFFFF).unflatten(-1, (units, values.GROUP))
    exponents = workspace.unit[row, :, :units, 0].long()
    assert weights.sum(-1).equal(workspace.unit[row, :, :units, 1].long())
    heads = (batch.layer.head_offset * batch.shape.group + torch.arange(len(weights), device="cuda")).unsqueeze(-1)
    numbers = batch.uniform(row, philox.Stream.values, heads, torch.arange(values.draws_needed(method, budget, n), device="cuda"))
    budgets = torch.full((len(weights),), budget, device="cuda")
    if method == Method.flash:
        weights = torch.nn.functional.pad(weights, (0, 0, 0, padded - units))
        exponents = torch.nn.functional.pad(exponents, (0, padded - units), value=-(1 << 20))
        per_tile = values.FLASH_TILE // values.GROUP
        tiles = values.Stash(weights.unflatten(1, (-1, per_tile)), exponents.unflatten(1, (-1, per_tile)))
        count = tiles.weights.shape[1]
        draws = (budgets // count).clamp(min=1).unsqueeze(-1).expand(-1, count).contiguous()
        copies = select.systematic(values.expected_copies(tiles, draws), numbers)
        mass, top = tiles.mass()
        mass = mass.double() * fixed_point.pow2(top - top.amax(-1, keepdim=True))
        return (copies * (mass / mass.sum(-1, keepdim=True) / draws).unsqueeze(-1)).flatten(1)[:, :n]
    rates = values.expected_copies(values.Stash(weights, exponents), budgets)
    if method in (Method.sys, Method.prop):
        copies = select.systematic(rates, numbers[..., 0])
    else:
        draw = torch.arange(budget, device="cuda")
        copies = select.draw(rates, draw * fixed_point.ONE + numbers if method == Method.strat else budget * numbers)
    return (copies.double() / budget)[:, :n]


def check_values(batch: Batch, method: Method) -> None:
    """Every row as the reference has it, from the kernel's stash."""
    output, lse, workspace = run_values(batch)
    for row, n in enumerate(batch.rows.seq_lens.tolist()):
        if n == 0:
            assert output[row].eq(0).all() and lse[row].eq(-torch.inf).all()
            continue
        weights = expected_value_weights(batch, row, method, workspace).unflatten(0, (HEADS, -1))
        assert_close(output[row], (weights @ batch.context(row)[1]).flatten(0, 1), batch.shape.dtype)
        torch.testing.assert_close(lse[row].double(), batch.scores(row).logsumexp(-1).flatten() / math.log(2), atol=5e-3, rtol=0)


@pytest.mark.parametrize("method", ops.VALUE_METHODS, ids=lambda method: method.name)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_value_samplers_draw_like_the_reference(shape: Shape, method: Method) -> None:
    check_values(make_batch(shape, method, 150, CONTEXTS), method)


def test_pps_of_rows_whose_codes_a_block_holds_in_parts_is_that_of_the_reference() -> None:
    batch = make_batch(SHAPES[0], Method.pps, 300, [300000, 140001])
    check_pps(batch, *run_pps(batch))


@pytest.mark.parametrize("method", [Method.santa, Method.prop], ids=lambda method: method.name)
def test_draws_from_rows_whose_masses_do_not_fit_in_registers_are_those_of_the_reference(method: Method) -> None:
    check_values(make_batch(SHAPES[0], method, 300, [300000]), method)


def test_stash_is_that_of_the_reference_within_a_step() -> None:
    batch = make_batch(SHAPES[0], Method.prop, 64, [5000])
    _, _, workspace = run_values(batch)
    reference = values.stash_scores(batch.scores(0).float().flatten(0, 1))
    kernel = workspace.weight[0, :, : reference.weights[0].numel()].long().bitwise_and(0xFFFF).view_as(reference.weights)
    same = reference.exponents == workspace.unit[0, :, : reference.exponents.shape[1], 0]
    assert same.float().mean() > 0.99
    assert (reference.weights - kernel)[same].abs().max() <= 2


def test_pps_with_a_budget_for_everything_is_dense_attention() -> None:
    batch = make_batch(SHAPES[0], Method.pps, 4096, [2500, 4096, 3])
    output, _, workspace = run_pps(batch)
    for row, n in enumerate([2500, 4096, 3]):
        assert workspace.count[row].eq(n).all()
        assert_close(output[row], (torch.softmax(batch.scores(row), -1) @ batch.context(row)[1]).flatten(0, 1), torch.bfloat16)


@pytest.mark.parametrize("spoiled", [torch.nan, torch.inf])
@pytest.mark.parametrize("method", [Method.pps, Method.prop, Method.flash], ids=lambda method: method.name)
def test_a_score_that_is_not_finite_spoils_its_row_only(method: Method, spoiled: float) -> None:
    batch = make_batch(SHAPES[0], method, 32, [700, 700])
    run = run_pps if method == Method.pps else run_values
    clean = run(batch)[0]
    block = batch.rows.block_table[0, 3].long()
    batch.kv[block, :, 5, 0] = spoiled
    batch.query[0, :, 0] = batch.query[0, :, 0].abs() + 1
    output = run(batch)[0]
    assert output[0].isnan().all()
    assert output[1].equal(clean[1])


def test_rows_of_other_methods_are_left_alone() -> None:
    batch = make_batch(SHAPES[0], Method.pps, 32, [900, 900, 900, 900])
    alone = run_pps(batch)[0]
    batch.rows.method[0], batch.rows.method[2] = int(Method.dense), int(Method.ssa)
    output, lse, _ = run_pps(batch)
    assert output[[0, 2]].eq(7).all() and lse[[0, 2]].eq(7).all()
    assert output[[1, 3]].equal(alone[[1, 3]])


@pytest.mark.parametrize("method", [Method.pps, *ops.VALUE_METHODS], ids=lambda method: method.name)
def test_runs_repeat_bit_for_bit(method: Method) -> None:
    batch = make_batch(SHAPES[0], method, 200, [30000, 12, 8192, 8193])
    run = run_pps if method == Method.pps else run_values
    first = run(batch)[0]
    assert all(run(batch)[0].equal(first) for _ in range(5))
    other = replace(batch.rows, seed=batch.rows.seed + 1)
    assert not run(replace(batch, rows=other))[0].equal(first)


@pytest.mark.parametrize("method", [Method.pps, Method.prop, Method.flash], ids=lambda method: method.name)
def test_hundreds_of_ragged_rows_match_each_row_alone(method: Method) -> None:
    contexts = [(37 * i) % 1500 for i in range(300)] + [60000]
    batch = make_batch(SHAPES[0], method, 40, contexts)
    run = run_pps if method == Method.pps else run_values
    output = run(batch)[0]
    for row in (1, 150, 299, 300):
        assert_close(output[row], run(single_row(batch, row))[0][0].double(), batch.shape.dtype)


def test_a_stash_that_is_given_up_behind_its_last_reader_was_read_by_all() -> None:
    """Stashes beyond what L2 keeps are given up; a row's draws are spread over four blocks here, of which the last one may do it."""
    contexts = [100000, 5000, 70001, 1, 64, 3000, 20000, 90001]
    batch = make_batch(SHAPES[0], Method.prop, 400, contexts)
    output, lse, workspace = run_values(batch)
    assert workspace.weight.nbytes > 9 << 20
    for _ in range(3):
        again, lse_again, _ = run_values(batch)
        assert again.equal(output) and lse_again.equal(lse)
    for row in range(len(contexts)):
        alone, lse_alone, small = run_values(single_row(batch, row))
        assert small.weight.nbytes < 9 << 20
        assert alone[0].equal(output[row]) and lse_alone[0].equal(lse[row])


def test_a_captured_graph_follows_its_buffers() -> None:
    batch = make_batch(SHAPES[0], Method.pps, 100, [12000, 3000])
    expected_long, _, workspace = run_pps(batch)
    output = torch.empty_like(batch.query)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.pps(batch.query, batch.kv, batch.rows, batch.layer, output, workspace)
    graph.replay()
    assert output.equal(expected_long)
    batch.rows.seq_lens.copy_(torch.tensor([700, 2999], dtype=torch.int32))
    batch.rows.budget.copy_(torch.tensor([5, 100], dtype=torch.int32))
    graph.replay()
    replayed = output.clone()
    assert replayed.equal(run_pps(batch, workspace)[0]) and not replayed.equal(expected_long)


def test_clear_errors() -> None:
    batch = make_batch(SHAPES[0], Method.pps, 10, [100])
    small = ops.PpsWorkspace(1, HEADS, batch.shape, 64, 10)
    with pytest.raises(ValueError, match="block_table: .* the workspace holds 64 tokens"):
        run_pps(batch, small)
    with pytest.raises(ValueError, match="query: .* must be contiguous"):
        ops.pps(batch.query[:, :4], batch.kv, batch.rows, batch.layer, batch.query, small)
    with pytest.raises(ValueError, match="head_dim 80 has no kernels"):
        Shape(80, 4, torch.bfloat16)
