"""The kernel that writes keys, values and codes, against the plain-torch encoder in float64."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("flashinfer", reason="the kernels are compiled by FlashInfer's JIT")

from pq_cache import make_cache, random_codebook

from vllm_santa.codebook import Codebook, CodebookError
from vllm_santa.jit import encode_spec
from vllm_santa.reference import pq
from vllm_santa.ssa_ops import CodebookBuffers, encode_blocks, write_cache

pytestmark = pytest.mark.gpu

HEADS = 2
SHAPES = [(128, 16, torch.bfloat16), (256, 16, torch.float16), (64, 8, torch.float16), (128, 32, torch.float16)]


@pytest.fixture(scope="module", autouse=True)
def modules() -> None:
    """Compile all shapes side by side."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda shape: encode_spec(shape[0], shape[2], shape[1]).build(), SHAPES))


def setup(head_dim: int, subspaces: int) -> tuple[Codebook, CodebookBuffers]:
    codebook = random_codebook(HEADS + 1, head_dim, subspaces)
    buffers = CodebookBuffers(HEADS, head_dim, subspaces)
    buffers.load(codebook, 1)
    return codebook.slice_heads(1, HEADS), buffers


def distances(keys: Tensor, codebook: Codebook) -> Tensor:
    """Squared distance of every transformed key to every centroid, less the key's square, in float64: [n, H, M, 256]."""
    turned = torch.einsum("nhd,hde->nhe", keys.double() - codebook.mean.double(), codebook.key_transform.double())
    parts = turned.unflatten(-1, (codebook.subspaces, -1))
    centroids = codebook.centroids.double()
    return centroids.square().sum(-1) - 2 * torch.einsum("nhmd,hmcd->nhmc", parts, centroids)


def assert_nearest(codes: Tensor, keys: Tensor, codebook: Codebook) -> None:
    """Every code is the nearest centroid's, or as near as float32 can tell; and all but very few are those of the float32 reference."""
    exact = distances(keys, codebook)
    excess = exact.gather(-1, codes.long().unsqueeze(-1)).squeeze(-1) - exact.amin(-1)
    assert excess.max() < 1e-4, float(excess.max())
    assert (codes != pq.encode(keys, codebook)).sum() <= max(1, 1e-3 * codes.numel())


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("tokens", [1, 16, 61, 300])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_new_tokens(shape: tuple[int, int, torch.dtype], tokens: int, block: int) -> None:
    head_dim, subspaces, dtype = shape
    codebook, buffers = setup(head_dim, subspaces)
    cache = make_cache(HEADS, head_dim, subspaces, dtype, [700], block)
    before, codes_before = cache.kv.clone(), cache.codes.clone()
    # As vLLM gives them: views into one projection.
    fused = torch.randn(tokens + 3, 5, HEADS, head_dim, device="cuda").to(dtype)
    key, value = fused[:tokens, 3], fused[:tokens, 4]
    slots = torch.randperm(cache.kv.shape[0] * block, device="cuda")[:tokens]
    slots[1::3] = -1
    write_cache(key, value, cache.kv, cache.codes, slots, buffers)
    kept = slots >= 0
    blocks, offsets = slots[kept] // block, slots[kept] % block
    assert cache.kv[blocks, :, offsets].equal(torch.cat([key, value], -1)[kept])
    assert_nearest(cache.codes[blocks, :, offsets], key[kept], codebook)
    untouched = torch.ones(cache.kv.shape[0], block, dtype=torch.bool, device="cuda")
    untouched[blocks, offsets] = False
    assert cache.codes.transpose(1, 2)[untouched].equal(codes_before.transpose(1, 2)[untouched])
    kv, kv_before = cache.kv.transpose(1, 2)[untouched], before.transpose(1, 2)[untouched]
    assert kv.view(torch.int16).equal(kv_before.view(torch.int16))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_code_does_not_depend_on_the_tokens_beside_it(shape: tuple[int, int, torch.dtype]) -> None:
    head_dim, subspaces, dtype = shape
    _, buffers = setup(head_dim, subspaces)
    cache = make_cache(HEADS, head_dim, subspaces, dtype, [700], 16)
    key = torch.randn(200, HEADS, head_dim, device="cuda").to(dtype)
    slots = torch.arange(200, device="cuda")
    write_cache(key, key, cache.kv, cache.codes, slots, buffers)
    together = cache.codes.clone()
    for size in (1, 40):
        for start in range(0, 200, size):
            part = slice(start, start + size)
            write_cache(key[part], key[part], cache.kv, cache.codes, slots[part].clone(), buffers)
        assert cache.codes.equal(together)
    cache.codes.zero_()
    encode_blocks(cache.kv, cache.codes, torch.arange(12, device="cuda"), buffers)
    assert cache.codes[:12].equal(together[:12])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cached_blocks(shape: tuple[int, int, torch.dtype]) -> None:
    head_dim, subspaces, dtype = shape
    codebook, buffers = setup(head_dim, subspaces)
    cache = make_cache(HEADS, head_dim, subspaces, dtype, [900], 32)
    before = cache.codes.clone()
    blocks = cache.block_table[0, :20].long()
    encode_blocks(cache.kv, cache.codes, blocks, buffers)
    keys = cache.context(0, 640)[0].transpose(0, 1).to(dtype)
    assert_nearest(cache.context(0, 640)[2], keys, codebook)
    others = torch.ones(cache.kv.shape[0], dtype=torch.bool, device="cuda")
    others[blocks] = False
    assert cache.codes[others].equal(before[others])
    encode_blocks(cache.kv, cache.codes, None, buffers)
    assert_nearest(cache.context(0, 900)[2], cache.context(0, 900)[0].transpose(0, 1).to(dtype), codebook)


def test_keys_that_are_not_finite_and_codebooks_that_appear_after_capture() -> None:
    head_dim, subspaces, dtype = SHAPES[0]
    codebook = random_codebook(HEADS, head_dim, subspaces)
    buffers = CodebookBuffers(HEADS, head_dim, subspaces)
    cache = make_cache(HEADS, head_dim, subspaces, dtype, [64], 16)
    key = torch.randn(20, HEADS, head_dim, device="cuda").to(dtype)
    key[3, :, 7] = torch.nan
    slots = torch.arange(20, device="cuda")
    write_cache(key, key, cache.kv, cache.codes, slots, buffers)
    assert cache.codes[0].eq(0).all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        write_cache(key, key, cache.kv, cache.codes, slots, buffers)
    buffers.load(codebook)
    graph.replay()
    finite = torch.arange(20, device="cuda") != 3
    codes = cache.codes.transpose(1, 2).flatten(0, 1)[:20]
    assert_nearest(codes[finite], key[finite], codebook)
    assert codes[3].eq(0).all()


def test_clear_errors() -> None:
    head_dim, subspaces, dtype = SHAPES[0]
    _, buffers = setup(head_dim, subspaces)
    cache = make_cache(HEADS, head_dim, subspaces, dtype, [64], 16)
    key, slots = torch.zeros(4, HEADS, head_dim, dtype=dtype, device="cuda"), torch.arange(4, device="cuda")
    with pytest.raises(ValueError, match="key: .* must be torch.bfloat16"):
        write_cache(key.half(), key, cache.kv, cache.codes, slots, buffers)
    with pytest.raises(ValueError, match="slots: torch.int32"):
        write_cache(key, key, cache.kv, cache.codes, slots.int(), buffers)
    with pytest.raises(ValueError, match="codes: "):
        write_cache(key, key, cache.kv, cache.codes[..., :8], slots, buffers)
    with pytest.raises(CodebookError, match="subspaces of the codebook is 8"):
        buffers.load(random_codebook(HEADS, head_dim, 8))
    with pytest.raises(CodebookError, match="head_dim is 96"):
        CodebookBuffers(1, 96, 16)
