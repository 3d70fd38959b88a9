"""Parameters and policy files of any kind: they work, or are refused in words. (tests/unit has the same without a server.)"""

import tempfile
from pathlib import Path

import httpx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server import Server

from vllm_santa.methods import METHOD_NAMES
from vllm_santa.policy import Policy, PolicyError
from vllm_santa.policy.file import read_policy
from vllm_santa.policy.parameters import PARAMETERS

CONFIGS = Path(__file__).parents[2] / "configs"
NUMBERS = st.integers(-(2**70), 2**70) | st.integers(0, 600) | st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text(max_size=8) | st.sampled_from([*METHOD_NAMES, "10%", "64", "nan", "1e3", "group", "head"])
VALUES = NUMBERS | TEXTS | st.booleans() | st.none() | st.lists(NUMBERS | TEXTS, max_size=3) | st.dictionaries(TEXTS, NUMBERS, max_size=2)
NAMES = st.sampled_from(PARAMETERS) | st.text(max_size=6).map("santa_".__add__) | st.text(max_size=6)


def test_any_parameters_are_served_or_refused(busy_server: Server) -> None:
    seen = set()

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.dictionaries(NAMES, VALUES, max_size=3))
    def ask(xargs: dict) -> None:
        body = {"model": "tiny", "prompt": [65] * 40, "max_tokens": 3, "vllm_xargs": xargs}
        answer = httpx.post(f"{busy_server.url}/v1/completions", json=body, timeout=120)
        assert answer.status_code in (200, 400), answer.text
        seen.add(answer.status_code)
        if answer.status_code == 400:
            assert len(answer.json()["error"]["message"]) > 10

    with busy_server.counting() as gained:
        ask()
    assert seen == {200, 400}
    assert busy_server.healthy()
    assert gained.total("santa_ignored_parameters_total") == 0, "what was not refused could be followed"


POLICIES = [path.read_bytes() for path in sorted(CONFIGS.glob("*.yaml"))]


@st.composite
def damaged_policies(draw: st.DrawFn) -> bytes:
    """A policy that ships, with pieces cut out, doubled, moved from another one, or made of other bytes."""
    text = draw(st.sampled_from(POLICIES))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = draw(st.integers(start, min(len(text), start + 40)))
        other = draw(st.sampled_from(POLICIES))
        begin = draw(st.integers(0, len(other)))
        piece = draw(st.sampled_from([b"", text[start:end] * 2, other[begin : begin + 20]]) | st.binary(max_size=6) | TEXTS.map(str.encode))
        text = text[:start] + piece + text[end:]
    return text


@settings(max_examples=400, deadline=None)
@given(damaged_policies())
def test_any_policy_file_is_read_or_refused(text: bytes) -> None:
    with tempfile.NamedTemporaryFile(suffix=".yaml") as file:
        file.write(text)
        file.flush()
        try:
            policy = read_policy(Path(file.name))
        except PolicyError as error:
            assert all(line.startswith(file.name) for line in str(error).splitlines()), str(error)
        else:
            assert isinstance(policy, Policy) and policy.possible_methods()
