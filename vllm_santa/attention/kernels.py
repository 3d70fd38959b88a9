"""The CUDA kernels that decode a batch's sparse rows, by families of methods that share launches."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.logger import init_logger

from vllm_santa.attention.workspaces import Arena
from vllm_santa.error_ops import ErrorWorkspace, estimate_errors
from vllm_santa.jit import Shape, encode_spec, error_spec, santa_spec, ssa_spec
from vllm_santa.kernel_ops import VALUE_METHODS, Layer, PpsWorkspace, Rows, ValuesWorkspace, pps, sample_values
from vllm_santa.limits import Limits
from vllm_santa.methods import Method
from vllm_santa.reference.fixed_point import exp2_table
from vllm_santa.reference.ssa import SelectionSettings
from vllm_santa.ssa_ops import SSA_METHODS, CodebookBuffers, SsaWorkspace, ssa

logger = init_logger("vllm.santa.kernels")


@dataclass(frozen=True)
class Wanted:
    """Whose errors are wanted: measured, int8 [R], and where they go: sums, float32 [>= R, parts, 2], contiguous."""

    measured: Tensor
    sums: Tensor


@dataclass(frozen=True)
class Batch:
    """One layer's view of a step. query, output: [R, Hq, D]. kv: [B, H, N, 2D]. codes: uint8 [B, H, N, M]."""

    query: Tensor
    kv: Tensor
    codes: Tensor
    rows: Rows
    layer: Layer
    codebook: CodebookBuffers
    output: Tensor
    errors: Wanted | None = None


@dataclass(frozen=True)
class Family:
    """Methods whose rows are decoded by the same launches.

    spec: FlashInfer's build specification of their module. workspace: (rows, kv_heads, shape, max_context, max_budget, device) -> its
    buffers. launch: decodes the batch's rows of these methods, and leaves their log-sum-exps where there is a tensor for them. selects:
    leaves a list of the rows it took, from which their error can be estimated.
    """

    methods: frozenset[Method]
    spec: Any
    workspace: Callable[..., Any]
    launch: Callable[[Batch, Any, SelectionSettings, Tensor | None], None]
    selects: bool = True


def _pps(batch: Batch, workspace: PpsWorkspace, settings: SelectionSettings, lse: Tensor | None) -> None:
    pps(batch.query, batch.kv, batch.rows, batch.layer, batch.output, workspace, lse)


def _values(methods: frozenset[Method]) -> Callable[[Batch, ValuesWorkspace, SelectionSettings, Tensor | None], None]:
    def launch(batch: Batch, workspace: ValuesWorkspace, settings: SelectionSettings, lse: Tensor | None) -> None:
        sample_values(batch.query, batch.kv, batch.rows, batch.layer, batch.output, workspace, lse, methods)

    return launch


def _proxies(methods: tuple[Method, ...]) -> Callable[[Batch, SsaWorkspace, SelectionSettings, Tensor | None], None]:
    def launch(batch: Batch, workspace: SsaWorkspace, settings: SelectionSettings, lse: Tensor | None) -> None:
        arguments = (batch.query, batch.kv, batch.codes, batch.rows, batch.layer, batch.codebook, settings, batch.output, workspace)
        ssa(*arguments, lse, methods)

    return launch


def families_of(methods: Iterable[Method], shape: Shape, subspaces: int) -> tuple[Family, ...]:
    """The families that some of `methods` need, each cut down to those methods. subspaces: of the codebooks."""
    possible = frozenset(methods)
    values = possible & frozenset(VALUE_METHODS)
    proxies = possible & frozenset(SSA_METHODS)
    families = (
        Family(possible & {Method.pps}, santa_spec(shape), PpsWorkspace, _pps),
        Family(values, santa_spec(shape), ValuesWorkspace, _values(values), selects=False),
        Family(proxies, ssa_spec(shape, subspaces), partial(SsaWorkspace, subspaces=subspaces), _proxies(tuple(proxies))),
    )
    return tuple(family for family in families if family.methods)


class Kernels:
    """Decodes sparse rows for layers of one head shape. Compiles and sets up on construction; allocates nothing afterwards.

    Raises RuntimeError if a kernel cannot be compiled; `vllm-santa doctor` says what is missing.
    """

    def __init__(
        self,
        shape: Shape,
        kv_heads: int,
        limits: Limits,
        methods: Iterable[Method],
        subspaces: int,
        settings: SelectionSettings,
        device: torch.device,
        targets: bool = False,
    ):
        """targets: whether rows can have error targets."""
        self.shape, self.limits, self.settings = shape, limits, settings
        self._families = families_of(methods, shape, subspaces)
        self.errors = ErrorWorkspace(limits.slots(limits.rows), kv_heads, shape, device) if targets else None
        self._compile(subspaces)
        exp2_table(device)
        self._kv_heads = kv_heads
        self._arena = Arena(device)
        self._placed: dict[int, tuple[Any, ...]] = {}
        for slots in [1 << power for power in range(limits.slots(limits.rows).bit_length())]:
            for buffers in self._describe(slots):
                self._arena.reserve(buffers)
        logger.info_once(
            "CUDA kernels decode sparse rows (%s), with %.0f MiB of buffers for %d tokens of context a step.",
            ", ".join(method.name for family in self._families for method in sorted(family.methods)),
            self._arena.size / 2**20,
            limits.tokens,
        )

    def _compile(self, subspaces: int) -> None:
        """Everything that layers of this shape need, side by side; a minute the first time, nothing once it is in FlashInfer's cache."""
        specs = {family.spec.name: family.spec for family in self._families}
        if any(method.needs_codes for family in self._families for method in family.methods):
            encoder = encode_spec(self.shape.head_dim, self.shape.dtype, subspaces)
            specs[encoder.name] = encoder
        if self.errors is not None:
            specs[error_spec(self.shape).name] = error_spec(self.shape)
        logger.info_once("Building the CUDA kernels %s, or finding them built.", ", ".join(specs))
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda spec: spec.build_and_load(), specs.values()))

    def families(self, methods: Iterable[Method]) -> frozenset[int]:
        """Indices of the families that decode rows of these methods."""
        found = frozenset(methods)
        return frozenset(index for index, family in enumerate(self._families) if family.methods & found)

    def launch(self, batch: Batch, families: Iterable[int]) -> None:
        """Decode the batch's rows of these families' methods, with the errors that are wanted; rows of others cost a few exits of blocks.

        Raises ValueError if errors are wanted that the kernels were not made for.
        """
        if batch.errors is not None and self.errors is None:
            raise ValueError("errors: these kernels were made without error targets")
        slots = self.limits.slots(batch.rows.seq_lens.shape[0])
        if slots not in self._placed:
            self._placed[slots] = tuple(map(self._arena.place, self._describe(slots)))
        for index in sorted(families):
            family, workspace = self._families[index], self._placed[slots][index]
            if batch.errors is None or self.errors is None or not family.selects:
                family.launch(batch, workspace, self.settings, None)
                continue
            family.launch(batch, workspace, self.settings, self.errors.lse)
            estimate_errors(
                batch.query, batch.kv, batch.rows, batch.errors.measured, batch.layer,
                [method for method in family.methods if method.estimates_error], batch.output, workspace, batch.errors.sums, self.errors,
            )  # fmt: skip

    def _describe(self, slots: int) -> Iterable[Any]:
        context, budget = self.limits.row_context(slots), self.limits.row_budget(slots)
        return [family.workspace(slots, self._kv_heads, self.shape, context, budget, "meta") for family in self._families]
