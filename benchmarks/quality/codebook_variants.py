"""Ways to build a layer's PQ codebook, from plain subspaces to what `train_codebook` does, and what was tried beyond it."""

from collections.abc import Callable

import torch
from torch import Tensor

from vllm_santa.codebook import CENTROIDS, Codebook
from vllm_santa.reference.pq import nearest, split_subspaces
from vllm_santa.training import ITERATIONS, balanced_rotation, kmeans, query_aware_transform, second_moment_roots, train_codebook

Variant = Callable[[Tensor, Tensor, int], Codebook]
"""keys [n, H, D], queries [m, H, G, D], subspaces -> Codebook."""


def quantise(keys: Tensor, mean: Tensor, key_transform: Tensor, query_transform: Tensor, subspaces: int) -> Codebook:
    """k-means on keys that some transform has turned."""
    points = split_subspaces((keys.transpose(0, 1) - mean[:, None]) @ key_transform, subspaces)
    centroids = kmeans(points, CENTROIDS, 0, ITERATIONS).unflatten(0, (keys.shape[1], subspaces))
    return Codebook(mean, key_transform, query_transform, centroids)


def identity(keys: Tensor) -> Tensor:
    return torch.eye(keys.shape[-1]).repeat(keys.shape[1], 1, 1)


def plain(keys: Tensor, queries: Tensor, subspaces: int) -> Codebook:
    return quantise(keys, keys.mean(0), identity(keys), identity(keys), subspaces)


def per_dimension(keys: Tensor, queries: Tensor, subspaces: int) -> Codebook:
    """Each feature scaled by its queries' root mean square: Σ_q taken for diagonal."""
    scale = queries.square().mean((0, 2)).sqrt()
    scale = (scale / scale.mean(-1, keepdim=True)).clamp(min=1e-3)
    return quantise(keys, keys.mean(0), torch.diag_embed(scale), torch.diag_embed(1 / scale), subspaces)


def allocation(keys: Tensor, queries: Tensor, subspaces: int) -> Codebook:
    """OPQ's eigenvalue allocation of the keys themselves: blind to the queries."""
    mean = keys.mean(0)
    rotation, scale = balanced_rotation((keys - mean).transpose(0, 1).double(), subspaces)
    return quantise(keys, mean, (rotation / scale).float(), (rotation * scale).float(), subspaces)


def root_only(keys: Tensor, queries: Tensor, subspaces: int) -> Codebook:
    root, inverse_root = second_moment_roots(queries)
    return quantise(keys, keys.mean(0), root.float(), inverse_root.float(), subspaces)


def root_random(keys: Tensor, queries: Tensor, subspaces: int) -> Codebook:
    root, inverse_root = second_moment_roots(queries)
    rotation = torch.linalg.qr(torch.randn(root.shape, generator=torch.Generator().manual_seed(0), dtype=root.dtype))[0]
    return quantise(keys, keys.mean(0), (root @ rotation).float(), (inverse_root @ rotation).float(), subspaces)


def uncentred(keys: Tensor, queries: Tensor, subspaces: int) -> Codebook:
    root, inverse_root = second_moment_roots(queries)
    rotation, scale = balanced_rotation(keys.transpose(0, 1).double() @ root, subspaces)
    mean = torch.zeros_like(keys[0])
    return quantise(keys, mean, (root @ rotation / scale).float(), (inverse_root @ rotation * scale).float(), subspaces)


def equal_heads(keys: Tensor, queries: Tensor, subspaces: int) -> Codebook:
    """Σ_q of heads scaled to equal power, so that none of the group outweighs the others."""
    return train_codebook(keys, queries / queries.square().mean((0, 3), keepdim=True).sqrt(), subspaces)


def learned_rotation(keys: Tensor, queries: Tensor, subspaces: int, rounds: int = 10) -> Codebook:
    """OPQ's alternation (Ge et al. 2013, non-parametric) from our rotation: Lloyd step, then the best rotation for its codes."""
    mean, key_transform, query_transform = query_aware_transform(keys, queries, subspaces)
    points = (keys.transpose(0, 1) - mean[:, None]) @ key_transform
    rotation = identity(keys)
    for _ in range(rounds):
        problems = split_subspaces(points @ rotation, subspaces)
        centroids = kmeans(problems, CENTROIDS, 0, 2)
        index = nearest(problems, centroids)[0][..., None].expand_as(problems)
        decoded = centroids.gather(1, index).unflatten(0, (-1, subspaces)).transpose(1, 2).flatten(2)
        left, _, right = torch.linalg.svd(points.mT.double() @ decoded.double())
        rotation = (left @ right).float()
    return quantise(keys, mean, key_transform @ rotation, query_transform @ rotation, subspaces)


VARIANTS: dict[str, Variant] = {
    "plain": plain,
    "per-dimension query scale": per_dimension,
    "allocation without A": allocation,
    "A alone": root_only,
    "A and random rotation": root_random,
    "A and allocation": train_codebook,
    "not centred": uncentred,
    "equal heads": equal_heads,
    "learned rotation": learned_rotation,
}
