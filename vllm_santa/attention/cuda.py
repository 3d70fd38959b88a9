"""SANTA on CUDA: FlashInfer, by vLLM's own classes, for everything dense; our decode for the sparse rows beside it."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, CommonAttentionMetadata, MultipleOf
from vllm.v1.attention.backends.flashinfer import FlashInferBackend, FlashInferImpl, FlashInferMetadata, FlashInferMetadataBuilder
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_santa.attention.layer import SparseLayer, SparseStep, attach_layers, refuse_unsupported
from vllm_santa.attention.traits import SantaTraits
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

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        return [64, 128, 256]

    @classmethod
    def supports_non_causal(cls) -> bool:
        return False

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False


@dataclass
class SantaCudaMetadata(FlashInferMetadata):
    """FlashInfer's view of a step, in which sparse rows have one token, and ours."""

    step: SparseStep


class SantaCudaMetadataBuilder(FlashInferMetadataBuilder):
    """Decides what each row of a step gets, and plans FlashInfer for the dense ones."""

    # Our page keeps heads outermost inside, whatever vLLM calls the layout around it.
    kv_cache_layout = KVCacheLayout.LBHNC

    def __init__(self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.runtime = runtime_for(vllm_config)
        self.counts = attach_layers(vllm_config, layer_names)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec) -> AttentionCGSupport:
        """The torch reference cannot be captured: vLLM then keeps attention out of its graphs."""
        return AttentionCGSupport.NEVER

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False) -> SantaCudaMetadata:
        common = common_attn_metadata
        plan = plan_step(common, self.runtime)
        if self.counts:
            self.runtime.count_step(plan)
        # To FlashInfer a sparse row is one token long; its output is overwritten afterwards.
        lengths = common.seq_lens_cpu_upper_bound.clone()
        starts = common.query_start_loc_cpu
        lengths[[token.row for token in plan.sparse if starts[token.row + 1] - starts[token.row] == 1]] = 1
        on_device = lengths.pin_memory().to(self.device, non_blocking=True)
        dense = super().build(0, common.replace(seq_lens=on_device, seq_lens_cpu_upper_bound=lengths), fast_build)
        return SantaCudaMetadata(**{f.name: getattr(dense, f.name) for f in fields(dense)}, step=SparseStep.of(common, plan))


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
        refuse_unsupported(attn_type, ALiBi=alibi_slopes, sinks=sinks, KV_sharing_between_layers=kv_sharing_target_layer_name)
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, None, sliding_window, kv_cache_dtype, logits_soft_cap, AttentionType.DECODER
        )
        self.santa = SparseLayer(num_heads, num_kv_heads, head_size, scale, logits_soft_cap, sliding_window)

    def fused_output_quant_supported(self, quant_key: object) -> bool:
        return False

    def do_kv_cache_update(self, layer: torch.nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        """Write new keys, values and codes. key, value: [>= T, H, D]. slot_mapping: int64 [T], -1 = padding."""
        kv, codes = self.santa.views(kv_cache)
        super().do_kv_cache_update(layer, key, value, kv, slot_mapping)
        used = slot_mapping >= 0
        self.santa.write_codes(key[: len(slot_mapping)][used], codes, slot_mapping[used])

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
        self.santa.train(query, key, kv, codes, attn_metadata.step)
        super().forward(layer, query, key, value, kv, attn_metadata, output)
        self.santa.decode(query, kv, codes, attn_metadata.step, output.view(len(output), self.num_heads, self.head_size))
        return output
