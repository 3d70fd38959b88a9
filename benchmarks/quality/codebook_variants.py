"""Ways to build a layer's PQ codebook: from plain subspaces to what `train_codebook` does, and what was tried beyond it."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_santa.codebook import CENTROIDS, Codebook
from vllm_santa.reference.pq import nearest, split_subspaces
from vllm_santa.training import ITERATIONS, balanced_rotation, kmeans, query_aware_transform, second_moment_roots, train_codebook


class Sample(NamedTuple):
    """What a codebook is trained on, float32: keys [n, H, D], queries [m, H, G, D], values [n, H, D]."""

    keys: Tensor
    queries: Tensor
    values: Tensor


Variant = Callable[[Sample, int], Codebook]
"""Sample, subspaces -> Codebook."""


def quantise(keys: Tensor, mean: Tensor, key_transform: Tensor, query_transform: Tensor, subspaces: int) -> Codebook:
    """k-means on keys [n, H, D] that some transform has turned; scores alone, no value norms."""
    points = split_subspaces((keys - mean).transpose(0, 1) @ key_transform.float(), subspaces)
    centroids = kmeans(points, CENTROIDS, 0, ITERATIONS).unflatten(0, (keys.shape[1], subspaces))
    return Codebook(mean, key_transform.float(), query_transform.float(), centroids, torch.zeros_like(mean))


def identity(keys: Tensor) -> Tensor:
    return torch.eye(keys.shape[-1], device=keys.device).repeat(keys.shape[1], 1, 1)


def plain(sample: Sample, subspaces: int) -> Codebook:
    eye = identity(sample.keys)
    return quantise(sample.keys, sample.keys.mean(0), eye, eye, subspaces)


def per_dimension(sample: Sample, subspaces: int) -> Codebook:
    """Each feature scaled by its queries' root mean square: Σ_q taken for diagonal."""
    scale = sample.queries.square().mean((0, 2)).sqrt()
    scale = (scale / scale.mean(-1, keepdim=True)).clamp(min=1e-3)
    return quantise(sample.keys, sample.keys.mean(0), torch.diag_embed(scale), torch.diag_embed(1 / scale), subspaces)


def allocation(sample: Sample, subspaces: int) -> Codebook:
    """OPQ's eigenvalue allocation of the keys themselves: blind to the queries."""
    mean = sample.keys.mean(0)
    rotation, scale = balanced_rotation((sample.keys - mean).transpose(0, 1).double(), subspaces)
    return quantise(sample.keys, mean, rotation / scale, rotation * scale, subspaces)


def root_only(sample: Sample, subspaces: int) -> Codebook:
    root, inverse_root = second_moment_roots(sample.queries)
    return quantise(sample.keys, sample.keys.mean(0), root, inverse_root, subspaces)


def root_random(sample: Sample, subspaces: int) -> Codebook:
    root, inverse_root = second_moment_roots(sample.queries)
    noise = torch.randn(root.shape, generator=torch.Generator().manual_seed(0), dtype=root.dtype)
    rotation = torch.linalg.qr(noise)[0].to(root.device)
    return quantise(sample.keys, sample.keys.mean(0), root @ rotation, inverse_root @ rotation, subspaces)


def root_allocation(sample: Sample, subspaces: int) -> Codebook:
    return train_codebook(sample.keys, sample.queries, subspaces)


def uncentred(sample: Sample, subspaces: int) -> Codebook:
    root, inverse_root = second_moment_roots(sample.queries)
    rotation, scale = balanced_rotation(sample.keys.transpose(0, 1).double() @ root, subspaces)
    return quantise(sample.keys, torch.zeros_like(sample.keys[0]), root @ rotation / scale, inverse_root @ rotation * scale, subspaces)


def equal_heads(sample: Sample, subspaces: int) -> Codebook:
    """Σ_q of heads scaled to equal power, so that none of the group outweighs the others."""
    return train_codebook(sample.keys, sample.queries / sample.queries.square().mean((0, 3), keepdim=True).sqrt(), subspaces)


def learned_rotation(sample: Sample, subspaces: int, rounds: int = 10) -> Codebook:
    """OPQ's alternation (Ge et al. 2013, non-parametric) from our rotation: k-means, then the best rotation for its codes."""
    mean, key_transform, query_transform = query_aware_transform(sample.keys, sample.queries, subspaces)
    points = (sample.keys - mean).transpose(0, 1) @ key_transform
    rotation = identity(sample.keys)
    for _ in range(rounds):
        problems = split_subspaces(points @ rotation, subspaces)
        centroids = kmeans(problems, CENTROIDS, 0, 2)
        index = nearest(problems, centroids)[0][..., None].expand_as(problems)
        decoded = centroids.gather(1, index).unflatten(0, (-1, subspaces)).transpose(1, 2).flatten(2)
        left, _, right = torch.linalg.svd(points.mT.double() @ decoded.double())
        rotation = (left @ right).float()
    return quantise(sample.keys, mean, key_transform @ rotation, query_transform @ rotation, subspaces)


def with_value_norms(sample: Sample, subspaces: int) -> Codebook:
    return train_codebook(sample.keys, sample.queries, subspaces, values=sample.values)


OURS = "A, allocation and value norms"
COMPARED = ("plain", "A and allocation", OURS)
"""Measured with every number of subspaces; the others with 16."""
VARIANTS: dict[str, Variant] = {
    "plain": plain,
    "per-dimension query scale": per_dimension,
    "allocation without A": allocation,
    "A alone": root_only,
    "A and random rotation": root_random,
    "A and allocation": root_allocation,
    "… not centred": uncentred,
    "… heads of equal power": equal_heads,
    "… rotation learned further": learned_rotation,
    OURS: with_value_norms,
}
