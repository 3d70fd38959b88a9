"""Prefix caching without mixing exact and sampled keys and values (policy: `prefix_cache: separate`).

A token that was decoded sparsely hands an approximate hidden state to the layers above, so their keys and values are approximate too, and
the next turn of a chat finds them in vLLM's prefix cache. With `separate`, requests that may decode sparsely get a cache salt of their own:
vLLM hashes it into the first block of a prompt, so they share blocks among themselves, and exact requests with exact requests only.

The place to set it is the platform's `validate_request`, which sees the input and the parameters of every request on its way to the engine.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_santa.front import engine_facts
from vllm_santa.methods import Method
from vllm_santa.policy import Policy
from vllm_santa.policy.parameters import RequestParams, parse_lenient
from vllm_santa.wrapping import wrap_once

if TYPE_CHECKING:
    from vllm import PoolingParams, SamplingParams

SALT = "/santa-sparse"


def may_decode_sparsely(policy: Policy, params: RequestParams) -> bool:
    """False only if every row of the request is dense for certain."""
    if params.method is not None or params.budget is not None or params.max_error is not None:
        return params.method is not Method.dense
    return any(rule.method is not Method.dense for rule in policy.rules)


def add_salt(engine_input: dict[str, Any], params: "SamplingParams | PoolingParams") -> None:
    """Salt the input of a request that may decode sparsely, if the policy of this process's engine separates them. A second time changes
    nothing."""
    engine = engine_facts()
    if engine is None or engine.policy.prefix_cache == "share":
        return
    policy = engine.policy
    asked, _ = parse_lenient(getattr(params, "extra_args", None), policy.requests)
    salt = engine_input.get("cache_salt") or ""
    if may_decode_sparsely(policy, asked) and not salt.endswith(SALT):
        engine_input["cache_salt"] = salt + SALT


def watch_requests() -> None:
    """Look at every request that this process sends to an engine from now on. Once per process; vLLM's plugin loading calls it."""
    from vllm.platforms import current_platform

    def validate_request(
        original: Callable[..., None], cls: type, processed_inputs: dict[str, Any], params: "SamplingParams | PoolingParams"
    ) -> None:
        original(cls, processed_inputs, params)
        add_salt(processed_inputs, params)

    wrap_once(type(current_platform), "validate_request", validate_request)
