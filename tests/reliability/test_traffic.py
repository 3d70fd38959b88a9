"""Random traffic in waves. Short in CI; `pytest tests/reliability/test_traffic.py --requests 10000` by hand.

After each wave the server must be as empty as before it: no request, no block in use, no parameters kept. At the end one request takes
every block there is, old answers come again, and memory has not grown.
"""

import time
from collections import Counter
from dataclasses import replace

import pytest
from checks import check_outcome, check_rows
from client import Outcome, send
from jobs import Job, Mix
from processes import memory
from server import NOISE, Server

WAVE = 40
WARM = 1000
"""Requests after which every page of the cache and every buffer has been used."""
FLAT, COLD = 16, 96
"""MiB that a server may grow by in the second half of a run: of one that was warm before it, and of a short one."""
REPEATED = 12
"""Answers that are asked for a second time."""


def test_the_adapter_has_its_own_answers(busy_server: Server) -> None:
    """What the traffic's LoRA jobs rely on."""
    job = replace(Mix(-2).full_size(), prompt=tuple(range(200)), max_tokens=8)
    base, adapted = send(busy_server.url, [job, replace(job, adapter=True)])
    assert base.choices[0].tokens != adapted.choices[0].tokens


def test_traffic(busy_server: Server, request: pytest.FixtureRequest) -> None:
    total, seed = request.config.getoption("--requests"), request.config.getoption("--traffic-seed")
    mix = Mix(seed)
    outcomes: list[Outcome] = []
    used: list[float] = []
    busy_server.reset_prefix_cache()
    busy_server.rpc("poison_cache")  # what is read without having been written is NaN from here on
    busy_server.rpc("watch_rows")
    with busy_server.counting() as gained:
        while len(outcomes) < total:
            outcomes += run_wave(busy_server, mix.wave(min(WAVE, total - len(outcomes))))
            used.append(memory(busy_server))
            print(f"{len(outcomes):6} requests, {used[-1]:.0f} MiB", flush=True)
    check_again(busy_server, outcomes)
    (codes,) = busy_server.rpc("check_codes")
    assert codes["stray"] == 0 and codes["excess"] < 1e-3, codes
    kinds = count_kinds(outcomes) | {"preemptions": int(gained.total("vllm:num_preemptions_total"))}
    print(kinds)
    assert min(kinds.values()) > 0, f"the traffic had none of some kind: {kinds}"
    growth = FLAT if len(outcomes) >= 2 * WARM else COLD
    assert used[-1] < used[len(used) // 2] + growth, f"memory grew: {[round(megabytes) for megabytes in used]} MiB"


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


def check_again(server: Server, outcomes: list[Outcome]) -> None:
    """A request of full size gets the whole cache; then some answers of the traffic are asked for again, alone."""
    (full,) = send(server.url, [Mix(-1).full_size()])
    check_outcome(full)
    repeatable = [outcome for outcome in outcomes if is_repeatable(outcome)][-REPEATED:]
    again = [send(server.url, [replace(outcome.job, stream=False, leaves_within=None)])[0] for outcome in repeatable]
    same = sum(is_same(old, new) for old, new in zip(repeatable, again, strict=True))
    # Batches of other sizes round differently, which now and then moves a draw (tests/serve/server.py).
    assert same > 0.7 * len(repeatable), f"{same} of {len(repeatable)} answers came again"


def is_repeatable(outcome: Outcome) -> bool:
    greedy = outcome.job.sampling.get("temperature") == 0
    return greedy and outcome.status == 200 and not outcome.job.refused and len(outcome.choices[0].tokens) > 4


def is_same(old: Outcome, new: Outcome) -> bool:
    a, b = old.choices[0], new.choices[0]
    return a.tokens == b.tokens and all(abs(x - y) < NOISE for x, y in zip(a.logprobs, b.logprobs, strict=True))


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
