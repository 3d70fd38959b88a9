"""PQ codebooks: what they hold, and the safetensors file that carries those of a whole model.

Product quantisation (Jegou et al. 2011) of the transformed keys `(k - mean) @ key_transform`. Queries get `query_transform`, the inverse
transpose, so that `q·k = (q @ query_transform)·((k - mean) @ key_transform) + q·mean`; the last term is the same for every key and softmax
does not see it. `query_offset` adds the logarithm of the value's norm: see training.py.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

CENTROIDS = 256  # one byte a code
SUBSPACES = (8, 16, 32)


class CodebookError(ValueError):
    """A codebook, or the file that holds it, that cannot be used; the message names the field, what it was and what is allowed."""


class ModelShape(NamedTuple):
    """What a codebook file must agree with its model on."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


def check_subspaces(head_dim: int, subspaces: int) -> None:
    """Raise CodebookError unless `subspaces` is 8, 16 or 32 and divides `head_dim`."""
    allowed = [m for m in SUBSPACES if head_dim % m == 0]
    if not allowed:
        raise CodebookError(f"head_dim is {head_dim}: PQ codes need one that 8, 16 or 32 subspaces divide")
    if subspaces not in allowed:
        raise CodebookError(f"subspaces is {subspaces}: head_dim {head_dim} allows {', '.join(map(str, allowed))}")


@dataclass(frozen=True)
class Codebook:
    """One layer's codebooks, a separate one per KV head; float32 all.

    mean             [H, D]             centre of the keys
    key_transform    [H, D, D]          applied from the right to a centred key
    query_transform  [H, D, D]          applied from the right to a query: inverse transpose of key_transform
    centroids        [H, M, 256, D/M]   in the transformed space, subspace after subspace
    query_offset     [H, D]             its product with a transformed key predicts log2 of the value's norm, less the mean
    """

    mean: torch.Tensor
    key_transform: torch.Tensor
    query_transform: torch.Tensor
    centroids: torch.Tensor
    query_offset: torch.Tensor

    def __post_init__(self) -> None:
        heads, head_dim = self.mean.shape
        subspaces = self.centroids.shape[1]
        check_subspaces(head_dim, subspaces)
        shapes = {
            "key_transform": (heads, head_dim, head_dim),
            "query_transform": (heads, head_dim, head_dim),
            "centroids": (heads, subspaces, CENTROIDS, head_dim // subspaces),
            "query_offset": (heads, head_dim),
        }
        for name, expected in shapes.items():
            shape = tuple(getattr(self, name).shape)
            if shape != expected:
                raise CodebookError(f"{name} has shape {shape}, expected {expected}")
        for name, tensor in self.tensors().items():
            if tensor.dtype != torch.float32:
                raise CodebookError(f"{name} is {tensor.dtype}, expected torch.float32")

    @property
    def num_kv_heads(self) -> int:
        return self.mean.shape[0]

    @property
    def head_dim(self) -> int:
        return self.mean.shape[1]

    @property
    def subspaces(self) -> int:
        """Bytes of a key's code."""
        return self.centroids.shape[1]

    def tensors(self) -> dict[str, torch.Tensor]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def to(self, device: torch.device | str) -> "Codebook":
        return Codebook(**{name: tensor.to(device) for name, tensor in self.tensors().items()})

    def slice_heads(self, start: int, count: int) -> "Codebook":
        """The KV heads [start, start + count) of a tensor-parallel rank."""
        if start < 0 or count < 1 or start + count > self.num_kv_heads:
            raise CodebookError(f"KV heads {start} to {start + count - 1} asked for: the codebook has {self.num_kv_heads}")
        return Codebook(**{name: tensor[start : start + count].contiguous() for name, tensor in self.tensors().items()})


class CodebookInfo(BaseModel):
    """Metadata of a codebook file: the model it is for and what it was trained on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: Literal["1"] = "1"
    model: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    subspaces: int
    text_sha256: str
    training_tokens: int
    vllm_santa_version: str

    @property
    def shape(self) -> ModelShape:
        return ModelShape(self.num_layers, self.num_kv_heads, self.head_dim)


@dataclass(frozen=True)
class Codebooks:
    """The codebooks of a model: layer index -> Codebook, and where they come from."""

    layers: Mapping[int, Codebook]
    info: CodebookInfo

    def fingerprint(self) -> str:
        """SHA-256 over names, shapes and bytes of all tensors, as hex. Equal fingerprints mean interchangeable codes."""
        return _digest(_flatten(self.layers))

    def slice_heads(self, start: int, count: int) -> "Codebooks":
        """The KV heads [start, start + count) of every layer; `info` still describes the whole file."""
        return replace(self, layers={index: layer.slice_heads(start, count) for index, layer in self.layers.items()})


def save_codebooks(codebooks: Codebooks, path: Path | str) -> None:
    """Write one safetensors file: tensors `layers.<index>.<field>`, metadata = info and fingerprint.

    Layers without attention are left out. Raises CodebookError if `info` and the layers do not agree.
    """
    _check_contents(path, codebooks.info, codebooks.layers)
    tensors = _flatten(codebooks.layers)
    metadata = {name: str(value) for name, value in codebooks.info.model_dump().items()}
    # Not save_file: it makes files that only their owner can read, and the server may be another user.
    Path(path).write_bytes(save(tensors, metadata | {"fingerprint": _digest(tensors)}))


def load_codebooks(path: Path | str, expected: ModelShape | None = None) -> Codebooks:
    """Read a file that save_codebooks wrote, onto the CPU.

    expected: the model's shape over all tensor-parallel ranks (slice_heads comes after); None accepts any model.
    Raises CodebookError if the file is missing, damaged, of another format version, or for another model shape.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError) as error:
        raise CodebookError(f"{path}: cannot be read as a safetensors file: {error}") from error
    fingerprint = metadata.pop("fingerprint", None)
    try:
        info = CodebookInfo.model_validate(metadata)
    except ValidationError as error:
        problem = error.errors()[0]
        field = ".".join(map(str, problem["loc"]))
        raise CodebookError(f"{path}: metadata field {field} is {metadata.get(field)!r}: {problem['msg']}") from error
    for field, was, allowed in zip(ModelShape._fields, info.shape, expected or info.shape, strict=True):
        if was != allowed:
            raise CodebookError(f"{path}: {field} is {was}, but the model has {allowed}; calibrate it for this model")
    if _digest(tensors) != fingerprint:
        raise CodebookError(f"{path}: fingerprint is {fingerprint}, but the tensors give {_digest(tensors)}: the file is damaged")
    layers = _unflatten(tensors)
    _check_contents(path, info, layers)
    return Codebooks(layers, info)


def load_served_codebooks(path: Path | str, expected: ModelShape, subspaces: int) -> Codebooks:
    """Read the file that a policy names, for a model of that shape and the policy's number of subspaces.

    Raises:
        CodebookError: as load_codebooks, or for another number of subspaces.
    """
    loaded = load_codebooks(path, expected)
    found = loaded.info.subspaces
    if found != subspaces:
        raise CodebookError(
            f"{path}: subspaces is {found}, but the policy says {subspaces}; "
            f"set `subspaces: {found}` in the policy, or calibrate with --subspaces {subspaces}"
        )
    return loaded


def _check_contents(path: Path | str, info: CodebookInfo, layers: Mapping[int, Codebook]) -> None:
    if not layers or max(layers) >= info.num_layers:
        raise CodebookError(f"{path}: num_layers is {info.num_layers}, but the tensors are of layers {sorted(layers)}")
    for index, layer in layers.items():
        for field in ("num_kv_heads", "head_dim", "subspaces"):
            if getattr(info, field) != getattr(layer, field):
                raise CodebookError(f"{path}: {field} is {getattr(info, field)}, but layer {index} has {getattr(layer, field)}")


def _flatten(layers: Mapping[int, Codebook]) -> dict[str, torch.Tensor]:
    return {
        f"layers.{index}.{name}": tensor.contiguous().cpu()
        for index, layer in sorted(layers.items())
        for name, tensor in layer.tensors().items()
    }


def _unflatten(tensors: Mapping[str, torch.Tensor]) -> dict[int, Codebook]:
    layers: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        _, index, field = name.split(".")
        layers.setdefault(int(index), {})[field] = tensor
    return {index: Codebook(**layers[index]) for index in sorted(layers)}


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()
