"""Product-quantised keys: encode, look-up tables, proxy scores. Plain torch, any device.

`H` KV heads, `G` query heads per KV head, `D` head_dim, `M` subspaces, `n` keys.
"""

import math

import torch

from vllm_santa.codebook import Codebook

_CHUNK = 1 << 20  # distances held at once: 4 MiB stay in a CPU's cache


def nearest(points: torch.Tensor, centroids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest centroid of every point, for P problems at once; a tie goes to the lower index.

    points [P, n, d], centroids [P, K, d], both float32 -> index [P, n] int64, squared distance [P, n] float32.
    """
    problems, count, _ = points.shape
    half_norms = centroids.square().sum(-1) / 2
    index = points.new_empty(problems, count, dtype=torch.int64)
    score = points.new_empty(problems, count)
    per_problem = centroids.shape[1] * max(count, 1)
    step, stride = max(1, _CHUNK // per_problem), max(1, _CHUNK // centroids.shape[1])
    for p in range(0, problems, step):
        some, part = slice(p, p + step), centroids[p : p + step].mT
        for i in range(0, count, stride):
            rows = slice(i, i + stride)
            half = torch.baddbmm(half_norms[some, None], points[some, rows], part, alpha=-1)
            torch.min(half, dim=-1, out=(score[some, rows], index[some, rows]))
    return index, (2 * score + points.square().sum(-1)).clamp_(min=0)


def transform_keys(keys: torch.Tensor, codebook: Codebook) -> torch.Tensor:
    """keys [n, H, D], any float dtype -> [H, n, D] float32: centred, then turned."""
    return (keys.float().transpose(0, 1) - codebook.mean[:, None]) @ codebook.key_transform


def split_subspaces(points: torch.Tensor, subspaces: int) -> torch.Tensor:
    """[H, n, D] -> [H * M, n, D/M], the independent problems of product quantisation."""
    heads, count, head_dim = points.shape
    return points.view(heads, count, subspaces, head_dim // subspaces).transpose(1, 2).flatten(0, 1).contiguous()


def encode(keys: torch.Tensor, codebook: Codebook) -> torch.Tensor:
    """keys [n, H, D] -> codes [n, H, M] uint8: per subspace, the nearest centroid to the transformed key."""
    problems = split_subspaces(transform_keys(keys, codebook), codebook.subspaces)
    index, _ = nearest(problems, codebook.centroids.flatten(0, 1))
    return index.to(torch.uint8).view(codebook.num_kv_heads, codebook.subspaces, -1).permute(2, 0, 1).contiguous()


def lookup_tables(query: torch.Tensor, codebook: Codebook, scale: float) -> torch.Tensor:
    """query [..., H, G, D] -> tables [..., H, G, M, 256] float32, in log2 units: (scale·log2(e)·query + offset) · centroid."""
    turned = (query.float() * (scale * math.log2(math.e))) @ codebook.query_transform + codebook.query_offset[:, None]
    parts = turned.unflatten(-1, (codebook.subspaces, -1))
    return torch.einsum("...hgmd,hmcd->...hgmc", parts, codebook.centroids)


def proxy_scores(tables: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Sum of a key's M table entries: about log2(e)·scale·q·k + log2 ‖v‖, up to a constant per query.

    tables [..., H, G, M, 256], codes [..., n, H, M] uint8 -> [..., H, G, n] float32.
    """
    index = codes.movedim(-3, -1).long().unsqueeze(-3)  # [..., H, 1, M, n]
    shape = torch.broadcast_shapes(tables.shape[:-1], index.shape[:-1])
    return tables.expand(*shape, -1).gather(-1, index.expand(*shape, -1)).sum(-2)
