"""Every estimator on one query's scores, keys and values of one layer: what it reads and how far its output is from dense attention."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_santa.methods import BernoulliSettings, Method
from vllm_santa.reference.attend import attend_selected
from vllm_santa.reference.bernoulli import bernoulli_query
from vllm_santa.reference.philox import Stream, uniform44
from vllm_santa.reference.pps import pps
from vllm_santa.reference.scores import exact_scores
from vllm_santa.reference.select import Selection, adaptive_with_replacement, certain
from vllm_santa.reference.ssa import SelectionSettings, importance_weights, proposal, select_by_proxy
from vllm_santa.reference.values import draws_needed, value_weights

FRACTIONS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
DRAWS = (16, 32, 64, 128, 256, 512, 1024, 2048)
BERNOULLI_SAMPLES = (4, 8, 16, 32)
SETTINGS = SelectionSettings()
TAIL_PRIOR = 20  # "ssa, shrunk tail", an experiment: weights of tokens with π < 1 times k / (k + this), less variance for some bias


@dataclass(frozen=True)
class Problem:
    """One query token of one layer.

    query [H, G, D], key, value [H, n, D], proxies [H, G, n] in natural-log units, all float32. layer and position seed the draws.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    proxies: Tensor
    layer: int
    position: int

    @property
    def context(self) -> int:
        return self.key.shape[1]

    def scores(self) -> Tensor:
        return exact_scores(self.query, self.key, self.scale)

    def random(self, repeats: int, stream: Stream, heads: int, draws: int) -> Tensor:
        """Numbers [repeats, heads, draws]; the seed is the repeat's number."""
        with self.query.device:
            seed = torch.arange(repeats).view(-1, 1, 1)
            return uniform44(seed, torch.tensor(self.position), self.layer, stream, torch.arange(heads).unsqueeze(-1), torch.arange(draws))


class Measured(NamedTuple):
    """One method at one budget.

    budget: draws per query head or bits of it (an integer), or the share of the context's tokens (a float). rows: rows of V read per KV
    head. errors: relative L2 errors, one per repeat and query head. key_features: share of K's features read, per head and per group.
    """

    method: str
    budget: float
    rows: float
    errors: Tensor
    key_features: tuple[float, float] = (1.0, 1.0)


def measure(problem: Problem, repeats: int) -> Iterator[Measured]:
    """All methods at all budgets; random ones `repeats` times."""
    scores = problem.scores()
    dense = torch.softmax(scores, -1) @ problem.value
    yield from _value_samplers(problem, scores, dense, repeats)
    yield from _selections(problem, scores, dense, repeats)
    yield from _bernoulli(problem, dense, repeats)


def _errors(weights: Tensor, value: Tensor, dense: Tensor) -> Tensor:
    """Relative L2 error of weights [R, H, G, n] @ value, flat."""
    per_head = weights.float().transpose(0, 1).flatten(1, 2) @ value
    output = per_head.unflatten(1, weights.shape[:1] + weights.shape[2:3]).transpose(0, 1)
    return _relative(output, dense)


def _relative(output: Tensor, dense: Tensor) -> Tensor:
    return ((output - dense).norm(dim=-1) / dense.norm(dim=-1)).flatten().cpu()


def _value_samplers(problem: Problem, scores: Tensor, dense: Tensor, repeats: int) -> Iterator[Measured]:
    heads, group, n = scores.shape
    for method in (Method.santa, Method.strat, Method.sys, Method.flash):
        for budget in DRAWS:
            numbers = problem.random(repeats, Stream.values, heads * group, draws_needed(method, budget, n)).unflatten(1, (heads, group))
            weights = value_weights(method, scores.expand(repeats, -1, -1, -1), numbers.new_full(numbers.shape[:-1], budget), numbers)
            rows = (weights.amax(-2) > 0).sum(-1).double().mean().item()
            yield Measured(method.name, budget, rows, _errors(weights, problem.value, dense))


def _selections(problem: Problem, scores: Tensor, dense: Tensor, repeats: int) -> Iterator[Measured]:
    heads, group, n = scores.shape
    for fraction in FRACTIONS:
        k = max(1, round(fraction * n))
        budget = torch.full((repeats, heads), k, device=scores.device)
        selection, weights = pps(scores.expand(repeats, -1, -1, -1), budget, problem.random(repeats, Stream.selection, heads, 1)[..., 0])
        yield Measured("pps", fraction, selection.taken.sum(-1).double().mean().item(), _errors(weights, problem.value, dense))
        for name, select in _SELECTIONS.items():
            tries = 1 if name in _CERTAIN else repeats
            numbers = problem.random(tries, Stream.selection, heads, k)
            selection = select(problem.proxies.expand(tries, -1, -1, -1), scores.expand(tries, -1, -1, -1), budget[:tries], numbers)
            yield _importance(name, fraction, selection, scores, problem, dense)
            if name == "ssa":
                shrunk = attend_selected(problem.query, problem.key, problem.value, selection, problem.scale, shrink_tail=True)
                yield Measured("ssa, James-Stein tail", fraction, shrunk.rows(), _relative(shrunk.output, dense))
                tail = torch.where(selection.probability < 1, k / (k + TAIL_PRIOR), 1.0)
                lighter = Selection(selection.taken, selection.probability / tail)
                yield _importance("ssa, shrunk tail", fraction, lighter, scores, problem, dense)
        # The paper's own form: every query head selects for itself, k/G rows each, so that no more rows are read per KV head.
        numbers = problem.random(repeats, Stream.selection, heads * group, k).unflatten(1, (heads, group))
        alone = problem.proxies.unsqueeze(-2).expand(repeats, -1, -1, -1, -1)
        for method in (Method.ssa, Method.ssa_fixed, Method.topk):
            share = numbers.new_full((repeats, heads, group), max(1, k // group))
            selection = select_by_proxy(method, alone, SETTINGS, share, numbers)
            yield _importance(f"{method.name}, per query head", fraction, selection, scores, problem, dense)


def _importance(name: str, budget: float, selection: Selection, scores: Tensor, problem: Problem, dense: Tensor) -> Measured:
    taken, probability = (x if x.dim() == 4 else x.unsqueeze(-2) for x in (selection.taken, selection.probability))
    kept = scores.masked_fill(~taken, -torch.inf).unsqueeze(-2)
    weights = importance_weights(kept, probability.expand(kept.shape[:-2] + probability.shape[-1:])).squeeze(-2)
    return Measured(name, budget, taken.any(-2).sum(-1).double().mean().item(), _errors(weights, problem.value, dense))


def _of(method: Method, exact: bool = False) -> Callable[[Tensor, Tensor, Tensor, Tensor], Selection]:
    return lambda proxies, scores, budget, numbers: select_by_proxy(method, scores if exact else proxies, SETTINGS, budget, numbers)


def _theory(proxies: Tensor, scores: Tensor, budget: Tensor, numbers: Tensor) -> Selection:
    forced, codes = proposal(proxies, SETTINGS)
    return certain(forced) | adaptive_with_replacement(codes, budget, numbers)


_SELECTIONS = {
    "ssa": _of(Method.ssa),
    "ssa, with replacement": _theory,
    "ssa_fixed": _of(Method.ssa_fixed),
    "topk": _of(Method.topk),
    "uniform_tail": _of(Method.uniform_tail),
    "oracle_topk": _of(Method.topk, exact=True),
    "ssa, exact proxy": _of(Method.ssa, exact=True),
}
_CERTAIN = ("topk", "oracle_topk")


def _bernoulli(problem: Problem, dense: Tensor, repeats: int) -> Iterator[Measured]:
    heads, group, dim = problem.query.shape
    query = problem.query.expand(repeats, -1, -1, -1)
    offset = problem.random(repeats, Stream.values, heads * group, 1).unflatten(1, (heads, group))
    for mean_group in (False, True):
        count = heads if mean_group else heads * group
        numbers = problem.random(repeats, Stream.bernoulli, count, dim).unflatten(1, (heads, -1))
        for samples in BERNOULLI_SAMPLES:
            estimate = bernoulli_query(query, BernoulliSettings(samples, mean_group), numbers)
            share = estimate.head_share().mean().item(), estimate.group_share().mean().item()
            scores = exact_scores(estimate.query, problem.key, problem.scale)
            name = "Bernoulli, mean group query" if mean_group else "Bernoulli, per head"
            yield Measured(name, samples, problem.context, _errors(torch.softmax(scores, -1), problem.value, dense), share)
            weights = value_weights(Method.sys, scores, offset.new_full(scores.shape[:-1], 128), offset)
            rows = (weights.amax(-2) > 0).sum(-1).double().mean().item()
            yield Measured(f"{name} + sys 128", samples, rows, _errors(weights, problem.value, dense), share)
