"""PQ encode, look-up tables and proxy scores; the training that makes them accurate."""

import math
from dataclasses import replace

import pytest
import torch

from vllm_santa.codebook import Codebook, CodebookError
from vllm_santa.reference.pq import encode, lookup_tables, nearest, proxy_scores, split_subspaces
from vllm_santa.training import allocate_eigenvalues, kmeans, query_aware_transform, train_codebook

H, G, D = 2, 3, 64


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def skewed(n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [n, H, D] and queries [n, H, G, D] with correlated features and different principal axes."""
    spread = torch.logspace(0.5, -1.5, D)
    keys = torch.einsum("nhd,hde->nhe", normal(n, H, D, seed=seed) * spread, torch.linalg.qr(normal(H, D, D, seed=90))[0])
    queries = torch.einsum("nhgd,hde->nhge", normal(n, H, G, D, seed=seed + 1) * spread, torch.linalg.qr(normal(H, D, D, seed=91))[0])
    return keys + 3, queries


def exact_scores(queries: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.einsum("bhgd,nhd->bhgn", queries, keys) * scale * math.log2(math.e)


def proxies(queries: torch.Tensor, keys: torch.Tensor, codebook: Codebook, scale: float) -> torch.Tensor:
    tables = lookup_tables(queries, codebook, scale)
    return proxy_scores(tables, encode(keys, codebook).expand(len(queries), -1, -1, -1))


def spread_of_error(queries: torch.Tensor, keys: torch.Tensor, codebook: Codebook) -> float:
    """Root mean square of the score error, without the part that all keys share."""
    error = proxies(queries, keys, codebook, 0.125) - exact_scores(queries, keys, 0.125)
    return (error - error.mean(-1, keepdim=True)).square().mean().sqrt().item()


def plain_codebook(keys: torch.Tensor, subspaces: int) -> Codebook:
    eye = torch.eye(D).expand(H, D, D).contiguous()
    mean = keys.mean(0)
    points = split_subspaces((keys - mean).transpose(0, 1), subspaces)
    centroids = kmeans(points, 256, 0, 5).unflatten(0, (H, subspaces))
    return Codebook(mean, eye, eye, centroids, torch.zeros(H, D))


@pytest.mark.parametrize("subspaces", [8, 16, 32])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_shapes_of_every_head_dim(head_dim: int, subspaces: int) -> None:
    keys, queries = normal(300, H, head_dim), normal(50, H, G, head_dim)
    codebook = train_codebook(keys, queries, subspaces)
    codes = encode(keys, codebook)
    tables = lookup_tables(queries, codebook, 1.0)
    assert codes.shape == (300, H, subspaces) and codes.dtype == torch.uint8
    assert tables.shape == (50, H, G, subspaces, 256) and tables.dtype == torch.float32
    assert proxy_scores(tables[0], codes).shape == (H, G, 300)


@pytest.mark.parametrize("subspaces", [8, 16, 32])
def test_scores_are_exact_when_every_key_is_a_centroid(subspaces: int) -> None:
    """With at most 256 keys each has a centroid of its own in every subspace: what is left is the algebra."""
    keys, queries = skewed(200)
    codebook = train_codebook(keys, queries, subspaces)
    proxy, exact = proxies(queries[:5], keys, codebook, 0.125), exact_scores(queries[:5], keys, 0.125)
    offset = (proxy - exact).mean(-1, keepdim=True)
    torch.testing.assert_close(proxy - offset, exact, atol=2e-3, rtol=0)
    centre = exact_scores(queries[:5], codebook.mean[None], 0.125)
    torch.testing.assert_close(offset, -centre, atol=2e-3, rtol=1e-4)


def test_scores_are_the_dot_products_of_the_decoded_keys() -> None:
    keys, queries = skewed(2000)
    codebook = train_codebook(keys, queries)
    codes = encode(keys, codebook).long()
    head, part = torch.arange(H)[:, None], torch.arange(16)[None]
    decoded = codebook.centroids[head, part, codes].flatten(2)  # [n, H, D], transformed space
    expected = torch.einsum("bhgd,hde,nhe->bhgn", queries[:4], codebook.query_transform, decoded) * 0.125 * math.log2(math.e)
    torch.testing.assert_close(proxies(queries[:4], keys, codebook, 0.125), expected, atol=1e-3, rtol=1e-4)


def test_transforms_are_inverse_transposes() -> None:
    keys, queries = skewed(500)
    _, key_transform, query_transform = query_aware_transform(keys, queries, 16)
    torch.testing.assert_close(query_transform @ key_transform.mT, torch.eye(D).expand(H, D, D), atol=1e-3, rtol=0)


def test_a_constant_added_to_the_keys_changes_nothing() -> None:
    keys, queries = skewed(1000)
    constant = normal(H, D, seed=5) * 4
    here, there = train_codebook(keys, queries), train_codebook(keys + constant, queries)
    torch.testing.assert_close(there.mean, here.mean + constant, atol=1e-4, rtol=0)
    moved = encode(keys + constant, replace(here, mean=here.mean + constant))
    assert (moved == encode(keys, here)).float().mean() > 0.999  # but for roundings
    errors = [spread_of_error(queries[:50], k, c) for k, c in ((keys, here), (keys + constant, there))]
    assert errors[1] == pytest.approx(errors[0], rel=0.02)


def test_query_aware_beats_plain_subspaces() -> None:
    keys, queries = skewed(3000)
    fresh_keys, fresh_queries = skewed(1000, seed=7)
    plain = spread_of_error(fresh_queries[:50], fresh_keys, plain_codebook(keys, 16))
    aware = spread_of_error(fresh_queries[:50], fresh_keys, train_codebook(keys, queries, 16))
    assert aware < 0.7 * plain


def test_more_subspaces_less_error() -> None:
    keys, queries = skewed(3000)
    errors = [spread_of_error(queries[:50], keys, train_codebook(keys, queries, m)) for m in (8, 16, 32)]
    assert errors[0] > 1.2 * errors[1] > 1.44 * errors[2]


def test_same_seed_same_codebook() -> None:
    keys, queries = skewed(1500)
    one, two, other = (train_codebook(keys, queries, seed=seed) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(one.tensors().values(), two.tensors().values(), strict=True))
    assert not torch.equal(one.centroids, other.centroids)


def test_eigenvalues_are_dealt_out_evenly() -> None:
    values = torch.logspace(-3, 3, 32, dtype=torch.float64).expand(2, 32)
    order = allocate_eigenvalues(values, 8)
    assert torch.equal(order.sort(-1).values, torch.arange(32).expand(2, 32))
    products = values.gather(-1, order).log().unflatten(-1, (8, 4)).sum(-1)
    assert (products.amax(-1) - products.amin(-1)).max() < 1.5


def test_nearest_is_brute_force_and_ties_go_to_the_lower_index() -> None:
    points, centroids = normal(3, 5000, 4), normal(3, 256, 4, seed=1)
    centroids[:, 200] = centroids[:, 10]
    index, distance = nearest(points, centroids)
    brute = torch.cdist(points.double(), centroids.double()).square()
    torch.testing.assert_close(brute.gather(-1, index[..., None])[..., 0], brute.amin(-1), atol=1e-5, rtol=0)
    torch.testing.assert_close(distance.double(), brute.amin(-1), atol=1e-5, rtol=0)
    assert (index == 10).any() and not (index == 200).any()


def test_kmeans_finds_separated_clusters() -> None:
    centres = normal(2, 40, 8) * 10
    points = (centres[:, None] + 0.01 * normal(2, 30, 40, 8, seed=1)).flatten(1, 2)
    distance = nearest(points, kmeans(points, 40, seed=0, iterations=20))[1]
    assert distance.max() < 0.05


def test_empty_clusters_restart_at_the_worst_served_points() -> None:
    """k-means++ draws copies of the one heavy point once no distance is left; the far points still get centroids of their own."""
    points = torch.cat([torch.zeros(1, 500, 2), normal(1, 300, 2) * 100], dim=1)
    centroids = kmeans(points, 256, seed=0, iterations=10)
    assert centroids.isfinite().all()
    assert nearest(points, centroids)[0].unique().numel() > 250


@pytest.mark.parametrize("distinct", [1, 2, 100])
def test_few_distinct_keys(distinct: int) -> None:
    keys, queries = skewed(distinct)
    keys = keys.repeat(5, 1, 1)
    codebook = train_codebook(keys, queries)
    assert all(tensor.isfinite().all() for tensor in codebook.tensors().values())
    error = proxies(queries[:1], keys, codebook, 0.125) - exact_scores(queries[:1], keys, 0.125)
    assert (error - error.mean(-1, keepdim=True)).abs().max() < 1e-2


@pytest.mark.parametrize("magnitude", [0.0, 1e-4, 1e4])
def test_finite_whatever_the_magnitude(magnitude: float) -> None:
    keys, queries = skewed(400)
    for k, q in ((keys * magnitude, queries), (keys, queries * magnitude)):
        codebook = train_codebook(k, q)
        assert all(tensor.isfinite().all() for tensor in codebook.tensors().values())
        assert proxies(q[:2], k, codebook, 0.125).isfinite().all()


def test_half_precision_keys_are_encoded_in_float32() -> None:
    keys, queries = skewed(600)
    codebook = train_codebook(keys, queries)
    assert torch.equal(encode(keys.half(), codebook), encode(keys.half().float(), codebook))


def test_value_norms_are_predicted_and_enter_the_proxies() -> None:
    """Value norms that depend on the key are found on fresh keys; norms that do not leave the proxies about alone."""
    direction = normal(H, D, seed=11)

    def values(keys: torch.Tensor) -> torch.Tensor:
        log_norm = torch.einsum("nhd,hd->nh", keys - 3, direction) / 3
        return torch.nn.functional.normalize(normal(*keys.shape, seed=12), dim=-1) * log_norm.exp2()[..., None]

    keys, queries = skewed(3000)
    fresh, fresh_queries = skewed(1000, seed=7)
    plain, biased = train_codebook(keys, queries), train_codebook(keys, queries, values=values(keys))
    assert torch.equal(encode(fresh, plain), encode(fresh, biased))
    added = proxies(fresh_queries[:1], fresh, biased, 0.125) - proxies(fresh_queries[:1], fresh, plain, 0.125)
    wanted = values(fresh).norm(dim=-1).log2().T
    for head in range(H):
        for query_head in range(G):
            assert torch.corrcoef(torch.stack([added[0, head, query_head], wanted[head]]))[0, 1] > 0.9
    unrelated = train_codebook(keys, queries, values=values(keys)[torch.randperm(3000, generator=torch.Generator().manual_seed(1))])
    noise = proxies(fresh_queries[:1], fresh, unrelated, 0.125) - proxies(fresh_queries[:1], fresh, plain, 0.125)
    assert noise.std() < 0.3 * added.std()


@pytest.mark.parametrize("norm", [0.0, 1e-20, 1e20])
def test_finite_whatever_the_values(norm: float) -> None:
    keys, queries = skewed(300)
    values = torch.full_like(keys, norm)
    values[:5] = 0
    assert train_codebook(keys, queries, values=values).query_offset.isfinite().all()


def test_refusals() -> None:
    keys, queries = skewed(10)
    with pytest.raises(CodebookError, match="subspaces is 12: head_dim 64 allows 8, 16, 32"):
        train_codebook(keys, queries, 12)
    with pytest.raises(CodebookError, match="subspaces is 32: head_dim 80 allows 8, 16"):
        train_codebook(normal(10, H, 80), normal(10, H, G, 80), 32)
    with pytest.raises(CodebookError, match="head_dim is 100: PQ codes need one that 8, 16 or 32 subspaces divide"):
        train_codebook(normal(10, H, 100), normal(10, H, G, 100))
    with pytest.raises(ValueError, match="queries have no rows"):
        train_codebook(keys, queries[:0])
    with pytest.raises(ValueError, match=r"queries have shape \(10, 1, 3, 64\), expected \[m, H, G, D\]"):
        train_codebook(keys, queries[:, :1])
    with pytest.raises(ValueError, match=r"values have shape \(9, 2, 64\), expected \[n, H, D\]"):
        train_codebook(keys, queries, values=keys[1:])
    with pytest.raises(ValueError, match="values: 10 of 10 rows are NaN or infinite"):
        train_codebook(keys, queries, values=keys * torch.inf)
    keys[4, 1, 7] = torch.nan
    with pytest.raises(ValueError, match="keys: 1 of 10 rows are NaN or infinite"):
        train_codebook(keys, queries)


def test_kmeans_of_a_problem_does_not_depend_on_the_others() -> None:
    """So tensor-parallel ranks train their heads as one worker would."""
    points = torch.randn(4, 300, 4, generator=torch.Generator().manual_seed(9))
    together = kmeans(points, 16, seed=3, iterations=3)
    alone = torch.cat([kmeans(points[i : i + 1], 16, seed=3, iterations=3) for i in range(4)])
    torch.testing.assert_close(together, alone)
