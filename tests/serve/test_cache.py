"""The KV cache of the main server under preemption, prefix hits, chunked prefill and the reuse of blocks.

Every test compares with the answers of an idle server, and ends with the codes of every cached token checked against its key.
"""

from collections.abc import Iterator

import openai
import pytest
from server import Ask, Server, assert_same
from tiny_model import prompt

METHODS = ("ssa", "pps", "topk", "santa", "ssa_fixed", "uniform_tail")


@pytest.fixture(autouse=True)
def poisoned(server: Server) -> Iterator[None]:
    """An empty cache full of NaN: whatever is read without having been written shows. Afterwards the codes must fit the keys."""
    server.reset_prefix_cache()
    (found,) = server.rpc("poison_cache")
    assert found["layers"] == 2
    yield
    (codes,) = server.rpc("check_codes")
    assert codes["written"] > 2 * 400, "the test wrote nothing"
    assert codes["stray"] == 0
    assert codes["excess"] < 1e-3


def asks(length: int, tokens: int, first_seed: int, methods: tuple[str, ...]) -> list[Ask]:
    return [
        Ask(prompt(length, first_seed + i), tokens, {"method": method, "budget": 32, "seed": 40 + i}) for i, method in enumerate(methods)
    ]


def test_poison_shows(server: Server) -> None:
    """What the other tests rely on: an answer from poisoned pages is not the answer, and the probe sees who wrote where."""
    ask = Ask(prompt(500, 100), 8, {"method": "ssa", "budget": 32, "seed": 1})
    right = server.ask(ask)
    (codes,) = server.rpc("check_codes")
    assert codes["written"] == 2 * 507
    server.rpc("poison_cache")  # the cache still believes in its blocks
    with pytest.raises((AssertionError, openai.APIError)):
        assert server.ask(ask).agreement(right) > 1
    server.reset_prefix_cache()
    server.rpc("poison_cache")
    assert server.ask(ask).agreement(right) == 8


def test_preemption(server: Server) -> None:
    """Five answers outgrow a pool of 2,560 tokens; who is thrown out comes back and says what it would have said.

    Here every step counts, so rounding gets chances (see assert_same), and so does a busy machine, on which the five may come too far apart
    to outgrow the pool together. Tokens that were drawn anew would fail every time.
    """
    attempts = []
    for first_seed in (200, 210, 220, 230):
        crowd = asks(470, 64, first_seed, METHODS[:5])
        alone = [server.ask(ask) for ask in crowd]
        server.reset_prefix_cache()
        server.rpc("poison_cache")
        with server.counting() as gained:
            together = server.ask_together(crowd)
        preemptions = gained.total("vllm:num_preemptions_total")
        agreed = [answer.agreement(before) for answer, before in zip(together, alone, strict=True)]
        if preemptions > 0 and agreed == [64] * 5:
            return
        attempts.append((preemptions, agreed))
    raise AssertionError(f"preemptions, and steps that agree: {attempts}")


def test_prefix_hits(server: Server) -> None:
    """The second time, the prompt's keys and codes come out of the cache."""
    crowd = asks(500, 8, 300, METHODS * 2)
    first = []
    second = []
    for ask in crowd:
        first.append(server.ask(ask))
        with server.counting() as gained:
            second.append(server.ask(ask))
        assert gained.total("vllm:prefix_cache_hits_total") >= 480
    assert_same(crowd, second, first)


def test_long_prefill_beside_decoding(server: Server) -> None:
    """A prompt of six chunks arrives while others decode: those stay sparse, and answer as before."""
    crowd = [*asks(120, 40, 400, ("ssa", "pps") * 2), Ask(prompt(1500, 420), 8, {"method": "topk", "budget": 32, "seed": 1})]
    with server.counting() as one_by_one:
        alone = [server.ask(ask) for ask in crowd]
    server.reset_prefix_cache()
    with server.counting() as gained:
        together = server.ask_together(crowd)
    steps = "vllm:iteration_tokens_total_count"
    assert gained.total(steps) < one_by_one.total(steps) - 10, "nothing ran side by side"
    for method, rows in (("ssa", 2 * 39), ("pps", 2 * 39), ("topk", 7), ("dense", 0)):
        assert gained.total("santa_rows_total", method=method) == rows
    assert_same(crowd, together, alone)


def test_poisoned_blocks_are_never_read(server: Server) -> None:
    """Pages whose unwritten part is NaN give the answers that pages full of old tokens give."""
    crowd = asks(333, 8, 500, METHODS * 2)  # ends within a block
    fresh = server.ask_together(crowd)
    server.reset_prefix_cache()
    again = [server.ask(ask) for ask in reversed(crowd)]
    assert_same(crowd, again[::-1], fresh)
