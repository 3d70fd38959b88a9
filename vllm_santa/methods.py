"""The decode methods a row may use, and what each of them needs."""

from dataclasses import dataclass
from enum import IntEnum


class Method(IntEnum):
    """A row's decode method; the number is what kernels and device buffers hold.

    The names are those of policies and of the request parameter `santa_method`.
    """

    dense = 0
    santa = 1
    strat = 2
    sys = 3
    prop = 4
    flash = 5
    pps = 6
    ssa = 7
    ssa_fixed = 8
    topk = 9
    uniform_tail = 10

    @property
    def needs_codes(self) -> bool:
        """True if the method scores keys by their PQ codes."""
        return self >= Method.ssa

    @property
    def scores_exactly(self) -> bool:
        """True if the method scores every key itself: the methods that Bernoulli queries go with."""
        return Method.santa <= self <= Method.pps

    @property
    def samples_values(self) -> bool:
        """True if the budget counts draws of V rows per query head; else it counts distinct rows per KV head."""
        return Method.santa <= self <= Method.flash

    @property
    def estimates_error(self) -> bool:
        """True if the rows that the method reads tell how far off its output is: those it took by chance. `topk` takes none by chance."""
        return self not in (Method.dense, Method.topk)


METHOD_NAMES = tuple(method.name for method in Method)

MAX_BERNOULLI_SAMPLES = 1 << 18


@dataclass(frozen=True, slots=True)
class BernoulliSettings:
    """Bernoulli queries (SANTA §5), which methods that score exactly may use; only the reference computes them.

    samples: B, draws per feature, 1 to MAX_BERNOULLI_SAMPLES. mean_group: one draw for the whole group (§5.1) instead of one for each
    query head. Raises ValueError for samples out of range.
    """

    samples: int
    mean_group: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.samples <= MAX_BERNOULLI_SAMPLES:
            raise ValueError(f"samples: {self.samples} is not between 1 and {MAX_BERNOULLI_SAMPLES}")

    def __str__(self) -> str:
        return f"Bernoulli queries of {self.samples} samples, one per {'group' if self.mean_group else 'query head'}"
