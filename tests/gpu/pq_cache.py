"""Paged caches with codes, and codebooks, for the tests of kernels that read or write codes."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_santa.codebook import Codebook
from vllm_santa.kernel_ops import Layer, Rows
from vllm_santa.page import page_views

LAYER = 5


def random_codebook(heads: int, head_dim: int, subspaces: int, seed: int = 0) -> Codebook:
    """Not trained, but with every part in use; on the GPU."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, device="cuda", generator=generator)

    transform = torch.linalg.qr(normal(heads, head_dim, head_dim))[0] * normal(heads, 1, head_dim).mul(0.3).exp()
    centroids = normal(heads, subspaces, 256, head_dim // subspaces)
    query_transform = torch.linalg.inv(transform).mT.contiguous()
    return Codebook(normal(heads, head_dim), transform, query_transform, centroids, 0.1 * normal(heads, head_dim))


@dataclass
class Cache:
    """kv [B, H, N, 2D] and codes [B, H, N, M] of pages in shuffled order; what no row may read is NaN, and its codes are random."""

    kv: Tensor
    codes: Tensor
    block_table: Tensor

    def context(self, row: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """K and V float64 [H, n, D], codes [n, H, M] of a row."""
        blocks = self.block_table[row, : -(-n // self.kv.shape[2])].long()
        kv, codes = (plane[blocks].transpose(0, 1).flatten(1, 2)[:, :n] for plane in (self.kv, self.codes))
        key, value = kv.double().chunk(2, -1)
        return key, value, codes.transpose(0, 1)


def make_cache(heads: int, head_dim: int, subspaces: int, dtype: torch.dtype, contexts: list[int], block: int, seed: int = 0) -> Cache:
    generator = torch.Generator("cuda").manual_seed(seed)
    used = [-(-n // block) for n in contexts]
    order = torch.randperm(sum(used) + 3, generator=generator, device="cuda").int()
    content = heads * (2 * head_dim + subspaces // dtype.itemsize)
    pages = torch.full((len(order), 1, block, content), torch.nan, dtype=dtype, device="cuda")
    kv, codes = page_views(pages, heads, head_dim)
    codes.random_(0, 256, generator=generator)
    table = order[-1].repeat(len(contexts), max(used) + 2)
    start = 0
    for row, n in enumerate(contexts):
        table[row, : used[row]] = order[start : start + used[row]]
        start += used[row]
        data = torch.full((used[row] * block, heads, 2 * head_dim), torch.nan, dtype=dtype, device="cuda")
        data[:n] = torch.randn(n, heads, 2 * head_dim, device="cuda", generator=generator).to(dtype)
        kv[table[row, : used[row]].long()] = data.unflatten(0, (-1, block)).transpose(1, 2)
    return Cache(kv, codes, table)


def make_rows(cache: Cache, contexts: list[int], methods: list[int], budgets: list[int]) -> Rows:
    def tensor(values: list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device="cuda")

    seeds = torch.arange(len(contexts), device="cuda") * 7919 - 3
    return Rows(cache.block_table, tensor(contexts, torch.int32), tensor(methods, torch.int8), tensor(budgets, torch.int32), seeds)


def make_layer(head_dim: int, soft_cap: float = 0.0) -> Layer:
    return Layer(LAYER, 1 / math.sqrt(head_dim), soft_cap, head_offset=6)
