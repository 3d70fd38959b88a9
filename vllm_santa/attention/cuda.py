"""SANTA on CUDA: FlashInfer, by vLLM's own classes, for everything dense; our kernels for the sparse rows beside it.

To FlashInfer a sparse row is one token long; our kernels then write its output. Graphs of decode batches come in variants, with some of
those parts (graph_variants.py).
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, CommonAttentionMetadata, MultipleOf
from vllm.v1.attention.backends.flashinfer import FlashInferBackend, FlashInferImpl, FlashInferMetadata, FlashInferMetadataBuilder
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_santa.attention.cuda_step import CudaStep, StepRows
from vllm_santa.attention.kernel_layer import KernelLayer
from vllm_santa.attention.layer import attach_layers
from vllm_santa.attention.plan_buffers import PlanBuffers
from vllm_santa.attention.traits import SantaTraits
from vllm_santa.graph_variants import DENSE
from vllm_santa.refusals import refuse_layer
from vllm_santa.rows import plan_step
from vllm_santa.runtime import runtime_for


class SantaCudaBackend(SantaTraits, FlashInferBackend):
    """SANTA for NVIDIA GPUs."""

    @staticmethod
    def get_impl_cls() -> "type[SantaCudaImpl]":
        return SantaCudaImpl

    @staticmethod
    def get_builder_cls() -> "type[SantaCudaMetadataBuilder]":
        return SantaCudaMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        return [16, 32, 64]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """What FlashInfer and our kernels have in common."""
        return [64, 128, 256]

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        """No quantised caches: our kernels read K and V as they are."""
        return kv_cache_dtype is None or kv_cache_dtype in cls.supported_kv_cache_dtypes

    @classmethod
    def supports_non_causal(cls) -> bool:
        return False

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """A row's method is chosen on the host, by its length there."""
        return False


@dataclass
class SantaCudaMetadata(FlashInferMetadata):
    """FlashInfer's view of a step for layers that read sparsely, and ours.

    full: FlashInfer's view for the dense layers of the same group, where every row has its whole length; None where there are none.
    """

    step: CudaStep
    full: FlashInferMetadata | None


class PageBuilder(FlashInferMetadataBuilder):
    """FlashInfer's builder for our page, whose heads are outermost inside, whatever vLLM calls the layout around it."""

    kv_cache_layout = KVCacheLayout.LBHNC

    def __init__(self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # Of a step: decodes and prefills, and decodes again for each draft token.
        self._plan_buffers = PlanBuffers(vllm_config.max_concurrent_batches, 2 + vllm_config.num_speculative_tokens)

    def _get_prefill_wrapper(self, *args: Any, **options: Any) -> Any:
        return self._plan_buffers.renew(super()._get_prefill_wrapper(*args, **options))

    def _get_decode_wrapper(self, *args: Any, **options: Any) -> Any:
        return self._plan_buffers.renew(super()._get_decode_wrapper(*args, **options))


class SantaCudaMetadataBuilder(PageBuilder):
    """Decides what each row of a step gets, and plans FlashInfer for the dense ones."""

    def __init__(self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.runtime = runtime_for(vllm_config)
        self.begins_step = attach_layers(vllm_config, layer_names)
        context = vllm_config.compilation_config.static_forward_context
        self.sparse_layers: list[KernelLayer] = [context[name].impl.santa for name in layer_names if context[name].impl.santa.sparse]
        dense = [name for name in layer_names if not context[name].impl.santa.sparse]
        self.rows = StepRows(self.sparse_layers[0].kernels, self.page_size, device) if self.sparse_layers else None
        self.full: PageBuilder | None = None
        if self.sparse_layers and dense:
            self.full = PageBuilder(kv_cache_spec, dense, vllm_config, device)
            self.full.set_workspace_buffer(self._get_workspace_buffer())

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec) -> AttentionCGSupport:
        """Graphs hold decode batches of one token a row; what else there is, vLLM runs with attention outside of its graphs. So it does
        with everything if rules want Bernoulli queries, which only the reference computes."""
        if runtime_for(vllm_config).policy.needs_reference:
            return AttentionCGSupport.NEVER
        return min(
            super().get_cudagraph_support(vllm_config, kv_cache_spec), AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE, key=lambda s: s.value
        )

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False) -> SantaCudaMetadata:
        common = common_attn_metadata
        plan = plan_step(common, self.runtime)
        if self.begins_step:
            self.runtime.begin_step(plan)
        if self.rows is None:
            dense = super().build(0, common, fast_build)
            return _with_step(dense, CudaStep.all_dense(common, plan), None)
        for layer in self.sparse_layers:
            layer.train_codebook()
        full = self.full.build(0, common, fast_build) if self.full else None
        dense = super().build(0, self.rows.fill(common, plan), fast_build)
        step = self.rows.step(common, plan, dense)
        self.runtime.graph_variants.needed = step.parts
        return _with_step(dense, step, full)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> SantaCudaMetadata:
        """A step without sparse rows, in which the parts of the graph's variant are launched all the same."""
        metadata = self.build(0, common_attn_metadata)
        if self.rows is not None:
            metadata.step = replace(metadata.step, parts=self.runtime.graph_variants.captured)
        return metadata

    def build_for_drafting(self, common_attn_metadata: CommonAttentionMetadata, draft_index: int) -> SantaCudaMetadata:
        """Draft tokens are dense."""
        dense = super().build(0, common_attn_metadata, fast_build=True)
        return _with_step(dense, CudaStep.all_dense(common_attn_metadata), dense)


def _with_step(dense: FlashInferMetadata, step: CudaStep, full: FlashInferMetadata | None) -> SantaCudaMetadata:
    return SantaCudaMetadata(**{field.name: getattr(dense, field.name) for field in fields(FlashInferMetadata)}, step=step, full=full)


class SantaCudaImpl(FlashInferImpl):
    """One attention layer."""

    supports_dcp = False
    can_return_lse_for_decode = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ):
        refuse_layer(attn_type, ALiBi=alibi_slopes, sinks=sinks, KV_sharing_between_layers=kv_sharing_target_layer_name)
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, None, sliding_window, kv_cache_dtype, logits_soft_cap, AttentionType.DECODER
        )
        self.santa = KernelLayer(num_heads, num_kv_heads, head_size, scale, logits_soft_cap, sliding_window)

    def fused_output_quant_supported(self, quant_key: object) -> bool:
        return False

    def do_kv_cache_update(self, layer: torch.nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        """Write new keys, values and codes. key, value: [>= T, H, D]. slot_mapping: int64 [T], -1 = padding."""
        kv, codes = self.santa.views(kv_cache)
        if self.santa.coded:
            self.santa.write(key, value, kv, codes, slot_mapping)
        else:
            super().do_kv_cache_update(layer, key, value, kv, slot_mapping)

    def forward(
        self,
        layer: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: SantaCudaMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of one step. query, output: [>= tokens, Hq, D]. key, value: [>= tokens, H, D], already in the cache."""
        if attn_metadata is None:  # vLLM's profiling run
            return output.fill_(0)
        kv, codes = self.santa.views(kv_cache)
        if not self.santa.sparse:
            return super().forward(layer, query, key, value, kv, attn_metadata.full or attn_metadata, output)
        if DENSE in attn_metadata.step.parts:
            super().forward(layer, query, key, value, kv, attn_metadata, output)
        attn_metadata.step.decode(self.santa, query, key, value, kv, codes, output)
        return output
