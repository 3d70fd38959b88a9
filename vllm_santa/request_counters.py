"""What became of request parameters at the server's door, for vLLM's /metrics.

Counted by the process that takes the requests. Of several API servers each counts its own, and prometheus_client adds them up.
"""

from functools import cache

from prometheus_client import REGISTRY, Counter

from vllm_santa.policy.parameters import PARAMETERS, UNKNOWN

REFUSED = Counter(
    "santa_refused_parameters", "Requests refused with HTTP 400, by the parameter that was the reason.", ["parameter"], registry=None
)
CLAMPED = Counter(
    "santa_clamped_parameters", "Request parameters outside the policy's limits that were moved to them.", ["parameter"], registry=None
)


@cache
def show_request_counters() -> None:
    """Put both on /metrics, from zero on; once a process."""
    for parameter in (*PARAMETERS, UNKNOWN):
        REFUSED.labels(parameter)
    CLAMPED.labels("santa_budget")
    for counter in (REFUSED, CLAMPED):
        REGISTRY.register(counter)
