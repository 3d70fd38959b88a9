"""Attention over taken rows: many rows at once give what each gives alone."""

import pytest
import torch
from sampling import uniform_bits
from torch import Tensor

from vllm_santa.methods import Method
from vllm_santa.reference.attend import Attended, attend_selected, attend_values, taken_rows
from vllm_santa.reference.scores import exact_scores
from vllm_santa.reference.ssa import SelectionSettings, select_by_proxy
from vllm_santa.reference.values import draws_needed

ROWS, HEADS, GROUP, TOKENS, DIM, BUDGET = 4, 2, 3, 300, 8, 20
SETTINGS = SelectionSettings(sink=8, local=8)


def attend(method: Method, query: Tensor, key: Tensor, value: Tensor, budget: Tensor, numbers: Tensor) -> Attended:
    scores = exact_scores(query, key, DIM**-0.5)
    if not method.needs_codes:
        return attend_values(method, scores, value, budget, numbers)
    selection = select_by_proxy(method, scores, SETTINGS, budget, numbers)
    return attend_selected(query, key, value, selection, DIM**-0.5)


def numbers_for(method: Method) -> Tensor:
    if method.samples_values:
        return uniform_bits(draws_needed(method, BUDGET, TOKENS), ROWS * HEADS * GROUP).unflatten(0, (ROWS, HEADS, GROUP))
    return uniform_bits(BUDGET if method == Method.ssa_fixed else 1, ROWS * HEADS).unflatten(0, (ROWS, HEADS))


@pytest.mark.parametrize("method", [method for method in Method if method != Method.dense])
def test_rows_and_heads_do_not_see_each_other(method: Method) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(ROWS, HEADS, GROUP, DIM, generator=generator) * 2
    key, value = torch.randn(2, ROWS, HEADS, TOKENS, DIM, generator=generator)
    budget = torch.tensor([[20, 3], [5, 20], [1, 1], [11, 7]])
    numbers = numbers_for(method)
    together = attend(method, query, key, value, budget, numbers)
    assert together.output.shape == (ROWS, HEADS, GROUP, DIM) and together.taken.shape == (ROWS, HEADS, TOKENS)
    for row in range(ROWS):
        alone = attend(method, query[row], key[row], value[row], budget[row], numbers[row])
        assert torch.equal(together.taken[row], alone.taken)
        assert torch.allclose(together.output[row], alone.output, atol=1e-5)


@pytest.mark.parametrize("method", [Method.sys, Method.pps, Method.ssa])
def test_one_cache_for_many_seeds(method: Method) -> None:
    """Keys and values need no copy for each draw: leading dimensions that are missing are shared."""
    generator = torch.Generator().manual_seed(1)
    query = (torch.randn(HEADS, GROUP, DIM, generator=generator) * 2).expand(ROWS, -1, -1, -1)
    key, value = torch.randn(2, HEADS, TOKENS, DIM, generator=generator)
    budget, numbers = torch.full((ROWS, HEADS), BUDGET), numbers_for(method)
    shared = attend(method, query, key, value, budget, numbers)
    copied = attend(method, query, key.expand(ROWS, -1, -1, -1), value.expand(ROWS, -1, -1, -1), budget, numbers)
    assert torch.equal(shared.taken, copied.taken) and torch.allclose(shared.output, copied.output, atol=1e-6)
    assert not torch.equal(shared.taken[0], shared.taken[1])


def test_taken_rows() -> None:
    taken = torch.tensor([[[True, False, True, True]], [[False, False, False, True]], [[False] * 4]])
    rows, valid = taken_rows(taken)
    assert rows[0, 0].tolist() == [0, 2, 3] and rows[1, 0, 0] == 3
    assert valid.squeeze(1).tolist() == [[True] * 3, [True, False, False], [False] * 3]
    assert Attended(torch.zeros(3, 1, 1, 2), taken).rows() == 4 / 3
