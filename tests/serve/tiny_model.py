"""A tiny Llama with random weights whose answers depend on its whole context, and a tokenizer of single bytes."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from vllm_santa.capture import capture_qkv
from vllm_santa.codebook import CodebookInfo, Codebooks, save_codebooks
from vllm_santa.training import train_codebook

LAYERS, QUERY_HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 2, 4, 2, 64, 128
BYTES = 256
_CHAT = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
_GAINS = {"q_proj": 1.6, "k_proj": 1.6, "v_proj": 1.0, "o_proj": 8.0, "lm_head": 3.0}
"""Standard deviations of the projections' outputs for inputs of unit variance. Queries and keys this large let a few tokens carry half of
the attention; o_proj makes up for the average over tokens that share nothing, so that attention outweighs the current token."""


def prompt(length: int, seed: int) -> list[int]:
    """Random tokens."""
    return torch.randint(BYTES, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def build_model(folder: Path) -> None:
    """Write config, weights (the same every time) and tokenizer as a Hugging Face folder."""
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=HIDDEN, intermediate_size=256, num_hidden_layers=LAYERS, num_attention_heads=QUERY_HEADS,
        num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, max_position_embeddings=8192, tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, dtype="float32",
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                layer = name.split(".")[-2]
                std = 1.0 if layer == "embed_tokens" else _GAINS.get(layer, 1.0) / weight.shape[1] ** 0.5
                weight.copy_(torch.randn(weight.shape, generator=generator) * std)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def build_codebooks(model_folder: Path, path: Path, subspaces: int = 16) -> None:
    """Codebooks of the model, trained on 1,024 tokens that no test uses."""
    model = LlamaForCausalLM.from_pretrained(model_folder)
    captured = capture_qkv(model, torch.tensor([prompt(1024, seed=999)]))
    layers = {
        index: train_codebook(layer.keys, layer.grouped_queries(), subspaces, values=layer.values) for index, layer in captured.items()
    }
    info = CodebookInfo(
        model="tiny", num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, subspaces=subspaces, text_sha256="0" * 64,
        training_tokens=1024, vllm_santa_version="test",
    )  # fmt: skip
    save_codebooks(Codebooks(layers, info), path)


def build_adapter(folder: Path, rank: int = 4) -> None:
    """Write a LoRA adapter of the model, as PEFT does, large enough to change answers."""
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for layer in range(LAYERS):
        for name, heads in (("q_proj", QUERY_HEADS), ("v_proj", KV_HEADS)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, HIDDEN, generator=generator) / HIDDEN**0.5
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(heads * HEAD_DIM, rank, generator=generator) / rank**0.5
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Of single bytes, with a chat template."""
    vocabulary = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=_CHAT)
