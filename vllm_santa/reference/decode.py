"""One decode row by any sparse method, from vLLM's pages: the reference of `ops.decode`."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_santa.codebook import Codebook
from vllm_santa.methods import BernoulliSettings, Method
from vllm_santa.reference.attend import attend_selected, attend_values
from vllm_santa.reference.bernoulli import bernoulli_query
from vllm_santa.reference.error import OutputError
from vllm_santa.reference.paged import gather_context
from vllm_santa.reference.philox import Stream, uniform44
from vllm_santa.reference.pq import lookup_tables, proxy_scores
from vllm_santa.reference.scores import exact_scores
from vllm_santa.reference.ssa import SelectionSettings, select_by_proxy
from vllm_santa.reference.values import draws_needed

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
    """output: [Hq, D] in the query's dtype. key_rows, value_rows: rows of K and of V read, mean over KV heads.

    key_features: share of the features of those K rows that was read; less than 1 with Bernoulli queries. error: of each query head's
    output [H, G], where asked for.
    """

    output: Tensor
    key_rows: float
    value_rows: float
    key_features: float = 1.0
    error: OutputError | None = None


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
    bernoulli: BernoulliSettings | None = None,
    estimate_error: bool = False,
) -> RowResult:
    """Sparse attention of one query token over its cache.

    query: [Hq, D]. kv: [B, H, N, 2D], K then V. codes: uint8 [B, H, N, M]. block_table: int32 [blocks]. context: tokens, the current one
    included. budget: >= 1, draws per query head or rows per KV head, as the method counts. seed: an unsigned 64-bit integer.
    bernoulli: exact scores become those of a Bernoulli query (SANTA §5); not for methods that score keys by their codes.
    estimate_error: with the result's `error`, of all that was left to chance but Bernoulli queries.
    Raises ValueError for a method that needs codes with a Bernoulli query or without a codebook.
    """
    if bernoulli is not None and method.needs_codes:
        raise ValueError(f"bernoulli: method {method.name} scores keys by their codes; allowed are santa, strat, sys, prop, flash, pps")
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
        numbers = random.per_kv_head(Stream.selection, budget if method == Method.ssa_fixed else 1)
        broken = ~(proxies < torch.inf).all(-1, keepdim=True)  # a query that is not finite: NaN for its head, nothing for the others
        selection = select_by_proxy(method, proxies.masked_fill(broken, -torch.inf), settings, random.budget(budget), numbers)
        attended = attend_selected(grouped, key, value, selection, layer.scale, layer.soft_cap, estimate_error=estimate_error)
        output = attended.output.masked_fill(broken, torch.nan)
        return RowResult(output.flatten(0, 1).to(query.dtype), attended.rows(), attended.rows(), error=attended.error)
    features = 1.0
    if bernoulli is not None:
        heads = random.per_kv_head if bernoulli.mean_group else random.per_query_head
        numbers = heads(Stream.bernoulli, query.shape[-1])
        estimate = bernoulli_query(grouped, bernoulli, numbers.unsqueeze(-2) if bernoulli.mean_group else numbers)
        grouped, features = estimate.query, estimate.group_share().mean().item()
    scores = exact_scores(grouped, key, layer.scale, layer.soft_cap)
    if method == Method.pps:
        numbers = random.per_kv_head(Stream.selection, 1)
    else:
        numbers = random.per_query_head(Stream.values, draws_needed(method, budget, context))
    attended = attend_values(method, scores, value, random.budget(budget), numbers, estimate_error)
    return RowResult(attended.output.flatten(0, 1).to(query.dtype), float(context), attended.rows(), features, attended.error)


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

    def per_kv_head(self, stream: Stream, draws: int) -> Tensor:
        """int64 [H, draws]."""
        return self._draw(stream, self.kv_head, draws)

    def per_query_head(self, stream: Stream, draws: int) -> Tensor:
        """int64 [H, G, draws]."""
        return self._draw(stream, self.query_head, draws)

    def _draw(self, stream: Stream, head: Tensor, draws: int) -> Tensor:
        draw = torch.arange(draws, device=self.device)
        return uniform44(self.seed, self.position, self.layer, stream, head.unsqueeze(-1), draw)
