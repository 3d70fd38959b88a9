"""`prefix_cache: separate`: exact requests find no keys and values that sparse decode steps have written."""

from server import Ask, Server
from tiny_model import prompt


def test_the_next_turn_is_exact(busy_server: Server) -> None:
    """The counterpart of tests/serve/test_prefix_cache.py."""
    busy_server.reset_prefix_cache()
    santa = {"method": "pps", "budget": 16, "seed": 1}
    first = Ask(prompt(300, 700), 64, santa)
    conversation = [*first.prompt, *busy_server.ask(first).tokens]
    with busy_server.counting() as gained:
        exact = busy_server.ask(Ask(conversation, 8, {"method": "dense"}))
    assert gained.total("vllm:prefix_cache_hits_total") == 0
    with busy_server.counting() as gained:
        busy_server.ask(Ask(conversation, 8, santa))
    assert gained.total("vllm:prefix_cache_hits_total") == 352, "sparse requests still share among themselves"
    with busy_server.counting() as gained:
        again = busy_server.ask(Ask(conversation, 8, {"method": "dense"}))
    assert gained.total("vllm:prefix_cache_hits_total") == 352, "and so do exact ones"
    assert again.agreement(exact) == 8
