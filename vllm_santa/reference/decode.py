"""One decode row by any sparse method, from vLLM's pages: the reference of `ops.decode`."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_santa.codebook import Codebook
from vllm_santa.methods import Method
from vllm_santa.reference.paged import gather_context, taken_rows
from vllm_santa.reference.philox import Stream, uniform44
from vllm_santa.reference.pps import pps
from vllm_santa.reference.pq import lookup_tables, proxy_scores
from vllm_santa.reference.scores import exact_scores
from vllm_santa.reference.ssa import SelectionSettings, importance_weights, select_by_proxy
from vllm_santa.reference.values import draws_needed, value_weights

_LN2 = math.log(2)


@dataclass(frozen=True)
class LayerContext:
    """What one attention layer adds to a row.

    layer: its index in the model. scale, soft_cap: of the scores (soft_cap 0 = none). first_query_head, first_kv_head: global indices of
    this rank's first heads, so that tensor parallelism draws the same numbers. codebook: of this layer's keys, None until there is one.
    """

    layer: int
    scale: float
    soft_cap: float = 0.0
    first_query_head: int = 0
    first_kv_head: int = 0
    codebook: Codebook | None = None


@dataclass(frozen=True)
class RowResult:
    """output: [Hq, D] in the query's dtype. key_rows, value_rows: rows of K and of V read, mean over KV heads."""

    output: Tensor
    key_rows: float
    value_rows: float


def decode_row(
    query: Tensor,
    kv: Tensor,
    codes: Tensor,
    block_table: Tensor,
    context: int,
    method: Method,
    budget: int,
    seed: int,
    layer: LayerContext,
    settings: SelectionSettings,
) -> RowResult:
    """Sparse attention of one query token over its cache.

    query: [Hq, D]. kv: [B, H, N, 2D], K then V. codes: uint8 [B, H, N, M]. block_table: int32 [blocks]. context: tokens, the current one
    included. budget: >= 1, draws per query head or rows per KV head, as the method counts. seed: an unsigned 64-bit integer.
    """
    if context == 0:
        return RowResult(torch.zeros_like(query), 0.0, 0.0)
    key, value = gather_context(kv, block_table, context).chunk(2, dim=-1)
    grouped = query.unflatten(0, (key.shape[0], -1))
    random = _Random(seed, context - 1, layer, grouped)
    if method.needs_codes:
        if layer.codebook is None:
            raise ValueError(f"layer {layer.layer} has no codebook: method {method.name} cannot score its keys")
        tables = lookup_tables(grouped, layer.codebook, layer.scale)
        proxies = proxy_scores(tables, gather_context(codes, block_table, context).transpose(0, 1)) * _LN2
        numbers = random.per_kv_head(budget if method == Method.ssa_fixed else 1)
        selection = select_by_proxy(method, proxies, settings, random.budget(budget), numbers)
        return _attend_selected(grouped, key, value, selection.taken, selection.probability, layer)
    scores = exact_scores(grouped, key, layer.scale, layer.soft_cap)
    broken = ~(scores < torch.inf).all(-1, keepdim=True)  # NaN or +inf: NaN out, as dense attention gives
    scores = scores.masked_fill(broken, -torch.inf)
    if method == Method.pps:
        selection, weights = pps(scores, random.budget(budget), random.per_kv_head(1)[..., 0])
        taken = selection.taken
    else:
        numbers = random.per_query_head(draws_needed(method, budget, context))
        weights = value_weights(method, scores, random.budget(budget).unsqueeze(-1).expand(scores.shape[:-1]), numbers)
        taken = weights.amax(-2) > 0
    rows, valid = taken_rows(taken)
    weights = weights.gather(-1, rows.unsqueeze(1).expand(-1, weights.shape[1], -1)) * valid.unsqueeze(1)
    output = (weights.float() @ _rows_of(value, rows, valid)).masked_fill(broken, torch.nan)
    return RowResult(output.flatten(0, 1).to(query.dtype), float(context), taken.sum(-1).double().mean().item())


def _attend_selected(query: Tensor, key: Tensor, value: Tensor, taken: Tensor, probability: Tensor, layer: LayerContext) -> RowResult:
    rows, valid = taken_rows(taken)
    scores = exact_scores(query, _rows_of(key, rows, valid), layer.scale, layer.soft_cap).masked_fill(~valid.unsqueeze(1), -torch.inf)
    weights = importance_weights(scores, probability.gather(-1, rows))
    output = weights.float() @ _rows_of(value, rows, valid)
    count = taken.sum(-1).double().mean().item()
    return RowResult(output.flatten(0, 1).to(query.dtype), count, count)


def _rows_of(cache: Tensor, rows: Tensor, valid: Tensor) -> Tensor:
    """[H, n, D] at [H, rows], float32, zeros where not valid."""
    picked = cache.gather(1, rows.unsqueeze(-1).expand(-1, -1, cache.shape[-1])).float()
    return picked.masked_fill(~valid.unsqueeze(-1), 0.0)


class _Random:
    """A row's random numbers at its position, by head."""

    def __init__(self, seed: int, position: int, layer: LayerContext, grouped_query: Tensor):
        heads, group = grouped_query.shape[:2]
        self.heads, self.layer, self.device = heads, layer.layer, grouped_query.device
        self.seed = self._scalar(seed - (1 << 64) if seed >= 1 << 63 else seed)  # the same 64 bits, as torch holds them
        self.position = self._scalar(position)
        self.kv_head = layer.first_kv_head + torch.arange(heads, device=self.device)
        self.query_head = layer.first_query_head + torch.arange(heads * group, device=self.device).unflatten(0, (heads, group))

    def _scalar(self, value: int) -> Tensor:
        return torch.tensor(value, dtype=torch.int64, device=self.device)

    def budget(self, budget: int) -> Tensor:
        return self._scalar(budget).expand(self.heads).contiguous()

    def per_kv_head(self, draws: int) -> Tensor:
        """int64 [H, draws] for a selection."""
        return self._draw(Stream.selection, self.kv_head, draws)

    def per_query_head(self, draws: int) -> Tensor:
        """int64 [H, G, draws] for the value samplers."""
        return self._draw(Stream.values, self.query_head, draws)

    def _draw(self, stream: Stream, head: Tensor, draws: int) -> Tensor:
        draw = torch.arange(draws, device=self.device)
        return uniform44(self.seed, self.position, self.layer, stream, head.unsqueeze(-1), draw)
