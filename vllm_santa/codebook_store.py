"""One worker's codebooks: read from the policy's file, or trained once from the first prompts, then never changed."""

import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.logger import init_logger

from vllm_santa.codebook import Codebook, CodebookError, ModelShape, load_served_codebooks
from vllm_santa.rotary import Rotary, layer_rotary
from vllm_santa.training import train_codebook

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_santa.policy import Policy

logger = init_logger("vllm.santa.codebooks")

LAYERS_PER_STEP = 2
"""Layers that train within one step: a count, not a time, so that all ranks of an engine agree on when codebooks appear."""


def first_kv_head(num_kv_heads_total: int) -> int:
    """Global index of this rank's first KV head; ranks beyond the number of heads share them."""
    return get_tensor_model_parallel_rank() * num_kv_heads_total // get_tensor_model_parallel_world_size()


class CodebookStore:
    """Codebooks by layer index. A worker's layers all see the same tokens; they train a few in each step, so that no step takes long."""

    def __init__(self, policy: "Policy", vllm_config: "VllmConfig"):
        self._policy = policy
        self._codebooks: dict[int, Codebook] = {}
        self._samples: dict[int, list[tuple[Tensor, ...]]] = {}
        self._expected: dict[int, Rotary | None] = {}
        self._may_train = LAYERS_PER_STEP
        self._started = 0.0
        self.trains = policy.codebooks is None
        model = vllm_config.model_config
        self._text_config, self._max_model_len = model.hf_text_config, model.max_model_len
        self._heads_total = model.get_total_num_kv_heads()
        self._heads = model.get_num_kv_heads(vllm_config.parallel_config)
        if policy.codebooks is not None:
            shape = ModelShape(model.get_total_num_hidden_layers(), self._heads_total, model.get_head_size())
            loaded = load_served_codebooks(policy.codebooks, shape, policy.subspaces)
            sliced = loaded.slice_heads(first_kv_head(self._heads_total), self._heads)
            self._codebooks = dict(sliced.layers)
            logger.info("Codebooks read from %s, fingerprint %s.", policy.codebooks, loaded.fingerprint()[:16])

    def expect(self, layer: int) -> None:
        """A layer that needs a codebook before any method with codes may run."""
        if not self.trains and layer not in self._codebooks:
            raise CodebookError(f"{self._policy.codebooks}: no codebook for layer {layer}; calibrate it for this model")
        # Read from the model's configuration now: what cannot be understood stops the start, not a step.
        self._expected[layer] = layer_rotary(self._text_config, layer, self._max_model_len) if self.trains else None

    def get(self, layer: int) -> Codebook | None:
        """The layer's codebook, None until there is one."""
        return self._codebooks.get(layer)

    @property
    def ready(self) -> bool:
        """True once every expected layer has its codebook."""
        return self._codebooks.keys() >= self._expected.keys()

    def observe(self, layer: int, keys: Tensor, queries: Tensor, values: Tensor) -> None:
        """Collect prompt tokens of a layer without a codebook, until there are enough; those with NaN or infinities are left out.

        keys, values: [n, H, D]. queries: [n, H, G, D].
        """
        if not self._samples:
            logger.info("No codebooks yet: methods with PQ codes decode densely until %d prompt tokens have passed.", self._wanted)
        samples = self._samples.setdefault(layer, [])
        missing = self._wanted - sum(len(part) for part, *_ in samples)
        if missing > 0:
            tokens = (keys, queries, values)
            finite = torch.stack([part.isfinite().flatten(1).all(1) for part in tokens]).all(0)
            samples.append(tuple(part[finite][:missing].clone() for part in tokens))

    def begin_step(self) -> None:
        """Allow the next few layers to train."""
        self._may_train = LAYERS_PER_STEP

    def train(self, layer: int) -> Codebook | None:
        """Train a layer whose samples are complete, if the step's allowance is not used up. Returns the new codebook, or None."""
        samples = self._samples.get(layer, [])
        if self._may_train == 0 or sum(len(part) for part, *_ in samples) < self._wanted:
            return None
        self._may_train -= 1
        self._started = self._started or time.monotonic()
        keys, queries, values = (torch.cat(parts) for parts in zip(*samples, strict=True))
        codebook = train_codebook(keys, queries, self._policy.subspaces, rotary=self._expected[layer], values=values)
        self._codebooks[layer] = codebook
        samples.clear()
        if self.ready:
            logger.info(
                "Codebooks trained from %d prompt tokens for %d layers in %.1f s: methods with PQ codes are sparse from the next step on.",
                self._wanted, len(self._expected), time.monotonic() - self._started,
            )  # fmt: skip
        return codebook

    @property
    def _wanted(self) -> int:
        return self._policy.training_tokens
