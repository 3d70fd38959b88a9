"""The buffers behind a step, on the CPU: how they are divided and filled."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from vllm_santa.attention.device_rows import UNLIMITED, DeviceRows
from vllm_santa.attention.plan_buffers import PlanBuffers
from vllm_santa.attention.workspaces import Arena
from vllm_santa.error_meter import ErrorMeter
from vllm_santa.error_ops import ErrorWorkspace
from vllm_santa.jit import Shape
from vllm_santa.kernel_ops import CHUNK, PpsWorkspace, ValuesWorkspace
from vllm_santa.limits import Limits
from vllm_santa.methods import Method
from vllm_santa.reads import expected_rows
from vllm_santa.rows import SparseToken
from vllm_santa.ssa_ops import SsaWorkspace

CPU = torch.device("cpu")


def token(row: int, method: Method = Method.pps, budget: int = 64, seed: int = 1) -> SparseToken:
    return SparseToken(row, row, 1000, method, budget, seed)


def test_rows_get_what_was_decided_and_lose_it_again() -> None:
    rows = DeviceRows(5, CPU)
    rows.fill([token(1, Method.prop, 32, 2**64 - 2), token(4, Method.ssa, 7, 9)])
    assert rows.method.tolist() == [0, Method.prop, 0, 0, Method.ssa]
    assert rows.budget.tolist() == [0, 32, 0, 0, 7] and rows.seed.tolist() == [0, -2, 0, 0, 9]
    assert rows.limit.tolist() == [UNLIMITED, 1, UNLIMITED, UNLIMITED, 1]
    address = rows.method.data_ptr()
    rows.fill([token(0)])
    assert rows.method.tolist() == [Method.pps, 0, 0, 0, 0]
    for _ in range(2):
        rows.fill([])
        assert rows.method.tolist() == [0] * 5 and rows.limit.tolist() == [UNLIMITED] * 5
    assert rows.method.data_ptr() == address


def test_dense_steps_send_nothing() -> None:
    rows = DeviceRows(2, CPU)
    rows.method.fill_(99)
    rows.fill([])
    assert rows.method.tolist() == [99, 99]


LIMITS = Limits(rows=100, context=100_000, max_budget=lambda context: 20_000, tokens=2**20)


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 33, 100])
def test_rows_share_the_buffers(rows: int) -> None:
    context = LIMITS.row_context(rows)
    assert context % CHUNK == 0 and context >= CHUNK
    assert LIMITS.slots(rows) >= rows and (LIMITS.slots(rows) * context <= LIMITS.tokens or context == CHUNK)
    assert LIMITS.row_budget(rows) <= context
    assert context <= -(-LIMITS.context // CHUNK) * CHUNK


def test_fewer_rows_may_be_longer() -> None:
    assert LIMITS.row_context(1) >= LIMITS.context > LIMITS.row_context(100)
    for context in (1, 10_000, 50_000, 100_000):
        rows = LIMITS.rows_of(context)
        assert LIMITS.row_context(rows) >= context
        assert rows == LIMITS.slots(LIMITS.rows) or LIMITS.row_context(2 * rows) < context


@dataclass
class Buffers:
    values: Tensor
    done: Tensor
    codes: Tensor


def described(size: int) -> Buffers:
    with torch.device("meta"):
        return Buffers(torch.empty(size, 3), torch.zeros(size, dtype=torch.int32), torch.empty(7, dtype=torch.int16))


def test_buffers_of_all_sizes_lie_over_one_allocation() -> None:
    arena = Arena(CPU)
    for size in (4, 100, 9):
        arena.reserve(described(size))
    small, large = arena.place(described(4)), arena.place(described(100))
    assert small.values.shape == (4, 3) and large.codes.dtype == torch.int16
    assert small.values.data_ptr() == large.values.data_ptr() and small.done.data_ptr() == large.done.data_ptr()
    large.values.fill_(1.5)
    large.codes.fill_(3)
    assert (large.done == 0).all(), "counters lie apart, and stay zero"
    assert (large.values == 1.5).all() and large.codes.data_ptr() % 256 == large.values.data_ptr() % 256


def test_expected_reads() -> None:
    assert expected_rows(Method.pps, 512, 1000, 4, 256) == (1000, 512)
    assert expected_rows(Method.prop, 128, 1000, 4, 256) == (1000, 512)
    assert expected_rows(Method.prop, 1024, 1000, 4, 256) == (1000, 1000)
    assert expected_rows(Method.ssa, 100, 1000, 4, 256) == (356, 356)
    assert expected_rows(Method.topk, 900, 1000, 4, 256) == (1000, 1000)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_buffers_are_what_they_are_while_a_model_is_loaded(dtype: torch.dtype) -> None:
    """vLLM makes layers under the model's dtype as default, and runs them under float32."""
    shape = Shape(128, 4, torch.bfloat16)

    def described() -> list[list[tuple[str, torch.dtype, torch.Size]]]:
        sizes = (4, 8, shape, 32768, 4096, "meta")
        workspaces = PpsWorkspace(*sizes), ValuesWorkspace(*sizes), SsaWorkspace(*sizes), ErrorWorkspace(4, 8, shape, "meta")
        tensors = [[(name, value) for name, value in vars(one).items() if isinstance(value, Tensor)] for one in workspaces]
        return [[(name, value.dtype, value.shape) for name, value in one] for one in tensors]

    expected = described()
    torch.set_default_dtype(dtype)
    try:
        assert described() == expected
        assert ErrorMeter([0, 1], 4, 8, CPU, lambda sums: sums).sums.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_plans_of_steps_in_flight_have_buffers_of_their_own() -> None:
    """With two steps in flight, a plan's buffer comes up again in the third step after it at the earliest, whichever wrapper plans."""
    buffers, wrappers = PlanBuffers(concurrent=2, plans=2), [Wrapper() for _ in range(5)]
    used = [
        [buffers.renew(wrappers[i % 5])._pin_memory_int_workspace_buffer.data_ptr() for i in (step, 3 * step + 1)] for step in range(12)
    ]
    for step, own in enumerate(used):
        assert len(set(own)) == 2
        assert not set(own) & {address for earlier in used[max(0, step - 2) : step] for address in earlier}
    assert len({address for own in used for address in own}) == 6


class Wrapper:
    """As much of a FlashInfer wrapper as holds its plan."""

    def __init__(self) -> None:
        self._pin_memory_int_workspace_buffer = torch.empty(64, dtype=torch.uint8)
