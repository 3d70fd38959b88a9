"""Per-request parameters inside vLLM: checked at the server's door, kept per row in the workers.

`SantaParams` is a vLLM logits processor that never touches a logit. Processors are the one official place that sees the parameters of
every request on both sides: `validate_params` in the API server, and the rows of the batch in each worker before attention metadata
is built. One class serves both model runners: V1 calls it by name only, V2 wants its own base class.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from vllm_santa.engine_id import engine_id
from vllm_santa.error_control import ErrorControl, ErrorControls
from vllm_santa.front import EngineFacts, engine_facts, runs_santa
from vllm_santa.policy import Budget, Policy, policy_of
from vllm_santa.policy.parameters import PARAMETERS, UNKNOWN, ParameterError, RequestParams, has_santa, parse, parse_lenient, unsigned
from vllm_santa.request_counters import CLAMPED, REFUSED

try:
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as _Base
except ImportError:  # without vLLM the parameters can still be read and tested
    _Base = object  # type: ignore[assignment,misc]

if TYPE_CHECKING:
    import torch
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata

__all__ = ["RequestParams", "RowRequest", "SantaParams", "parse", "parse_lenient", "processor_for"]

_NOT_SANTA = "this server does not run --attention-backend santa"

_processors: "WeakValueDictionary[str, SantaParams]" = WeakValueDictionary()


@dataclass(frozen=True, slots=True)
class RowRequest:
    """What one row of the batch asked for.

    `seed` keys the row's random numbers, an unsigned 64-bit value: `santa_seed`, else the request's `seed`, else the policy's
    `base_seed`, else drawn once. `prompt_len` is in tokens; None where the prompt came as embeddings. `control`: of its budgets, where it
    may have an error target.
    """

    params: RequestParams
    seed: int
    prompt_len: int | None
    control: ErrorControl | None = None


def processor_for(vllm_config: "VllmConfig") -> "SantaParams | None":
    """The processor of this worker's engine. None where vLLM makes none: on the V1 runner with speculative decoding, and on the V2 runner
    for pipeline ranks before the last; rows then follow the policy alone."""
    return _processors.get(engine_id(vllm_config))


class SantaParams(_Base):  # type: ignore[misc,valid-type]
    """Checks `santa_*` parameters and keeps them per batch row (V1) or request slot (V2).

    `ignored` counts parameters that reached the worker and could not be read (only a front end that skips validation lets them through).
    """

    def __init__(self, vllm_config: "VllmConfig", *runner_args: Any) -> None:
        """`runner_args` is `(device, is_pin_memory)` from V1 and `(req_states,)` from V2."""
        self.ignored = 0
        self._policy = policy_of(vllm_config) if runs_santa(vllm_config) else None
        self._rows: dict[int, RowRequest] = {}
        if len(runner_args) == 1:  # [slots] int32 on the host, kept current by the runner
            self._prompt_lens, self._prefill_lens = runner_args[0].prompt_len.np, runner_args[0].prefill_len.np
        # Every rank of an engine adds requests in the same order, so with the engine's id they draw the same seeds.
        self._seeds = random.Random(engine_id(vllm_config))
        self._controls = ErrorControls()
        _processors[engine_id(vllm_config)] = self

    @classmethod
    def validate_params(cls, sampling_params: "SamplingParams") -> None:
        """Refuse a request at admission.

        Raises:
            ValueError: names the parameter, its value and what is allowed; vLLM answers HTTP 400 with it. Counted on servers with this
                backend.
        """
        extra_args = sampling_params.extra_args or {}
        if not has_santa(extra_args):
            return
        engine = engine_facts()
        if engine is None:
            raise ValueError(f"{_given(extra_args)}: {_NOT_SANTA}; allowed: no santa_* parameters")
        try:
            params = _admit(extra_args, engine)
        except ParameterError as error:
            REFUSED.labels(error.parameter).inc()
            raise
        if params.budget is not None and params.budget != Budget.parse(extra_args["santa_budget"]):
            CLAMPED.labels("santa_budget").inc()

    def rows_of(self, common: "CommonAttentionMetadata") -> list[RowRequest | None]:
        """What each of the `num_reqs` rows of a step asked for; None for padded rows."""
        slots = range(common.num_reqs) if common.req_idx is None else common.req_idx.tolist()
        rows = [self._rows.get(slot) for slot in slots[: common.num_reqs]]
        return rows + [None] * (common.num_reqs - len(rows))

    # V1 runner

    def is_argmax_invariant(self) -> bool:
        """True: vLLM then leaves greedy batches alone."""
        return True

    def update_state(self, batch_update: Any) -> None:
        """Follow the requests as they enter, move within and leave the persistent batch."""
        policy = self._policy
        if policy is None or not batch_update:
            return
        from vllm.v1.sample.logits_processor import process_dict_updates

        def new_row(sampling: "SamplingParams", prompt: list[int] | None, output: list[int]) -> RowRequest:
            return self._row(policy, sampling, None if prompt is None else len(prompt), len(output))

        process_dict_updates(self._rows, batch_update, new_row)

    # V2 runner

    def add_request(self, req_idx: int, sampling_params: "SamplingParams") -> bool:
        """Take the place of whatever the slot held before. False: no logit will be touched."""
        if self._policy is not None:
            prompt_len = int(self._prompt_lens[req_idx])
            self._rows[req_idx] = self._row(self._policy, sampling_params, prompt_len, int(self._prefill_lens[req_idx]) - prompt_len)
        return False

    # both

    def apply(self, logits: "torch.Tensor", ctx: Any = None) -> "torch.Tensor":
        """The logits as they are."""
        return logits

    def _row(self, policy: Policy, sampling: "SamplingParams", prompt_len: int | None, answered: int) -> RowRequest:
        """answered: tokens of its answer that the request brings along, as it does after preemption."""
        params, ignored = parse_lenient(sampling.extra_args, policy.requests)
        self.ignored += ignored
        candidates = (params.seed, sampling.seed, policy.base_seed)
        seed = next((seed for seed in candidates if seed is not None), None)
        control = None
        if params.max_error is not None or policy.sets_targets:
            lasting = seed is not None and prompt_len is not None  # else it comes back as another request
            computed = prompt_len + answered - 1 if prompt_len is not None and answered else 0
            control = self._controls.enter((params, seed, prompt_len) if lasting else None, computed)
        return RowRequest(params, self._seeds.getrandbits(64) if seed is None else unsigned(seed), prompt_len, control)


def _given(extra_args: Mapping[str, Any]) -> str:
    return ", ".join(key for key in extra_args if has_santa({key: 0}))


def _admit(extra_args: Mapping[str, Any], engine: EngineFacts) -> RequestParams:
    """The parameters of a request, if the engine can follow them.

    Raises:
        ParameterError: it cannot.
    """
    if engine.blind_workers:
        given = _given(extra_args)
        text = f"{given}: cannot be followed with {engine.blind_workers}; allowed: no santa_* parameters, the policy decides"
        raise ParameterError(next((key for key in PARAMETERS if key in extra_args), UNKNOWN), text)
    params = parse(extra_args, engine.policy.requests)
    engine.policy.check_target(params, kernels_only=engine.captures_decodes)
    if params.bernoulli is not None and engine.captures_decodes:
        text = (
            f"santa_bernoulli: {extra_args['santa_bernoulli']!r} is refused; allowed: nothing, this server decodes from CUDA graphs, "
            "and no kernel computes Bernoulli queries (start it with --enforce-eager or -cc.cudagraph_mode=PIECEWISE to allow them)"
        )
        raise ParameterError("santa_bernoulli", text)
    return params
