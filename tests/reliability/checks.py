"""What must hold for every outcome, and for the rows that the server decoded meanwhile."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from client import Choice, Outcome
from jobs import FIRST_CHARACTER, LIMIT, REGEX, STOPS, Job

Rows = Counter[tuple[int, int, str, int, int]]
"""How often a row was decoded: (seed, context, method, budget, Bernoulli samples)."""


def check_outcome(outcome: Outcome) -> None:
    """Nothing is lost: who asked well and stayed has n whole answers, who asked badly has a 400, who left is not checked."""
    job = outcome.job
    if job.refused:
        # vLLM checks the parameters of a stream when it has begun: the 400 is its first and only event.
        assert outcome.status == 400 or (job.stream and '"code": 400' in outcome.error), outcome
        assert not outcome.choices, outcome
        assert "santa_" in outcome.error or len(job.prompt) + job.max_tokens > LIMIT, outcome.error
        return
    if job.leaves and outcome.status == 0:
        assert not outcome.error, outcome.error
        return
    assert outcome.status == 200 and not outcome.error, outcome
    assert sorted(outcome.choices) == list(range(job.n)), outcome
    for choice in outcome.choices.values():
        _check_choice(job, choice)


def _check_choice(job: Job, choice: Choice) -> None:
    assert choice.finish in ("length", "stop"), choice
    if choice.finish == "length":
        assert len(choice.tokens) == job.max_tokens, choice
    assert 1 <= len(choice.tokens) <= job.max_tokens, choice
    assert len(choice.logprobs) == len(choice.tokens), choice
    assert all(math.isfinite(logprob) and logprob <= 1e-5 for logprob in choice.logprobs), choice
    if "stop" in job.sampling:
        assert not set(STOPS) & set(choice.text), choice
    if "structured_outputs" in job.sampling and choice.finish == "stop" and "stop" not in job.sampling:
        # Not the text: vLLM puts the end of a prompt that is not UTF-8 before it.
        assert re.fullmatch(REGEX, "".join(chr(token + FIRST_CHARACTER) for token in choice.tokens[:-1])), choice


def check_rows(rows: Rows, outcomes: Sequence[Outcome], preempted: bool) -> None:
    """Every sparse row has its own request's method and budget, and each decode step of an answer was decoded once.

    preempted: some requests were, and had rows decoded again.
    """
    by_seed: dict[int, Rows] = {}
    for row, count in rows.items():
        by_seed.setdefault(row[0], Counter())[row] = count
    known = {outcome.job.seed for outcome in outcomes}
    assert by_seed.keys() <= known, f"rows of nobody's seed: {by_seed.keys() - known}"
    for outcome in outcomes:
        _check_rows_of(outcome, by_seed.get(outcome.job.seed, Counter()), preempted)


def _check_rows_of(outcome: Outcome, rows: Rows, preempted: bool) -> None:
    job = outcome.job
    for _, context, *decided in rows:
        assert job.sparse_row(context) == tuple(decided), f"{job}: decoded {decided} at {context}"
    if job.refused:
        assert not rows, f"{job}: refused, and decoded {rows}"
    if outcome.status != 200 or job.refused:
        return
    expected = _expected(job, outcome.prompt_tokens, [len(choice.tokens) for choice in outcome.choices.values()])
    if preempted or any(choice.finish == "stop" for choice in outcome.choices.values()):  # decoded again, or one step past a stop string
        assert not expected - rows, f"{job}: not decoded: {expected - rows}"
    else:
        assert rows == expected, f"{job}: {rows - expected} too many, {expected - rows} missing"


def _expected(job: Job, prompt_tokens: int, answers: Iterable[int]) -> Rows:
    """The sparse rows of answers of that many tokens. The first token of an answer comes from the prompt."""
    rows: Rows = Counter()
    for tokens in answers:
        for context in range(prompt_tokens + 1, prompt_tokens + tokens):
            decided = job.sparse_row(context)
            if decided is not None:
                rows[(job.seed, context, *decided)] += 1
    return rows
