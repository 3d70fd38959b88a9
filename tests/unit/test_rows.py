"""From a step's metadata to what each token gets."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")
from vllm.v1.attention.backend import CommonAttentionMetadata  # noqa: E402

from vllm_santa.error_control import ErrorControl  # noqa: E402
from vllm_santa.methods import BernoulliSettings, Method  # noqa: E402
from vllm_santa.policy import Decision, Policy  # noqa: E402
from vllm_santa.policy.budget import Budget  # noqa: E402
from vllm_santa.policy.decision import ErrorTarget  # noqa: E402
from vllm_santa.policy.parameters import RequestParams  # noqa: E402
from vllm_santa.request import RowRequest, SantaParams  # noqa: E402
from vllm_santa.rows import NO_CODEBOOK, NO_KERNEL, NO_WORKSPACE, SparseToken, plan_step  # noqa: E402


def asks(method: str | None = "topk", budget: int = 64, seed: int = 1, prompt_len: int | None = 1000) -> RowRequest:
    return RowRequest(RequestParams(method and Method[method], Budget(budget) if method else None), seed, prompt_len)


def step(lengths: list[int], contexts: list[int], prefilling: list[bool] | None = None, **others: Any) -> CommonAttentionMetadata:
    """A batch of rows with these numbers of query tokens and these contexts, the step's tokens included."""
    starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    seq_lens = torch.tensor(contexts, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=seq_lens, seq_lens_cpu_upper_bound=seq_lens, num_reqs=len(lengths),
        num_actual_tokens=sum(lengths), max_query_len=max(lengths), max_seq_len=max(contexts),
        block_table_tensor=torch.zeros(len(lengths), 1, dtype=torch.int32), slot_mapping=torch.zeros(sum(lengths), dtype=torch.int64),
        is_prefilling=None if prefilling is None else torch.tensor(prefilling), **others,
    )  # fmt: skip


def runtime(
    requests: list[RowRequest | None],
    policy: Policy | None = None,
    ready: bool = True,
    speculates: bool = False,
    longest: float = float("inf"),
    captures: bool = False,
) -> Any:
    return SimpleNamespace(
        policy=policy or Policy(sink=16, local=16), model_name="tiny", speculates=speculates, codebooks=SimpleNamespace(ready=ready),
        requests_of=lambda common: requests, longest_sparse_row=lambda rows: longest, captures_decodes=captures,
    )  # fmt: skip


def test_decoding_rows_get_what_they_asked_for() -> None:
    plan = plan_step(step([1, 1, 1], [1200, 1001, 1500]), runtime([asks("topk", 64, 5), asks("pps", 8, 6), asks(None)]))
    assert plan.sparse == [SparseToken(0, 0, 1200, Method.topk, 64, 5), SparseToken(1, 1, 1001, Method.pps, 8, 6)]
    assert [(token.token, token.context, token.decision.method) for token in plan.decoding] == [
        (0, 1200, Method.topk), (1, 1001, Method.pps), (2, 1500, Method.dense),
    ]  # fmt: skip


def test_bernoulli_queries_reach_the_token() -> None:
    asked = RowRequest(RequestParams(Method.prop, Budget(8), bernoulli=BernoulliSettings(4, False)), 6, 1000)
    plan = plan_step(step([1, 1], [1200, 1200]), runtime([asked, asks("prop", 8, 6)]))
    assert [token.bernoulli for token in plan.sparse] == [BernoulliSettings(4, False), None]


def test_prompts_are_dense() -> None:
    """A whole prompt, a chunk, and a last chunk of one token, which gives the answer its first token."""
    plan = plan_step(step([1000, 300, 1], [1000, 600, 1000], [True] * 3), runtime([asks()] * 3))
    assert plan.decoding == [] and plan.sparse == []


def test_recomputed_answers_are_drawn_as_they_were() -> None:
    """A preempted request comes back as one prefill of its prompt and its answer so far."""
    plan = plan_step(step([1003], [1003], [True]), runtime([asks(seed=9)]))
    assert plan.sparse == [SparseToken(1000 + i, 0, 1001 + i, Method.topk, 64, 9) for i in range(3)]


def test_recomputation_in_chunks_and_after_a_prefix_hit() -> None:
    lengths, contexts = [4, 6, 5], [1002, 1010, 1005]  # the chunk with the prompt's end; after it; a hit that ends at the prompt's end
    plan = plan_step(step(lengths, contexts, [True] * 3), runtime([asks()] * 3))
    assert [(token.token, token.row, token.context) for token in plan.sparse] == [
        (2, 0, 1001), (3, 0, 1002),
        *((4 + i, 1, 1005 + i) for i in range(6)),
        *((10 + i, 2, 1001 + i) for i in range(5)),
    ]  # fmt: skip


def test_drafts_under_verification_are_dense() -> None:
    plan = plan_step(step([3, 1], [1003, 1003]), runtime([asks(), asks()], speculates=True))
    assert [token.token for token in plan.sparse] == [3]


def test_padded_rows_are_left_alone() -> None:
    """CUDA graphs pad with rows of no tokens, or of tokens without a request."""
    common = step([1, 0, 0], [1200, 0, 0])
    assert [token.token for token in plan_step(common, runtime([asks(), asks(), None])).decoding] == [0]
    common = step([1, 1], [1200, 0])
    assert [token.token for token in plan_step(common, runtime([asks(), None])).decoding] == [0]


def test_a_prompt_of_embeddings_decodes_token_by_token() -> None:
    unknown = asks(prompt_len=None)
    plan = plan_step(step([1, 1, 20], [1200, 1200, 1200], [False, True, True]), runtime([unknown] * 3))
    assert [token.token for token in plan.sparse] == [0]


def test_no_codebook_means_dense() -> None:
    plan = plan_step(step([1, 1], [1200, 1200]), runtime([asks("ssa"), asks("pps")], ready=False))
    assert plan.decoding[0].decision == NO_CODEBOOK
    assert [token.method for token in plan.sparse] == [Method.pps]


def test_rules_see_generated_tokens_and_the_batch() -> None:
    policy = Policy.model_validate(
        {"rules": [{"generated": {"min": 3}, "method": "topk", "budget": 32}, {"batch": {"min": 2}, "method": "pps", "budget": 16}]}
    )
    free = asks(None)
    alone = plan_step(step([1, 200], [1001, 400], [False, True]), runtime([free] * 2, policy))  # the prefill does not count
    assert alone.sparse == []
    pair = plan_step(step([1, 1], [1002, 1003]), runtime([free] * 2, policy))
    assert [(token.method, token.budget) for token in pair.sparse] == [(Method.pps, 16), (Method.topk, 32)]


@pytest.mark.parametrize("slots", [None, np.array([2, 0])])
def test_requests_are_found_by_row_or_by_slot(slots: np.ndarray | None) -> None:
    """V1 keeps the batch's order; V2 sorts every step and says which slot a row is."""
    params = SantaParams.__new__(SantaParams)
    params._rows = {0: asks(seed=10), 1: asks(seed=11), 2: asks(seed=12)}
    seeds = [request and request.seed for request in params.rows_of(step([1, 1], [1200, 1200], req_idx=slots))]
    assert seeds == ([10, 11] if slots is None else [12, 10])


def test_rows_beyond_the_kernels_buffers_are_dense() -> None:
    plan = plan_step(step([1, 1], [1200, 1001]), runtime([asks(), asks()], longest=1100))
    assert [token.decision for token in plan.decoding] == [NO_WORKSPACE, Decision(Method.topk, 64, "request")]
    assert [token.token for token in plan.sparse] == [1]


def test_bernoulli_queries_are_dense_where_decodes_are_captured() -> None:
    """The door refuses them; what comes in another way must not claim to be sparse."""
    request = RowRequest(RequestParams(Method.pps, Budget(64), bernoulli=BernoulliSettings(8)), 1, 1000)
    assert not plan_step(step([1], [1200]), runtime([request])).sparse[0].by_kernel
    plan = plan_step(step([1], [1200]), runtime([request], captures=True))
    assert plan.sparse == [] and plan.decoding[0].decision == NO_KERNEL


def test_targets_move_budgets_and_measure_the_last_token_of_a_row() -> None:
    """Of tokens that are computed again, the last one is new: it was sampled, but not yet read."""
    control = ErrorControl()
    request = RowRequest(RequestParams(Method.pps, Budget(64), max_error=0.1), 1, 1000, control)
    for context in range(1001, 1004):
        (token,) = plan_step(step([1], [context]), runtime([request])).sparse
        assert token.control is control and token.max_error == 0.1 and token.budget == 64
        control.observe(context, 0.4, 0.1)
    for context in range(1004, 1009):
        (token,) = plan_step(step([1], [context]), runtime([request])).sparse
    assert token.budget > 64
    budgets = [control.budget(context, 64, ErrorTarget(0.1, 1, 10**4)) for context in range(1001, 1010)]
    again = plan_step(step([1009], [1009], [True]), runtime([request])).sparse
    assert [token.budget for token in again] == budgets
    assert [token.control for token in again] == [None] * 8 + [control]


def test_a_budget_that_a_target_raised_over_the_context_is_dense() -> None:
    control = ErrorControl()
    policy = Policy.model_validate({"requests": {"budget": {"max": 4096}}})
    request = RowRequest(RequestParams(Method.pps, Budget(900), max_error=0.01), 1, 1000, control)
    for context in range(1001, 1010):
        plan = plan_step(step([1], [context]), runtime([request], policy))
        control.observe(context, 0.08, 0.01)
    assert plan.sparse == [] and plan.decoding[0].decision.reason == "budget_covers_context"


@pytest.mark.parametrize("captures", [False, True])
def test_errors_of_value_samplers_have_no_kernel(captures: bool) -> None:
    request = RowRequest(RequestParams(Method.sys, Budget(64), max_error=0.1), 1, 1000, ErrorControl())
    plan = plan_step(step([1], [1200]), runtime([request], captures=captures))
    assert plan.decoding[0].decision == NO_KERNEL if captures else not plan.sparse[0].by_kernel
