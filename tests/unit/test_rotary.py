"""RoPE at other positions, against transformers' own."""

import pytest
import torch
from transformers import Gemma3TextConfig, GlmConfig, LlamaConfig, PretrainedConfig, SmolLM3Config
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.glm import modeling_glm
from transformers.models.llama import modeling_llama

from vllm_santa.reference.pq import encode, lookup_tables, proxy_scores
from vllm_santa.rotary import Rotary, layer_rotary
from vllm_santa.training import train_codebook

SIZES = dict(hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_hidden_layers=6, max_position_embeddings=8192)
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 1024}  # fmt: skip
CASES = [
    (modeling_llama, modeling_llama.LlamaRotaryEmbedding, LlamaConfig(**SIZES), 0),
    (modeling_llama, modeling_llama.LlamaRotaryEmbedding, LlamaConfig(**SIZES, rope_parameters=LLAMA3), 0),
    (modeling_glm, modeling_glm.GlmRotaryEmbedding, GlmConfig(**SIZES, pad_token_id=0), 0),
    (modeling_gemma3, modeling_gemma3.Gemma3RotaryEmbedding, Gemma3TextConfig(**SIZES), 0),
    (modeling_gemma3, modeling_gemma3.Gemma3RotaryEmbedding, Gemma3TextConfig(**SIZES), 5),
]


@pytest.mark.parametrize("module, embedding, config, layer", CASES, ids=["llama", "llama3", "glm", "gemma3-sliding", "gemma3-full"])
def test_rotating_on_is_what_transformers_does_at_the_later_position(
    module: object, embedding: type, config: PretrainedConfig, layer: int
) -> None:
    x = torch.randn(1, 3, 20, 64, generator=torch.Generator().manual_seed(0))
    positions, offsets = torch.arange(20), torch.arange(20) * 37 + 5
    layer_type = [config.layer_types[layer]] if config.model_type == "gemma3_text" else []
    rope = embedding(config)

    def at(where: torch.Tensor) -> torch.Tensor:
        return module.apply_rotary_pos_emb(x, x, *rope(x, where[None], *layer_type))[0][0].transpose(0, 1)

    rotary = layer_rotary(config, layer, 8192)
    torch.testing.assert_close(rotary.rotate(at(positions), offsets), at(positions + offsets), atol=1e-4, rtol=1e-4)


def test_layers_without_rope_have_none() -> None:
    config = SmolLM3Config(**SIZES, no_rope_layers=[1, 1, 1, 0, 1, 1], pad_token_id=0)
    assert layer_rotary(config, 3, 100) is None and layer_rotary(config, 4, 100) is not None
    assert layer_rotary(PretrainedConfig(), 0, 100) is None


def test_spread_covers_the_context_and_keeps_norms() -> None:
    rotary = Rotary(torch.tensor([1e-3]), False, 1000)
    x = torch.tensor([[1.0, 0.0]]).expand(4000, 2)
    turned = rotary.spread(x, torch.Generator().manual_seed(0))
    position = torch.atan2(turned[:, 1], turned[:, 0]) * 1000
    torch.testing.assert_close(turned.norm(dim=-1), torch.ones(4000))
    assert position.min() >= -1e-3 and 980 < position.max() < 1000
    assert abs((position < 250).float().mean() - 0.5) < 0.03  # u² < 1/4 half of the time


def test_a_codebook_trained_on_short_texts_serves_long_ones() -> None:
    """Content repeats, positions do not: keys and queries of later positions keep their accuracy only if training has seen those."""
    rotary = Rotary(1e4 ** (-torch.arange(0, 64, 2) / 64), False, 8192)
    generator = torch.Generator().manual_seed(0)
    centre = 3 * torch.randn(64, generator=generator)
    contents = [torch.randn(1500, 1, 64, generator=generator) + centre for _ in range(2)]
    keys, queries = (rotary.rotate(content, torch.arange(1500)) for content in contents)
    late_keys, late_queries = (rotary.rotate(content, torch.arange(1500) + 6000) for content in contents)

    def error(rotary: Rotary | None) -> float:
        codebook = train_codebook(keys, queries[:, :, None], rotary=rotary)
        tables = lookup_tables(late_queries[-20:, :, None], codebook, 0.125)
        proxy = proxy_scores(tables, encode(late_keys, codebook).expand(20, -1, -1, -1))
        gap = proxy[:, 0, 0] * 0.6931 - torch.einsum("bd,nd->bn", late_queries[-20:, 0], late_keys[:, 0]) * 0.125
        return (gap - gap.mean(-1, keepdim=True)).square().mean().sqrt().item()

    assert error(rotary) < 0.7 * error(None)
