"""Tiny Gemmas with random weights: layers with a sliding window between layers without, of Gemma-2 with soft-capped scores as well."""

from pathlib import Path

import torch
from tiny_model import byte_tokenizer
from transformers import Gemma2Config, Gemma2ForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedModel

LAYERS, WINDOW, SOFT_CAP = ["sliding_attention", "full_attention"] * 2, 64, 3.0
_STD = {"q_proj": 1.6, "k_proj": 1.6, "embed_tokens": 1.0}
"""Of the outputs for inputs of unit variance; 1 where not named. Scores then vary by some nats, so that a few tokens carry half of the
attention, and the soft cap bends them."""


def build_gemma(folder: Path, generation: int) -> None:
    """Write config, weights (the same every time) and tokenizer as a Hugging Face folder. generation: 2 or 3."""
    tokenizer = byte_tokenizer()
    sizes = {
        "vocab_size": len(tokenizer), "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": len(LAYERS), "layer_types": LAYERS,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": WINDOW,
        "max_position_embeddings": 2048, "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": None, "final_logit_softcapping": None, "dtype": "float32",
    }  # fmt: skip
    if generation == 2:
        model: PreTrainedModel = Gemma2ForCausalLM(Gemma2Config(**sizes, attn_logit_softcapping=SOFT_CAP))
    else:
        model = Gemma3ForCausalLM(Gemma3TextConfig(**sizes))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            layer = name.split(".")[-2]
            if weight.dim() == 2:  # embeddings are scaled by sqrt(hidden), and the head is tied to them
                weight.copy_(torch.randn(weight.shape, generator=generator) * _STD.get(layer, 1.0) / weight.shape[1] ** 0.5)
            else:  # norms multiply by 1 + weight
                weight.fill_({"q_norm": 0.6, "k_norm": 0.6}.get(layer, 0.5 if name == "model.norm.weight" else 0.0))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def load_gemma(folder: Path, generation: int) -> PreTrainedModel:
    """By transformers, with attention that knows soft caps."""
    kind = Gemma2ForCausalLM if generation == 2 else Gemma3ForCausalLM
    return kind.from_pretrained(folder, attn_implementation="eager").eval()
