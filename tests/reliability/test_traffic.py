"""Random traffic in waves. Short in CI; `pytest tests/reliability/test_traffic.py --requests 10000` by hand.

After each wave the server must be as empty as before it: no request, no block in use, no parameters kept. At the end one request takes
every block there is, old answers come again, and memory has not grown.
"""

import time
from collections import Counter
from dataclasses import replace

import pytest
from checks import check_outcome, check_rows
from client import Choice, Outcome, send
from jobs import LIMIT, Job, Mix
from processes import memory
from scipy.stats import poisson
from server import Answer, Server

WAVE = 40
WARM = 1000
"""Requests after which every page of the cache and every buffer has been used."""
FLAT, COLD = 16, 96
"""MiB that a server may grow by in the second half of a run: of one that was warm before it, and of a short one."""
REPEATED, FIRST_STEPS = 12, 8
"""Answers that are asked for a second time, and how many of their steps are the first."""
PARTING, FALSE_ALARM = 0.001, 1e-3
"""Chance that a step parts from that of another run by rounding alone, which differs with the size of the batch and moves a draw on the
border between two tokens: upper 95 % limit of 15 in 24,000 steps of this traffic. And the chance that such steps alone fail a check."""


def test_base_and_adapter_answer_together_as_alone(busy_server: Server) -> None:
    """What the traffic's LoRA jobs rely on, and the jobs beside them: in one step, every row gets its own request's weights."""
    base = replace(Mix(-2).full_size(), prompt=tuple(range(200)), max_tokens=8, santa={})
    jobs = [base, replace(base, adapter=True)]
    alone = [send(busy_server.url, [job])[0] for job in jobs]
    assert alone[0].choices[0].tokens != alone[1].choices[0].tokens
    for old, new in zip(alone * 3, send(busy_server.url, jobs * 3), strict=True):
        assert agreement(old.choices[0], new.choices[0]) == 8, f"alone {old.choices}, together {new.choices}: {new.job}"


def test_traffic(busy_server: Server, request: pytest.FixtureRequest) -> None:
    total, seed = request.config.getoption("--requests"), request.config.getoption("--traffic-seed")
    deadline = time.monotonic() + 60 * request.config.getoption("--minutes")
    mix = Mix(seed)
    outcomes: list[Outcome] = []
    used: list[float] = []
    busy_server.reset_prefix_cache()
    busy_server.rpc("poison_cache")  # what is read without having been written is NaN from here on
    busy_server.rpc("watch_rows")
    with busy_server.counting() as gained:
        while len(outcomes) < total and time.monotonic() < deadline:
            outcomes += run_wave(busy_server, mix.wave(min(WAVE, total - len(outcomes))))
            used.append(memory(busy_server))
            print(f"{len(outcomes):6} requests, {used[-1]:.0f} MiB", flush=True)
    (full,) = send(busy_server.url, [Mix(-1).full_size()])
    check_outcome(full)
    (codes,) = busy_server.rpc("check_codes")
    assert codes["stray"] == 0 and codes["excess"] < 1e-3, codes
    kinds = count_kinds(outcomes) | {"preemptions": int(gained.total("vllm:num_preemptions_total"))}
    print(kinds)
    assert min(kinds.values()) > 0, f"the traffic had none of some kind: {kinds}"
    check_memory(used, FLAT if len(outcomes) >= 2 * WARM else COLD)
    check_again(busy_server, outcomes)


def run_wave(server: Server, wave: list[Job]) -> list[Outcome]:
    """Send a wave and check its outcomes, its rows, and what it left behind."""
    with server.counting() as gained:
        outcomes = send(server.url, wave)
        empty(server)
    for outcome in outcomes:
        check_outcome(outcome)
    (taken,) = server.rpc("take_rows")
    rows = Counter({tuple(row): count for *row, count in taken})
    check_rows(rows, outcomes, preempted=gained.total("vllm:num_preemptions_total") > 0)
    assert gained.total("santa_ignored_parameters_total") == 0
    assert server.healthy()
    return outcomes


def empty(server: Server, seconds: float = 60) -> None:
    """Wait until nobody is served or waits; then no block is in use."""
    deadline = time.monotonic() + seconds
    while True:
        metrics = server.metrics()
        left = {name: metrics.total(f"vllm:{name}") for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")}
        if not any(left.values()):
            return
        assert time.monotonic() < deadline, f"still there after {seconds} s: {left}"
        time.sleep(0.05)
        send(server.url, [Job(0, (1,), 1)])  # the gauges are those of the last step


def check_memory(used: list[float], growth: float) -> None:
    """The least of the last quarter is no more than that of the quarter before the middle: what the allocator holds for a while after a
    large step, some tens of MiB, is no leak, and a leak would raise the least as well."""
    quarter, middle = max(1, len(used) // 4), len(used) // 2 + 1
    assert min(used[-quarter:]) < min(used[:middle][-quarter:]) + growth, f"memory grew: {[round(megabytes) for megabytes in used]} MiB"


def check_again(server: Server, outcomes: list[Outcome]) -> None:
    """Some answers of the traffic are asked for again, alone. No more of them part from the old ones than rounding explains, neither
    anywhere nor in their first steps, which is where they part if parameters, weights or cache were not their own."""
    repeatable = [outcome for outcome in outcomes if is_repeatable(outcome)][-REPEATED:]
    again = [send(server.url, [replace(outcome.job, stream=False, leaves_within=None)])[0] for outcome in repeatable]
    pairs = list(zip(repeatable, again, strict=True))
    check_partings(pairs, FIRST_STEPS)
    check_partings(pairs, LIMIT)


def check_partings(pairs: list[tuple[Outcome, Outcome]], first: int) -> None:
    agreed = [agreement(old.choices[0], new.choices[0]) for old, new in pairs]
    ends = [min(first, len(old.choices[0].tokens)) for old, _ in pairs]
    parted = [pair for pair, steps, end in zip(pairs, agreed, ends, strict=True) if steps < end]
    looked_at = sum(min(steps + 1, end) for steps, end in zip(agreed, ends, strict=True))
    allowed = poisson.isf(FALSE_ALARM, PARTING * looked_at)
    print(f"{len(parted)} of {len(pairs)} old answers part in their first {first} steps ({looked_at} in all); allowed are {allowed:.0f}")
    assert len(parted) <= allowed, parted


def is_repeatable(outcome: Outcome) -> bool:
    greedy = outcome.job.sampling.get("temperature") == 0
    return greedy and outcome.status == 200 and not outcome.job.refused and len(outcome.choices[0].tokens) > 4


def agreement(old: Choice, new: Choice) -> int:
    """Leading steps that are the same."""
    return Answer(old.tokens, old.logprobs).agreement(Answer(new.tokens, new.logprobs))


def count_kinds(outcomes: list[Outcome]) -> dict[str, int]:
    """How many jobs there were of each kind that the run is about."""
    jobs = [outcome.job for outcome in outcomes]
    return {
        "answered": sum(outcome.status == 200 for outcome in outcomes),
        "refused": sum(job.refused for job in jobs),
        "left": sum(outcome.status == 0 for outcome in outcomes),
        "streamed": sum(job.stream for job in jobs),
        "chat": sum(bool(job.text) for job in jobs),
        "LoRA": sum(job.adapter for job in jobs),
        "n > 1": sum(job.n > 1 for job in jobs),
        "stop strings": sum("stop" in job.sampling for job in jobs),
        "guided": sum("structured_outputs" in job.sampling for job in jobs),
    }
