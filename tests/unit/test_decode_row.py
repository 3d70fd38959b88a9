"""One decode row from vLLM's pages: every method against float64 attention, and nothing read that is not the row's."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from vllm_santa.codebook import Codebook
from vllm_santa.methods import BernoulliSettings, Method
from vllm_santa.reference.decode import LayerContext, RowResult, decode_row
from vllm_santa.reference.pq import encode
from vllm_santa.reference.ssa import SelectionSettings
from vllm_santa.training import train_codebook

HEADS, GROUP, DIM, BLOCK, BLOCKS = 2, 3, 16, 16, 24
SPARSE = [method for method in Method if method != Method.dense]
SAMPLERS = [method for method in SPARSE if method.samples_values]
WITH_CODES = [method for method in SPARSE if method.needs_codes]
SETTINGS = SelectionSettings(sink=8, local=8)


@pytest.fixture(scope="module")
def codebook() -> Codebook:
    generator = torch.Generator().manual_seed(5)
    return train_codebook(torch.randn(600, HEADS, DIM, generator=generator), torch.randn(50, HEADS, GROUP, DIM, generator=generator), 8)


class Cache:
    """A row of `context` tokens in scattered pages; every other block is poison."""

    def __init__(self, codebook: Codebook, context: int, poison: float = torch.nan, dtype: torch.dtype = torch.float32):
        generator = torch.Generator().manual_seed(context)
        self.context, self.layer = context, LayerContext(layer=3, scale=DIM**-0.5, codebook=codebook)
        self.query = (2 * torch.randn(HEADS * GROUP, DIM, generator=generator)).to(dtype)
        tokens = -(-context // BLOCK)
        self.table = torch.full((BLOCKS,), 10**6, dtype=torch.int32)  # beyond the row's own blocks: no block at all
        self.table[:tokens] = torch.randperm(BLOCKS, generator=generator)[:tokens].int()
        self.kv = torch.full((BLOCKS, HEADS, BLOCK, 2 * DIM), poison, dtype=dtype)
        self.codes = torch.full((BLOCKS, HEADS, BLOCK, codebook.subspaces), 255, dtype=torch.uint8)
        self.rows = torch.randn(context, HEADS, 2 * DIM, generator=generator).to(dtype)
        self.write(self.rows)

    def write(self, rows: Tensor) -> None:
        slot = torch.arange(self.context)
        block, offset = self.table.long()[slot // BLOCK], slot % BLOCK
        self.kv[block, :, offset] = rows
        self.codes[block, :, offset] = encode(rows[..., :DIM].nan_to_num(0, 0, 0), self.layer.codebook)

    def decode(self, method: Method, budget: int, seed: int = 0, settings: SelectionSettings = SETTINGS, **changes) -> RowResult:
        bernoulli = changes.pop("bernoulli", None)
        layer = replace(self.layer, **changes)
        return decode_row(self.query, self.kv, self.codes, self.table, self.context, method, budget, seed, layer, settings, bernoulli)

    def dense(self, soft_cap: float = 0.0) -> Tensor:
        """Float64 attention, [Hq, D]."""
        key, value = self.rows.double().transpose(0, 1).chunk(2, -1)
        scores = self.query.double().view(HEADS, GROUP, DIM) @ key.mT * self.layer.scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        return (torch.softmax(scores, -1) @ value).flatten(0, 1)


def close(output: Tensor, expected: Tensor, tolerance: float) -> bool:
    return bool(((output.double() - expected).norm(dim=-1) <= tolerance * expected.norm(dim=-1)).all())


@pytest.mark.parametrize("method", SPARSE)
@pytest.mark.parametrize("context", [1, 15, 16, 17, 100, 383])
def test_a_large_budget_gives_dense_attention(codebook: Codebook, method: Method, context: int) -> None:
    cache = Cache(codebook, context)
    settings = replace(SETTINGS, heavy_fraction=1.0)  # else ssa_fixed draws with replacement, and misses some tokens of any budget
    result = cache.decode(method, 1 << 15 if method.samples_values else 500, settings=settings)
    tolerance = {Method.santa: 0.08, Method.flash: 0.01}.get(method, 3e-3 if method.samples_values else 1e-5)
    assert close(result.output, cache.dense(), tolerance)
    assert result.value_rows <= context and result.key_rows <= context


@pytest.mark.parametrize("method", SPARSE)
def test_the_mean_over_seeds_is_dense_attention(codebook: Codebook, method: Method) -> None:
    cache = Cache(codebook, 200)
    outputs = torch.stack([cache.decode(method, 40, seed).output for seed in range(300)]).double()
    error = (outputs.mean(0) - cache.dense()).norm(dim=-1) / cache.dense().norm(dim=-1)
    if method == Method.topk:  # no tail: the same every time, and biased
        assert torch.equal(outputs[0], outputs[-1]) and error.max() > 0.02
    else:
        bound = 5 * outputs.std(0).norm(dim=-1) / 300**0.5 / cache.dense().norm(dim=-1)
        bias = 0.02 if method.needs_codes else 0.0  # a ratio of two unbiased sums
        assert (error <= bound + bias).all() and outputs.std(0).max() > 0


@pytest.mark.parametrize("method", SPARSE)
def test_rows_read(codebook: Codebook, method: Method) -> None:
    result = Cache(codebook, 200).decode(method, 40)
    assert result.key_features == 1.0
    if method.needs_codes:
        assert result.key_rows == result.value_rows and 16 < result.value_rows <= 16 + 41
    else:
        assert result.key_rows == 200 and 0 < result.value_rows <= (41 if method == Method.pps else 40 * GROUP)


@pytest.mark.parametrize("method", SPARSE)
def test_only_the_rows_own_tokens_are_read(codebook: Codebook, method: Method) -> None:
    """Poisoned blocks, a poisoned rest of the last block, and table entries that name no block."""
    with_nan, with_inf = (Cache(codebook, 101, poison).decode(method, 30).output for poison in (torch.nan, torch.inf))
    assert with_nan.isfinite().all() and torch.equal(with_nan, with_inf)


@pytest.mark.parametrize("method", SPARSE)
def test_pages_may_have_any_strides(codebook: Codebook, method: Method) -> None:
    cache = Cache(codebook, 150)
    expected = cache.decode(method, 30).output
    page = torch.full((BLOCKS, HEADS, BLOCK, 2 * DIM + 8), torch.nan)  # a code plane lies between the pages
    page[..., : 2 * DIM] = cache.kv
    cache.kv = page[..., : 2 * DIM]
    assert torch.equal(cache.decode(method, 30).output, expected)


@pytest.mark.parametrize("method", SPARSE)
def test_tensor_parallel_ranks_draw_the_same_numbers(codebook: Codebook, method: Method) -> None:
    cache = Cache(codebook, 150)
    whole = cache.decode(method, 30, seed=7).output
    cache.query, cache.kv, cache.codes = cache.query[GROUP:], cache.kv[:, 1:], cache.codes[:, 1:]
    part = cache.decode(method, 30, seed=7, first_query_head=GROUP, first_kv_head=1, codebook=codebook.slice_heads(1, 1)).output
    assert torch.allclose(part, whole[GROUP:], atol=1e-6)


@pytest.mark.parametrize("method", [Method.santa, Method.prop, Method.pps, Method.ssa])
def test_all_64_bits_of_the_seed_count(codebook: Codebook, method: Method) -> None:
    cache = Cache(codebook, 200)
    seeds = [5, 5 + 2**32, 5 + 2**63, 2**64 - 1]
    outputs = [cache.decode(method, 12, seed).output for seed in seeds]
    assert all(not torch.equal(outputs[i], outputs[j]) for i in range(4) for j in range(i))
    assert torch.equal(outputs[3], cache.decode(method, 12, seeds[3]).output)


@pytest.mark.parametrize("method", [method for method in SPARSE if method != Method.topk])
def test_heads_draw_independently(codebook: Codebook, method: Method) -> None:
    """The same keys, values and queries in two KV heads still give two samples."""
    cache = Cache(codebook, 200)
    cache.kv[:, 1], cache.codes[:, 1] = cache.kv[:, 0], cache.codes[:, 0]
    cache.query = cache.query[:GROUP].repeat(2, 1)
    two = Codebook(**{name: tensor[:1].repeat(2, *[1] * (tensor.dim() - 1)) for name, tensor in codebook.tensors().items()})
    first, second = cache.decode(method, 12, codebook=two).output.split(GROUP)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("method", SPARSE)
def test_empty_row(codebook: Codebook, method: Method) -> None:
    cache = Cache(codebook, 16)
    cache.context = 0
    result = cache.decode(method, 4)
    assert not result.output.any() and result.output.shape == (HEADS * GROUP, DIM) and result.value_rows == 0


@pytest.mark.parametrize("method", SPARSE)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_query_that_is_not_finite_gives_nan_for_its_head_only(codebook: Codebook, method: Method, bad: float) -> None:
    cache = Cache(codebook, 120)
    cache.query[1, 0] = bad
    output = cache.decode(method, 30, settings=SelectionSettings(0, 0)).output
    assert output[1].isnan().all()
    assert output[[0, 2, 3, 4, 5]].isfinite().all()


@pytest.mark.parametrize("method", SPARSE)
def test_a_nan_key_that_is_read_gives_nan(codebook: Codebook, method: Method) -> None:
    cache = Cache(codebook, 120)
    cache.rows[0, 0, 0] = torch.nan  # a sink token: every method reads it
    cache.write(cache.rows)
    output = cache.decode(method, 30).output
    assert output[:GROUP].isnan().all() and output[GROUP:].isfinite().all()


@pytest.mark.parametrize("method", SPARSE)
def test_minus_infinity_scores_are_never_taken(codebook: Codebook, method: Method) -> None:
    cache = Cache(codebook, 120)
    cache.query = cache.query.abs() + 0.1
    cache.rows[20:90, :, :DIM] = -torch.inf
    cache.rows[20:90, :, DIM:] = 1e6
    cache.write(cache.rows)
    output = cache.decode(method, 60).output
    assert output.isfinite().all() and output.abs().max() < 100


@pytest.mark.parametrize("method", SPARSE)
def test_a_row_of_minus_infinity_gives_zeros(codebook: Codebook, method: Method) -> None:
    cache = Cache(codebook, 60)
    cache.query = cache.query.abs() + 0.1
    cache.rows[..., :DIM] = -torch.inf
    cache.write(cache.rows)
    assert not cache.decode(method, 30).output.any()


@pytest.mark.parametrize("method", SPARSE)
def test_one_huge_score(codebook: Codebook, method: Method) -> None:
    cache = Cache(codebook, 150)
    cache.query = cache.query.abs() + 0.5
    cache.rows[3, :, :DIM] = 500.0
    cache.write(cache.rows)
    assert close(cache.decode(method, 10).output, cache.dense(), 1e-3)


@pytest.mark.parametrize("method", SPARSE)
def test_equal_keys(codebook: Codebook, method: Method) -> None:
    cache = Cache(codebook, 150)
    cache.rows[..., :DIM] = 0.25
    cache.rows[..., DIM:] = 1.0
    cache.write(cache.rows)
    output = cache.decode(method, 37).output
    assert torch.allclose(output, torch.ones_like(output), atol=0.06)  # pps: a count of 37 give or take one


@pytest.mark.parametrize("method", SPARSE)
def test_soft_cap(codebook: Codebook, method: Method) -> None:
    cache = Cache(codebook, 100)
    budget = 1 << 15 if method.samples_values else 500
    output = cache.decode(method, budget, settings=replace(SETTINGS, heavy_fraction=1.0), soft_cap=2.0).output
    assert close(output, cache.dense(soft_cap=2.0), 0.08 if method == Method.santa else 0.01)
    assert not close(output, cache.dense(), 0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", SPARSE)
def test_half_precision_caches(codebook: Codebook, method: Method, dtype: torch.dtype) -> None:
    cache = Cache(codebook, 100, dtype=dtype)
    result = cache.decode(method, 1 << 15 if method.samples_values else 500, settings=replace(SETTINGS, heavy_fraction=1.0))
    assert result.output.dtype == dtype and close(result.output, cache.dense(), 0.08)


@pytest.mark.parametrize("mean_group", [False, True])
@pytest.mark.parametrize("method", [method for method in SPARSE if not method.needs_codes])
def test_bernoulli_queries_combine_with_every_value_stage(codebook: Codebook, method: Method, mean_group: bool) -> None:
    cache = Cache(codebook, 100)
    budget = 1 << 13 if method.samples_values else 100
    coarse, fine = (cache.decode(method, budget, bernoulli=BernoulliSettings(b, mean_group)) for b in (1, 4096))
    assert close(fine.output, cache.dense(), 0.1)
    assert coarse.key_features < 1.0 and fine.key_features > 0.95
    assert not torch.equal(coarse.output, cache.decode(method, budget, bernoulli=BernoulliSettings(1, mean_group), seed=1).output)


@pytest.mark.parametrize("method", WITH_CODES)
def test_refusals(codebook: Codebook, method: Method) -> None:
    cache = Cache(codebook, 100)
    with pytest.raises(ValueError, match=f"bernoulli: method {method.name} .* allowed are santa, strat"):
        cache.decode(method, 10, bernoulli=BernoulliSettings(4))
    with pytest.raises(ValueError, match="layer 3 has no codebook"):
        cache.decode(method, 10, codebook=None)
