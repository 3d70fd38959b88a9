"""How many rows of K and V a method reads, from what was asked for."""

from vllm_santa.methods import Method


def expected_rows(method: Method, budget: int, context: int, group: int, windows: int) -> tuple[float, float]:
    """Rows of K and of V that a sparse row of the batch reads per KV head.

    budget: draws per query head or rows per KV head, as the method counts. group: query heads per KV head. windows: sink and local tokens.
    Draws of one token are counted once each, so for methods that draw values the second number is an upper bound.
    """
    if method.needs_codes:
        rows = min(budget + windows, context)
        return rows, rows
    return context, min(budget * group if method.samples_values else budget, context)
