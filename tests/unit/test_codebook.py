"""The Codebook type and the file of a whole model's codebooks."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_santa.codebook import Codebook, CodebookError, CodebookInfo, Codebooks, ModelShape, load_codebooks, save_codebooks

H, D, M = 4, 64, 16
INFO = CodebookInfo(
    model="tiny", num_layers=2, num_kv_heads=H, head_dim=D, subspaces=M, text_sha256="ab" * 32, training_tokens=9, vllm_santa_version="0"
)


def random_codebook(seed: int) -> Codebook:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(H, D), (H, D, D), (H, D, D), (H, M, 256, D // M), (H, D)]
    return Codebook(*(torch.randn(shape, generator=generator) for shape in shapes))


@pytest.fixture
def codebooks() -> Codebooks:
    return Codebooks({0: random_codebook(0), 1: random_codebook(1)}, INFO)


@pytest.fixture
def path(codebooks: Codebooks, tmp_path: Path) -> Path:
    save_codebooks(codebooks, tmp_path / "c.safetensors")
    return tmp_path / "c.safetensors"


def test_round_trip(codebooks: Codebooks, path: Path) -> None:
    loaded = load_codebooks(path, ModelShape(2, H, D))
    assert loaded.info == INFO and list(loaded.layers) == [0, 1]
    assert loaded.fingerprint() == codebooks.fingerprint()
    for index, layer in codebooks.layers.items():
        assert all(torch.equal(tensor, loaded.layers[index].tensors()[name]) for name, tensor in layer.tensors().items())


def test_the_file_has_the_mode_of_other_files(path: Path) -> None:
    (path.parent / "other").write_text("")
    assert path.stat().st_mode == (path.parent / "other").stat().st_mode


def test_fingerprint_sees_every_tensor_and_layer(codebooks: Codebooks) -> None:
    seen = {codebooks.fingerprint()}
    for index, layer in codebooks.layers.items():
        for name, tensor in layer.tensors().items():
            changed = tensor.clone()
            changed.view(-1)[-1] += 1e-3
            seen.add(replace(codebooks, layers={**codebooks.layers, index: replace(layer, **{name: changed})}).fingerprint())
    seen.add(replace(codebooks, layers={0: codebooks.layers[1], 1: codebooks.layers[0]}).fingerprint())
    assert len(seen) == 12


def test_slice_heads(codebooks: Codebooks) -> None:
    half = codebooks.slice_heads(2, 2).layers[1]
    assert half.num_kv_heads == 2
    assert all(torch.equal(tensor, codebooks.layers[1].tensors()[name][2:]) for name, tensor in half.tensors().items())
    for start, count in ((3, 2), (-1, 2), (0, 0)):
        with pytest.raises(CodebookError, match="the codebook has 4"):
            codebooks.slice_heads(start, count)


@pytest.mark.parametrize(
    "field, shape", [("num_layers", ModelShape(3, H, D)), ("num_kv_heads", ModelShape(2, 8, D)), ("head_dim", ModelShape(2, H, 128))]
)
def test_another_model_is_refused(path: Path, field: str, shape: ModelShape) -> None:
    message = f"c.safetensors: {field} is {getattr(INFO.shape, field)}, but the model has {getattr(shape, field)}"
    with pytest.raises(CodebookError, match=message):
        load_codebooks(path, shape)


def rewrite(path: Path, change: dict[str, str | None]) -> None:
    """Change the metadata of a codebook file (None removes a field), keeping its tensors."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        metadata = {**file.metadata(), **change}
    save_file(load_file(path), path, {name: value for name, value in metadata.items() if value is not None})


@pytest.mark.parametrize(
    "change, message",
    [
        ({"format_version": "2"}, "metadata field format_version is '2': Input should be '1'"),
        ({"head_dim": "wide"}, "metadata field head_dim is 'wide'"),
        ({"model": None}, "metadata field model is None: Field required"),
        ({"colour": "red"}, "metadata field colour is 'red': Extra inputs"),
        ({"fingerprint": None}, "fingerprint is None, but the tensors give"),
        ({"fingerprint": "00"}, "fingerprint is 00, but the tensors give"),
        ({"num_layers": "1"}, r"num_layers is 1, but the tensors are of layers \[0, 1\]"),
        ({"subspaces": "8"}, "subspaces is 8, but layer 0 has 16"),
    ],
)
def test_damaged_metadata_is_refused(path: Path, change: dict[str, str | None], message: str) -> None:
    rewrite(path, change)
    with pytest.raises(CodebookError, match=message):
        load_codebooks(path)


def test_disagreement_is_refused_on_writing_too(codebooks: Codebooks, tmp_path: Path) -> None:
    with pytest.raises(CodebookError, match="num_kv_heads is 4, but layer 0 has 2"):
        save_codebooks(codebooks.slice_heads(0, 2), tmp_path / "half.safetensors")


def test_unreadable_files_are_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(CodebookError, match=r"missing.safetensors: cannot be read"):
        load_codebooks(tmp_path / "missing.safetensors")
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CodebookError, match=r"c.safetensors: cannot be read as a safetensors file"):
        load_codebooks(path)
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CodebookError, match="metadata field model is None"):
        load_codebooks(tmp_path / "model.safetensors")


def test_a_flipped_bit_is_refused(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CodebookError, match="the file is damaged"):
        load_codebooks(path)


@pytest.mark.parametrize(
    "field, tensor, message",
    [
        ("key_transform", torch.zeros(H, D, 32), r"key_transform has shape \(4, 64, 32\), expected \(4, 64, 64\)"),
        ("centroids", torch.zeros(H, M, 128, 4), r"centroids has shape \(4, 16, 128, 4\), expected \(4, 16, 256, 4\)"),
        ("query_offset", torch.zeros(H, M), r"query_offset has shape \(4, 16\), expected \(4, 64\)"),
        ("centroids", torch.zeros(H, 12, 256, 4), "subspaces is 12: head_dim 64 allows 8, 16, 32"),
        ("mean", torch.zeros(H, D, dtype=torch.float16), "mean is torch.float16, expected torch.float32"),
    ],
)
def test_malformed_codebooks_are_refused(field: str, tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(CodebookError, match=message):
        replace(random_codebook(0), **{field: tensor})


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, vllm_santa; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
