"""SANTA on vLLM's CPU build: dense attention by torch's SDPA, sparse tokens by the reference."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionLayer,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec

from vllm_santa.attention.layer import SparseLayer, SparseStep, attach_layers
from vllm_santa.attention.traits import SantaTraits
from vllm_santa.reference.dense import dense_attention
from vllm_santa.reference.paged import gather_context
from vllm_santa.refusals import refuse_layer
from vllm_santa.rows import plan_step
from vllm_santa.runtime import runtime_for


class SantaCpuBackend(SantaTraits, AttentionBackend):
    """SANTA for vLLM's CPU platform."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]

    @staticmethod
    def get_impl_cls() -> "type[SantaCpuImpl]":
        return SantaCpuImpl

    @staticmethod
    def get_builder_cls() -> "type[SantaCpuMetadataBuilder]":
        return SantaCpuMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]


@dataclass
class SantaCpuMetadata(AttentionMetadata):
    """One step, as every layer reads it.

    starts: first token of each row in the flat batch, and the end [rows + 1]. contexts: tokens each row attends to [rows].
    """

    starts: list[int]
    contexts: list[int]
    step: SparseStep


class SantaCpuMetadataBuilder(AttentionMetadataBuilder[SantaCpuMetadata]):
    """Decides what each token of a step gets."""

    _cudagraph_support = AttentionCGSupport.NEVER

    def __init__(self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1)
        self.runtime = runtime_for(vllm_config)
        self.begins_step = attach_layers(vllm_config, layer_names)

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False) -> SantaCpuMetadata:
        common = common_attn_metadata
        plan = plan_step(common, self.runtime)
        if self.begins_step:
            self.runtime.begin_step(plan)
        return SantaCpuMetadata(plan.starts, common.seq_lens.tolist(), SparseStep(common.block_table_tensor, plan))


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
        sinks: Tensor | None = None,
    ):
        refuse_layer(attn_type, ALiBi=alibi_slopes, sinks=sinks, KV_sharing_between_layers=kv_sharing_target_layer_name)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.sliding_window = sliding_window
        self.santa = SparseLayer(num_heads, self.num_kv_heads, head_size, scale, logits_soft_cap, sliding_window)

    def do_kv_cache_update(self, layer: AttentionLayer, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        """Write new keys, values and codes. key, value: [>= T, H, D]. slot_mapping: int64 [T], -1 = padding."""
        kv, codes = self.santa.views(kv_cache)
        used = slot_mapping >= 0
        slots, count = slot_mapping[used], len(slot_mapping)
        key, value = key[:count][used].to(kv.dtype), value[:count][used].to(kv.dtype)
        kv[slots // kv.shape[2], :, slots % kv.shape[2]] = torch.cat((key, value), dim=-1)
        self.santa.write_codes(key, codes, slots)

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
        kv, codes = self.santa.views(kv_cache)
        self.santa.train(query, key, value, kv, codes, attn_metadata.step)
        self._attend_densely(query, kv, attn_metadata, output)
        self.santa.decode(query, kv, codes, attn_metadata.step.block_table, attn_metadata.step.plan.sparse, output)
        return output

    def _attend_densely(self, query: Tensor, kv: Tensor, metadata: SantaCpuMetadata, output: Tensor) -> None:
        """Every row but those that the layer will decode sparsely as a whole."""
        sparse = {token.token for token in metadata.step.plan.sparse} if self.santa.sparse else set()
        for row, context in enumerate(metadata.contexts):
            start, end = metadata.starts[row], metadata.starts[row + 1]
            if sparse.issuperset(range(start, end)):
                continue
            keys, values = gather_context(kv, metadata.step.block_table[row], context).chunk(2, dim=-1)
            soft_cap = self.santa.context.soft_cap
            output[start:end] = dense_attention(query[start:end], keys, values, self.scale, soft_cap, self.sliding_window)
