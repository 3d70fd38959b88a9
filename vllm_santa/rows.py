"""What each token of a step is to get: dense attention, or a sparse method with a budget and a seed."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from vllm_santa.error_control import ErrorControl
from vllm_santa.methods import BernoulliSettings, Method
from vllm_santa.policy import Decision, RowContext

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from vllm_santa.request import RowRequest
    from vllm_santa.runtime import Runtime


class SparseToken(NamedTuple):
    """One query token that reads its cache sparsely.

    token: its index in the step's flat batch. row: its request's index in the batch. context: tokens it attends to, itself included.
    budget: as the method counts. seed: unsigned 64 bits. bernoulli: not None where keys are scored by Bernoulli queries. control: learns
    the error of the token's output, which is to stay under max_error; None where it is not estimated.
    """

    token: int
    row: int
    context: int
    method: Method
    budget: int
    seed: int
    bernoulli: BernoulliSettings | None = None
    control: ErrorControl | None = None
    max_error: float = 0.0

    @property
    def by_kernel(self) -> bool:
        """Whether CUDA kernels can decode it; what they cannot, the reference decodes: scores of Bernoulli queries, and the error of
        samplers of values."""
        return self.bernoulli is None and not (self.control is not None and self.method.samples_values)


class DecodingToken(NamedTuple):
    """A token of an answer: its index in the flat batch, the tokens it attends to, and what was decided for it."""

    token: int
    context: int
    decision: Decision


@dataclass(frozen=True)
class StepPlan:
    """starts: first token of each row in the flat batch, and the end [rows + 1]. decoding: every token that belongs to an answer, in batch
    order. sparse: those of them that read sparsely."""

    starts: list[int]
    decoding: list[DecodingToken]
    sparse: list[SparseToken]


def plan_step(common: "CommonAttentionMetadata", runtime: "Runtime") -> StepPlan:
    """Decide for every token of the step. Needs only host memory: no device synchronisation."""
    starts = common.query_start_loc_cpu.tolist()
    contexts = common.seq_lens_cpu_upper_bound.tolist()
    prefilling = [False] * common.num_reqs if common.is_prefilling is None else common.is_prefilling.tolist()
    requests = runtime.requests_of(common)
    spans = []
    for row, request in enumerate(requests):
        tokens = starts[row + 1] - starts[row]
        if tokens > 0 and request is not None:
            first = _first_decoding(tokens, contexts[row], prefilling[row], request.prompt_len, runtime.speculates)
            if first < tokens:
                spans.append((row, starts[row], tokens, contexts[row], first, request))
    plan = StepPlan(starts, [], [])
    if spans:
        decide = _Decider(runtime, common.num_reqs, len(spans))
        for row, start, tokens, context, first, request in spans:
            for i in range(first, tokens):
                seen = context - tokens + i + 1
                decision = decide(request, seen)
                plan.decoding.append(DecodingToken(start + i, seen, decision))
                if decision.method is not _DENSE:
                    sparse = SparseToken(start + i, row, seen, decision.method, decision.budget, request.seed, decision.bernoulli)
                    if decision.target is not None and i == tokens - 1:  # what is computed again before it has been learnt from already
                        sparse = sparse._replace(control=request.control, max_error=decision.target.max_error)
                    plan.sparse.append(sparse)
    return plan


def _first_decoding(tokens: int, context: int, prefilling: bool, prompt_len: int | None, speculates: bool) -> int:
    """Index of the row's first token that counts as decoding; `tokens` if none does.

    A token decodes if it was generated. So tokens of an answer that a preempted request computes again are drawn again as they were the
    first time, and preemption does not change the answer. Drafts under verification are dense.
    """
    if tokens > 1 and speculates:
        return tokens
    if prompt_len is None:
        return 0 if tokens == 1 and not prefilling else tokens
    return min(max(prompt_len - (context - tokens), 0), tokens)


class _Decider:
    """The policy's decisions within one step, less what cannot be done in it. What is the same for all rows is looked up once."""

    def __init__(self, runtime: "Runtime", rows: int, decoding: int):
        """rows: of the step, padding included. decoding: those that decode."""
        self._decide, self._model, self._decoding = runtime.policy.decider, runtime.model_name, decoding
        self._ready = runtime.codebooks.ready
        self._longest = runtime.longest_sparse_row(rows)
        self._captures = runtime.captures_decodes

    def __call__(self, request: "RowRequest", context: int) -> Decision:
        generated = 0 if request.prompt_len is None else context - request.prompt_len
        decision = self._decide(RowContext(context, generated, self._decoding, self._model), request.params)
        if decision.method is _DENSE:
            return decision
        if decision.method.needs_codes and not self._ready:
            return NO_CODEBOOK
        if context > self._longest:
            return NO_WORKSPACE
        if self._captures and (decision.bernoulli is not None or (decision.target is not None and decision.method.samples_values)):
            return NO_KERNEL
        if decision.target is not None and request.control is not None:
            rows = request.control.budget(context, decision.budget, decision.target)
            return self._decide.with_budget(decision, rows, context)
        return decision


_DENSE = Method.dense  # a member's look-up in its class is slow beside the rest of a decision
NO_CODEBOOK = Decision(Method.dense, 0, "no_codebook")
NO_WORKSPACE = Decision(Method.dense, 0, "workspace")
NO_KERNEL = Decision(Method.dense, 0, "no_kernel")
STEP_REASONS = {
    NO_CODEBOOK.reason: "the method scores keys by their codes, and there are no codebooks yet",
    NO_WORKSPACE.reason: "the row is longer than its part of the kernels' buffers (`workspace_tokens`)",
    NO_KERNEL.reason: "no kernel computes what the row wants, and CUDA graphs hold nothing but kernels",
}
