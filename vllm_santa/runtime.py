"""What one worker process knows about its engine: the policy, the codebooks, the requests, the counters."""

import random
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING

import torch
from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_santa.codebook_store import CodebookStore
from vllm_santa.counters import Counters
from vllm_santa.engine_id import engine_id
from vllm_santa.error_meter import ErrorMeter
from vllm_santa.graph_variants import DENSE, ERRORS, GraphVariants
from vllm_santa.graphs import captures_decodes
from vllm_santa.limits import limits_of
from vllm_santa.methods import Method
from vllm_santa.policy import policy_of, policy_path, served_model
from vllm_santa.policy.parameters import RequestParams, unsigned
from vllm_santa.reads import expected_rows
from vllm_santa.reference.ssa import SelectionSettings
from vllm_santa.request import RowRequest, processor_for

logger = init_logger("vllm.santa")

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from vllm_santa.attention.kernels import Kernels
    from vllm_santa.jit import Shape
    from vllm_santa.rows import SparseToken, StepPlan


class Runtime:
    """State of one engine's worker, shared by its attention layers and metadata builders."""

    def __init__(self, vllm_config: "VllmConfig"):
        self.vllm_config = vllm_config
        self.policy = policy_of(vllm_config)
        self.model_name = served_model(vllm_config)
        self.speculates = vllm_config.speculative_config is not None
        self.dense_layers = self.policy.dense_layer_set(vllm_config.model_config.get_total_num_hidden_layers())
        self.settings = SelectionSettings(self.policy.sink, self.policy.local, self.policy.heavy_fraction, self.policy.uniform_share)
        self.codebooks = CodebookStore(self.policy, vllm_config)
        self.layers: set[int] = set()
        """Attention layers of this worker."""
        self.sparse_layers: set[int] = set()
        """Those of them that may read sparsely."""
        self._kernels: dict[tuple[Shape, int], Kernels] = {}
        decoder = "CUDA kernels" if current_platform.is_cuda() else "the torch reference"
        logger.info("SANTA backend: policy %s, sparse rows are decoded by %s.", policy_path(vllm_config) or "built in", decoder)

    @cached_property
    def _group(self) -> int:
        """Query heads per KV head."""
        model, parallel = self.vllm_config.model_config, self.vllm_config.parallel_config
        return model.get_num_attention_heads(parallel) // model.get_num_kv_heads(parallel)

    @property
    def captures_decodes(self) -> bool:
        """Whether decode batches are replayed from CUDA graphs, attention included."""
        return captures_decodes(self.vllm_config, self.policy)

    @cached_property
    def counters(self) -> Counters:
        """Made on first use, in the process that serves."""
        return Counters.create(self.vllm_config)

    @cached_property
    def meter(self) -> ErrorMeter:
        """Of the errors of rows that have a target. Made once the layers are known."""
        from vllm.distributed import get_tp_group

        workspaces = [kernels.errors for kernels in self._kernels.values() if kernels.errors is not None]
        parts = max((workspace.parts for workspace in workspaces), default=1)
        device = workspaces[0].lse.device if workspaces else torch.device("cpu")
        rows = limits_of(self.vllm_config, self.policy).rows
        return ErrorMeter(self.sparse_layers, rows, parts, device, get_tp_group().all_reduce)

    def add_layer(self, layer: int, windowed: bool) -> bool:
        """Note an attention layer of this worker. Returns whether it may read sparsely: then it needs a codebook before methods with
        codes can run. Layers with a sliding window are short already, and stay dense."""
        self.layers.add(layer)
        sparse = not windowed and layer not in self.dense_layers
        if sparse:
            self.sparse_layers.add(layer)
        if sparse and self.policy.needs_codes:
            self.codebooks.expect(layer)
        return sparse

    def kernels(self, shape: "Shape", kv_heads: int) -> "Kernels":
        """The CUDA kernels of all layers of a head shape; compiled and set up on first use, on the current device."""
        from vllm_santa.attention.kernels import Kernels

        if (shape, kv_heads) not in self._kernels:
            device = torch.device("cuda", torch.cuda.current_device())
            limits, methods = limits_of(self.vllm_config, self.policy), self.policy.possible_methods()
            self._kernels[shape, kv_heads] = Kernels(
                shape, kv_heads, limits, methods, self.policy.subspaces, self.settings, device, self.policy.allows_targets
            )
        return self._kernels[shape, kv_heads]

    @cached_property
    def graph_variants(self) -> GraphVariants:
        """Of the decode graphs: dense rows alone, those with what the rules want, with anything; each family of kernels without dense rows;
        anything with estimates of errors. Asked for once the kernels are there."""
        kernels = next(iter(self._kernels.values()))
        rules = kernels.families(rule.method for rule in self.policy.rules)
        every = kernels.families(self.policy.possible_methods())
        sets = {parts | {DENSE} for parts in (frozenset[int](), rules, every)} | {frozenset({family}) for family in every}
        if self.policy.sets_targets:
            sets |= {rules | {ERRORS}, rules | {DENSE, ERRORS}}
        if self.policy.allows_targets:
            sets.add(every | {DENSE, ERRORS})
        return GraphVariants(self.vllm_config, sorted(sets, key=lambda parts: (len(parts), sorted(parts))))

    def longest_sparse_row(self, rows: int) -> float:
        """Tokens that a sparse row of a batch of `rows` can have: what the kernels' buffers hold; without kernels there is no bound."""
        return min((kernels.limits.row_context(rows) for kernels in self._kernels.values()), default=inf)

    def begin_step(self, plan: "StepPlan") -> None:
        """Count a step's rows, learn their errors, and let codebooks train; once a step, whatever the number of layers."""
        self.codebooks.begin_step()
        if self.sparse_layers and self.policy.allows_targets:
            self._learn_errors([token for token in plan.sparse if token.control is not None])
        self.counters.count_decoding(plan.decoding)
        by_kernel = [token for token in plan.sparse if self._kernels and token.by_kernel]
        self.counters.count_reference_rows(len(plan.sparse) - len(by_kernel))
        self._count_kernel_reads(by_kernel)
        self.counters.set_codebooks_ready(self.codebooks.ready)
        processor = processor_for(self.vllm_config)
        if processor is not None:
            self.counters.set_ignored(processor.ignored)

    def _learn_errors(self, tokens: "list[SparseToken]") -> None:
        """Begin to measure `tokens`, and pass on what is known of earlier ones."""
        for token, error in self.meter.begin_step(tokens):
            if token.control is not None:
                token.control.observe(token.context, error, token.max_error)
                self.counters.count_error(token.method, token.budget, error, token.max_error)

    def _count_kernel_reads(self, tokens: "list[SparseToken]") -> None:
        """Count what the kernels read by what was asked of them; counting on the device would cost time."""
        share = len(self.sparse_layers) / len(self.layers)
        windows = self.settings.sink + self.settings.local
        for token in tokens:
            keys, values = expected_rows(token.method, token.budget, token.context, self._group, windows)
            dense = (1 - share) * token.context
            self.counters.count_read(token.method, share * keys + dense, share * values + dense)

    def count_layer_read(self, method: Method, key_rows: float, value_rows: float) -> None:
        """Count what one layer read for one token; the counters hold the mean over layers."""
        self.counters.count_read(method, key_rows / len(self.layers), value_rows / len(self.layers))

    def requests_of(self, common: "CommonAttentionMetadata") -> list[RowRequest | None]:
        """What each row of the step asked for. Rows follow the policy alone where vLLM gives no request parameters."""
        processor = processor_for(self.vllm_config)
        if processor is None:
            return [self._anonymous] * common.num_reqs
        return processor.rows_of(common)

    @cached_property
    def _anonymous(self) -> RowRequest:
        seed = self.policy.base_seed
        if seed is None:  # the same on every rank of an engine
            seed = random.Random(engine_id(self.vllm_config)).getrandbits(64)
        return RowRequest(RequestParams(), unsigned(seed), None)


_runtimes: dict[str, Runtime] = {}


def runtime_for(vllm_config: "VllmConfig") -> Runtime:
    """The runtime of this configuration's engine in this process, made on first use.

    Raises:
        PolicyError, CodebookError: the policy or its codebook file cannot be used; the server then does not start.
    """
    runtime = _runtimes.get(engine_id(vllm_config))
    if runtime is None:
        runtime = _runtimes[engine_id(vllm_config)] = Runtime(vllm_config)
    return runtime


def current_runtime() -> Runtime:
    """The runtime made last: the engine whose model is being loaded, where vLLM passes no configuration."""
    return next(reversed(_runtimes.values()))
