"""Which requests get a cache salt of their own."""

from types import SimpleNamespace

import pytest

from vllm_santa import front, prefix_cache
from vllm_santa.policy.file import parse_policy
from vllm_santa.prefix_cache import SALT, add_salt

NO_RULES = "prefix_cache: separate"
RULES = NO_RULES + "\nrules: [{context: {min: 10000}, method: pps}]"
DENSE_RULES = NO_RULES + "\nrules: [{context: {min: 10000}, method: dense}]"


def salt_of(monkeypatch: pytest.MonkeyPatch, policy: str | None, salt: str | None = None, **santa: object) -> str | None:
    monkeypatch.setattr(front, "_facts", policy and front.EngineFacts(parse_policy(policy, "p.yaml")))
    engine_input = {"type": "token", "prompt_token_ids": [1]} | ({} if salt is None else {"cache_salt": salt})
    params = SimpleNamespace(extra_args={f"santa_{name}": value for name, value in santa.items()} or None)
    for _ in range(2):  # twice is once
        add_salt(engine_input, params)
    return engine_input.get("cache_salt")


@pytest.mark.parametrize(
    ("policy", "santa", "salted"),
    [
        (NO_RULES, {}, False),
        (NO_RULES, {"seed": 1}, False),
        (NO_RULES, {"method": "dense"}, False),
        (NO_RULES, {"method": "pps"}, True),
        (NO_RULES, {"budget": "2%"}, True),
        (DENSE_RULES, {}, False),
        (RULES, {}, True),  # it may grow to 10,000 tokens
        (RULES, {"method": "dense"}, False),
        (RULES, {"method": "dense", "budget": 64}, False),
        ("prefix_cache: share", {"method": "pps"}, False),
        (None, {"method": "pps"}, False),
    ],
)
def test_who_is_salted(monkeypatch: pytest.MonkeyPatch, policy: str | None, santa: dict, salted: bool) -> None:
    assert salt_of(monkeypatch, policy, **santa) == (SALT if salted else None)


def test_a_client_keeps_its_own_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    assert salt_of(monkeypatch, NO_RULES, salt="tenant", method="pps") == "tenant" + SALT
    assert salt_of(monkeypatch, NO_RULES, salt="tenant", method="dense") == "tenant"


def test_pooling_requests_have_no_extra_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "_facts", front.EngineFacts(parse_policy(NO_RULES, "p.yaml")))
    engine_input: dict = {}
    add_salt(engine_input, SimpleNamespace())
    assert engine_input == {}


def test_the_platform_asks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    platforms = pytest.importorskip("vllm.platforms")
    seen: list[object] = []

    class Platform:
        @classmethod
        def validate_request(cls, processed_inputs: dict, params: object) -> None:
            seen.append(params)

    monkeypatch.setattr(platforms, "current_platform", Platform())
    monkeypatch.setattr(prefix_cache, "add_salt", lambda engine_input, params: engine_input.update(cache_salt=params))
    prefix_cache.watch_requests()
    first = Platform.validate_request.__func__
    prefix_cache.watch_requests()
    assert Platform.validate_request.__func__ is first
    engine_input: dict = {}
    Platform().validate_request(engine_input, "params")
    assert (seen, engine_input) == (["params"], {"cache_salt": "params"})
