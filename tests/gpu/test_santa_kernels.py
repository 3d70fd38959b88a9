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


def expected_codes(batch: Batch, row: int, workspace: ops.PpsWorkspace) -> Tensor:
    """Of q = sum over heads of exp(score - norm), with the kernel's first estimates of the norms: [H, n]."""
    look = workspace.look[row, :, : min(ops.LOOK_PARTS, 8 * (1 + int(batch.rows.seq_lens[row]) // 16384))].double()
    norms = torch.logsumexp(look[..., 0] * math.log(2) + look[..., 1].log(), 1)
    q = torch.exp(batch.scores(row) - norms.unsqueeze(-1)).sum(1)
    return (8 * q.log2()).floor().long().clamp(1 - ops.CODE_ZERO, ops.BYTE_CODES - 1 - ops.CODE_ZERO) * ops.CODE_STEP


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("budget", [1, 300])
def test_pps_selects_and_weighs_like_the_reference(shape: Shape, budget: int) -> None:
    batch = make_batch(shape, Method.pps, budget, CONTEXTS, soft_cap=20.0 if shape.head_dim == 96 else 0.0)
    output, lse, workspace = run_pps(batch)
    heads = batch.layer.head_offset + torch.arange(HEADS, device="cuda")
    for row, n in enumerate(CONTEXTS):
        if n == 0:
            assert output[row].eq(0).all() and lse[row].eq(-torch.inf).all()
            continue
        codes, rate = log_codes(workspace.codes[row, :, :n]), workspace.rate[row].long()
        budgets = batch.rows.budget[row].long().expand(HEADS).contiguous()
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
            assert_close(output[row], expected, shape.dtype)
        torch.testing.assert_close(lse[row].double(), scores.logsumexp(-1).flatten() / math.log(2), atol=1e-3, rtol=0)


def unit_table(batch: Batch, row: int, workspace: ops.ValuesWorkspace) -> tuple[Tensor, Tensor]:
    """The kernel's exponents and masses of 64 tokens each: [Hq, units]."""
    units = -(-int(batch.rows.seq_lens[row]) // ops.UNIT)
    table = workspace.unit[row, :, :units].permute(0, 2, 1, 3).flatten(0, 1).long()
    return table[..., 0], table[..., 1]


def token_weights(batch: Batch, row: int, workspace: ops.ValuesWorkspace) -> Tensor:
    """The stash of flash: [Hq, units, 64]."""
    units = -(-int(batch.rows.seq_lens[row]) // ops.UNIT)
    return workspace.weight[row, :, : units * ops.UNIT].long().bitwise_and(0xFFFF).unflatten(-1, (units, ops.UNIT))


def weights_of_fours(batch: Batch, row: int, workspace: ops.ValuesWorkspace) -> Tensor:
    """The stash of the others, a weight for four tokens: [Hq, units, 16]."""
    units, capacity, group = -(-int(batch.rows.seq_lens[row]) // ops.UNIT), workspace.unit.shape[2], batch.shape.group
    stash = workspace.weight[row].view(HEADS, -1)[:, : capacity * group * 16].view(HEADS, capacity, group, 16)[:, :units]
    return stash.permute(0, 2, 1, 3).flatten(0, 1).long().bitwise_and(0xFFFF)


def numbers(batch: Batch, row: int, method: Method) -> Tensor:
    """The reference's random numbers: [Hq, draws_needed]."""
    heads = batch.layer.head_offset * batch.shape.group + torch.arange(HEADS * batch.shape.group, device="cuda")
    count = values.draws_needed(method, int(batch.rows.budget[row]), int(batch.rows.seq_lens[row]))
    return batch.uniform(row, philox.Stream.values, heads.unsqueeze(-1), torch.arange(count, device="cuda"))


def flash_weights(batch: Batch, row: int, workspace: ops.ValuesWorkspace) -> Tensor:
    """What each row of V weighs by the reference, from the kernel's stash: float64 [Hq, n]."""
    n, weights, (exponents, mass) = int(batch.rows.seq_lens[row]), token_weights(batch, row, workspace), unit_table(batch, row, workspace)
    assert weights.sum(-1).equal(mass)
    per_tile = values.FLASH_TILE // values.GROUP
    missing = -weights.shape[1] % per_tile
    weights = torch.nn.functional.pad(weights, (0, 0, 0, missing)).unflatten(1, (-1, per_tile))
    exponents = torch.nn.functional.pad(exponents, (0, missing), value=-(1 << 20)).unflatten(1, (-1, per_tile))
    tiles = values.Stash(weights, exponents)
    count = weights.shape[1]
    draws = torch.full(weights.shape[:2], max(1, int(batch.rows.budget[row]) // count), device="cuda")
    copies = select.systematic(values.expected_copies(tiles, draws), numbers(batch, row, Method.flash))
    tile_mass, top = tiles.mass()
    tile_mass = tile_mass.double() * fixed_point.pow2(top - top.amax(-1, keepdim=True))
    return (copies * (tile_mass / tile_mass.sum(-1, keepdim=True) / draws).unsqueeze(-1)).flatten(1)[:, :n]


def check_draws(batch: Batch, row: int, method: Method, workspace: ops.ValuesWorkspace) -> Tensor:
    """The kernel drew the fours that the reference draws from its stash, and of each the token that the point falls on. Returns what each
    row of V weighs: float64 [Hq, n]."""
    n, budget = int(batch.rows.seq_lens[row]), int(batch.rows.budget[row])
    weights, (exponents, mass) = weights_of_fours(batch, row, workspace), unit_table(batch, row, workspace)
    assert weights.sum(-1).equal(mass)
    rates = values.expected_copies(values.Stash(weights, exponents), torch.full((len(weights),), budget, device="cuda"))
    uniform, draw = numbers(batch, row, method), torch.arange(budget, device="cuda")
    if method == Method.santa:
        points = budget * uniform
    else:
        points = draw * fixed_point.ONE + (uniform if method == Method.strat else fixed_point.ONE - 1 - uniform)
    drawn = workspace.drawn[row, :, :budget].long()
    prefix = rates.cumsum(-1)
    hit = points < prefix[:, -1:]
    assert drawn.eq(-1).equal(~hit) and hit.float().mean() > 0.99 and drawn.max() < n
    counts = torch.zeros_like(rates).scatter_add(-1, drawn.clamp(min=0) // 4, hit.long())
    assert counts.equal(select.draw(rates, points))
    if method in (Method.sys, Method.prop):
        assert counts.equal(select.systematic(rates, uniform[:, 0]))

    four, token = drawn.clamp(min=0) // 4, drawn.clamp(min=0) % 4
    fraction = (points - prefix.gather(-1, four) + rates.gather(-1, four)).double() / rates.gather(-1, four).double()
    exact = torch.nn.functional.pad(batch.scores(row).flatten(0, 1), (0, -n % 4), value=-torch.inf).unflatten(-1, (-1, 4))
    exact = torch.softmax(exact.gather(1, four.unsqueeze(-1).expand(-1, -1, 4)), -1)
    end = exact.cumsum(-1).gather(-1, token.unsqueeze(-1)).squeeze(-1)
    start = end - exact.gather(-1, token.unsqueeze(-1)).squeeze(-1)
    assert ((fraction > start - 1e-3) & (fraction < end + 1e-3))[hit].all()
    return torch.zeros(len(drawn), n, dtype=torch.float64, device="cuda").scatter_add(-1, drawn.clamp(min=0), hit.double() / budget)


@pytest.mark.parametrize("method", ops.VALUE_METHODS, ids=lambda method: method.name)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_value_samplers_draw_like_the_reference(shape: Shape, method: Method) -> None:
    batch = make_batch(shape, method, 150, CONTEXTS, soft_cap=20.0 if shape.head_dim == 96 else 0.0)
    output, lse, workspace = run_values(batch)
    for row, n in enumerate(CONTEXTS):
        if n == 0:
            assert output[row].eq(0).all() and lse[row].eq(-torch.inf).all()
            continue
        weights = flash_weights(batch, row, workspace) if method == Method.flash else check_draws(batch, row, method, workspace)
        assert_close(output[row], (weights.unflatten(0, (HEADS, -1)) @ batch.context(row)[1]).flatten(0, 1), shape.dtype)
        torch.testing.assert_close(lse[row].double(), batch.scores(row).logsumexp(-1).flatten() / math.log(2), atol=5e-3, rtol=0)


def test_stash_is_that_of_the_reference_within_a_step() -> None:
    exponents = []
    for method, stash in ((Method.flash, token_weights), (Method.prop, weights_of_fours)):
        batch = make_batch(SHAPES[0], method, 64, [5000])
        _, _, workspace = run_values(batch)
        scores = batch.scores(0).flatten(0, 1)
        reference = values.stash_scores(scores.float())
        expected = reference.weights
        if method == Method.prop:
            x = torch.nn.functional.pad(scores, (0, -5000 % 64), value=-torch.inf).unflatten(-1, (-1, 64)) / math.log(2)
            expected = (torch.exp2(x - reference.exponents.unsqueeze(-1)).unflatten(-1, (16, 4)).sum(-1) * 2**14).long().clamp(max=65535)
        exponents.append(unit_table(batch, 0, workspace)[0])
        same = reference.exponents == exponents[-1]
        assert same.float().mean() > 0.99
        assert (expected - stash(batch, 0, workspace))[same].abs().max() <= 2
    assert exponents[0].equal(exponents[1])


def test_rows_of_flash_and_of_other_samplers_share_a_batch() -> None:
    batch = make_batch(SHAPES[0], Method.prop, 64, [3000, 3000, 700])
    alone = run_values(batch)[0]
    batch.rows.method[1] = int(Method.flash)
    output, _, workspace = run_values(batch)
    assert output[[0, 2]].equal(alone[[0, 2]])
    weights = flash_weights(batch, 1, workspace).unflatten(0, (HEADS, -1))
    assert_close(output[1], (weights @ batch.context(1)[1]).flatten(0, 1), batch.shape.dtype)


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
        rows = {name: getattr(batch.rows, name)[row : row + 1] for name in ("block_table", "seq_lens", "method", "budget", "seed")}
        single = Batch(batch.shape, batch.query[row : row + 1], batch.kv, ops.Rows(**rows), batch.layer)
        assert_close(output[row], run(single)[0][0].double(), batch.shape.dtype)


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
