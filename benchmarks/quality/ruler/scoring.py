"""Scores as RULER gives them, and how sure they are."""

import re
from collections.abc import Mapping, Sequence

import numpy as np

RESAMPLES = 10_000
_CONTROL = re.compile(r"[\x00-\x1f]")


def score(task: str, text: str, answers: Sequence[str]) -> float:
    """0 to 100: the share of the answers that the text contains (string_match_all); for questions, whether it contains any (part)."""
    said = _CONTROL.sub("\n", text.strip()).lower()
    found = [answer.lower() in said for answer in answers]
    return 100.0 * (any(found) if task.startswith("qa_") else sum(found) / len(found))


def interval(samples: Sequence[Sequence[float]], resamples: int = RESAMPLES) -> tuple[float, float]:
    """95 % bootstrap interval (percentiles) of the mean over tasks of the mean over samples; each task is resampled on its own."""
    generator = np.random.default_rng(0)
    means = np.mean([_resampled_means(np.asarray(task, dtype=np.float64), generator, resamples) for task in samples], axis=0)
    low, high = np.percentile(means, (2.5, 97.5))
    return float(low), float(high)


def _resampled_means(samples: np.ndarray, generator: np.random.Generator, resamples: int) -> np.ndarray:
    return samples[generator.integers(len(samples), size=(resamples, len(samples)))].mean(1)


def paired_differences(scores: Mapping[int, float], reference: Mapping[int, float]) -> list[float]:
    """Score minus the reference's, of every sample that both have."""
    return [scores[index] - reference[index] for index in sorted(scores.keys() & reference.keys())]
