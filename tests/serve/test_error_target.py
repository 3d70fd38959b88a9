"""Error targets on a real server: budgets follow them, the same seed gives the same answer, and /metrics says what was achieved."""

import pytest
from server import NOISE, Answer, Ask, Delta, Server
from tiny_model import prompt

TOKENS = 121


def ask(max_error: float, method: str = "pps", number: int = 1, tokens: int = TOKENS, **others: object) -> Ask:
    """number: of the prompt, and the seed unless `others` name one."""
    return Ask(prompt(900, number), tokens, {"method": method, "seed": number, "max_error": max_error} | others)


def mean(gained: Delta, name: str, method: str) -> float:
    return gained.total(f"santa_estimated_{name}_total", method=method) / gained.total("santa_estimated_rows_total", method=method)


@pytest.mark.parametrize("method", ["pps", "ssa", "sys"])
def test_the_budget_follows_the_target(server: Server, method: str) -> None:
    """A loose and a tight target, from the same budget: the errors end up near them, by very different budgets."""
    errors, budgets = {}, {}
    for target in (0.3, 0.1):
        with server.counting() as gained:
            server.ask(ask(target, method, budget=64))
        rows = gained.total("santa_rows_total", method=method, reason="request")
        assert rows == TOKENS - 1 and gained.total("santa_estimated_rows_total", method=method) == pytest.approx(rows, abs=4)
        errors[target], budgets[target] = (mean(gained, name, method) for name in ("error", "budget"))
        missed = gained.total("santa_missed_targets_total", method=method)
        assert 0 < missed < rows
    assert errors[0.1] < 0.13 and errors[0.1] < 0.7 * errors[0.3] and errors[0.3] < 0.33, (errors, budgets)
    assert budgets[0.1] > 1.5 * budgets[0.3]


def test_without_a_method_it_is_the_default(server: Server) -> None:
    with server.counting() as gained:
        server.ask(Ask(prompt(900, 2), 21, {"max_error": "20%", "seed": 1}))
    assert gained.total("santa_rows_total", method="pps", reason="request") == 20


def test_rows_without_a_target_are_not_estimated(server: Server) -> None:
    plain = Ask(prompt(900, 2), 21, {"method": "pps", "budget": 64})
    server.ask(plain)  # estimates of requests before it become known in its first steps
    with server.counting() as gained:
        server.ask(plain)
    assert gained.total("santa_estimated_rows_total") == 0


def agreeing(answer: Answer, other: Answer) -> float:
    """Share of the steps with the same token and log-probability. Rounding, which differs with the batch, moves a draw now and then, and
    one step with it; other budgets or random numbers make every step another from there on."""
    steps = zip(answer.tokens, other.tokens, answer.logprobs, other.logprobs, strict=True)
    return sum(a == b and abs(p - q) <= NOISE for a, b, p, q in steps) / len(other.tokens)


def test_the_same_seed_gives_the_same_answer_beside_others(server: Server) -> None:
    """Of four answers one may go its own way, where a moved draw makes another token the likeliest."""
    asks = [ask(target, method, seed, 48) for seed, (target, method) in enumerate([(0.1, "pps"), (0.2, "pps"), (0.1, "ssa"), (0.2, "sys")])]
    alone = [server.ask(one) for one in asks]
    assert agreeing(server.ask(asks[0]), alone[0]) > 0.9
    others = [Ask(prompt(600, 50 + i), 60, {"method": "ssa", "budget": 32}) for i in range(2)]
    together = server.ask_together([*others, *asks])[2:]
    shares = [agreeing(answer, before) for answer, before in zip(together, alone, strict=True)]
    assert sorted(shares)[1] > 0.9, shares
    other = [server.ask(ask(0.1, "pps", 0, 48, seed=77)), server.ask(ask(0.2, "pps", 0, 48))]
    assert all(agreeing(answer, alone[0]) < 0.3 for answer in other), "another seed, another target"


def test_preemption(server: Server) -> None:
    """Who is thrown out in the middle of its answer comes back to the budgets that it had. (Attempts as in test_cache.py.)"""
    attempts = []
    for first_seed in (400, 410, 420, 430):
        crowd = [Ask(prompt(470, first_seed + i), 64, {"method": "pps", "max_error": 0.15, "seed": first_seed + i}) for i in range(5)]
        alone = [server.ask(one) for one in crowd]
        server.reset_prefix_cache()
        with server.counting() as gained:
            together = server.ask_together(crowd)
        preemptions = gained.total("vllm:num_preemptions_total")
        shares = [agreeing(answer, before) for answer, before in zip(together, alone, strict=True)]
        if preemptions > 0 and min(shares) > 0.9:
            return
        attempts.append((preemptions, shares))
    raise AssertionError(f"preemptions, and shares of steps that agree: {attempts}")
