"""From answers to scores with intervals, as JSON and as Markdown tables."""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from benchmarks.quality.ruler.answers import Answer
from benchmarks.quality.ruler.configurations import CONFIGURATIONS
from benchmarks.quality.ruler.scoring import interval, paired_differences, score
from benchmarks.quality.ruler.tasks import TASKS

AVERAGE = "average"
DENSE_SCORES_FROM = 20.0
"""Tasks on which dense attention scores less say nothing about the others."""


class Score(NamedTuple):
    """score, low, high: mean and 95 % bootstrap interval, 0 to 100. difference, difference_low, difference_high: to dense attention on the
    same samples, None where there are none. task: one of RULER's, or `average`, the mean over tasks."""

    length: int
    configuration: str
    task: str
    samples: int
    score: float
    low: float
    high: float
    difference: float | None = None
    difference_low: float | None = None
    difference_high: float | None = None


def scores_of(answers: Iterable[Answer]) -> list[Score]:
    """Scores of every length, configuration and task, and averages over tasks where a configuration has all tasks of its length."""
    samples: dict[tuple[int, str, str], dict[int, float]] = defaultdict(dict)
    for answer in answers:
        samples[answer.length, answer.configuration, answer.task][answer.index] = score(answer.task, answer.text, answer.answers)
    found = []
    for length in sorted({length for length, _, _ in samples}):
        tasks = _ordered({task for at, _, task in samples if at == length}, TASKS)
        for configuration in _ordered({name for at, name, _ in samples if at == length}, CONFIGURATIONS):
            own = {task: samples[length, configuration, task] for task in tasks if (length, configuration, task) in samples}
            dense = {task: samples.get((length, "dense", task), {}) for task in own}
            found += [_score(length, configuration, task, {task: own[task]}, {task: dense[task]}) for task in own]
            if len(own) == len(tasks) > 1:
                found.append(_score(length, configuration, AVERAGE, own, dense))
    return found


def _score(
    length: int, configuration: str, task: str, samples: dict[str, dict[int, float]], dense: dict[str, dict[int, float]]
) -> Score:  # fmt: skip
    values = [list(by_index.values()) for by_index in samples.values()]
    plain = Score(length, configuration, task, sum(map(len, values)), round(_mean(values), 2), *_rounded(interval(values)))
    differences = [paired_differences(samples[name], dense[name]) for name in samples]
    if configuration == "dense" or not all(differences):
        return plain
    low, high = _rounded(interval(differences))
    return plain._replace(difference=round(_mean(differences), 2), difference_low=low, difference_high=high)


def _mean(tasks: list[list[float]]) -> float:
    return sum(sum(task) / len(task) for task in tasks) / len(tasks)


def _rounded(ends: tuple[float, float]) -> tuple[float, float]:
    return round(ends[0], 2), round(ends[1], 2)


def _ordered(names: set[str], order: Iterable[str]) -> list[str]:
    known = [name for name in order if name in names]
    return known + sorted(names - set(known))


def table(scores: list[Score], length: int) -> str:
    """One length as Markdown: a row a configuration, a column a task. In brackets the 95 % interval; ▼ where a score lies below the
    interval of dense attention, on tasks where that scores above 20."""
    at_length = [entry for entry in scores if entry.length == length]
    tasks = list(dict.fromkeys(entry.task for entry in at_length if entry.task != AVERAGE))
    cells = {(entry.configuration, entry.task): entry for entry in at_length}
    averaged = any(entry.task == AVERAGE for entry in at_length)
    columns = [*tasks, AVERAGE] if averaged else tasks
    counts = sorted({entry.samples for entry in at_length if entry.task != AVERAGE})
    samples = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"  # a run that was cut off has fewer of some
    lines = [f"| {length:,} tokens, {samples} samples a task | {' | '.join(columns)} | against dense |"]
    lines.append("|---" * (len(columns) + 2) + "|")
    for configuration in dict.fromkeys(entry.configuration for entry in at_length):
        row = [_cell(cells.get((configuration, task)), cells.get(("dense", task))) for task in columns]
        last = cells.get((configuration, columns[-1]))
        lines.append(f"| {configuration} | {' | '.join(row)} | {_difference(last)} |")
    return "\n".join(lines)


def _cell(entry: Score | None, dense: Score | None) -> str:
    if entry is None:
        return "–"
    below = dense is not None and dense.score > DENSE_SCORES_FROM and entry.score < dense.low
    return f"{entry.score:.1f} ({entry.low:.0f}–{entry.high:.0f}){' ▼' if below else ''}"


def _difference(entry: Score | None) -> str:
    if entry is None or entry.difference is None:
        return ""
    return f"{entry.difference:+.1f} ({entry.difference_low:+.1f} to {entry.difference_high:+.1f})"
