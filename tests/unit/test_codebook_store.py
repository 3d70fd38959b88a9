"""Where a worker's codebooks come from: the policy's file, cut to the rank's heads, or the first prompts."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import PretrainedConfig

pytest.importorskip("vllm")
from vllm_santa import codebook_store  # noqa: E402
from vllm_santa.codebook import Codebook, CodebookError, CodebookInfo, Codebooks, save_codebooks  # noqa: E402
from vllm_santa.codebook_store import LAYERS_PER_STEP, CodebookStore, first_kv_head  # noqa: E402
from vllm_santa.policy import Policy  # noqa: E402

LAYERS, HEADS, D, M = 2, 4, 64, 8


def codebook(seed: int, heads: int = HEADS) -> Codebook:
    random = torch.Generator().manual_seed(seed)
    eye = torch.eye(D).expand(heads, D, D).contiguous()
    centroids = torch.randn(heads, M, 256, D // M, generator=random)
    return Codebook(torch.randn(heads, D, generator=random), eye, eye.clone(), centroids, torch.zeros(heads, D))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save(tmp_path)


def save(folder: Path, layers: int = LAYERS, heads: int = HEADS, missing: int | None = None) -> Path:
    books = {index: codebook(index, heads) for index in range(layers) if index != missing}
    info = CodebookInfo(
        model="m", num_layers=layers, num_kv_heads=heads, head_dim=D, subspaces=M, text_sha256="0" * 64, training_tokens=256,
        vllm_santa_version="test",
    )  # fmt: skip
    save_codebooks(Codebooks(books, info), folder / "codebooks.safetensors")
    return folder / "codebooks.safetensors"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch):
    """A store of a rank: store(policy, rank, ranks)."""

    def make(policy: Policy, rank: int = 0, ranks: int = 1) -> CodebookStore:
        monkeypatch.setattr(codebook_store, "get_tensor_model_parallel_rank", lambda: rank)
        monkeypatch.setattr(codebook_store, "get_tensor_model_parallel_world_size", lambda: ranks)
        model = SimpleNamespace(
            get_total_num_hidden_layers=lambda: LAYERS, get_total_num_kv_heads=lambda: HEADS, get_head_size=lambda: D,
            get_num_kv_heads=lambda _: max(1, HEADS // ranks), hf_text_config=PretrainedConfig(), max_model_len=4096,
        )  # fmt: skip
        return CodebookStore(policy, SimpleNamespace(model_config=model, parallel_config=None))

    return make


def from_file(path: Path, **others: object) -> Policy:
    return Policy(codebooks=str(path), subspaces=M, **others)


def test_read_from_a_file(store, path: Path) -> None:
    books = store(from_file(path))
    for layer in range(LAYERS):
        books.expect(layer)
        assert torch.equal(books.get(layer).centroids, codebook(layer).centroids)
    assert books.ready


@pytest.mark.parametrize(("rank", "ranks", "heads"), [(1, 2, [2, 3]), (3, 4, [3]), (5, 8, [2])])
def test_a_rank_gets_its_heads(store, path: Path, rank: int, ranks: int, heads: list[int]) -> None:
    """More ranks than KV heads share them, as vLLM replicates them."""
    books = store(from_file(path), rank, ranks)
    assert first_kv_head(HEADS) == heads[0]
    assert torch.equal(books.get(1).mean, codebook(1).mean[heads])


def test_a_file_for_another_model(store, tmp_path: Path) -> None:
    with pytest.raises(CodebookError, match="num_kv_heads is 2, but the model has 4; calibrate it for this model"):
        store(from_file(save(tmp_path, heads=2)))
    with pytest.raises(CodebookError, match="num_layers is 3, but the model has 2"):
        store(from_file(save(tmp_path, layers=3)))


def test_a_file_with_other_subspaces(store, path: Path) -> None:
    with pytest.raises(CodebookError, match="subspaces is 8, but the policy says 16; set `subspaces: 8` in the policy"):
        store(Policy(codebooks=str(path), subspaces=16))


def test_a_file_without_a_layer(store, tmp_path: Path) -> None:
    with pytest.raises(CodebookError, match="no codebook for layer 1"):
        books = store(from_file(save(tmp_path, missing=1)))
        books.expect(0)
        books.expect(1)


def test_a_missing_file(store, tmp_path: Path) -> None:
    with pytest.raises(CodebookError, match="cannot be read"):
        store(from_file(tmp_path / "none.safetensors"))


def prompt_tokens(count: int, seed: int) -> list[torch.Tensor]:
    """Keys, queries and values."""
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=random) for shape in ((count, HEADS, D), (count, HEADS, 2, D), (count, HEADS, D))]


def offer(books: CodebookStore, layer: int, *tokens: torch.Tensor) -> Codebook | None:
    books.observe(layer, *tokens)
    return books.train(layer)


def test_trained_once_enough_prompt_tokens_have_passed(store) -> None:
    books = store(Policy(subspaces=M, training_tokens=256))
    for layer in range(LAYERS):
        books.expect(layer)
    for seed in range(2):
        assert [offer(books, layer, *prompt_tokens(100, seed)) for layer in range(LAYERS)] == [None, None]
    first = offer(books, 0, *prompt_tokens(100, 2))
    assert isinstance(first, Codebook) and first.subspaces == M
    assert not books.ready, "layer 1 has none yet"
    assert offer(books, 1, *prompt_tokens(100, 2)) is books.get(1)
    assert books.ready


def test_a_step_trains_a_few_layers(store) -> None:
    """However many wait: the others follow in the next steps, from the same samples."""
    books = store(Policy(subspaces=M, training_tokens=256))
    layers = range(2 * LAYERS_PER_STEP + 1)
    for layer in layers:
        books.expect(layer)
        books.observe(layer, *prompt_tokens(300, layer))
    for done in (LAYERS_PER_STEP, 2 * LAYERS_PER_STEP, len(layers)):
        books.begin_step()
        for layer in layers:
            books.train(layer)
        assert sum(books.get(layer) is not None for layer in layers) == done
        assert books.ready == (done == len(layers))


def test_the_same_prompts_give_the_same_codebooks(store) -> None:
    """Tensor-parallel ranks and restarts agree; what comes after the wanted tokens does not count."""
    trained = []
    for extra in (0, 50):
        books = store(Policy(subspaces=M, training_tokens=256))
        books.expect(0)
        tokens = prompt_tokens(256 + extra, 3)
        for tensor, first in zip(tokens, prompt_tokens(256, 4), strict=True):
            tensor[:256] = first
        trained.append(offer(books, 0, *tokens))
    assert torch.equal(trained[0].centroids, trained[1].centroids)


def test_broken_tokens_do_not_spoil_training(store) -> None:
    books = store(Policy(subspaces=M, training_tokens=256))
    books.expect(0)
    keys, queries, values = prompt_tokens(300, 5)
    keys[7, 1, 3], queries[9, 0, 1, 2], values[11, 2, 0] = torch.nan, torch.inf, torch.nan
    trained = offer(books, 0, keys, queries, values)
    assert all(tensor.isfinite().all() for tensor in trained.tensors().values())
