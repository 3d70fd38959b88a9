"""One attention layer on CPU, fed as vLLM feeds it, in a cache where everything unwritten is NaN."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PretrainedConfig

pytest.importorskip("vllm")
from vllm_santa.attention import layer as layer_module  # noqa: E402
from vllm_santa.attention.cpu import SantaCpuImpl, SantaCpuMetadata  # noqa: E402
from vllm_santa.attention.layer import SparseStep  # noqa: E402
from vllm_santa.codebook import Codebook  # noqa: E402
from vllm_santa.methods import BernoulliSettings, Method  # noqa: E402
from vllm_santa.policy import Decision  # noqa: E402
from vllm_santa.reference import pq  # noqa: E402
from vllm_santa.reference.decode import decode_row  # noqa: E402
from vllm_santa.reference.dense import dense_attention  # noqa: E402
from vllm_santa.rows import DecodingToken, SparseToken, StepPlan  # noqa: E402
from vllm_santa.runtime import Runtime  # noqa: E402

H, G, D, M, N, BLOCKS = 2, 2, 64, 16, 16, 64
SCALE = 2 / math.sqrt(D)
SPARSE = [method for method in Method if method is not Method.dense]


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact_attention(query: Tensor, key: Tensor, value: Tensor, soft_cap: float = 0.0, window: int | None = None) -> Tensor:
    """dense_attention in float64, by its definition."""
    tokens, context = query.shape[0], key.shape[1]
    output = torch.empty(query.shape, dtype=torch.float64)
    for t in range(tokens):
        last = context - tokens + t
        first = 0 if window is None else max(0, last - window + 1)
        for head in range(query.shape[1]):
            keys, values = (x[head // G, first : last + 1].double() for x in (key, value))
            scores = keys @ query[t, head].double() * SCALE
            if soft_cap:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            output[t, head] = scores.softmax(0) @ values
    return output


@pytest.mark.parametrize("soft_cap", [0.0, 3.0])
@pytest.mark.parametrize("window", [None, 1, 10])
@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_dense_attention(tokens: int, window: int | None, soft_cap: float) -> None:
    query, key, value = normal(tokens, H * G, D, seed=0), normal(H, 40, D, seed=1), normal(H, 40, D, seed=2)
    output = dense_attention(query, key, value, SCALE, soft_cap, window)
    torch.testing.assert_close(output.double(), exact_attention(query, key, value, soft_cap, window), rtol=1e-5, atol=1e-5)


class Row(NamedTuple):
    """One request: keys and values [n, H, D] of its whole context, its blocks, and how many of its last tokens the step computes."""

    key: Tensor
    value: Tensor
    blocks: list[int]
    tokens: int

    @property
    def slots(self) -> Tensor:
        return torch.tensor([self.blocks[i // N] * N + i % N for i in range(len(self.key))])


class Layer:
    """A SantaCpuImpl with a runtime of its own, and a poisoned cache."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, policy: Path, text: str = "", index: int = 1):
        policy.write_text("sink: 4\nlocal: 4\n" + text)
        model = SimpleNamespace(
            get_total_num_hidden_layers=lambda: 2, get_total_num_kv_heads=lambda: H, get_num_kv_heads=lambda _: H, get_head_size=lambda: D,
            served_model_name="tiny", hf_text_config=PretrainedConfig(), max_model_len=1024,
        )  # fmt: skip
        config = SimpleNamespace(
            additional_config={"santa": {"policy": str(policy)}}, speculative_config=None, parallel_config=None, model_config=model
        )
        self.runtime = Runtime(config)
        self.read: dict[Method, tuple[float, float]] = {}
        self.runtime.counters = SimpleNamespace(count_read=lambda method, *rows: self.read.update({method: rows}))
        monkeypatch.setattr(layer_module, "get_current_vllm_config", lambda: config)
        monkeypatch.setattr(layer_module, "runtime_for", lambda _: self.runtime)
        monkeypatch.setattr(layer_module, "get_tensor_model_parallel_rank", lambda: 0)
        monkeypatch.setattr(layer_module, "first_kv_head", lambda _: 0)
        self.impl = SantaCpuImpl(H * G, D, SCALE, H)
        self.impl.santa.attach(index)
        self.cache = torch.full((BLOCKS, 1, N, H * (2 * D + M // 4) * 4), 255, dtype=torch.uint8).view(torch.float32)

    def write(self, row: Row, first: int = 0, last: int | None = None) -> None:
        """Tokens [first, last) of the row."""
        span = slice(first, last)
        self.impl.do_kv_cache_update(None, row.key[span], row.value[span], self.cache, row.slots[span])

    def attend(self, query: Tensor, rows: list[Row], sparse: list[SparseToken]) -> Tensor:
        """Output of a step whose tokens are the last ones of each row, already written. query: [tokens, Hq, D]."""
        starts = [0, *np.cumsum([row.tokens for row in rows]).tolist()]
        table = torch.zeros(len(rows), max(len(row.blocks) for row in rows), dtype=torch.int32)
        for i, row in enumerate(rows):
            table[i, : len(row.blocks)] = torch.tensor(row.blocks)
        decoding = [DecodingToken(token.token, token.context, Decision(token.method, token.budget, "request")) for token in sparse]
        metadata = SantaCpuMetadata(starts, [len(row.key) for row in rows], SparseStep(table, StepPlan(starts, decoding, sparse)))
        output = torch.full_like(query, torch.nan)
        key, value = (torch.cat([getattr(row, name)[-row.tokens :] for row in rows]) for name in ("key", "value"))
        return self.impl.forward(None, query, key, value, self.cache, metadata, output)


def make_rows(lengths: list[int], tokens: list[int]) -> list[Row]:
    """Rows whose blocks lie all over the cache; block 0 belongs to nobody, as in vLLM."""
    free = (torch.randperm(BLOCKS - 1, generator=torch.Generator().manual_seed(0)) + 1).tolist()
    rows = []
    for seed, (length, count) in enumerate(zip(lengths, tokens, strict=True)):
        blocks = [free.pop() for _ in range(-(-length // N))]
        rows.append(Row(normal(length, H, D, seed=10 + seed), normal(length, H, D, seed=50 + seed), blocks, count))
    return rows


@pytest.fixture(scope="module")
def codebook() -> Codebook:
    from vllm_santa.training import train_codebook

    return train_codebook(normal(600, H, D, seed=1), normal(600, H, G, D, seed=2), M)


@pytest.fixture
def coded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, codebook: Codebook) -> Layer:
    """A layer with a codebook."""
    layer = Layer(monkeypatch, tmp_path / "policy.yaml")
    layer.runtime.codebooks._codebooks[1] = codebook
    layer.impl.santa.attach(1)
    return layer


def alone(query: Tensor, row: Row, token: SparseToken, layer: Layer) -> Tensor:
    """The token's row of output, from a cache that holds only its own context in order."""
    length = token.context
    blocks = -(-length // N)
    padding = (0, 0, 0, 0, 0, blocks * N - length)
    pages = torch.nn.functional.pad(torch.cat((row.key[:length], row.value[:length]), -1), padding).unflatten(0, (blocks, N))
    codes = torch.nn.functional.pad(pq.encode(row.key[:length], layer.impl.santa.context.codebook), padding).unflatten(0, (blocks, N))
    return decode_row(
        query, pages.transpose(1, 2), codes.transpose(1, 2), torch.arange(blocks), length, token.method, token.budget, token.seed,
        layer.impl.santa.context, layer.runtime.settings, token.bernoulli,
    ).output  # fmt: skip


def test_every_method_in_one_step(coded: Layer) -> None:
    """Sparse rows of all methods, a dense row, and a chunk of a prompt; nobody reads a neighbour or an unwritten token."""
    lengths = [37 + 5 * i for i in range(len(SPARSE))] + [33, 50]
    rows = make_rows(lengths, [1] * len(SPARSE) + [1, 20])
    for row in rows:
        coded.write(row)
    query = normal(sum(row.tokens for row in rows), H * G, D, seed=3)
    sparse = [SparseToken(i, i, lengths[i], method, 12, 100 + i) for i, method in enumerate(SPARSE)]
    output = coded.attend(query, rows, sparse)
    assert output.isfinite().all()
    for token in sparse:
        torch.testing.assert_close(output[token.token], alone(query[token.token], rows[token.row], token, coded))
    start = 0
    for row in rows:
        exact = exact_attention(query[start : start + row.tokens], row.key.transpose(0, 1), row.value.transpose(0, 1)).float()
        close = torch.isclose(output[start : start + row.tokens], exact, rtol=1e-4, atol=1e-4).all()
        assert close == (start >= len(SPARSE)), "dense rows are exact, sparse ones are not"
        start += row.tokens
    assert coded.read[Method.pps] == (lengths[SPARSE.index(Method.pps)], pytest.approx(12, abs=1))
    assert coded.read[Method.topk] == (12 + 8, 12 + 8)


@pytest.mark.parametrize("mean_group", [True, False])
def test_bernoulli_queries_count_the_features_they_read(coded: Layer, mean_group: bool) -> None:
    (row,) = make_rows([61], [1])
    coded.write(row)
    query = normal(1, H * G, D, seed=4)
    token = SparseToken(0, 0, 61, Method.prop, 512, 7, BernoulliSettings(1, mean_group))
    output = coded.attend(query, [row], [token])
    torch.testing.assert_close(output[0], alone(query[0], row, token, coded))
    key_rows, _ = coded.read[Method.prop]
    magnitude = query[0].unflatten(0, (H, G)).abs()
    drawn = magnitude.mean(1, keepdim=True) if mean_group else magnitude
    missed = (1 - drawn / drawn.amax(-1, keepdim=True)).prod(1)  # probability that no head of the group reads the feature, [H, D]
    share, spread = (1 - missed).mean(), (missed * (1 - missed)).sum().sqrt() / missed.numel()
    assert abs(key_rows / 61 - share) <= 4 * spread
    exact = coded.attend(query, [row], [token._replace(bernoulli=None)])
    assert not torch.isclose(output, exact, rtol=0.1).all()


@pytest.mark.parametrize("method", [Method.pps, Method.ssa, Method.topk, Method.uniform_tail])
def test_a_budget_of_everything_is_dense(coded: Layer, method: Method) -> None:
    (row,) = make_rows([61], [1])
    coded.write(row)
    query = normal(1, H * G, D, seed=4)
    output = coded.attend(query, [row], [SparseToken(0, 0, 61, method, 61, 7)])
    exact = exact_attention(query, row.key.transpose(0, 1), row.value.transpose(0, 1))
    torch.testing.assert_close(output.double(), exact, rtol=1e-4, atol=1e-5)


def test_a_recomputed_answer_is_what_it_was(coded: Layer) -> None:
    """Prompt and three answer tokens in one prefill: each answer token is drawn as it was when it came alone."""
    (row,) = make_rows([45], [1])
    coded.write(row)
    query = normal(10, H * G, D, seed=5)
    tokens = [SparseToken(7 + i, 0, 43 + i, Method.ssa, 10, 3) for i in range(3)]
    together = coded.attend(query, [row._replace(tokens=10)], tokens)
    for token in tokens:
        torch.testing.assert_close(together[token.token], alone(query[token.token], row, token, coded))
    prompt = exact_attention(query, row.key.transpose(0, 1), row.value.transpose(0, 1))[:7]
    torch.testing.assert_close(together[:7].double(), prompt, rtol=1e-4, atol=1e-5)


def test_padding_is_not_written(coded: Layer) -> None:
    before = coded.cache.view(torch.uint8).clone()
    slots = torch.tensor([5 * N + 3, -1, -1])
    coded.impl.do_kv_cache_update(None, normal(4, H, D, seed=1), normal(4, H, D, seed=2), coded.cache, slots)
    changed = (coded.cache.view(torch.uint8) != before).flatten(1).any(1).nonzero().flatten().tolist()
    assert changed == [5]


def test_codes_follow_the_keys(coded: Layer, codebook: Codebook) -> None:
    """In chunks and single tokens, and written again where a block is used again."""
    first, second = make_rows([50, 34], [1, 1])
    second = second._replace(blocks=first.blocks[:3])
    coded.write(first)
    for start, end in ((0, 20), (20, 33), (33, 34)):
        coded.write(second, start, end)
    _, codes = coded.impl.santa.views(coded.cache)
    for row, span in ((second, slice(0, 34)), (first, slice(34, 50))):
        slots = row.slots[span]
        assert torch.equal(codes[slots // N, :, slots % N], pq.encode(row.key[span], codebook))


def test_training_encodes_what_the_cache_holds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    layer = Layer(monkeypatch, tmp_path / "policy.yaml", "training_tokens: 256\n")
    first, second, third = make_rows([100, 200, 20], [100, 100, 1])
    for row, tokens in ((first, 100), (second._replace(key=second.key[:100], value=second.value[:100]), 100)):
        layer.write(row)
        layer.attend(normal(tokens, H * G, D, seed=6), [row._replace(tokens=tokens)], [])
    layer.write(third)
    layer.attend(normal(1, H * G, D, seed=7), [third], [SparseToken(0, 0, 20, Method.pps, 8, 1)])  # an answer does not train
    assert layer.impl.santa.context.codebook is None and not layer.runtime.codebooks.ready
    layer.write(second, 100)
    layer.attend(normal(100, H * G, D, seed=8), [second], [])
    codebook = layer.impl.santa.context.codebook
    assert codebook is not None and layer.runtime.codebooks.ready
    _, codes = layer.impl.santa.views(layer.cache)
    for row in (first, second, third):
        assert torch.equal(codes[row.slots // N, :, row.slots % N], pq.encode(row.key, codebook))


def test_a_dense_layer_stays_dense(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    layer = Layer(monkeypatch, tmp_path / "policy.yaml", "dense_layers: [1]\n")
    (row,) = make_rows([61], [1])
    layer.write(row)
    query = normal(1, H * G, D, seed=4)
    output = layer.attend(query, [row], [SparseToken(0, 0, 61, Method.topk, 8, 7)])
    exact = exact_attention(query, row.key.transpose(0, 1), row.value.transpose(0, 1))
    torch.testing.assert_close(output.double(), exact, rtol=1e-4, atol=1e-5)
    assert layer.read == {Method.topk: (61, 61)}
    assert layer.runtime.codebooks.ready, "a dense layer needs no codebook"


def test_the_profiling_run_has_no_metadata(coded: Layer) -> None:
    query = normal(3, H * G, D, seed=1)
    assert (coded.impl.forward(None, query, None, None, coded.cache, None, torch.ones_like(query)) == 0).all()


@pytest.mark.parametrize(
    ("feature", "given"),
    [
        ("ALiBi", {"alibi_slopes": [0.5] * 4}),
        ("sinks", {"sinks": torch.zeros(4)}),
        ("KV sharing between layers", {"kv_sharing_target_layer_name": "layers.0.attn"}),
        ("encoder only attention", {"attn_type": "encoder_only"}),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(feature: str, given: dict) -> None:
    with pytest.raises(NotImplementedError, match=f"--attention-backend santa does not support {feature}"):
        SantaCpuImpl(H * G, D, SCALE, H, **given)
