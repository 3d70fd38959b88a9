"""How a step on the GPU is divided between FlashInfer, the kernels and the reference; no GPU is needed to say so."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm")
from test_rows import step  # noqa: E402

from vllm_santa.attention import cuda_step  # noqa: E402
from vllm_santa.attention.cuda_step import StepRows  # noqa: E402
from vllm_santa.error_control import ErrorControl  # noqa: E402
from vllm_santa.graph_variants import DENSE, ERRORS  # noqa: E402
from vllm_santa.limits import Limits  # noqa: E402
from vllm_santa.methods import BernoulliSettings, Method  # noqa: E402
from vllm_santa.policy import Decision  # noqa: E402
from vllm_santa.rows import DecodingToken, SparseToken, StepPlan  # noqa: E402

BLOCK = 16
LIMITS = Limits(rows=16, context=20_000, max_budget=lambda context: 512, tokens=2**18)
FAMILY = {Method.pps: 0, Method.prop: 1, Method.ssa: 2}


@dataclass
class CpuRows:
    """Rows without the demand that they be on a GPU."""

    block_table: Tensor
    seq_lens: Tensor
    method: Tensor
    budget: Tensor
    seed: Tensor


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> StepRows:
    monkeypatch.setattr(cuda_step, "Rows", CpuRows)
    kernels = SimpleNamespace(limits=LIMITS, families=lambda methods: frozenset(FAMILY[method] for method in methods))
    return StepRows(kernels, BLOCK, torch.device("cpu"))  # type: ignore[arg-type]


def batch(lengths: list[int], contexts: list[int], sparse: list[SparseToken]) -> tuple[Any, StepPlan]:
    common = step(lengths, contexts)
    width = 32768 // BLOCK
    common.block_table_tensor = torch.arange(len(lengths) * width, dtype=torch.int32).view(len(lengths), width)
    starts = common.query_start_loc_cpu.tolist()
    decoding = [DecodingToken(token.token, token.context, Decision(token.method, token.budget, "request")) for token in sparse]
    return common, StepPlan(starts, decoding, sparse)


def dense(decodes: int, tokens: int | None = None) -> Any:
    """What FlashInfer's builder says of the batch."""
    return SimpleNamespace(num_decodes=decodes, num_decode_tokens=decodes if tokens is None else tokens)


def test_flashinfer_sees_one_token_of_sparse_rows(rows: StepRows) -> None:
    common, plan = batch([1, 1, 1], [900, 800, 700], [SparseToken(1, 1, 800, Method.pps, 64, 2**64 - 1)])
    seen = rows.fill(common, plan)
    assert seen.seq_lens.tolist() == [900, 1, 700] and seen.seq_lens_cpu_upper_bound.tolist() == [900, 1, 700]
    assert common.seq_lens.tolist() == [900, 800, 700] and common.seq_lens_cpu_upper_bound.tolist() == [900, 800, 700]
    made = rows.step(common, plan, dense(3))
    assert made.decodes.seq_lens.tolist() == [900, 800, 700], "the kernels see whole rows"
    assert made.decodes.method.tolist() == [0, Method.pps, 0] and made.decodes.seed.tolist() == [0, -1, 0]
    assert made.parts == {0, DENSE} and made.gathered == () and made.by_reference == ()


def test_a_dense_step_has_nothing_of_ours(rows: StepRows) -> None:
    common, plan = batch([1, 1, 50], [900, 800, 50], [])
    assert rows.fill(common, plan).seq_lens.tolist() == [900, 800, 50]
    made = rows.step(common, plan, dense(2))
    assert made.parts == {DENSE} and made.gathered == () and made.by_reference == ()
    assert made.prompt_tokens.tolist() == list(range(52))


def test_rows_with_a_target_are_measured(rows: StepRows) -> None:
    """A sampler of values has no kernel for its error, so the reference decodes it."""
    measured = SparseToken(1, 1, 800, Method.pps, 64, 1, control=ErrorControl(), max_error=0.1)
    sampler = SparseToken(2, 2, 700, Method.prop, 64, 1, control=ErrorControl(), max_error=0.1)
    common, plan = batch([1, 1, 1], [900, 800, 700], [SparseToken(0, 0, 900, Method.pps, 64, 1), measured, sampler])
    rows.fill(common, plan)
    made = rows.step(common, plan, dense(3))
    assert made.parts == {0, DENSE, ERRORS} and made.measured.tolist() == [0, 1, 0] and made.by_reference == (sampler,)
    common, plan = batch([1, 1, 1], [901, 801, 701], [SparseToken(0, 0, 901, Method.pps, 64, 1)])
    rows.fill(common, plan)
    made = rows.step(common, plan, dense(3))
    assert made.parts == {0, DENSE} and made.measured.tolist() == [0, 0, 0]


def test_rows_lose_what_they_had(rows: StepRows) -> None:
    common, plan = batch([1, 1], [900, 800], [SparseToken(0, 0, 900, Method.ssa, 64, 1), SparseToken(1, 1, 800, Method.pps, 9, 2)])
    rows.fill(common, plan)
    assert rows.step(common, plan, dense(2)).parts == {0, 2}
    common, plan = batch([1, 1], [901, 801], [SparseToken(1, 1, 801, Method.prop, 5, 3)])
    assert rows.fill(common, plan).seq_lens.tolist() == [901, 1]
    made = rows.step(common, plan, dense(2))
    assert made.decodes.method.tolist() == [0, Method.prop] and made.parts == {1, DENSE}


def test_tokens_among_others_of_their_request_are_gathered(rows: StepRows) -> None:
    """A decode beside a request that computes three answer tokens again: FlashInfer sees that one whole."""
    again = [SparseToken(1 + i, 1, 598 + i, Method.prop, 32, 7) for i in range(3)]
    common, plan = batch([1, 3], [900, 600], [SparseToken(0, 0, 900, Method.pps, 64, 1), *again])
    assert rows.fill(common, plan).seq_lens.tolist() == [1, 600]
    made = rows.step(common, plan, dense(1))
    assert made.parts == {0, DENSE} and made.decodes.seq_lens.tolist() == [900]
    (part,) = made.gathered
    assert part.tokens.tolist() == [1, 2, 3] and part.owners.tolist() == [1, 1, 1] and part.families == {1} and part.measured is None
    assert part.rows.seq_lens.tolist() == [598, 599, 600] and part.rows.seed.tolist() == [7] * 3
    assert torch.equal(part.rows.block_table, common.block_table_tensor[[1, 1, 1], : part.rows.block_table.shape[1]])


def test_the_last_of_gathered_tokens_may_be_measured(rows: StepRows) -> None:
    again = [SparseToken(i, 0, 598 + i, Method.pps, 32, 7) for i in range(3)]
    again[2] = again[2]._replace(control=ErrorControl(), max_error=0.1)
    common, plan = batch([3], [600], again)
    rows.fill(common, plan)
    made = rows.step(common, plan, dense(0))
    (part,) = made.gathered
    assert part.measured.tolist() == [2] and ERRORS not in made.parts


def test_many_gathered_tokens_come_in_parts_that_the_buffers_hold(rows: StepRows) -> None:
    context = 20_000
    again = [SparseToken(i, 0, context - 40 + i, Method.pps, 64, 7) for i in range(40)]
    common, plan = batch([40], [context], again)
    rows.fill(common, plan)
    parts = rows.step(common, plan, dense(0)).gathered
    assert [token for part in parts for token in part.tokens.tolist()] == list(range(40))
    for part in parts:
        count = part.rows.seq_lens.shape[0]
        assert LIMITS.row_context(count) >= context and part.rows.block_table.shape[1] * BLOCK >= context


def test_what_no_kernel_computes_goes_to_the_reference(rows: StepRows) -> None:
    token = SparseToken(0, 0, 900, Method.pps, 64, 1, BernoulliSettings(8))
    common, plan = batch([1, 1], [900, 800], [token])
    assert rows.fill(common, plan).seq_lens.tolist() == [900, 800]
    made = rows.step(common, plan, dense(2))
    assert made.by_reference == (token,) and made.parts == {DENSE} and made.decodes.method.tolist() == [0, 0]


def test_drafts_among_the_decodes(rows: StepRows) -> None:
    """With speculation, decode rows may have several tokens: rows are then not tokens, and sparse ones are gathered."""
    common, plan = batch([3, 1], [900, 800], [SparseToken(3, 1, 800, Method.pps, 64, 1)])
    rows.fill(common, plan)
    made = rows.step(common, plan, dense(2, tokens=4))
    assert made.decodes is None and [part.tokens.tolist() for part in made.gathered] == [[3]]


def test_padding_is_dense(rows: StepRows) -> None:
    common, plan = batch([1, 0, 0], [900, 0, 0], [SparseToken(0, 0, 900, Method.pps, 64, 1)])
    assert rows.fill(common, plan).seq_lens.tolist() == [1, 0, 0]
    made = rows.step(common, plan, dense(3))
    assert made.decodes.method.tolist() == [Method.pps, 0, 0] and made.parts == {0}, "no row needs FlashInfer"
