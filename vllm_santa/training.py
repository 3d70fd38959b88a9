"""Train a layer's PQ codebooks from real keys and queries.

What is minimised is the error of q·k, not of k. With Σ_q the second moment of the group's queries, E (q·e)² = e Σ_q eᵀ = ‖e A‖² for
A = Σ_q^{1/2}: keys multiplied by A can be quantised by plain k-means. A rotation then deals the eigenvalues of their covariance out over
the subspaces, as Optimized Product Quantization does for Gaussian data (Ge et al., CVPR 2013: eigenvalue allocation).

What a selection wants is p·‖v‖, not p: that is the proposal of least variance. log ‖v‖ is to a good part linear in the key, so a constant
vector added to the transformed query brings it into the scores, and no byte is stored for it.
"""

import torch

from vllm_santa.codebook import CENTROIDS, Codebook, check_subspaces
from vllm_santa.reference.pq import nearest, split_subspaces
from vllm_santa.rotary import Rotary

ITERATIONS = 5
RIDGE = 1e-3  # of Σ_q's mean eigenvalue: keeps the queries' transform, its inverse root, bounded
VALUE_RIDGE = 1e-2  # of a transformed key's mean square, 1


def train_codebook(
    keys: torch.Tensor,
    queries: torch.Tensor,
    subspaces: int = 16,
    seed: int = 0,
    iterations: int = ITERATIONS,
    rotary: Rotary | None = None,
    values: torch.Tensor | None = None,
) -> Codebook:
    """keys [n, H, D], queries [m, H, G, D] (as attention sees them: after RoPE) -> Codebook on the same device.

    n and m are free and unrelated; n < 256, or few distinct keys, only leaves centroids unused. Same inputs and seed, same codebook.
    rotary: spreads keys and queries over all positions to be served; without it the codebook is good only up to the positions it has seen.
    values: [n, H, D], those of the keys; without them the query offset is zero: the proxies are scores alone.
    Raises CodebookError for a head_dim that the subspaces do not divide, ValueError for empty, mismatched or non-finite inputs.
    """
    check_subspaces(keys.shape[-1], subspaces)
    _check_inputs(keys, queries, values)
    if rotary:
        generator = torch.Generator().manual_seed(seed)
        keys, queries = rotary.spread(keys, generator), rotary.spread(queries, generator)
    mean, key_transform, query_transform = query_aware_transform(keys, queries, subspaces)
    transformed = (keys.float().transpose(0, 1) - mean[:, None]) @ key_transform
    points = split_subspaces(transformed, subspaces)
    centroids = kmeans(points, CENTROIDS, seed, iterations).unflatten(0, (keys.shape[1], subspaces))
    offset = torch.zeros_like(mean) if values is None else value_direction(transformed, values)
    return Codebook(mean, key_transform, query_transform, centroids, offset)


def value_direction(transformed: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """transformed keys [H, n, D], values [n, H, D] -> [H, D] float32 whose product with a key predicts log2 ‖v‖ less its mean.

    Ridge regression; norms below a thousandth of their mean count as that.
    """
    keys = transformed.double()
    norms = values.double().norm(dim=-1).T
    norms = norms.clamp(min=1e-3 * norms.mean(-1, keepdim=True)).clamp(min=1e-30)
    target = norms.log2() - norms.log2().mean(-1, keepdim=True)
    moment = keys.mT @ keys / keys.shape[1] + VALUE_RIDGE * torch.eye(keys.shape[-1], dtype=keys.dtype, device=keys.device)
    return torch.linalg.solve(moment, keys.mT @ target[..., None] / keys.shape[1])[..., 0].float()


def query_aware_transform(keys: torch.Tensor, queries: torch.Tensor, subspaces: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Centre [H, D], key transform A R / s and query transform A⁻¹ R s, both [H, D, D]; float32.

    s gives the transformed keys a mean square of 1 per dimension, so that half precision holds them.
    """
    mean = keys.float().mean(0)
    root, inverse_root = second_moment_roots(queries)
    weighted = (keys.double().transpose(0, 1) - mean[:, None].double()) @ root
    rotation, scale = balanced_rotation(weighted, subspaces)
    return mean, (root @ rotation / scale).float(), (inverse_root @ rotation * scale).float()


def second_moment_roots(queries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """queries [m, H, G, D] -> Σ_q^{1/2} and its inverse, [H, D, D] float64, with a small ridge; the identity if all queries are zero."""
    rows = queries.double().permute(1, 0, 2, 3).flatten(1, 2)
    values, vectors = torch.linalg.eigh(rows.mT @ rows / rows.shape[1])
    mean = values.mean(-1, keepdim=True)
    values = torch.where(mean > 0, values.clamp(min=0) + RIDGE * mean, 1.0).sqrt()
    return (vectors * values[:, None]) @ vectors.mT, (vectors / values[:, None]) @ vectors.mT


def balanced_rotation(points: torch.Tensor, subspaces: int) -> tuple[torch.Tensor, torch.Tensor]:
    """points [H, n, D] float64, centred -> rotation [H, D, D] to balanced principal axes, root mean square [H, 1, 1] (1 if zero)."""
    values, vectors = torch.linalg.eigh(points.mT @ points / points.shape[1])
    order = allocate_eigenvalues(values, subspaces)
    power = values.clamp(min=0).mean(-1)[:, None, None]
    return vectors.gather(-1, order[:, None].expand_as(vectors)), torch.where(power > 0, power, 1.0).sqrt()


def allocate_eigenvalues(values: torch.Tensor, subspaces: int) -> torch.Tensor:
    """Deal ascending eigenvalues [H, D] out to equal-sized subspaces of about equal product: largest first, to the smallest product so far.

    Returns the axes [H, D] int64, subspace after subspace.
    """
    heads, head_dim = values.shape
    size = head_dim // subspaces
    floor = values[:, -1:].clamp(min=1e-30) * 1e-9
    logs = values.clamp(min=floor).log()
    logs = (logs - logs[:, :1]).cpu()  # >= 0, so a fuller subspace never looks emptier
    product = torch.zeros(heads, subspaces, dtype=logs.dtype)
    filled = torch.zeros(heads, subspaces, dtype=torch.int64)
    order = torch.empty(heads, head_dim, dtype=torch.int64)
    head = torch.arange(heads)
    for axis in reversed(range(head_dim)):
        target = product.masked_fill(filled == size, torch.inf).argmin(-1)
        order[head, target * size + filled[head, target]] = axis
        product[head, target] += logs[:, axis]
        filled[head, target] += 1
    return order.to(values.device)


def kmeans(points: torch.Tensor, clusters: int, seed: int, iterations: int) -> torch.Tensor:
    """Lloyd's algorithm from a k-means++ start, for P problems at once: points [P, n, d] float32 -> centroids [P, clusters, d].

    A cluster that loses all its points restarts at the points worst served, the farthest first.
    """
    problems, count, dim = points.shape
    centroids = _plus_plus(points, clusters, seed)
    first = torch.arange(problems, device=points.device)[:, None] * clusters  # a problem's first row among all centroids
    for _ in range(iterations):
        index, distance = nearest(points, centroids)
        rows = (index + first).flatten()
        sizes = torch.bincount(rows, minlength=problems * clusters).view(problems, clusters, 1)
        sums = points.new_zeros(problems * clusters, dim).index_add_(0, rows, points.flatten(0, 1))
        centroids = sums.view_as(centroids) / sizes.clamp(min=1)
        if (sizes == 0).any():
            centroids = torch.where(sizes == 0, _restarts(points, distance, sizes), centroids)
    return centroids


def _restarts(points: torch.Tensor, distance: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """For the j-th empty cluster of a problem, the j-th farthest point; [P, clusters, d], meaningful where sizes == 0."""
    worst = distance.topk(min(sizes.shape[1], points.shape[1]), dim=1).indices
    rank = ((sizes == 0).cumsum(1) - 1).clamp(0, worst.shape[1] - 1)
    return points.gather(1, worst[..., None].gather(1, rank).expand(-1, -1, points.shape[-1]))


def _plus_plus(points: torch.Tensor, clusters: int, seed: int) -> torch.Tensor:
    """k-means++ (Arthur and Vassilvitskii 2007): each next centroid is a point drawn in proportion to its squared distance."""
    problems, count, dim = points.shape
    # The same numbers for every problem, so that a tensor-parallel rank trains its heads as a single worker would.
    draws = torch.rand(clusters, generator=torch.Generator().manual_seed(seed)).to(points.device)
    columns = points.mT.contiguous()  # [P, d, n]: the long axis innermost is several times faster on a CPU
    centroids = points.new_empty(problems, dim, clusters)
    distance = points.new_ones(problems, count)
    for step, draw in enumerate(draws):
        total = distance.cumsum(1)
        chosen = torch.searchsorted(total, draw * total[:, -1:], right=True).clamp_(max=count - 1)
        centroid = columns.gather(2, chosen[:, None].expand(-1, dim, 1))
        centroids[..., step : step + 1] = centroid
        gap = (columns - centroid).square_().sum(1)
        distance = gap if step == 0 else torch.minimum(distance, gap)
    return centroids.mT.contiguous()


def _check_inputs(keys: torch.Tensor, queries: torch.Tensor, values: torch.Tensor | None) -> None:
    if queries.shape[1] != keys.shape[1] or queries.shape[-1] != keys.shape[-1]:
        raise ValueError(f"queries have shape {tuple(queries.shape)}, expected [m, H, G, D] with H and D of keys {tuple(keys.shape)}")
    if values is not None and values.shape[:2] != keys.shape[:2]:
        raise ValueError(f"values have shape {tuple(values.shape)}, expected [n, H, D] with n and H of keys {tuple(keys.shape)}")
    for name, tensor in (("keys", keys), ("queries", queries), ("values", keys if values is None else values)):
        if tensor.shape[0] == 0:
            raise ValueError(f"{name} have no rows: at least one is needed")
        bad = int((~tensor.isfinite()).flatten(1).any(1).sum())
        if bad:
            raise ValueError(f"{name}: {bad} of {tensor.shape[0]} rows are NaN or infinite; they must be finite")
