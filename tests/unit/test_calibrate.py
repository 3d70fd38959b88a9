"""Capture of a Hugging Face model's attention inputs, and `vllm-santa calibrate`."""

import re
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from typer.testing import CliRunner, Result

from vllm_santa.capture import capture_qkv
from vllm_santa.cli import app
from vllm_santa.codebook import ModelShape, load_codebooks

SIZES = dict(
    vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    head_dim=64, max_position_embeddings=1024,
)  # fmt: skip
MODELS = [(LlamaForCausalLM, LlamaConfig), (Qwen2ForCausalLM, Qwen2Config), (Gemma3ForCausalLM, Gemma3TextConfig)]
TEXT = " ".join(str(number) for number in range(1000))


def tiny(kind: type[PreTrainedModel], config: type) -> PreTrainedModel:
    torch.manual_seed(0)
    return kind(config(**SIZES)).eval()


@pytest.mark.parametrize("kind, config", MODELS, ids=lambda item: item.__name__)
def test_captured_tensors_are_what_attention_saw(kind: type[PreTrainedModel], config: type) -> None:
    """Causal attention over the captured q, k, v, through the layer's own output projection, is the layer's own output."""
    model, ids = tiny(kind, config), torch.arange(50)[None]
    outputs = {}
    for layer in model.base_model.layers:
        layer.self_attn.register_forward_hook(lambda module, _, output: outputs.__setitem__(module.layer_idx, output[0]))
    captured = capture_qkv(model, ids)
    assert list(captured) == [0, 1, 2]
    for index, (queries, keys, values, scale) in captured.items():
        assert queries.shape == (50, 4, 64) and keys.shape == values.shape == (50, 2, 64)
        q, k, v = (tensor.transpose(0, 1) for tensor in (queries, keys, values))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        attention = model.base_model.layers[index].self_attn
        torch.testing.assert_close(attention.o_proj(out.transpose(0, 1).flatten(1)), outputs[index][0], atol=1e-5, rtol=1e-4)


def test_grouped_queries_put_the_heads_of_a_kv_head_together() -> None:
    captured = capture_qkv(tiny(*MODELS[0]), torch.arange(20)[None])[1]
    assert torch.equal(captured.grouped_queries()[:, 1, 0], captured.queries[:, 2])


def test_capture_of_some_layers_leaves_the_model_as_it_was() -> None:
    model, ids = tiny(*MODELS[0]), torch.arange(20)[None]
    before = model(ids).logits
    assert list(capture_qkv(model, ids, [2])) == [2]
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(ids).logits, before)


def test_capture_refusals() -> None:
    model = tiny(*MODELS[0])
    with pytest.raises(ValueError, match=r"input_ids has shape \(2, 5\), expected \[1, n\]"):
        capture_qkv(model, torch.zeros(2, 5, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"layers \[7\] of LlamaForCausalLM made no attention call"):
        capture_qkv(model, torch.arange(5)[None], [1, 7])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-llama")
    tiny(*MODELS[0]).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def calibrate(model: Path, tmp_path: Path, *options: str, text: str = TEXT) -> Result:
    (tmp_path / "text.txt").write_text(text)
    arguments = ["calibrate", str(model), "--text", str(tmp_path / "text.txt"), "--out", str(tmp_path / "c.safetensors"), *options]
    return CliRunner().invoke(app, arguments)


def test_calibrate_writes_what_load_reads(folder: Path, tmp_path: Path) -> None:
    """1,500 tokens are two windows of a model whose context is 1,024."""
    result = calibrate(folder, tmp_path, "--tokens", "1500", "--subspaces", "8")
    assert result.exit_code == 0, result.output
    loaded = load_codebooks(tmp_path / "c.safetensors", ModelShape(3, 2, 64))
    assert (loaded.info.model, loaded.info.subspaces, loaded.info.training_tokens) == (folder.name, 8, 1500)
    assert f"3 layers, 2 KV heads, head_dim 64, 8 bytes a key, from 1500 tokens; fingerprint {loaded.fingerprint()}" in result.output
    calibrate(folder, tmp_path, "--tokens", "1500", "--subspaces", "8")
    assert load_codebooks(tmp_path / "c.safetensors").fingerprint() == loaded.fingerprint()


@pytest.mark.parametrize(
    "options, text, message",
    [
        (["--subspaces", "12"], TEXT, "subspaces is 12: head_dim 64 allows 8, 16, 32"),
        ([], "too short", "the text has 9 tokens: at least 1024 are needed"),
    ],
)
def test_calibrate_refusals(folder: Path, tmp_path: Path, options: list[str], text: str, message: str) -> None:
    result = calibrate(folder, tmp_path, *options, text=text)
    assert result.exit_code != 0
    assert message in re.sub(r"[\s│]+", " ", result.output)
    assert not (tmp_path / "c.safetensors").exists()


def test_calibrate_keeps_codebooks_out_of_the_models_folder(folder: Path, tmp_path: Path) -> None:
    result = calibrate(folder, tmp_path, "--out", str(folder / "codebooks.safetensors"))
    assert result.exit_code == 1 and "lies in the model's folder" in result.output
    assert not (folder / "codebooks.safetensors").exists()


def test_calibrate_names_a_missing_model(tmp_path: Path) -> None:
    result = calibrate(tmp_path / "nowhere", tmp_path)
    assert result.exit_code == 1 and "nowhere" in result.output
