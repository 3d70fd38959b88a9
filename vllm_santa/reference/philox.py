"""Counter-based random numbers: Philox4x32-10 (Salmon et al., SC 2011), the same words as the CUDA kernels draw."""

from enum import IntEnum

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


class Stream(IntEnum):
    """Independent uses of one row's numbers at one position, layer and head."""

    values = 0
    selection = 1
    bernoulli = 2


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds on int64 tensors that hold 32-bit words; counters and keys broadcast against each other."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # int64 products wrap, but their 64 bits are those of the unsigned product.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = ((p1 >> 32) & _WORD) ^ c1 ^ k0, p1 & _WORD, ((p0 >> 32) & _WORD) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def uniform44(seed: Tensor, position: Tensor, layer: int, stream: Stream, head: Tensor, draw: Tensor) -> Tensor:
    """Integers uniform in [0, 2^44): one per element of the arguments' broadcast shape.

    seed: int64, the row's 64 bits. position: the token's place in its sequence. head: global query or KV head. draw: number of the draw.
    """
    words = (position & _WORD, torch.full_like(position, layer | stream << 16), head & _WORD, draw & _WORD)
    words = torch.broadcast_tensors(*words, seed)[:4]
    word0, word1, _, _ = philox(words, (seed & _WORD, (seed >> 32) & _WORD))
    return (word0 << 12) | (word1 >> 20)
