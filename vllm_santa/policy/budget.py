"""A budget: how many rows a decode row may read, as a number or as a part of its context."""

import math
import re
from dataclasses import dataclass

MAX_ROWS = 2**18
"""The largest budget that the integer arithmetic of the estimators holds (docs/estimators.md)."""

ALLOWED = f"rows as an integer from 1 to {MAX_ROWS}, or a fraction of the context above 0 and below 1, as 0.02 or '2%'"

_PARTS = 10**9
_DIGITS = re.compile(r"[0-9]{1,18}")
_PERCENT = re.compile(r"([0-9]{1,18}(?:\.[0-9]{0,18})?|\.[0-9]{1,18}) ?%")


@dataclass(frozen=True, slots=True)
class Budget:
    """`count` rows, or (where `count` is 0) `parts` billionths of the context.

    The unit is the method's: draws per query head for santa, strat, sys, prop and flash; distinct rows per KV head, without the sink and
    local windows, for the others. Fractions are kept as integers so that 7 % of 100 is 7 rows on every machine.
    """

    count: int
    parts: int = 0

    @property
    def is_fraction(self) -> bool:
        return self.count == 0

    @property
    def fraction(self) -> float:
        """The part of the context in (0, 1); 0.0 for a number of rows."""
        return self.parts / _PARTS

    def rows(self, context: int) -> int:
        """Rows for a context of that many tokens: fractions round up; at least 1, at most MAX_ROWS."""
        return min(MAX_ROWS, self.count or max(1, -(-self.parts * context // _PARTS)))

    def __str__(self) -> str:
        return f"{self.parts / (_PARTS // 100):g}%" if self.is_fraction else str(self.count)

    @classmethod
    def parse(cls, value: object, field: str = "budget", allowed: str = ALLOWED) -> "Budget":
        """Read an int, a float, digits in a string, or a percentage in a string. Limits above MAX_ROWS are the caller's to refuse or clamp.

        Raises:
            ValueError: names the field, the value and what is allowed.
        """
        number = value
        if isinstance(value, str):
            text = value.strip()
            if _DIGITS.fullmatch(text):
                number = int(text)
            elif percent := _PERCENT.fullmatch(text):
                number = float(percent[1]) / 100
        if isinstance(number, int) and not isinstance(number, bool) and number >= 1:
            return cls(number)
        if isinstance(number, float) and math.isfinite(number) and 0 < (parts := round(number * _PARTS)) < _PARTS:
            return cls(0, parts)
        raise ValueError(f"{field}: {shown(value)} is not a budget; allowed: {allowed}")


def shown(value: object) -> str:
    """A value as an error message shows it: its repr, cut where it grows long."""
    if isinstance(value, int) and value.bit_length() > 256:  # Python refuses to print integers of thousands of digits
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
