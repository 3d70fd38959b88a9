"""Refused and clamped parameters are counted, once each, by the parameter that was the reason."""

from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from vllm_santa import front, request_counters
from vllm_santa.policy.file import parse_policy
from vllm_santa.policy.parameters import PARAMETERS, UNKNOWN
from vllm_santa.request import SantaParams
from vllm_santa.request_counters import CLAMPED, REFUSED


def counted(counter) -> dict[str, float]:
    """By parameter, without zeros."""
    samples = [sample for family in counter.collect() for sample in family.samples if sample.name.endswith("_total")]
    return {sample.labels["parameter"]: sample.value for sample in samples if sample.value}


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch):
    """ask(limits, facts, parameters): whether the door lets them in. Counters start at zero."""
    REFUSED.clear()
    CLAMPED.clear()

    def ask(limits: str, facts: dict[str, object] | None = None, **extra_args: object) -> bool:
        policy = parse_policy(f"requests: {limits}", "p")
        monkeypatch.setattr(front, "_facts", front.EngineFacts(policy, **(facts or {})))
        try:
            SantaParams.validate_params(SimpleNamespace(extra_args=extra_args))
        except ValueError:
            return False
        return True

    return ask


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"santa_method": "psp"}, "santa_method"),
        ({"santa_method": "ssa"}, "santa_method"),
        ({"santa_method": "pps", "santa_budget": 21}, "santa_budget"),
        ({"santa_method": "pps", "santa_budget": "many"}, "santa_budget"),
        ({"santa_seed": "x"}, "santa_seed"),
        ({"santa_method": "pps", "santa_bernoulli": 0}, "santa_bernoulli"),
        ({"santa_method": "dense", "santa_bernoulli": 4}, "santa_bernoulli"),
        ({"santa_method": "pps", "santa_bernoulli_query": "head"}, "santa_bernoulli_query"),
        ({"santa_budgett": 16}, UNKNOWN),
        ({"santa_" + "x" * 50: 16}, UNKNOWN),
    ],
)
def test_refusals(ask, parameters: dict, reason: str) -> None:
    limits = "{methods: [dense, pps], budget: {min: 10, max: 20}}"
    assert not ask(limits, **parameters)
    assert not ask(limits, **parameters)
    assert counted(REFUSED) == {reason: 2} and counted(CLAMPED) == {}


def test_what_is_let_in_is_not_counted(ask) -> None:
    limits = "{budget: {min: 10, max: 20}, over_limit: clamp}"
    assert ask(limits) and ask(limits, other=1) and ask(limits, santa_budget=10) and ask(limits, santa_budget="20", santa_method="pps")
    assert counted(REFUSED) == counted(CLAMPED) == {}


def test_clamped_budgets(ask) -> None:
    limits = "{budget: {min: 10, max: 20}, fraction: {min: 1%, max: 5%}, over_limit: clamp}"
    assert all(ask(limits, santa_budget=budget) for budget in (9, 21, "21", 0.06, "0.5%"))
    assert counted(CLAMPED) == {"santa_budget": 5} and counted(REFUSED) == {}


@pytest.mark.parametrize("reason", ["blind workers", "graphs"])
def test_what_this_engine_cannot_do(ask, reason: str) -> None:
    facts = {"captures_decodes": True, "blind_workers": "something" if reason == "blind workers" else ""}
    assert not ask("{}", facts, santa_bernoulli=4, santa_method="pps")
    assert counted(REFUSED) == {"santa_method" if reason == "blind workers" else "santa_bernoulli": 1}


def test_other_backends_count_nothing(ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "_facts", None)
    with pytest.raises(ValueError, match="does not run"):
        SantaParams.validate_params(SimpleNamespace(extra_args={"santa_seed": 1}))
    assert counted(REFUSED) == {}


def test_on_metrics_from_zero_on(ask, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = CollectorRegistry()
    monkeypatch.setattr(request_counters, "REGISTRY", registry)
    request_counters.show_request_counters.__wrapped__()
    for parameter in (*PARAMETERS, UNKNOWN):
        assert registry.get_sample_value("santa_refused_parameters_total", {"parameter": parameter}) == 0
    assert registry.get_sample_value("santa_clamped_parameters_total", {"parameter": "santa_budget"}) == 0
    ask("{}", santa_budget=0)
    assert registry.get_sample_value("santa_refused_parameters_total", {"parameter": "santa_budget"}) == 1
