"""Keys and values that sparse decode steps wrote, and who finds them in the prefix cache (`prefix_cache: share`, the default)."""

from server import Ask, Server
from tiny_model import prompt


def test_shared_the_next_turn_is_not_exact(server: Server) -> None:
    """An exact request that continues a sparse answer takes over its blocks. tests/reliability has the same with `separate`."""
    server.reset_prefix_cache()
    sparse = Ask(prompt(300, 700), 64, {"method": "pps", "budget": 16, "seed": 1})
    next_turn = Ask([*sparse.prompt, *server.ask(sparse).tokens], 8, {"method": "dense"})
    with server.counting() as gained:
        taken_over = server.ask(next_turn)
    assert gained.total("vllm:prefix_cache_hits_total") == 352  # of 364 tokens, in blocks of 16
    server.reset_prefix_cache()
    assert taken_over.agreement(server.ask(next_turn)) < 8
