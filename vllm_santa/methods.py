"""The decode methods a row may use, and what each of them needs."""

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
    def samples_values(self) -> bool:
        """True if the budget counts draws of V rows per query head; else it counts distinct rows per KV head."""
        return Method.santa <= self <= Method.flash


METHOD_NAMES = tuple(method.name for method in Method)
