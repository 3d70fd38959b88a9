"""Probabilities as integers (docs/estimators.md): exact sums and comparisons whatever the tiling, order or device."""

from functools import cache

import torch
from torch import Tensor

ONE_BITS = 44
ONE = 1 << ONE_BITS
"""One expected row."""
LOG_STEPS = 256
"""Log-codes per octave."""
MAX_LEVEL = (1 << 24) - 1
"""A λ so large that every token is certain."""
EXCLUDED = -32768
"""The log-code of a token that may not be selected."""


@cache
def exp2_table(device: torch.device) -> Tensor:
    """EXP2 of docs/estimators.md, int64 [256]."""
    exp2 = [round(2.0 ** (ONE_BITS - 1) * 2.0 ** (f / LOG_STEPS)) for f in range(LOG_STEPS)]
    return torch.tensor(exp2, dtype=torch.int64, device=device)


@cache
def _fine_table(device: torch.device) -> Tensor:
    return torch.tensor([round(2.0**16 * 2.0 ** (f / 65536)) for f in range(256)], dtype=torch.int64, device=device)


def power(z: Tensor) -> Tensor:
    """min(1, 2^(z/256)) in units of 1/ONE. z: int64, any shape."""
    exp2 = exp2_table(z.device)
    shift = (-(z >> 8) - 1).clamp(0, 63)
    return torch.where(z >= 0, ONE, exp2[z & 255] >> shift)


def power_fine(codes: Tensor, level: Tensor) -> Tensor:
    """min(1, 2^(code/256 + level/65536)) in units of 1/ONE, 0 where the code is EXCLUDED.

    codes: int64 [..., n]. level: int64 [...], one λ per row and head.
    """
    fine = _fine_table(codes.device)
    level = level.unsqueeze(-1)
    value = (power(codes + (level >> 8)) * fine[level & 255]) >> 16
    return torch.where(codes == EXCLUDED, 0, value.clamp(max=ONE))


def log_codes(weights: Tensor, included: Tensor) -> Tensor:
    """The signed 16-bit log-codes of positive weights, as int64.

    weights: float [..., n], any positive numbers. included: bool [..., n], False gives EXCLUDED.
    """
    codes = torch.floor(LOG_STEPS * torch.log2(weights)).clamp(-32767, 32767)
    return torch.where(included, codes, EXCLUDED).to(torch.int64)


def pow2(exponent: Tensor) -> Tensor:
    """Exactly 2^exponent as float64, 0 below the normal range. exponent: int64, at most 1023."""
    return torch.where(exponent < -1022, 0, (exponent.clamp(min=-1022) + 1023) << 52).view(torch.float64)
