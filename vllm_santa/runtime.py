"""What one worker process knows about its engine: the policy, the codebooks, the requests, the counters."""

import random
from functools import cached_property
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm_santa import ops
from vllm_santa.codebook_store import CodebookStore
from vllm_santa.methods import Method
from vllm_santa.metrics import Counters
from vllm_santa.policy import policy_of, policy_path, served_model
from vllm_santa.policy.parameters import RequestParams, unsigned
from vllm_santa.reference.ssa import SelectionSettings
from vllm_santa.request import RowRequest, processor_for

logger = init_logger("vllm.santa")

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from vllm_santa.rows import StepPlan


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
        logger.info("SANTA backend: policy %s, decode by %s.", policy_path(vllm_config) or "built in", ops.implementation())

    @cached_property
    def counters(self) -> Counters:
        """Made on first use, in the process that serves."""
        return Counters.create(self.vllm_config)

    def add_layer(self, layer: int, windowed: bool) -> bool:
        """Note an attention layer of this worker. Returns whether it may read sparsely: then it needs a codebook before methods with
        codes can run. Layers with a sliding window are short already, and stay dense."""
        self.layers.add(layer)
        sparse = not windowed and layer not in self.dense_layers
        if sparse:
            self.codebooks.expect(layer)
        return sparse

    def begin_step(self, plan: "StepPlan") -> None:
        """Count a step's rows, and let codebooks train; once a step, whatever the number of layers."""
        self.codebooks.begin_step()
        self.counters.count_decoding(plan.decoding)
        self.counters.set_codebooks_ready(self.codebooks.ready)
        processor = processor_for(self.vllm_config)
        if processor is not None:
            self.counters.set_ignored(processor.ignored)

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
            seed = random.Random(self.vllm_config.instance_id).getrandbits(64)
        return RowRequest(RequestParams(), unsigned(seed), None)


_runtimes: dict[str, Runtime] = {}


def runtime_for(vllm_config: "VllmConfig") -> Runtime:
    """The runtime of this configuration's engine in this process, made on first use.

    Raises:
        PolicyError, CodebookError: the policy or its codebook file cannot be used; the server then does not start.
    """
    runtime = _runtimes.get(vllm_config.instance_id)
    if runtime is None:
        runtime = _runtimes[vllm_config.instance_id] = Runtime(vllm_config)
    return runtime


def current_runtime() -> Runtime:
    """The runtime made last: the engine whose model is being loaded, where vLLM passes no configuration."""
    return next(reversed(_runtimes.values()))
