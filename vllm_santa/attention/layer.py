"""What one attention layer does beside dense attention, on any platform: keep the codes, train the codebook, decode sparse tokens."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.models.utils import extract_layer_index

from vllm_santa import ops
from vllm_santa.codebook import Codebook
from vllm_santa.codebook_store import first_kv_head
from vllm_santa.page import page_views
from vllm_santa.reference.decode import LayerContext
from vllm_santa.rows import SparseToken, StepPlan
from vllm_santa.runtime import Runtime, runtime_for


@dataclass(frozen=True)
class SparseStep:
    """One step's sparse work, as every layer reads it.

    block_table: int32 [rows, blocks]. plan: what its tokens get.
    """

    block_table: Tensor
    plan: StepPlan

    @cached_property
    def prompt_tokens(self) -> Tensor:
        """int64, on the host: indices in the flat batch of the tokens that belong to prompts, which train codebooks."""
        prompt = torch.ones(self.plan.starts[-1], dtype=torch.bool)
        prompt[[token.token for token in self.plan.decoding]] = False
        return prompt.nonzero().squeeze(1)


def attach_layers(vllm_config: VllmConfig, layer_names: list[str]) -> bool:
    """Tell the layers of a builder their indices. Returns whether they include the first layer: its builder begins the steps, so that
    a model with several groups of layers counts their rows once."""
    layers = vllm_config.compilation_config.static_forward_context
    for name in layer_names:
        layers[name].impl.santa.attach(extract_layer_index(name))
    return min(runtime_for(vllm_config).layers) in map(extract_layer_index, layer_names)


class SparseLayer:
    """The part of an attention implementation that is ours. Made while vLLM loads the model, attached before the first step."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, scale: float, soft_cap: float | None, window: int | None):
        self.num_kv_heads, self.head_dim, self.window = num_kv_heads, head_dim, window
        vllm_config = get_current_vllm_config()
        self.runtime: Runtime = runtime_for(vllm_config)
        kv_head = first_kv_head(vllm_config.model_config.get_total_num_kv_heads())
        self.context = LayerContext(-1, scale, soft_cap or 0.0, get_tensor_model_parallel_rank() * num_heads, kv_head)
        self.sparse = self.coded = False
        self.uncoded: Tensor | None = None  # bool [blocks], written before there was a codebook

    def attach(self, layer: int) -> None:
        """Learn the layer's index in the model, which vLLM tells no earlier."""
        self.sparse = self.runtime.add_layer(layer, windowed=self.window is not None)
        self.coded = self.sparse and self.runtime.policy.needs_codes
        self.context = replace(self.context, layer=layer, codebook=self.runtime.codebooks.get(layer))

    def views(self, cache: Tensor) -> tuple[Tensor, Tensor]:
        """kv [B, H, N, 2D] and codes [B, H, N, M] of the layer's cache."""
        return page_views(cache, self.num_kv_heads, self.head_dim)

    def write_codes(self, key: Tensor, codes: Tensor, slots: Tensor) -> None:
        """Write the codes of new keys, or note their blocks while there is no codebook. key: [T, H, D]. slots: int64 [T], none negative."""
        if self.context.codebook is not None:
            ops.encode(key, codes, slots, self.context.codebook)
        elif self.coded:
            if self.uncoded is None:
                self.uncoded = torch.zeros(codes.shape[0], dtype=torch.bool, device=codes.device)
            self.uncoded[slots // codes.shape[2]] = True

    def train(self, query: Tensor, key: Tensor, value: Tensor, kv: Tensor, codes: Tensor, step: SparseStep) -> None:
        """While there is no codebook: offer it the step's prompt tokens, and when it appears, encode what the cache holds.

        query: [T, Hq, D]. key, value: [T, H, D].
        """
        self.observe(query, key, value, step)
        codebook = self.train_codebook()
        if codebook is not None and self.uncoded is not None:
            ops.encode_blocks(kv, codes, self.uncoded.nonzero().squeeze(1), codebook)
            self.uncoded = None

    def observe(self, query: Tensor, key: Tensor, value: Tensor, step: SparseStep) -> None:
        """While the layer has no codebook, collect the step's prompt tokens for its training. Shapes as in `train`."""
        if self.coded and self.context.codebook is None and len(step.prompt_tokens) > 0:
            tokens = step.prompt_tokens.to(key.device)
            queries = query[tokens].unflatten(1, (self.num_kv_heads, -1))
            self.runtime.codebooks.observe(self.context.layer, key[tokens], queries, value[tokens])

    def train_codebook(self) -> Codebook | None:
        """Train and keep the layer's codebook, if its samples are complete. Returns it in the step in which it appears, else None."""
        if not self.coded or self.context.codebook is not None:
            return None
        codebook = self.runtime.codebooks.train(self.context.layer)
        if codebook is not None:
            self.context = replace(self.context, codebook=codebook)
        return codebook

    def decode(self, query: Tensor, kv: Tensor, codes: Tensor, block_table: Tensor, tokens: Iterable[SparseToken], output: Tensor) -> None:
        """Write the rows of the output of sparse tokens by the reference; note what they read, and how wrong they are.

        query, output: [T, Hq, D].
        """
        if not self.sparse:
            for token in tokens:
                rows = min(token.context, self.window or token.context)
                self.runtime.count_layer_read(token.method, rows, rows)
            return
        results = ops.decode(query, kv, codes, block_table, tokens, self.context, self.runtime.settings, output)
        for token, result in results:
            self.runtime.count_layer_read(token.method, result.key_rows * result.key_features, result.value_rows)
            if result.error is not None:
                self.runtime.meter.write(self.context.layer, token.row, result.error)
