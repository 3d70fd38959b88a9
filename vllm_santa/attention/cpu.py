"""SANTA on vLLM's CPU build: dense attention by torch's SDPA, sparse rows by the reference."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionImpl,
    AttentionLayer,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_santa import ops
from vllm_santa.codebook_store import first_kv_head
from vllm_santa.page import page_views
from vllm_santa.reference.decode import LayerContext
from vllm_santa.reference.dense import dense_attention
from vllm_santa.reference.paged import gather_context
from vllm_santa.rows import SparseToken, plan_step
from vllm_santa.runtime import runtime_for


@dataclass
class SantaCpuMetadata(AttentionMetadata):
    """One step, as every layer reads it.

    starts: first token of each row in the flat batch, and the end [rows + 1]. contexts: tokens each row attends to [rows].
    block_table: int32 [rows, blocks]. sparse: the tokens that read sparsely.
    prompt_tokens: bool [tokens], True for prompt tokens, which may train codebooks.
    """

    starts: list[int]
    contexts: list[int]
    block_table: Tensor
    sparse: list[SparseToken]
    prompt_tokens: Tensor


class SantaCpuMetadataBuilder(AttentionMetadataBuilder[SantaCpuMetadata]):
    """Decides what each row of a step gets."""

    _cudagraph_support = AttentionCGSupport.NEVER

    def __init__(self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1)
        self.runtime = runtime_for(vllm_config)
        for name in layer_names:
            vllm_config.compilation_config.static_forward_context[name].impl.attach(extract_layer_index(name))

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False) -> SantaCpuMetadata:
        common = common_attn_metadata
        plan = plan_step(common, self.runtime)
        # A model may have several groups of layers, each with a builder: the one with the first layer counts.
        if min(self.runtime.layers) in map(extract_layer_index, self.layer_names):
            self.runtime.count_step(plan)
        starts = common.query_start_loc_cpu.tolist()
        prompt_tokens = torch.ones(starts[-1], dtype=torch.bool)
        prompt_tokens[[token.token for token in plan.decoding]] = False
        return SantaCpuMetadata(starts, common.seq_lens.tolist(), common.block_table_tensor, plan.sparse, prompt_tokens)


class SantaCpuImpl(AttentionImpl[SantaCpuMetadata]):
    """One attention layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **others: object,
    ):
        refused = {
            "ALiBi": alibi_slopes is not None,
            "KV sharing between layers": kv_sharing_target_layer_name is not None,
            f"{attn_type} attention": attn_type != AttentionType.DECODER,
            "attention sinks": others.get("sinks") is not None,
        }
        for feature, present in refused.items():
            if present:
                raise NotImplementedError(f"--attention-backend santa does not support {feature}; serve this model with another backend")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.sliding_window = sliding_window
        vllm_config = get_current_vllm_config()
        self.runtime = runtime_for(vllm_config)
        kv_head = first_kv_head(vllm_config.model_config.get_total_num_kv_heads())
        query_head = get_tensor_model_parallel_rank() * num_heads
        self.context = LayerContext(-1, scale, logits_soft_cap or 0.0, query_head, kv_head)
        self.sparse = False
        self.uncoded: Tensor | None = None  # bool [blocks], written before there was a codebook

    def attach(self, layer: int) -> None:
        """Learn the layer's index in the model, which vLLM tells no earlier."""
        self.sparse = self.runtime.add_layer(layer, windowed=self.sliding_window is not None)
        self.context = replace(self.context, layer=layer, codebook=self.runtime.codebooks.get(layer))

    def do_kv_cache_update(self, layer: AttentionLayer, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        """Write new keys, values and, once there is a codebook, codes. key, value: [>= T, H, D]. slot_mapping: int64 [T], -1 = padding."""
        kv, codes = page_views(kv_cache, self.num_kv_heads, self.head_size)
        used = slot_mapping >= 0
        slots, count = slot_mapping[used], len(slot_mapping)
        block, offset = slots // kv.shape[2], slots % kv.shape[2]
        key, value = key[:count][used].to(kv.dtype), value[:count][used].to(kv.dtype)
        kv[block, :, offset] = torch.cat((key, value), dim=-1)
        if self.context.codebook is not None:
            ops.encode(key, codes, slots, self.context.codebook)
        elif self.sparse:
            if self.uncoded is None:
                self.uncoded = torch.zeros(kv.shape[0], dtype=torch.bool)
            self.uncoded[block] = True

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: SantaCpuMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of one step. query, output: [tokens, Hq, D]. key, value: [tokens, H, D], already in the cache."""
        if attn_metadata is None:  # vLLM's profiling run
            return output.fill_(0)
        kv, codes = page_views(kv_cache, self.num_kv_heads, self.head_size)
        if self.sparse and self.context.codebook is None:
            self._train(query, key, kv, codes, attn_metadata.prompt_tokens)
        sparse = attn_metadata.sparse if self.sparse else []
        self._attend_densely(query, kv, attn_metadata, {token.token for token in sparse}, output)
        for token, key_rows, value_rows in ops.decode(
            query, kv, codes, attn_metadata.block_table, sparse, self.context, self.runtime.settings, output
        ):
            self.runtime.count_layer_read(token.method, key_rows, value_rows)
        if not self.sparse:
            for token in attn_metadata.sparse:
                rows = min(token.context, self.sliding_window or token.context)
                self.runtime.count_layer_read(token.method, rows, rows)
        return output

    def _attend_densely(self, query: Tensor, kv: Tensor, step: SantaCpuMetadata, sparse: set[int], output: Tensor) -> None:
        for row, context in enumerate(step.contexts):
            start, end = step.starts[row], step.starts[row + 1]
            if all(token in sparse for token in range(start, end)):
                continue
            keys, values = gather_context(kv, step.block_table[row], context).chunk(2, dim=-1)
            output[start:end] = dense_attention(query[start:end], keys, values, self.scale, self.context.soft_cap, self.sliding_window)

    def _train(self, query: Tensor, key: Tensor, kv: Tensor, codes: Tensor, prompt_tokens: Tensor) -> None:
        """Offer the step's prompt tokens to the codebook; when it is there, encode what the cache holds."""
        tokens = prompt_tokens.nonzero().squeeze(1)
        if len(tokens) == 0:
            return
        codebook = self.runtime.codebooks.observe(self.context.layer, key[tokens], query[tokens].unflatten(1, (self.num_kv_heads, -1)))
        if codebook is not None:
            self.context = replace(self.context, codebook=codebook)
            ops.encode_blocks(kv, codes, self.uncoded.nonzero().squeeze(1), codebook)
            self.uncoded = None
