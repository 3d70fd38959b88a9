"""What a request may not ask for is answered with HTTP 400 that names the parameter, its value and what is allowed.

JSON's `true` reaches the server's check as the number 1 (docs/requests.md), so it is refused as what 1 is.
"""

import httpx
import openai
import pytest
from server import Ask, Server
from tiny_model import prompt

from vllm_santa.policy.parameters import PARAMETERS, UNKNOWN

ROWS = "8 to 512 rows, or a fraction of the context from 0.001 (0.1%) to 0.5 (50%)"
REFUSED = {
    "unknown key": ({"santa_budgett": 64}, ["santa_budgett", "64", "did you mean santa_budget?"]),
    "unknown method": ({"santa_method": "psp"}, ["santa_method", "'psp'", "did you mean pps?"]),
    "forbidden method": ({"santa_method": "prop"}, ["santa_method", "'prop'", "not allowed by this server's policy", "pps"]),
    "method of a wrong type": ({"santa_method": 3}, ["santa_method", "3", "allowed: dense, santa"]),
    "method true": ({"santa_method": True}, ["santa_method", "1", "allowed: dense, santa"]),
    "words for a budget": ({"santa_budget": "many"}, ["santa_budget", "'many'", ROWS]),
    "list for a budget": ({"santa_budget": [64]}, ["santa_budget", "[64]", ROWS]),
    "budget true": ({"santa_budget": True}, ["santa_budget", "1", ROWS]),
    "budget NaN": ({"santa_budget": "nan"}, ["santa_budget", "'nan'", ROWS]),
    "budget infinite": ({"santa_budget": "inf"}, ["santa_budget", "'inf'", ROWS]),
    "budget zero": ({"santa_budget": 0}, ["santa_budget", "0", ROWS]),
    "budget negative": ({"santa_budget": -64}, ["santa_budget", "-64", ROWS]),
    "budget over the limit": ({"santa_budget": 513}, ["santa_budget", "513", ROWS]),
    "budget under the limit": ({"santa_budget": 7}, ["santa_budget", "7", ROWS]),
    "fraction one": ({"santa_budget": 1.0}, ["santa_budget", "1", ROWS]),
    "fraction above one": ({"santa_budget": 1.5}, ["santa_budget", "1.5", ROWS]),
    "fraction over the limit": ({"santa_budget": "51%"}, ["santa_budget", "'51%'", ROWS]),
    "Bernoulli queries of zero samples": ({"santa_method": "pps", "santa_bernoulli": 0}, ["santa_bernoulli", "0", "from 1 to 262144"]),
    "Bernoulli queries of a method with codes": ({"santa_method": "ssa", "santa_bernoulli": 4}, ["santa_bernoulli", "ssa", "with santa_m"]),
    "Bernoulli queries of no method": ({"santa_bernoulli": 4}, ["santa_bernoulli", "no santa_method", "pps"]),
    "error of zero": ({"santa_max_error": 0}, ["santa_max_error", "0", "above 0 and up to 1"]),
    "error above one": ({"santa_max_error": "120%"}, ["santa_max_error", "'120%'", "above 0 and up to 1"]),
    "error of a dense row": ({"santa_method": "dense", "santa_max_error": 0.1}, ["santa_max_error", "0.1", "reads everything", "pps"]),
    "error of top rows": ({"santa_method": "topk", "santa_max_error": 0.1}, ["santa_max_error", "topk", "takes no row by chance"]),
    "error beside Bernoulli queries": (
        {"santa_method": "pps", "santa_max_error": 0.1, "santa_bernoulli": 4},
        ["santa_max_error", "0.1", "santa_bernoulli", "one of them"],
    ),
    "Bernoulli query of another kind": (
        {"santa_method": "pps", "santa_bernoulli": 4, "santa_bernoulli_query": "all"},
        ["santa_bernoulli_query", "'all'", "group, head"],
    ),
    "seed of words": ({"santa_seed": "seven"}, ["santa_seed", "'seven'", "an integer"]),
    "seed of 65 bits": ({"santa_seed": 2**64}, ["2**64 - 1"]),  # vLLM's own words
    "seed not whole": ({"santa_seed": 1.5}, ["santa_seed", "1.5", "an integer"]),
}


@pytest.mark.parametrize(("xargs", "words"), REFUSED.values(), ids=REFUSED)
def test_refused(server: Server, xargs: dict, words: list[str]) -> None:
    with server.counting() as gained, pytest.raises(openai.BadRequestError) as refusal:
        server.client.completions.create(model="tiny", prompt="Hello", max_tokens=4, extra_body={"vllm_xargs": xargs})
    for word in words:
        assert word in refusal.value.message
    if words != ["2**64 - 1"]:  # refused by vLLM, before it asks us
        assert gained.total("santa_refused_parameters_total") == 1
        known = words[0] if words[0] in PARAMETERS else UNKNOWN
        assert gained.total("santa_refused_parameters_total", parameter=known) == 1


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_json_does_not_know(server: Server, number: str) -> None:
    body = f'{{"model": "tiny", "prompt": "Hello", "max_tokens": 4, "vllm_xargs": {{"santa_budget": {number}}}}}'
    answer = httpx.post(f"{server.url}/v1/completions", content=body, headers={"Content-Type": "application/json"}, timeout=60)
    assert answer.status_code == 400
    assert "santa_budget" in answer.text


def test_chat_refuses_too(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="santa_budget: 0 is not a budget"):
        server.client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hello"}], extra_body={"vllm_xargs": {"santa_budget": 0}}
        )


def test_the_server_is_healthy_afterwards(server: Server) -> None:
    with pytest.raises(openai.BadRequestError):
        server.client.completions.create(model="tiny", prompt="Hello", extra_body={"vllm_xargs": {"santa_budget": -1}})
    assert server.healthy()
    assert server.metrics().total("santa_ignored_parameters_total") == 0, "nothing that was refused reached a worker"
    assert len(server.ask(Ask(prompt(300, seed=1), 8, {"method": "pps", "budget": 16})).tokens) == 8
