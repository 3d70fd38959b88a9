"""Answers of the main server: each request gets what it asked for, whatever else happens beside it."""

import pytest
from server import Answer, Ask, Server, assert_same
from tiny_model import prompt

WINDOWS = 32
"""Tokens of the sink and local windows together, under the main server's policy."""

SPARSE = ("santa", "strat", "sys", "flash", "pps", "ssa", "ssa_fixed", "topk", "uniform_tail")


def asks_of_all_methods(seed: int = 5) -> list[Ask]:
    """Three of each method."""
    return [
        Ask(prompt(260 + 10 * i, seed=i), 8, {"method": method, "budget": 32, "seed": seed})
        for i, method in enumerate(method for method in SPARSE for _ in range(3))
    ]


@pytest.fixture(scope="module")
def alone(server: Server) -> list[Answer]:
    """The answers to asks_of_all_methods, one at a time."""
    return [server.ask(ask) for ask in asks_of_all_methods()]


def test_vllm_says_which_backend_runs(server: Server) -> None:
    log = server.log.read_text()
    assert "SANTA policy: " in log
    assert "SANTA backend: policy " in log
    assert "Codebooks read from" in log


def test_methods_differ(server: Server, alone: list[Answer]) -> None:
    """Sparse answers are not the dense one in disguise. The first token is: it comes from the prompt."""
    asks = asks_of_all_methods()
    dense = server.ask_together([Ask(ask.prompt, ask.tokens, {"method": "dense"}) for ask in asks])
    for ask, answer, exact in zip(asks, alone, dense, strict=True):
        assert 1 <= answer.agreement(exact) < 4, ask.santa


def test_two_budgets_in_one_batch(server: Server) -> None:
    """topk reads its budget and the windows, to the row."""
    asks = [Ask(prompt(500, seed=1), 21, {"method": "topk", "budget": 16}), Ask(prompt(500, seed=2), 31, {"method": "topk", "budget": 96})]
    alone = [server.ask(ask) for ask in asks]
    with server.counting() as gained:
        together = server.ask_together(asks)
    assert gained.total("vllm:iteration_tokens_total_count") < 20 + 30, "the two never shared a step"
    assert gained.total("santa_rows_total", method="topk", reason="request") == 20 + 30
    rows = 20 * (16 + WINDOWS) + 30 * (96 + WINDOWS)
    assert gained.total("santa_key_rows_read_total", method="topk") == pytest.approx(rows)
    assert gained.total("santa_value_rows_read_total", method="topk") == pytest.approx(rows)
    assert_same(asks, together, alone)


def test_pps_reads_every_key_and_its_budget_of_values(server: Server) -> None:
    ask = Ask(prompt(500, seed=3), 21, {"method": "pps", "budget": 48, "seed": 1})
    with server.counting() as gained:
        server.ask(ask)
    context = sum(range(501, 521))
    assert gained.total("santa_context_tokens_total", method="pps") == context
    assert gained.total("santa_key_rows_read_total", method="pps") == pytest.approx(context)
    assert gained.total("santa_value_rows_read_total", method="pps") == pytest.approx(20 * 48, abs=20)


def test_bernoulli_queries_read_some_features_of_keys(server: Server) -> None:
    """One draw a feature reads few of them, many draws nearly all; the answer follows the seed."""
    exact = Ask(prompt(500, seed=3), 21, {"method": "pps", "budget": 256, "seed": 1})
    shares, answers = [], []
    for bernoulli in ({"bernoulli": 1}, {"bernoulli": 1, "bernoulli_query": "head"}, {"bernoulli": 4096}):
        with server.counting() as gained:
            answers.append(server.ask(Ask(exact.prompt, 21, exact.santa | bernoulli)))
        assert gained.total("santa_rows_total", method="pps", reason="request") == 20
        shares.append(gained.total("santa_key_rows_read_total", method="pps") / gained.total("santa_context_tokens_total", method="pps"))
    assert 0.1 < shares[0] < shares[1] < 0.9 and 0.95 < shares[2] <= 1
    again = server.ask(Ask(exact.prompt, 21, exact.santa | {"bernoulli": 1}))
    assert_same([exact], [again], answers[:1])
    assert all(1 <= answer.agreement(server.ask(exact)) < 4 for answer in answers[:2])


def test_a_fraction_grows_with_the_context(server: Server) -> None:
    with server.counting() as gained:
        server.ask(Ask(prompt(595, seed=3), 21, {"method": "topk", "budget": "10%"}))
    rows = sum(-(-context // 10) + WINDOWS for context in range(596, 616))
    assert gained.total("santa_value_rows_read_total", method="topk") == pytest.approx(rows)


def test_a_budget_that_covers_the_context_is_dense(server: Server) -> None:
    with server.counting() as gained:
        covered = server.ask(Ask(prompt(100, seed=4), 9, {"method": "topk", "budget": 400}))
    assert gained.total("santa_rows_total", reason="budget_covers_context") == 8
    assert covered.agreement(server.ask(Ask(prompt(100, seed=4), 9, {"method": "dense"}))) == 9


def test_requests_without_parameters_follow_the_policy(server: Server) -> None:
    with server.counting() as gained:
        server.ask(Ask(prompt(100, seed=4), 9))
    assert gained.total("santa_rows_total", method="dense", reason="no_rule") == 8


def test_answers_do_not_depend_on_the_batch(server: Server, alone: list[Answer]) -> None:
    """All methods side by side, in other slots than before, eight at a time: each gives the answer that its seed gave alone."""
    asks = asks_of_all_methods()
    with server.counting() as gained:
        together = server.ask_together(asks[::-1])[::-1]
    assert gained.total("vllm:iteration_tokens_total_count") < len(asks) * 8 / 2, "they hardly shared a step"
    for method in SPARSE:
        assert gained.total("santa_rows_total", method=method, reason="request") >= 3 * 7
    assert_same(asks, together, alone)


def test_another_seed_gives_another_answer(server: Server, alone: list[Answer]) -> None:
    for ask, answer, first in zip(asks_of_all_methods(), server.ask_together(asks_of_all_methods(seed=6)), alone, strict=True):
        if ask.santa["method"] == "topk":
            assert_same([ask], [answer], [first])
        else:
            assert 1 <= answer.agreement(first) < 4, ask.santa


def test_the_seed_of_the_request_serves_too(server: Server) -> None:
    ask = Ask(prompt(400, seed=0), 12, {"method": "pps", "budget": 32})
    body = ask.body()
    answers = [server.client.completions.create(**body, seed=seed).choices[0].token_ids for seed in (7, 7, 8)]
    assert answers[0] == answers[1] != answers[2]
    assert answers[0] == server.ask(Ask(ask.prompt, 12, ask.santa | {"seed": 7})).tokens
    assert server.ask(ask).logprobs != server.ask(ask).logprobs, "without a seed every request draws its own"


@pytest.mark.parametrize("stream", [False, True])
def test_text_and_chat_completions(server: Server, stream: bool) -> None:
    xargs = {"ignore_eos": True, "vllm_xargs": {"santa_method": "pps", "santa_budget": 16, "santa_seed": 3}}
    common = {"model": "tiny", "max_tokens": 16, "temperature": 0, "stream": stream, "extra_body": xargs}
    text = "It was a bright cold day in April, and the clocks were striking thirteen. " * 3
    with server.counting() as gained:
        completion = server.client.completions.create(prompt=text, **common)
        said = "".join(part.choices[0].text for part in completion) if stream else completion.choices[0].text
    assert gained.total("santa_rows_total", method="pps") == 15
    with server.counting() as gained:
        chat = server.client.chat.completions.create(messages=[{"role": "user", "content": text}], **common)
        answered = "".join(part.choices[0].delta.content or "" for part in chat) if stream else chat.choices[0].message.content
    assert gained.total("santa_rows_total", method="pps") == 15
    expected = _SAID.setdefault("said", (said, answered))
    assert said and answered and (said, answered) == expected, "streamed and not, the answers are the same"


_SAID: dict[str, tuple[str, str]] = {}
