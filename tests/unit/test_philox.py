"""The random numbers are Random123's Philox4x32-10, laid out as docs/estimators.md says."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from vllm_santa.reference.fixed_point import ONE
from vllm_santa.reference.philox import Stream, philox, uniform44

# Random123's kat_vectors: counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
WORD = st.integers(0, 2**32 - 1)


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def tensors(values: list[int]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(value) for value in values)


def plain_philox(counter: list[int], key: list[int]) -> list[int]:
    """The algorithm in Python's integers, after the paper's Figure."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 % 2**32, (p0 >> 32) ^ c[3] ^ k[1], p0 % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_known_answers(counter: str, key: str, result: str) -> None:
    assert [int(word) for word in philox(tensors(words(counter)), tensors(words(key)))] == words(result)
    assert plain_philox(words(counter), words(key)) == words(result)


@settings(max_examples=50, deadline=None)
@given(st.lists(WORD, min_size=4, max_size=4), st.lists(WORD, min_size=2, max_size=2))
def test_any_counter_and_key(counter: list[int], key: list[int]) -> None:
    assert [int(word) for word in philox(tensors(counter), tensors(key))] == plain_philox(counter, key)


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 0x0123456789ABCDEF])
def test_layout_of_counter_and_key(seed: int) -> None:
    signed = seed - 2**64 if seed >= 2**63 else seed
    number = uniform44(torch.tensor(signed), torch.tensor(70_000), 31, Stream.bernoulli, torch.tensor(7), torch.tensor(3))
    word0, word1, _, _ = plain_philox([70_000, 31 | 2 << 16, 7, 3], [seed % 2**32, seed >> 32])
    assert int(number) == word0 << 12 | word1 >> 20


def test_every_part_of_the_counter_matters() -> None:
    base = {"seed": 9, "position": 100, "layer": 2, "stream": Stream.values, "head": 4, "draw": 0}
    changes = [{}, {"seed": 9 + 2**32}, {"position": 101}, {"layer": 3}, {"stream": Stream.selection}, {"head": 5}, {"draw": 1}]
    numbers = set()
    for change in changes:
        use = base | change
        seed, position, head, draw = (torch.tensor(use[name]) for name in ("seed", "position", "head", "draw"))
        numbers.add(int(uniform44(seed, position, use["layer"], use["stream"], head, draw)))
    assert len(numbers) == len(changes)


def test_arguments_broadcast() -> None:
    seed, head, draw = torch.arange(3).view(3, 1, 1), torch.arange(4).view(4, 1), torch.arange(5)
    numbers = uniform44(seed, torch.tensor(8), 1, Stream.values, head, draw)
    assert numbers.shape == (3, 4, 5)
    alone = uniform44(torch.tensor(2), torch.tensor(8), 1, Stream.values, torch.tensor(3), torch.tensor(4))
    assert numbers[2, 3, 4] == alone


@pytest.mark.parametrize("shift", [36, 12, 0])  # the upper, a middle and the lowest byte
def test_uniform(shift: int) -> None:
    numbers = uniform44(torch.arange(100).unsqueeze(-1), torch.tensor(1000), 0, Stream.values, torch.tensor(0), torch.arange(1000))
    assert numbers.min() >= 0 and numbers.max() < ONE
    counts = torch.bincount((numbers >> shift & 255).flatten(), minlength=256)
    assert chisquare(counts.numpy()).pvalue > 1e-3
